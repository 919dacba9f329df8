"""Disturb runs on a real Slurm of three nodes at random instants: do they resume by themselves?

    python benchmarks/slurm_faults.py --out slurm_faults.json
    python benchmarks/slurm_faults.py --seed 3 --faults 8 --only node-down,orphan

Root, and Debian's slurmctld, slurmd, slurm-client and munge are needed; nodes are network
namespaces on this machine (tests/slurm_cluster.py). `mgt run --engine slurm --nodes 2` trains a
small model in float64 on two CPU ranks per node; one node is spare. Several faults hit each run,
each at a random instant after it trains again. At its end the weights are compared with those of
an undisturbed run on this machine, and the samples of every step of every attempt.

    requeue      scontrol requeue: SIGTERM, as for a preempted job
    signal       scancel --signal=USR1
    node-down    kill -9 of slurmd and of every process of a node
    orphan       kill -9 of slurmd alone: its ranks run on and must be fenced off
    time-limit   Slurm warns the job before its limit
    shrink       node-down of a run of 1:2 nodes without a spare: one node goes on
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import slurm_run
from slurm_cluster import SlurmCluster, why_not
from slurm_run import SlurmRun, local_run, same_order, worst

FAULTS = ("requeue", "signal", "node-down", "orphan")
PER_RUN = 4
PAUSE_S = 0.1
slurm_run.PATIENCE_S = 1500.0  # starts take minutes on a machine that others use, too


def play(run: SlurmRun, kind: str, chance: random.Random) -> dict[str, Any]:
    """One fault, and how long until training got further."""
    slurm = run.slurm
    assert slurm is not None
    before = run.restarts()
    run.after(before)
    time.sleep(chance.uniform(0.0, 8.0))
    lost: list[int] = []
    began, step = time.time(), run.newest()
    if kind == "requeue":
        slurm.run("scontrol", "requeue", run.job)
    elif kind == "signal":
        slurm.run("scancel", "--signal=USR1", run.job)
    elif kind in ("node-down", "orphan", "shrink"):
        lost = [chance.choice(run.allocated())]
        (slurm.orphan if kind == "orphan" else slurm.kill_node)(lost[0])
    took = run.after(before + 1, step) - began
    here = {"fault": kind, "at_step": step, "seconds": round(took, 1), "nodes": run.allocated()}
    if kind in ("node-down", "shrink"):
        assert not set(lost) & set(here["nodes"]), f"{lost} is down, and was given again"
    for node in lost:
        slurm.revive(node)
    print(f"  {kind:10s} at step {step}: training again after {took:.0f} s", flush=True)
    return here


references: dict[int, SlurmRun] = {}  # undisturbed runs, by their length


def train(
    slurm: SlurmCluster,
    folder: Path,
    kinds: list[str],
    chance: random.Random,
    flags: list[str],
    limit: str,
) -> dict[str, Any]:
    epochs = 60 * len(kinds) + (300 if kinds == ["time-limit"] else 0)
    with SlurmRun(slurm, folder / "run", epochs, PAUSE_S) as run:
        run.submit("--time", limit if "time-limit" in kinds else "1:00:00", *flags)
        played = [play(run, kind, chance) for kind in kinds]
        code = run.finish()
        if epochs not in references:
            references[epochs] = local_run(folder.parent / f"reference-{epochs}", epochs)
        reference = references[epochs]
        difference = worst(run.weights(), reference.weights())
        fixed = "1:2" not in flags
        return {
            "faults": played,
            "code": code,
            "difference": difference,
            "same_order": same_order(run, reference),
            "repeated_steps": run.repeated(),
            "ok": code == 0
            and same_order(run, reference)
            and (difference == 0.0 if fixed else difference < 1e-12),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--only", help="like node-down,orphan")
    parser.add_argument("--limit", default="4:00", help="the time limit that is run into")
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(f"cannot run: {reason}")
    chance = random.Random(flags.seed)
    known = flags.only.split(",") if flags.only else list(FAULTS)
    results: list[dict[str, Any]] = []
    with SlurmCluster() as slurm, tempfile.TemporaryDirectory(prefix="mgt-faults-") as place:
        kinds = [chance.choice(known) for _ in range(flags.faults)]
        if flags.only is None:
            kinds = [*known, *kinds[len(known) :]]
            chance.shuffle(kinds)
        special = [kind for kind in kinds if kind in ("time-limit", "shrink")]
        kinds = [kind for kind in kinds if kind not in special]
        plans = [(kinds[i : i + PER_RUN], ["--nodes", "2"]) for i in range(0, len(kinds), PER_RUN)]
        if flags.only is None:
            special = ["time-limit", "shrink"]
        for kind in special:
            plans.append(([kind], ["--nodes", "1:2" if kind == "shrink" else "2"]))
        for number, (some, more) in enumerate(plans):
            print(f"run {number + 1} of {len(plans)}: {', '.join(some)}", flush=True)
            slurm.mend()
            if some == ["shrink"]:
                slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=no spare")
            try:
                results.append(
                    train(slurm, Path(place) / str(number), some, chance, more, flags.limit)
                )
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                results.append({"faults": [{"fault": k} for k in some], "ok": False})
                print(f"  failed: {error}", flush=True)
            shown = {k: v for k, v in results[-1].items() if k != "faults"}
            print(f"  {shown}", flush=True)
            if flags.out is not None:  # what is known so far
                found = {"machine": platform.platform(), "seed": flags.seed, "runs": results}
                flags.out.write_text(json.dumps(found, indent=1) + "\n")
    show(results)
    sys.exit(not all(result["ok"] for result in results))


def show(results: list[dict[str, Any]]) -> None:
    rows: dict[str, list[tuple[float, bool]]] = {}
    for result in results:
        for fault in result["faults"]:
            rows.setdefault(fault["fault"], []).append((fault.get("seconds", 0.0), result["ok"]))
    print("\n| fault | times | training again after, s | resumed, same weights and samples |")
    print("|---|---|---|---|")
    for kind, found in rows.items():
        seconds = sorted(s for s, _ in found)
        span = f"{seconds[0]:.0f}-{seconds[-1]:.0f}"
        print(f"| {kind} | {len(found)} | {span} | {sum(ok for _, ok in found)} |")


if __name__ == "__main__":
    main()
