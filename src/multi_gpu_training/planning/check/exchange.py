"""What real ranks found when they met: sums, speed, a training step, and the curve as a file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from multi_gpu_training.planning.check import failure
from multi_gpu_training.planning.check.findings import Finding, Group
from multi_gpu_training.planning.check.ranks import Team
from multi_gpu_training.planning.check.team import Watched

GROUP = Group("Ranks")
TOLERANCE = 1e-4  # of the weights after three steps in float32, other orders of additions included
ENOUGH = 0.4  # of what the slowest link gives: rings of real GPUs get 60 to 85 %
COLUMNS = ("source", "method", "hardware", "gpus", "nodes", "bytes", "time_us", "busbw_GBps")


def judge(
    team: Team, members: Sequence[Watched], link_gbps: float | None = None
) -> Iterator[Finding]:
    """`link_gbps` is what the slowest link of a ring should give."""
    problem = failure.find(team, members)
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
