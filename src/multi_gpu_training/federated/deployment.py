"""A real federation: Flower's SuperLink on the server, a SuperNode on each client.

Both are Flower's own programs, started as children and ended with this process. The server submits
a small app, whose only code is an import of this package: clients must have it installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.federated.client_run import ClientSetup
from multi_gpu_training.federated.federation_settings import FederatedSettings, require_flower
from multi_gpu_training.federated.rounds_report import write_report
from multi_gpu_training.run_places import path_problem
from multi_gpu_training.safe_files import make_private, read_json, write_atomically
from multi_gpu_training.safe_output import brief

LOOK_EVERY_S = 0.5
START_S = 300.0
AGAIN_S = 5.0  # between two tries of a client to reach its server
ENDED = "ended.json"
ACTIVATED = "SuperNode ID"  # in a SuperNode's log, once the server has let it in
APP = """\
[project]
name = "mgt-federation"
version = "1.0.0"
description = "A federation of multi-gpu-training"
dependencies = []

[tool.flwr.app]
publisher = "multi-gpu-training"

[tool.flwr.app.components]
serverapp = "mgt_federation.server_app:app"
clientapp = "mgt_federation.client_app:app"

[tool.flwr.app.config]
folder = ""
"""
# Flower looks for an assignment to `app` without importing anything.
ONE_APP = "from multi_gpu_training.federated.deployed_apps import {name}\n\napp = {name}\n"


class FlowerFailed(MultiGPUError):
    """One of Flower's programs ended where it should not."""

    code = "MGT800"


@dataclass(frozen=True)
class ServerPlace:
    """Where the server listens, and whom it trusts."""

    address: str
    ca_file: str | None = None
    certificate: str | None = None
    key: str | None = None
    client_keys: str | None = None
    insecure: bool = False

    def check(self) -> None:
        files = {"--ca-file": self.ca_file, "--certificate": self.certificate, "--key": self.key}
        problems = [
            f"{flag} {str(name)[:80]} does not exist" for flag, name in files.items() if _gone(name)
        ]
        if self.insecure and (any(files.values()) or self.client_keys):
            problems.append("--insecure-network with certificates or keys; drop one of them")
        missing = [flag for flag, name in files.items() if name is None]
        if not self.insecure and missing:
            problems.append(
                f"{', '.join(missing)} missing; `mgt federated keys` makes them, and "
                "--insecure-network does without"
            )
        problem = path_problem(self.client_keys or ".")
        if problem is not None:
            problems.append(f"--client-keys {brief(self.client_keys, 80)}: {problem}")
        elif not self.insecure and not self.keys:
            problems.append("--client-keys must be a folder with the public keys of all clients")
        if not _is_address(self.address, any_host=True):
            problems.append(f"--address {brief(self.address, 80)} is not HOST:PORT")
        if problems:
            raise ConfigError(problems)

    @property
    def keys(self) -> list[Path]:
        return sorted(Path(self.client_keys).glob("*.pub")) if self.client_keys else []


@dataclass(frozen=True)
class ClientPlace:
    """Which server a client goes to, and how each knows the other."""

    server: str
    ca_file: str | None = None
    key: str | None = None
    insecure: bool = False

    def check(self) -> None:
        problems = []
        if not _is_address(self.server):
            problems.append(f"--server {brief(self.server, 80)} is not HOST:PORT")
        if not self.insecure:
            for flag, name in (("--ca-file", self.ca_file), ("--key", self.key)):
                if name is None or _gone(name):
                    problems.append(
                        f"{flag} is missing; see `mgt federated keys`"
                        if name is None
                        else f"{flag} {brief(name, 80)} does not exist; see `mgt federated keys`"
                    )
        elif self.ca_file or self.key:
            problems.append("--insecure-network with --ca-file or --key; drop one of them")
        if problems:
            raise ConfigError(problems)


def _gone(name: str | None) -> bool:
    return name is not None and (path_problem(name) is not None or not Path(name).is_file())


def _is_address(text: str, any_host: bool = False) -> bool:
    text = f"0.0.0.0{text}" if any_host and text.startswith(":") else text
    found = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", text)
    return found is not None and 0 < int(found[2]) < 2**16


def serve(
    federation: FederatedSettings,
    folder: Path,
    place: ServerPlace,
    resume: bool,
    say: Callable[[str], None],
) -> int:
    """Run the SuperLink and the federation until its last round; returns the exit code."""
    require_flower(accountant=federation.dp != "off")
    place.check()
    _end_children_on_sigterm()
    folder = folder.absolute()
    if (folder / "federation.json").exists() and not resume:
        raise ConfigError(
            f"{folder} already holds a federation; continue it with --resume", code="MGT106"
        )
    make_private(folder)
    (folder / ENDED).unlink(missing_ok=True)
    settings = {"settings": federation.model_dump(), "resume": resume}
    write_atomically(folder / "server.json", json.dumps(settings))
    host, _, port = place.address.rpartition(":")
    words = ["--host", host, "--port", port, "--disable-runtime-dependency-installation"]
    if place.insecure:
        words.append("--insecure")
    else:
        words += ["--ssl-ca-certfile", _full(place.ca_file), "--ssl-certfile"]
        words += [_full(place.certificate), "--ssl-keyfile", _full(place.key)]
        words.append("--enable-supernode-auth")
    link = _start("flower-superlink", words, folder / "superlink.log", folder)
    try:
        _submit(place, folder, link)
        say(f"serving on {place.address}; waiting for {federation.clients} clients")
        return _follow(folder, link, say)
    finally:
        _stop(link)


