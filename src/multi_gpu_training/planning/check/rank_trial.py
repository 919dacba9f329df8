"""Real ranks that meet, sum and train a step: what they found, or why they did not end well."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from multi_gpu_training.distributed.sockets import is_loopback
from multi_gpu_training.distributed.trial import ABSENT, TrialRequest
from multi_gpu_training.planning.check.check_report import Finding, Group
from multi_gpu_training.planning.check.network_check import answer
from multi_gpu_training.planning.check.topology import Team
from multi_gpu_training.planning.check.watched_process import Watched, watch
from multi_gpu_training.planning.forecast.interconnect import CURVE_COLUMNS

GROUP = Group("Ranks")
SUMS, MEETING = GROUP.about("all-reduce"), GROUP.about("meeting")
SIZES = [4**n * 1024 for n in range(1, 8)] + [2**25]  # 4 KiB to 32 MiB
GPU_SIZES = [2**n for n in range(12, 29)]  # 4 KiB to 256 MiB
TOLERANCE = 1e-4  # of the weights after three steps in float32, other orders of additions included
ENOUGH = 0.4  # of what the slowest link gives: rings of real GPUs get 60 to 85 %
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


# Start them, and end them


def start(team: Team, facts: dict[str, object]) -> list[Watched]:
    """Real rank processes. The first of each machine carries its findings to rank 0."""
    env = dict(os.environ)
    if is_loopback(team.address):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not any(device.startswith("cuda") for device in team.devices):
        env["OMP_NUM_THREADS"] = "1"
    members = []
    for number in range(team.here):
        rank = team.first + number
        request = TrialRequest(
            rank,
            team.ranks,
            team.address,
            team.port,
            team.devices[number],
            team.backend,
            team.limit_s,
            GPU_SIZES if team.backend == "nccl" else SIZES,
            hosted=team.hosted_elsewhere,
            key=team.key,
            prefix=f"mgt-check/{team.run_id}",
            facts=facts if number == 0 else {},
        )
        members.append(Watched("multi_gpu_training.distributed.trial", asdict(request), env))
    return members


def try_out(team: Team, facts: dict[str, object]) -> list[Watched]:
    """The ranks, at their end, hanging, or waiting for the verdict (see `dismiss`)."""
    members = start(team, facts)
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


# What they found


def judge(
    team: Team, members: Sequence[Watched], link_gbps: float | None = None
) -> Iterator[Finding]:
    """`link_gbps` is what the slowest link of a ring should give."""
    problem = find_failure(team, members)
    first = members[0]
    if first.told("all_came"):
        where = f"{team.ranks} ranks" + (f" on {team.nodes} machines" if team.nodes > 1 else "")
        text = f"{where} met at {team.address}:{team.port}"
        yield MEETING.passed(f"{text}, backend {team.backend}")
    if problem is not None:
        yield problem
        return
    done = {line["done"]: line for line in first.told("done")}
    wrong = done["values"]["wrong_anywhere"]
    if wrong:
        yield SUMS.fail(
            f"{wrong} elements of known sums are wrong",
            "do not train like this. Between GPUs try NCCL_P2P_DISABLE=1; if that helps, direct "
            "copies are broken (IOMMU, ACS); else look for a faulty GPU or network card",
        )
    yield from _speed(team, done["curve"]["curve"], link_gbps)
    yield _training(team, done["training"])


def bus_gbps(size: int, seconds: float, ranks: int) -> float:
    """GB/s on the busiest link of a ring, as nccl-tests counts."""
    return size / seconds / 1e9 * 2 * (ranks - 1) / ranks


def _speed(
    team: Team, curve: Sequence[tuple[int, float]], link_gbps: float | None
) -> Iterator[Finding]:
    if team.ranks == 1:
        yield SUMS.passed("one rank: nothing to exchange")
        return
    size, seconds = curve[-1]
    speed = bus_gbps(size, seconds, team.ranks)
    text = (
        f"sums are right; {curve[0][1] * 1e6:,.0f} us for {curve[0][0] // 1024} KiB, "
        f"{speed:.2g} GB/s at {size // 2**20} MiB"
    )
    facts = {"bus_gbps": speed, "curve": [list(point) for point in curve]}
    if link_gbps is not None:
        text += f"; the links give up to {link_gbps:.0f}"
    if link_gbps is not None and speed < ENOUGH * link_gbps:
        yield SUMS.warn(
            text,
            "NCCL_DEBUG=INFO shows which paths it takes; look at `nvidia-smi topo -m`, at other "
            "processes on these GPUs, and for NCCL_P2P_DISABLE or NCCL_ALGO in the environment",
            **facts,
        )
    else:
        yield SUMS.passed(text, **facts)


def _training(team: Team, found: dict[str, object]) -> Finding:
    topic, apart = GROUP.about("training step"), float(str(found["apart"]))
    text = f"{found['steps']} DDP steps on {team.ranks} ranks"
    if found["replicas_differ"] or not apart <= TOLERANCE:  # NaN is not within it either
        return topic.fail(
            f"{text} do not match one process: weights differ by {apart:.1e}"
            + (", and between ranks" if found["replicas_differ"] else ""),
            "do not train like this; `mgt verify image` looks for the cause",
        )
    text += f" match one process (weights differ by {apart:.0e})"
    return topic.passed(text, apart=apart)


def save_curve(path: Path, curve: Sequence[tuple[int, float]], team: Team, hardware: str) -> None:
    """The measured times as a table that `mgt estimate --curve` reads."""
    method = f"measured {team.backend} all-reduce"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CURVE_COLUMNS)
        for size, seconds in curve:
            busy = round(bus_gbps(size, seconds, team.ranks), 4)
            row = ("mgt check", method, hardware, team.ranks, team.nodes, size)
            writer.writerow([*row, round(seconds * 1e6, 2), busy])


# Why they did not end together


def find_failure(team: Team, members: Sequence[Watched]) -> Finding | None:
    """The first cause of a trial that did not end well."""
    for member in members:
        if member.code == ABSENT:
            return _absent(team, member.last("absent"))
    # The newest word of each rank elsewhere, which only rank 0 hears.
    peers = {line["peer"]: line for line in members[0].told("peer")} if team.main else {}
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


def _absent(team: Team, ranks: Sequence[int]) -> Finding:
    names = ", ".join(map(str, ranks))
    return MEETING.fail(
        f"rank {names} of {team.ranks} did not come to {team.address}:{team.port} within "
        f"{team.limit_s:g} s (--timeout)",
        "start `mgt check` on every machine with the same address, port and number of ranks; look "
        "there for its message",
        absent=list(ranks),
    )


def _not_met(team: Team, rank: int, complaint: str) -> Finding:
    place = f"{team.address}:{team.port}"
    if rank == 0 and not team.hosted_elsewhere:
        return MEETING.fail(
            f"rank 0 cannot open {place}: {complaint}",
            "choose another MASTER_PORT, and for MASTER_ADDR an address of this machine",
        )
    if "cluster token" in complaint:
        return MEETING.fail(f"rank {rank} was refused: {complaint}", "see `mgt cluster token`")
    reply = answer(team.address, team.port)
    if reply == "":
        return MEETING.fail(
            f"a program answers at {place}, but not as rank 0 of a training: {complaint}",
            f"choose another MASTER_PORT on every machine, or end that program (on its machine: "
            f"ss -ltnp 'sport = :{team.port}')",
        )
    return MEETING.fail(
        f"rank {rank} did not find rank 0 at {place} within {team.limit_s:g} s (--timeout): "
        f"{reply}",
        "start rank 0 at the same time, with the same MASTER_PORT; its firewall must let "
        f"{team.port}/tcp in",
    )


def _failed(team: Team, failure: _Failure) -> Finding:
    doing = f" while {DOING[failure.stage]}" if failure.stage in DOING else ""
    remedy = "fix this first: training would fail in the same way"
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
