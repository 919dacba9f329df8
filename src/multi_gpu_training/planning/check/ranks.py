"""Real ranks of a check: those of this machine, which meet the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from multi_gpu_training.distributed.trial import TrialRequest
from multi_gpu_training.planning.check.team import Watched, watch

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SIZES = [4**n * 1024 for n in range(1, 8)] + [2**25]  # 4 KiB to 32 MiB
GPU_SIZES = [2**n for n in range(12, 29)]  # 4 KiB to 256 MiB


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

    @property
    def main(self) -> bool:
        return self.first == 0

    def start(self, facts: dict[str, object]) -> list[Watched]:
        """Real rank processes. The first of each machine carries its findings to rank 0."""
        env = {key: value for key, value in os.environ.items() if key != "MGT_BENCH"}
        if self.address in LOOPBACK:
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not any(device.startswith("cuda") for device in self.devices):
            env["OMP_NUM_THREADS"] = "1"
        team = []
        for number in range(self.here):
            rank = self.first + number
            request = TrialRequest(
                rank,
                self.ranks,
                self.address,
                self.port,
                self.devices[number],
                self.backend,
                self.limit_s,
                GPU_SIZES if self.backend == "nccl" else SIZES,
                hosts_store=rank == 0 and not self.hosted_elsewhere,
                prefix=f"mgt-check/{self.run_id}",
                facts=facts if number == 0 else {},
            )
            team.append(Watched("multi_gpu_training.distributed.trial", asdict(request), env))
        return team


def try_out(team: Team, facts: dict[str, object]) -> list[Watched]:
    """The ranks, at their end, hanging, or waiting for the verdict (see `dismiss`)."""
    members = team.start(facts)
    try:
        watch(members, team.limit_s)
    except BaseException:
        dismiss(members)
        raise
    return members


def dismiss(members: Sequence[Watched], verdict: int | None = None, limit_s: float = 0.0) -> None:
    """Let the other machines know the verdict, or wait for theirs, and end every process."""
    try:
        if members and all(member.stage == "end" for member in members):
            if verdict is not None:
                members[0].tell(str(verdict))
            watch(members, limit_s, until="")
    finally:
        for member in members:
            member.kill()
