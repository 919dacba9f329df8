"""What real ranks found when they met: who was missing, wrong sums, speed, a training step."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from multi_gpu_training.distributed.trial import ABSENT, Request
from multi_gpu_training.planning.check import network
from multi_gpu_training.planning.check.findings import Finding, Group
from multi_gpu_training.planning.check.team import Watched, watch

GROUP = Group("Ranks")
TOLERANCE = 1e-4  # of the weights after three steps in float32, other orders of additions included
ENOUGH = 0.4  # of what the slowest link gives: rings of real GPUs get 60 to 85 %
COLUMNS = ("source", "method", "hardware", "gpus", "nodes", "bytes", "time_us", "busbw_GBps")
SIZES = [4**n * 1024 for n in range(1, 8)] + [2**25]  # 4 KiB to 32 MiB
GPU_SIZES = [2**n for n in range(12, 29)]  # 4 KiB to 256 MiB
DOING = {
    "start": "starting (importing torch)",
    "meet": "waiting for the others",
    "join": "joining the group",
    "values": "summing over the ranks",
    "curve": "summing over the ranks",
    "training": "training a step together",
    "end": "done",
}
HANG = (
    "look at what that rank does (py-spy dump --pid PID); between GPUs try NCCL_P2P_DISABLE=1, "
    "between machines open all ports and set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; "
    "NCCL_DEBUG=INFO shows the paths"
)


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
        if self.nodes == 1 and self.address == "127.0.0.1":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not any(device.startswith("cuda") for device in self.devices):
            env["OMP_NUM_THREADS"] = "1"
        team = []
        for number in range(self.here):
            rank = self.first + number
            request = Request(
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


def run(team: Team, facts: dict[str, object]) -> list[Watched]:
    """The ranks, at their end, hanging, or waiting for the verdict (see `close`)."""
    members = team.start(facts)
    try:
        watch(members, team.limit_s)
    except BaseException:
        close(members)
        raise
    return members


def close(members: Sequence[Watched], verdict: int | None = None, limit_s: float = 0.0) -> None:
    """Let the other machines know the verdict, or wait for theirs, and end every process."""
    try:
        if members and all(member.stage == "end" for member in members):
            if verdict is not None:
                members[0].tell(str(verdict))
            watch(members, limit_s, until="")
    finally:
        for member in members:
            member.kill()


def judge(
    team: Team, members: Sequence[Watched], link_gbps: float | None = None
) -> Iterator[Finding]:
    """`link_gbps` is what the slowest link of a ring should give."""
    problem = _problem(team, members)
    first = members[0]
    joined = first.told("all_came")
    if joined:
        where = f"{team.ranks} ranks" + (f" on {team.nodes} machines" if team.nodes > 1 else "")
        text = f"{where} met at {team.address}:{team.port}"
        yield GROUP.passed("meeting", f"{text}, backend {team.backend}")
    if problem is not None:
        yield problem
        return
    done = {line["done"]: line for line in first.told("done")}
    wrong = done["values"]["wrong_anywhere"]
    if wrong:
        yield GROUP.fail(
            "all-reduce",
            f"{wrong} elements of known sums are wrong",
            "do not train like this. Between GPUs try NCCL_P2P_DISABLE=1; if that helps, direct "
            "copies are broken (IOMMU, ACS); else look for a faulty GPU or network card",
        )
    yield from _speed(team, done["curve"]["curve"], link_gbps)
    yield _training(team, done["training"])


def _problem(team: Team, members: Sequence[Watched]) -> Finding | None:
    """The first cause of a trial that did not end well."""
    for member in members:
        if member.process.poll() == ABSENT:
            return _absent(team, member.last("absent"))
    failed = [m for m in members if m.process.poll() not in (None, 0, ABSENT)]
    hanging = [m for m in members if m.timed_out]
    peers = _peers(members[0]) if team.main else {}
    told = [(rank, str(peer["error"])) for rank, peer in peers.items() if "error" in peer]
    if told and not failed:
        rank, text = told[0]
        return _failed(team, rank, text.splitlines()[0])
    if failed:
        member = failed[0]
        rank = team.first + members.index(member)
        if member.stage == "meet":
            return _not_met(team, rank, member.complaint())
        return _failed(team, rank, member.complaint(), member.stage)
    if hanging:
        return _hang(team, members, peers)
    return None


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


def _failed(team: Team, rank: int, complaint: str, stage: str = "") -> Finding:
    doing = f" while {DOING[stage]}" if stage in DOING else ""
    return GROUP.fail(
        f"rank {rank}",
        f"it failed{doing}: {complaint}",
        "mend this first: training would fail in the same way; NCCL_DEBUG=INFO shows more of "
        "NCCL's side"
        if team.backend == "nccl"
        else "mend this first: training would fail in the same way",
    )


def _hang(team: Team, members: Sequence[Watched], peers: dict[int, dict[str, str]]) -> Finding:
    """Who is behind: the rank in the earliest stage keeps the others waiting."""
    stages = list(DOING)
    at = {team.first + number: member.stage for number, member in enumerate(members)}
    at |= {rank: str(peer.get("at", "meet")) for rank, peer in peers.items() if rank not in at}
    if members[0].stage == "meet" and not members[0].last("met"):
        return _not_met(team, team.first, f"no greeting within {team.limit_s:g} s")
    earliest = min(stages.index(stage) for stage in at.values())
    behind = sorted(rank for rank, stage in at.items() if stages.index(stage) == earliest)
    who = f"rank {', '.join(map(str, behind))}"
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


def bus_gbps(size: int, seconds: float, ranks: int) -> float:
    """GB/s on the busiest link of a ring, as nccl-tests counts."""
    return size / seconds / 1e9 * 2 * (ranks - 1) / ranks


def _speed(
    team: Team, curve: Sequence[tuple[int, float]], link_gbps: float | None
) -> Iterator[Finding]:
    if team.ranks == 1:
        yield GROUP.passed("all-reduce", "one rank: there is nobody to exchange with")
        return
    size, seconds = curve[-1]
    speed = bus_gbps(size, seconds, team.ranks)
    text = (
        f"sums right; {curve[0][1] * 1e6:,.0f} us for {curve[0][0] // 1024} KiB, {speed:.2g} GB/s "
        f"at {size // 2**20} MiB"
    )
    facts = {"bus_gbps": speed, "curve": [list(point) for point in curve]}
    if link_gbps is None:
        yield GROUP.passed("all-reduce", text, **facts)
        return
    text += f"; the links give up to {link_gbps:.0f}"
    if speed < ENOUGH * link_gbps:
        yield GROUP.warn(
            "all-reduce",
            text,
            "NCCL_DEBUG=INFO shows which paths it takes; look at `nvidia-smi topo -m`, at other "
            "processes on these GPUs, and for NCCL_P2P_DISABLE or NCCL_ALGO in the environment",
            **facts,
        )
    else:
        yield GROUP.passed("all-reduce", text, **facts)


def _training(team: Team, found: dict[str, object]) -> Finding:
    apart = float(str(found["apart"]))
    text = f"{found['steps']} steps of DDP on {team.ranks} ranks"
    if found["replicas_differ"] or not apart <= TOLERANCE:
        return GROUP.fail(
            "training step",
            f"{text} are not what one process computes: weights differ by {apart:.1e}"
            + (", and between ranks" if found["replicas_differ"] else ""),
            "do not train like this; `mgt verify image` looks for the cause",
        )
    return GROUP.passed(
        "training step", f"{text} are those of one process (weights apart {apart:.0e})", apart=apart
    )


def save_curve(path: Path, curve: Sequence[tuple[int, float]], team: Team, hardware: str) -> None:
    """The measured times as a table that `mgt estimate --curve` reads."""
    method = f"measured {team.backend} all-reduce"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for size, seconds in curve:
            busy = round(bus_gbps(size, seconds, team.ranks), 4)
            row = ("mgt check", method, hardware, team.ranks, team.nodes, size)
            writer.writerow([*row, round(seconds * 1e6, 2), busy])
