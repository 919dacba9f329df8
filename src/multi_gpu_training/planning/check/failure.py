"""Why ranks did not end together: who was missing, failed, or kept the others waiting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from multi_gpu_training.distributed.trial import ABSENT
from multi_gpu_training.planning.check import network
from multi_gpu_training.planning.check.findings import Finding, Group
from multi_gpu_training.planning.check.ranks import Team
from multi_gpu_training.planning.check.team import Watched

GROUP = Group("Ranks")
DOING = {
    "start": "starting (importing torch)",
    "meet": "waiting for the others",
    "join": "joining the group",
    "values": "summing over the ranks",
    "curve": "summing over the ranks",
    "training": "training a step together",
    "end": "done",
}
# What a rank says when another one is gone.
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|timed? ?out", re.IGNORECASE
)
HANG = (
    "look at what that rank does (py-spy dump --pid PID); between GPUs try NCCL_P2P_DISABLE=1, "
    "between machines open all ports and set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; "
    "NCCL_DEBUG=INFO shows the paths"
)


def find(team: Team, members: Sequence[Watched]) -> Finding | None:
    """The first cause of a trial that did not end well."""
    for member in members:
        if member.code == ABSENT:
            return _absent(team, member.last("absent"))
    peers = _peers(members[0]) if team.main else {}
    failures = [
        _Failure(rank, str(peer["error"]).splitlines()[0])
        for rank, peer in peers.items()
        if "error" in peer
    ]
    for number, member in enumerate(members):
        if member.code:
            rank = team.first + number
            if member.stage == "meet" and not member.last("met"):
                return _not_met(team, rank, member.complaint())
            failures.append(_Failure(rank, member.complaint(), member.stage))
    if failures:
        return _failed(team, min(failures, key=lambda failure: failure.second_hand))
    if any(member.timed_out for member in members):
        return _hang(team, members, peers)
    return None


@dataclass(frozen=True)
class _Failure:
    rank: int
    complaint: str
    stage: str = ""

    @property
    def second_hand(self) -> bool:
        """Whether it only says that another rank is gone."""
        return LOST.search(self.complaint) is not None


def _peers(member: Watched) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {}
    for line in member.told("peer"):
        found[line["peer"]] = line
    return found


def _absent(team: Team, ranks: Sequence[int]) -> Finding:
    names = ", ".join(map(str, ranks))
    return GROUP.fail(
        "meeting",
        f"rank {names} of {team.ranks} did not come to {team.address}:{team.port} within "
        f"{team.limit_s:g} s (--timeout)",
        "start `mgt check` on every machine with the same address, port and number of ranks; look "
        "there for its message",
        absent=list(ranks),
    )


def _not_met(team: Team, rank: int, complaint: str) -> Finding:
    place = f"{team.address}:{team.port}"
    if rank == 0 and not team.hosted_elsewhere:
        return GROUP.fail(
            "meeting",
            f"rank 0 cannot open {place}: {complaint}",
            "choose another MASTER_PORT, and for MASTER_ADDR an address of this machine",
        )
    answer = network.answer(team.address, team.port)
    if answer == "":
        return GROUP.fail(
            "meeting",
            f"a program answers at {place}, but not as rank 0 of a training: {complaint}",
            f"choose another MASTER_PORT on every machine, or end that program (on its machine: "
            f"ss -ltnp 'sport = :{team.port}')",
        )
    return GROUP.fail(
        "meeting",
        f"rank {rank} did not find rank 0 at {place} within {team.limit_s:g} s (--timeout): "
        f"{answer}",
        "start rank 0 at the same time, with the same MASTER_PORT; its firewall must let "
        f"{team.port}/tcp in",
    )


def _failed(team: Team, failure: _Failure) -> Finding:
    doing = f" while {DOING[failure.stage]}" if failure.stage in DOING else ""
    remedy = "mend this first: training would fail in the same way"
    if failure.second_hand:
        remedy = "another rank ended or cannot be reached: look at its machine and its messages"
    if team.backend == "nccl":
        remedy += "; NCCL_DEBUG=INFO shows more of NCCL's side"
    text = f"it failed{doing}: {failure.complaint}"
    return GROUP.fail(f"rank {failure.rank}", text, remedy)


def _hang(team: Team, members: Sequence[Watched], peers: dict[int, dict[str, str]]) -> Finding:
    """Who is behind: the rank in the earliest stage keeps the others waiting."""
    stages = list(DOING)
    at = {team.first + number: member.stage for number, member in enumerate(members)}
    at |= {rank: str(peer.get("at", "meet")) for rank, peer in peers.items() if rank not in at}
    if members[0].stage == "meet" and not members[0].last("met"):
        return _not_met(team, team.first, f"no greeting within {team.limit_s:g} s")
    hellos = members[0].told("hello") if team.nodes > 1 else []
    earliest = min(stages.index(stage) for stage in at.values())
    behind = sorted(rank for rank, stage in at.items() if stages.index(stage) == earliest)
    hosts = {line["hello"]: f" (process {line['pid']} on {line['host']})" for line in hellos}
    who = "rank " + ", ".join(f"{rank}{hosts.get(rank, '')}" for rank in behind)
    if len(behind) == len(at):
        who = "every rank"
    size = members[0].last("bytes") if stages[earliest] == "curve" else None
    of = f" ({size / 2**20:g} MiB)" if size else ""
    return GROUP.fail(
        "all-reduce" if stages[earliest] in ("join", "values", "curve") else "ranks",
        f"a hang: {who} of {team.ranks} said nothing for {team.limit_s:g} s (--timeout) while "
        f"{DOING[stages[earliest]]}{of}",
        HANG,
        behind=behind,
        stage=stages[earliest],
    )
