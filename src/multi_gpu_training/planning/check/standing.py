"""Who this process is in a check: alone on its machine, or one of many that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from multi_gpu_training.distributed.identity import Identity, from_environment
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.engine import Hosts
from multi_gpu_training.planning.check import network
from multi_gpu_training.planning.check.findings import Finding
from multi_gpu_training.planning.check.ranks import Team

CPU_RANKS = 2
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class Standing:
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

    def meeting(self) -> network.Meeting:
        port = self.hosts.master_port
        if self.together and port is None:
            port = network.DEFAULT_PORT
        address = self.hosts.master_addr
        return network.Meeting(address, port, self.main, self.held, self.nodes > 1)

    def team(self, gpus: int, limit_s: float) -> Team:
        """The ranks that this process starts."""
        ranks = self.ranks(gpus)
        if self.identity is not None:
            first, here, local = self.identity.rank, 1, self.identity.local_rank
        else:
            here, local = ranks // self.hosts.nodes, 0
            first = self.hosts.node_rank * here
        names = [f"cuda:{(local + i) % gpus}" if gpus else "cpu" for i in range(here)]
        shared = max(here, self.ranks_here(gpus)) > gpus
        meeting = self.meeting()
        return Team(
            first=first,
            here=here,
            ranks=ranks,
            nodes=self.nodes,
            address=(meeting.address or "127.0.0.1") if self.together else "127.0.0.1",
            port=(meeting.port or 0) if self.together else network.free_port(),
            devices=names,
            backend="gloo" if shared else "nccl",
            limit_s=limit_s,
            hosted_elsewhere=self.held,
            run_id=str(self.identity.attempt if self.identity is not None else 0),
        )


def stand(
    hosts: Mapping[str, Any], asked: int, env: Mapping[str, str]
) -> tuple[Standing, list[Finding]]:
    """Where this process stands; what is wrong with the environment's word on it as findings."""
    problems: list[Finding] = []
    identity = None
    with suppress(ConfigError):  # network.launcher_variables names it
        identity = from_environment(env)
    if identity is not None and identity.rank >= identity.world_size:
        identity = None
    try:
        place = Hosts.from_environment(**hosts)
    except ConfigError as error:
        flags = any(value is not None for value in hosts.values())
        if flags and not os.environ.get("MASTER_PORT"):
            raise  # a wrong flag, not a finding
        problems = [
            network.GROUP.fail("MASTER_PORT", problem, "export MASTER_PORT=29500, or unset it")
            for problem in error.problems
        ]
        place = Hosts()
    held = identity is not None and env.get(AGENT_STORE) == "True"
    return Standing(identity, place, held, asked), problems