def _submit(place: ServerPlace, folder: Path, link: subprocess.Popen[bytes]) -> None:
    """Make the clients known to the SuperLink, and hand it the app."""
    host, _, port = place.address.rpartition(":")
    here = f"{'127.0.0.1' if host in ('', '0.0.0.0') else host}:{port}"
    app = folder / "flower" / "app"
    shutil.rmtree(app, ignore_errors=True)
    make_private(app / "mgt_federation")
    (app / "pyproject.toml").write_text(APP)
    (app / "mgt_federation" / "__init__.py").write_text("")
    for name in ("server_app", "client_app"):
        (app / "mgt_federation" / f"{name}.py").write_text(ONE_APP.format(name=name))
    trust = "insecure = true" if place.insecure else f"root-certificates = '{_full(place.ca_file)}'"
    (folder / "flower" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{here}"\n{trust}\n'
    )
    _wait_for(here, folder, link)
    for key in place.keys:
        _flwr(["supernode", "register", str(key), "here"], folder)
    _flwr(["run", str(app), "here", "-c", f"folder='{folder}'"], folder)


def _wait_for(here: str, folder: Path, link: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while link.poll() is None and time.monotonic() < deadline:
        host, _, port = here.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(LOOK_EVERY_S)
    raise FlowerFailed(f"the SuperLink did not start:\n{_tail(folder / 'superlink.log')}")


def _flwr(words: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        [_program("flwr"), *words], env=_environment(folder), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise FlowerFailed(f"flwr {words[0]} failed: {(done.stdout + done.stderr)[-1000:]}")


def _follow(folder: Path, link: subprocess.Popen[bytes], say: Callable[[str], None]) -> int:
    """Show what the server says, until it has ended."""
    shown = 0
    log = folder / "server.log"
    while True:
        ended = (folder / ENDED).exists()
        text = log.read_text(errors="replace") if log.exists() else ""
        whole = text.rfind("\n") + 1
        for line in text[shown:whole].splitlines():
            say(line)
        shown = max(shown, whole)
        if ended:
            problem = read_json(folder / ENDED, dict[str, str])["problem"]
            if problem:
                raise FlowerFailed(problem)
            say(f"report: {write_report(folder)}")
            return 0
        if link.poll() is not None:
            raise FlowerFailed(f"the SuperLink ended:\n{_tail(folder / 'superlink.log')}")
        time.sleep(LOOK_EVERY_S)


def take_part(setup: ClientSetup, place: ClientPlace, say: Callable[[str], None]) -> int:
    """Run the SuperNode until Ctrl-C; it is started again where the server was away."""
    require_flower()
    place.check()
    _end_children_on_sigterm()
    folder = Path(setup.folder)
    make_private(folder)
    file = setup.save(folder / "client.json")
    words = ["--superlink", place.server, "--node-config", f"setup='{file}'"]
    words += ["--host", "127.0.0.1", "--port", str(_free_port())]
    if place.insecure:
        words.append("--insecure")
    else:
        words += ["--root-certificates", _full(place.ca_file)]
        words += ["--auth-supernode-private-key", _full(place.key)]
    say(f"{setup.name}: taking part at {place.server}; {folder}/supernode.log tells how")
    while True:
        begun = _size(folder / "supernode.log")
        node = _start("flower-supernode", words, folder / "supernode.log", folder)
        try:
            code = node.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            _stop(node)
        if code == 0:
            return 0
        if ACTIVATED not in _tail(folder / "supernode.log", begun):  # refused, rather than lost
            raise FlowerFailed(
                f"{place.server} refused this client, or cannot be reached:\n"
                f"{_tail(folder / 'supernode.log')}"
            )
        say(f"{setup.name}: lost {place.server}; trying again")
        time.sleep(AGAIN_S)


# Programs


def _end_children_on_sigterm() -> None:
    """Let SIGTERM run the `finally` blocks, which end Flower's programs."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _environment(folder: Path) -> Mapping[str, str]:
    # Flower keeps apps and connections in its home folder: one per federation. Its programs start
    # others by name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "FLWR_HOME": str(folder / "flower"), "PATH": path}


def _start(name: str, words: Sequence[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    make_private(folder / "flower")
    with log.open("ab") as file:
        return subprocess.Popen(
            [_program(name), *words],
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End one of Flower's programs and what it has started."""
    for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


def _full(name: str | None) -> str:
    assert name is not None
    return str(Path(name).expanduser().absolute())


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _tail(log: Path, start: int | None = None) -> str:
    """The last lines of a log, or all since `start`."""
    try:
        raw = log.read_bytes()
    except OSError:
        return ""
    if start is not None:
        return raw[start:].decode(errors="replace")
    return "\n".join(raw.decode(errors="replace").splitlines()[-12:])
