"""Three nodes train one run while links between them are cut and healed at random.

    python benchmarks/partitions.py --schedules 100 --at-once 4 --mixed --out partitions.json

Each node is a network namespace with its own address and disk (tests/nodes.py); root and nft are
needed (MGT_TEST_NFT names another nft). A schedule has one to three faults: one node, one link or
all links are cut, in one direction or both, by DROP or by REJECT, or a node stands still (SIGSTOP),
for 1 to 25 s. `mgt run --nnodes 1:3` trains a small model with a checkpoint every five steps.
Of five schedules with --mixed one has a witness in a file, one a witness on a fourth machine, whose
links are cut, too, and of four one has a disk that all nodes share.

Every schedule must show
    never two        no step is completed by one part of the nodes while another part trains
    nothing lost     the run ends with the weights and samples of an undisturbed run on one rank,
                     or, where no majority came about in time, with the documented ending
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import node_run
from node_run import TOKEN, Run, compare, undisturbed
from nodes import Machine, Network, firewall, why_not

# Starts are not measured here, and there are hundreds (tests/processes.py).
os.environ.setdefault("PYTEST_VERSION", "none")
node_run.PATIENCE_S = 900.0  # several schedules at once, on a machine that others use, too
ENDING = "stops at its newest checkpoint"
SECONDS = (1, 3, 6, 8, 11, 14, 18, 25)
WITNESS_PORT = 29400


def directions(chance: random.Random, machines: int) -> list[tuple[int, int]]:
    """Which node no longer hears which: one node, one link or all, one way or both.

    The fourth machine, where there is one, is the witness."""
    what = chance.choice(["node", "node", "link", "all"])
    if what == "node":
        alone = chance.randrange(3)
        others = range(chance.choice([3, machines]))
        pairs = [(alone, other) for other in others if other != alone]
    elif what == "link":
        pairs = [tuple(chance.sample(range(machines), 2))]
    else:
        pairs = [(0, 1), (0, 2), (1, 2)]
    way = chance.choice(["both", "both", "there", "back"])
    there = pairs if way in ("both", "there") else []
    back = [(b, a) for a, b in pairs] if way in ("both", "back") else []
    return [*there, *back]


def fault(run: Run, machines: Sequence[Machine], chance: random.Random) -> dict[str, Any]:
    """Cut something for a while, then heal it; what was done."""
    seconds = chance.choice(SECONDS)
    network = run.network
    done: dict[str, Any] = {"seconds": seconds, "at_step": run.newest()}
    if chance.random() < 0.2:
        number = chance.randrange(3)
        node = network.nodes[number]
        node.kill(signal.SIGSTOP)
        time.sleep(seconds)
        node.kill(signal.SIGCONT)
        return {**done, "paused": number}
    how, pairs = chance.choice(["drop", "reject"]), directions(chance, len(machines))
    for source, target in pairs:
        network.block(machines[source], machines[target], how)
    time.sleep(seconds)
    network.unblock(machines)
    return {**done, how: pairs}


def witness_server(network: Network, stack: ExitStack) -> Machine:
    """A fourth machine that runs `mgt cluster witness`."""
    found = Machine(network, 3, network.folder / "disk-of-witness", network.folder / "disk")
    stack.callback(found.remove)
    source = str(Path(__file__).parent.parent / "src")
    found.start(
        *("-m", "multi_gpu_training", "cluster", "witness", f"{found.address}:{WITNESS_PORT}"),
        env={"PYTHONPATH": source, "MGT_CLUSTER_TOKEN": TOKEN},
    )
    return found


def perform(
    seed: int, epochs: int, pause: float, shared: bool, witness: str | None
) -> dict[str, Any]:
    chance = random.Random(seed)
    row: dict[str, Any] = {"seed": seed, "ok": False, "shared": shared, "witness": witness}
    row["faults"] = []
    with Network(shared, 3) as network, ExitStack() as stack:
        run = Run(network, epochs, pause)
        machines = [*network.nodes]
        flags = ["--recovery-timeout", "60"]
        if witness == "file":
            (network.folder / "witness").mkdir()
            flags += ["--witness", str(network.folder / "witness" / "it")]
        elif witness == "server":
            machines.append(witness_server(network, stack))
            flags += ["--witness", f"{machines[-1].address}:{WITNESS_PORT}"]
        try:
            for node in network.nodes:
                run.start(node, *flags)
            run.reach(6, world=3)
            for _ in range(chance.randint(1, 3)):
                if all(node.code is not None for node in network.nodes):
                    break
                row["faults"].append(fault(run, machines, chance))
                time.sleep(chance.choice([0.0, 2.0, 6.0, 12.0]))
            run.hurry()
            row["codes"] = run.end()
            judge(row, run)
        except (AssertionError, OSError, ValueError) as error:
            row["problem"] = str(error)[-8000:]
        row["overlaps"] = list(overlaps(run, 1 if witness else 2))
        if not row["ok"] or row["overlaps"]:
            row.setdefault("problem", network.said())
        return row


def judge(row: dict[str, Any], run: Run) -> None:
    """Whether the run ended well, or as documented where it could not."""
    documented = [bool(n.code == 1 and ENDING in n.said) for n in run.network.nodes]
    row["steps"], row["repeated"] = run.newest(), run.repeated()
    row["attempts"] = len({line["attempt"] for line in run.lines()})
    row["trained_to_the_end"] = 0 in row["codes"]
    if 0 in row["codes"]:
        row["weights"], row["orders"] = run.weights(), run.orders()
    row["ok"] = all(code == 0 or ends for code, ends in zip(row["codes"], documented, strict=True))


def overlaps(run: Run, least: int) -> Iterator[str]:
    """Steps that two parts completed at the same time, or that too few nodes completed."""
    done: dict[tuple[int, int, int], dict[int, tuple[float, str]]] = {}
    for line in run.lines():
        key = (line["attempt"], line["world"], line["step"])
        done.setdefault(key, {})[line["rank"]] = (line["time"], line["node"])
    spans: dict[tuple[int, frozenset[str]], list[float]] = {}
    for (attempt, world, step), ranks in done.items():
        if len(ranks) < world:
            continue
        part = frozenset(number for _, number in ranks.values())
        if len(part) < least:
            yield f"nodes {sorted(part)} completed step {step} in attempt {attempt}"
        when = max(at for at, _ in ranks.values())
        spans.setdefault((attempt, part), []).append(when)
    ordered = sorted(spans.items(), key=lambda item: min(item[1]))
    for (one, first), (other, second) in itertools.pairwise(ordered):
        if min(second) < max(first):
            yield f"{one} trained until {max(first):.2f}, {other} from {min(second):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=14, help="of seven steps")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between steps")
    parser.add_argument("--shared", action="store_true", help="one disk for all nodes")
    parser.add_argument("--witness", choices=("file", "server"), help="what decides")
    parser.add_argument("--mixed", action="store_true", help="each of these in some schedules")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reason = why_not() or (None if firewall() else "nft is not installed")
    if reason is not None:
        sys.exit(reason)
    reference = undisturbed(given.epochs, 12)
    rows: list[dict[str, Any]] = []

    def one(seed: int) -> None:
        began = time.time()
        shared, witness = given.shared, given.witness
        if given.mixed:
            shared, witness = seed % 4 == 1, {3: "file", 4: "server"}.get(seed % 5)
        row = perform(seed, given.epochs, given.pause, shared, witness)
        row["wall_s"] = round(time.time() - began, 1)
        if row.get("trained_to_the_end"):
            compare(row, reference)
        else:
            row["same"] = None if row["ok"] else False
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "problem"}), flush=True)
        if not row["ok"] or row["same"] is False or row["overlaps"]:
            print(row.get("problem", ""), flush=True)
        if given.out is not None:
            facts = {"machine": platform.platform(), "cpus": os.cpu_count()}
            ordered = sorted(rows, key=lambda found: found["seed"])
            given.out.write_text(json.dumps({**facts, "schedules": ordered}, indent=1))

    with ThreadPoolExecutor(given.at_once) as threads:
        list(threads.map(one, range(given.first_seed, given.first_seed + given.schedules)))
    well = [row for row in rows if row["ok"] and row["same"] is not False and not row["overlaps"]]
    ended = [row for row in well if row["same"] is None]
    print(f"{len(well)} of {len(rows)} as promised, {len(ended)} with the documented ending")
    if len(well) < len(rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
