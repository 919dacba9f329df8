"""Nodes for tests: network namespaces on a switch of their own, each with its own disk.

    with Network() as network:
        first, second = network.nodes
        first.start("-m", "multi_gpu_training", "run", ..., "train.py")
        network.cut(second)      # packets are dropped without a word
        network.heal(second)
        network.block(first, second, "reject")     # as a firewall on the second does; one way
        network.unblock()
        second.kill()            # every process of the node, kill -9

Addresses are 10.77.0.1, 10.77.0.2 and so on. A node sees its own disk at the same path as the
others see theirs, by a mount of its own; with shared=True all see one disk there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from processes import quickly

_MOUNT = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'
_NOT_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")


def firewall() -> str | None:
    """The program that blocks single directions of a link: nft, or what MGT_TEST_NFT names."""
    return os.environ.get("MGT_TEST_NFT") or shutil.which("nft")


def why_not() -> str | None:
    """What this machine lacks for namespaces; None if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, util-linux)"
    name = f"mgt{os.getpid()}x"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "br0", "type", "bridge")
        _run("unshare", "-m", "true")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


class Machine:
    """A node: a namespace with one interface, and a folder that is its disk."""

    def __init__(self, network: Network, number: int, disk: Path, mount: Path) -> None:
        self.name = f"{network.name}n{number}"
        self.port = f"p{number}"
        self.address = f"10.77.0.{number + 1}"
        self.disk = disk
        self.mount = mount
        self.processes: list[subprocess.Popen[bytes]] = []
        disk.mkdir(exist_ok=True)
        _ip("netns", "add", self.name)
        _ip("-n", self.name, "link", "set", "lo", "up")
        end = ["type", "veth", "peer", "name", "eth0", "netns", self.name]
        _ip("-n", network.switch, "link", "add", self.port, *end)
        _ip("-n", network.switch, "link", "set", self.port, "master", "br0", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def start(self, *arguments: object, env: dict[str, str] | None = None) -> None:
        """`python ARGUMENTS` on this node, in its own folder."""
        words = ["ip", "netns", "exec", self.name, "unshare", "-m", "--propagation", "private"]
        words += ["sh", "-c", _MOUNT, "sh", str(self.disk), str(self.mount), sys.executable]
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        with self.log.open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [*words, *map(str, arguments)],
                    env=quickly({**inherited, **(env or {})}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    @property
    def log(self) -> Path:
        return self.disk.with_name(f"{self.name}.log")

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def code(self) -> int | None:
        """Exit code of what was started last; None while it runs."""
        return self.processes[-1].poll()

    @property
    def launcher(self) -> int:
        """The process that was started last, without what set its network and disk up."""
        return next(p for p in self.pids() if b"-m\0multi_gpu_training\0" in _command(p))

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Every process of the node at once."""
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if number == signal.SIGKILL:
            for process in self.processes:
                process.wait()

    def remove(self) -> None:
        deadline = time.monotonic() + 10
        while self.pids() and time.monotonic() < deadline:
            self.kill()
            time.sleep(0.05)
        for process in self.processes:
            process.wait(10)
        _ip("netns", "del", self.name)


class Network:
    """The switch, the nodes on it, and an end to all of it."""

    def __init__(self, shared: bool = False, nodes: int = 2) -> None:
        self.name = f"mgt{os.getpid()}{os.urandom(2).hex()}"
        self.switch = f"{self.name}s"
        self._folder = tempfile.TemporaryDirectory(prefix="mgt-nodes-")
        self.folder = Path(self._folder.name)
        mount = self.folder / "disk"
        mount.mkdir()
        self.nodes: list[Machine] = []
        _ip("netns", "add", self.switch)
        try:
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            for number in range(nodes):
                disk = self.folder / ("disk-of-all" if shared else f"disk-{number}")
                self.nodes.append(Machine(self, number, disk, mount))
        except BaseException:
            self.close()
            raise

    def cut(self, node: Machine) -> None:
        """The switch no longer passes anything from or to this node; nobody is told."""
        _ip("-n", self.switch, "link", "set", node.port, "nomaster")

    def heal(self, node: Machine) -> None:
        _ip("-n", self.switch, "link", "set", node.port, "master", "br0")

    def block(self, source: Machine, target: Machine, how: str = "drop") -> None:
        """`target` takes nothing from `source`: packets are dropped, or answered by a reset."""
        what = "drop" if how == "drop" else "reject with tcp reset"
        rules = f"""
            add table ip mgt
            add chain ip mgt in {{ type filter hook input priority 0; }}
            add rule ip mgt in ip saddr {source.address} ip protocol tcp {what}
            add rule ip mgt in ip saddr {source.address} drop
        """
        self._nft(target, rules)

    def unblock(self, machines: Sequence[Machine] | None = None) -> None:
        for node in self.nodes if machines is None else machines:
            self._nft(node, "add table ip mgt\ndelete table ip mgt\n")

    def _nft(self, node: Machine, rules: str) -> None:
        nft = firewall()
        assert nft is not None, "nft is not installed"
        words = ["ip", "netns", "exec", node.name, nft, "-f", "-"]
        subprocess.run(words, input=rules, check=True, capture_output=True, text=True)

    def when(self, happened: Callable[[], Any], within_s: float, what: str) -> Any:
        """What `happened()` gives as soon as it is true."""
        deadline = time.monotonic() + within_s
        while True:
            found = happened()
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {within_s:g} s\n{self.said()}")
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(f"--- node {i}\n{node.said[-4000:]}" for i, node in enumerate(self.nodes))

    def close(self) -> None:
        for node in self.nodes:
            node.remove()
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)
        self._folder.cleanup()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
