"""Who takes part in a check: this process alone, or one of many that a launcher started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from multi_gpu_training.distributed.identity import Identity, from_environment
from multi_gpu_training.distributed.sockets import is_loopback
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.engine import Hosts
from multi_gpu_training.planning.check.check_report import Finding, Group

NETWORK = Group("Network")
CPU_RANKS = 2
DEFAULT_PORT = 29500
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun holds MASTER_PORT itself


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks meet. `here`: this machine holds the port; `held`: a launcher like torchrun
    has opened it already; `several`: more than one machine takes part."""

    address: str | None = None
    port: int | None = None
    here: bool = True
    held: bool = False
    several: bool = False


@dataclass(frozen=True)
class Team:
    """The ranks of this machine in a check. `ranks` and `nodes` are of the whole job."""

    first: int
    here: int
    ranks: int
    nodes: int
    address: str
    port: int
    devices: Sequence[str]
    backend: str
    limit_s: float
    hosted_elsewhere: bool = False
    run_id: str = ""
    key: str | None = field(default=None, repr=False)  # what ranks on several machines must know

    @property
    def main(self) -> bool:
        return self.first == 0


@dataclass(frozen=True)
class Topology:
    """`identity` is what a launcher gave; without one `hosts` says which machines take part.
    `held`: the launcher has opened the port already, as torchrun does."""

    identity: Identity | None
    hosts: Hosts
    held: bool = False
    asked: int = -1

    @property
    def looks(self) -> bool:
        """Whether this process looks at its machine: one of them does."""
        return self.identity is None or self.identity.local_rank == 0

    @property
    def nodes(self) -> int:
        if self.identity is not None:
            return max(1, -(-self.identity.world_size // self.identity.local_world_size))
        return self.hosts.nodes

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are on this machine, so that they need no token."""
        from multi_gpu_training.distributed.meeting_place import meets_here  # imports torch

        if self.identity is not None:
            return meets_here(self.identity)
        return self.nodes == 1 or is_loopback(self.hosts.master_addr or "")

    @property
    def together(self) -> bool:
        """Whether it meets ranks that others start."""
        return self.identity is not None or self.nodes > 1

    def ranks_here(self, gpus: int) -> int:
        """Ranks that will train on this machine."""
        if self.identity is not None:
            return self.identity.local_world_size
        return self.asked if self.asked > 0 else gpus or CPU_RANKS

    def ranks(self, gpus: int) -> int:
        """Ranks that meet: on one machine two at least, also where they share a GPU."""
        if self.identity is not None:
            return self.identity.world_size
        if self.hosts.nodes == 1:
            return max(self.ranks_here(gpus), CPU_RANKS)
        return self.ranks_here(gpus) * self.hosts.nodes

    @property
    def main(self) -> bool:
        """Whether rank 0 is here."""
        if self.identity is not None:
            return self.identity.rank == 0
        return self.hosts.node_rank == 0

    def meeting(self) -> MeetingPoint:
        address, port = self.hosts.master_addr, self.hosts.master_port
        if self.together and port is None:
            port = DEFAULT_PORT
        return MeetingPoint(address, port, self.main, self.held, self.nodes > 1)

    def team(self, gpus: int, limit_s: float) -> Team:
        """The ranks that this process starts."""
        ranks = self.ranks(gpus)
        if self.identity is not None:
            first, here, local = self.identity.rank, 1, self.identity.local_rank
        else:
            here, local = ranks // self.hosts.nodes, 0
            first = self.hosts.node_rank * here
        names = [f"cuda:{(local + i) % gpus}" if gpus else "cpu" for i in range(here)]
        # NCCL refuses two ranks on one GPU; gloo takes them, through host memory.
        shared = max(here, self.ranks_here(gpus)) > gpus
        meeting = self.meeting()
        return Team(
            first=first,
            here=here,
            ranks=ranks,
            nodes=self.nodes,
            address=(meeting.address or "127.0.0.1") if self.together else "127.0.0.1",
            port=(meeting.port or 0) if self.together else free_port(),
            devices=names,
            backend="gloo" if shared else "nccl",
            limit_s=limit_s,
            hosted_elsewhere=self.held,
            # A restarted launcher keeps its store: old keys must not be taken for new ones.
            run_id=str(self.identity.attempt if self.identity is not None else 0),
        )


def find_topology(
    hosts: Mapping[str, Any], asked: int, env: Mapping[str, str]
) -> tuple[Topology, list[Finding]]:
    """Where this process stands; what is wrong with the environment's word on it as findings."""
    problems: list[Finding] = []
    identity = None
    with suppress(ConfigError):  # network_check.launcher_variables names it
        identity = from_environment(env)
    try:
        place = Hosts.from_environment(**hosts)
    except ConfigError as error:
        flags = any(value is not None for value in hosts.values())
        if flags and not os.environ.get("MASTER_PORT"):
            raise  # a wrong flag, not a finding
        problems = [
            NETWORK.fail("MASTER_PORT", problem, "export MASTER_PORT=29500, or unset it")
            for problem in error.problems
        ]
        place = Hosts()
    held = identity is not None and env.get(AGENT_STORE) == "True"
    return Topology(identity, place, held, asked), problems


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
