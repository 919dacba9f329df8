"""A real Slurm for tests: a controller and nodes in network namespaces on this machine.

    with SlurmCluster() as slurm:
        slurm.run("sbatch", "--wrap", "hostname")
        slurm.kill_node(1)       # slurmd and every process of the node, kill -9
        slurm.orphan(1)          # slurmd alone: its tasks run on, out of reach
        slurm.revive(1)

Debian's packages slurmctld, slurmd, slurm-client and munge are needed, and root. All nodes share
this machine's disk, as nodes of a cluster share a home.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nodes

# Of this process, so that two clusters can run at once.
NETWORK = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
CONTROLLER_PORT, NODE_PORT = 20000 + os.getpid() % 5000, 25000 + os.getpid() % 5000
TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "nsenter")
PARTITION_OF_PREEMPTED = "low"

CONF = """
ClusterName=mgt
SlurmctldHost=controller({network}.254)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,defer
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=30
InactiveLimit=0
MinJobAge=300
ReturnToService=2
JobRequeue=1
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
"""


def why_not() -> str | None:
    """What this machine lacks for a Slurm; None if nothing."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed; apt-get install slurmctld slurmd slurm-client munge"
    return nodes.why_not()


class SlurmCluster:
    """slurmctld and munged in this namespace, one slurmd per node in its own.

    Nodes are called n1, n2 ... and have addresses but no names that resolve.
    """

    def __init__(self, count: int = 3, cpus: int = 4, gpus: int = 0) -> None:
        reason = why_not()
        if reason is not None:
            raise RuntimeError(reason)
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self._mark = f"mgt{os.getpid() % 100000}"
        self._bridge = f"{self._mark}b"[:15]
        self._temporary = tempfile.TemporaryDirectory(prefix="mgt-slurm-")
        self.folder = Path(self._temporary.name)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.folder.chmod(0o755)
        for part in ("state", "munge"):
            (self.folder / part).mkdir(mode=0o700)
        lines = [
            f"NodeName={name} NodeAddr={NETWORK}.{i} NodeHostname={name} CPUs={cpus} "
            f"RealMemory=2000 State=UNKNOWN" + (f" Gres=gpu:{gpus}" if gpus else "")
            for i, name in enumerate(self.names, 1)
        ]
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                network=NETWORK,
                folder=self.folder,
                controller_port=CONTROLLER_PORT,
                node_port=NODE_PORT,
                nodes="\n".join(lines),
            )
        )
        if gpus:  # devices that every machine has stand in for GPUs
            (self.folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[0-{gpus - 1}]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        try:
            self._start(count)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for number, name in enumerate(self.names, 1):
            space, port = self._space(name), f"{self._mark}p{number}"[:15]
            _run("ip", "netns", "add", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run(
                *("ip", "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", space),
            )
            _run("ip", "link", "set", port, "master", self._bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._daemon(
            "munged",
            *("munged", "-F", "--force", f"--key-file={key}"),
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge/pid",
            f"--log-file={self.folder}/munge/log",
            f"--seed-file={self.folder}/munge/seed",
        )
        self.when(lambda: (self.folder / "munge.socket").exists(), 20, "munged")
        # Its own name, so that the controller of slurm.conf is this process's host.
        self._daemon(
            "slurmctld",
            *("unshare", "-u", "sh", "-c", 'hostname controller; exec "$@"', "sh"),
            *("slurmctld", "-D", "-f", str(self.folder / "slurm.conf")),
        )
        for name in self.names:
            self._start_node(name)
        self.when(lambda: self.idle() == set(self.names), 60, f"{count} idle nodes")

    def _space(self, name: str) -> str:
        return f"{self._mark}{name}"

    def _start_node(self, name: str) -> None:
        # Not `ip netns exec`, which hides /sys/fs/cgroup, and slurmd then refuses to start.
        self._daemon(
            name,
            *("nsenter", f"--net=/run/netns/{self._space(name)}"),
            *("unshare", "-u", "sh", "-c", f'hostname {name}; exec "$@"', "sh"),
            *("slurmd", "-D", "-f", str(self.folder / "slurm.conf")),
        )

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self.environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def environment(self) -> dict[str, str]:
        """Where commands find this Slurm."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, **kwargs: Any) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, **kwargs
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def idle(self) -> set[str]:
        try:
            out = self.run("sinfo", "-N", "-h", "-p", "main", "-o", "%N %t")
        except RuntimeError:
            return set()
        return {line.split()[0] for line in out.splitlines() if line.split()[1] == "idle"}

    def job(self, number: int | str) -> dict[str, str]:
        """The fields of `scontrol show job`; empty where it has been forgotten."""
        try:
            out = self.run("scontrol", "-o", "show", "job", str(number))
        except RuntimeError:
            return {}
        return dict(word.partition("=")[::2] for word in out.split() if "=" in word)

    def pids(self, node: int) -> list[int]:
        name = self._space(self.names[node - 1])
        return [int(pid) for pid in _run("ip", "netns", "pids", name).split()]

    def kill_node(self, node: int) -> None:
        """The machine loses power: every process of it, at once."""
        for pid in self.pids(node):
            _kill(pid)

    def orphan(self, node: int) -> None:
        """kill -9 of slurmd alone."""
        self._daemons[self.names[node - 1]].kill()

    def revive(self, node: int) -> None:
        """Start slurmd again and wait for the node to be of use."""
        name = self.names[node - 1]
        daemon = self._daemons.get(name)
        if daemon is not None and daemon.poll() is None:
            return
        self._start_node(name)
        self.when(lambda: name in self.idle(), 90, f"{name} idle")

    def mend(self) -> None:
        """Every node is there and has nothing to do."""
        for node in range(1, len(self.names) + 1):
            self.revive(node)
        for name in self.names:
            if "DRAIN" in self.run("scontrol", "-o", "show", "node", name):
                self.run("scontrol", "update", f"nodename={name}", "state=resume")
        self.when(lambda: self.idle() == set(self.names), 120, "idle nodes")

    def when(self, happened: Callable[[], Any], within_s: float, what: str) -> Any:
        deadline = time.monotonic() + within_s
        while True:
            found = happened()
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {within_s:g} s\n{self.said()}")
            time.sleep(0.2)

    def said(self) -> str:
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs
        )

    def close(self) -> None:
        for name in self.names:
            space = self._space(name)
            if not Path(f"/run/netns/{space}").exists():
                continue
            deadline = time.monotonic() + 10
            while (found := _run("ip", "netns", "pids", space).split()) and (
                time.monotonic() < deadline
            ):
                for pid in found:
                    _kill(int(pid))
                time.sleep(0.05)
            _run("ip", "netns", "del", space)
        for daemon in self._daemons.values():
            if daemon.poll() is None:
                daemon.kill()
            daemon.wait(10)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        self._temporary.cleanup()

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":  # a cluster to try things on, until Enter or the end of input
    with SlurmCluster(gpus=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as cluster:
        print(f"export SLURM_CONF={cluster.folder}/slurm.conf", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()
