"""Nodes train one run; links are cut and nodes are killed: what happens, and how long it takes.

    python benchmarks/nodes.py --out nodes.json
    python benchmarks/nodes.py --only follower-killed,leader-killed
    python benchmarks/nodes.py --seed 3 --random 5      further cases at random moments

Each node is a network namespace with an address and a disk of its own (tests/nodes.py); root is
needed. `mgt run --nnodes 1:2 train.py` is started on each, a small model, a checkpoint every five
steps. Measured is the time from the fault until a step further than any before is done, and whether
the run ends by itself with the weights of an undisturbed run on one rank, every step of it made of
the same samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from node_run import PATIENCE_S, TOKEN, Run, compare, undisturbed
from nodes import Machine, Network, why_not

WITNESS = ("--witness", "../witness/it")  # beside the nodes' disks


def everyone(run: Run) -> list[Machine]:
    return run.network.nodes


def all_but(*numbers: int) -> Callable[[Run], list[Machine]]:
    return lambda run: [n for i, n in enumerate(run.network.nodes) if i not in numbers]


@dataclass
class Case:
    name: str
    what: str
    play: Callable[[Run], float | None]  # seconds until training again
    ends: Callable[[Run], list[Machine]] = everyone  # the nodes that see the end of the run
    shared: bool = False
    nodes: int = 2


def begin(run: Run, *flags: str) -> list[Machine]:
    """All nodes train."""
    for node in run.network.nodes:
        run.start(node, *flags)
    run.reach(12, world=run.world)
    return run.network.nodes


def again(run: Run, since: float, world: int | None = None) -> float:
    """Seconds from `since` until training got further than it was."""
    return run.reach(run.newest() + 1, world) - since


def all_train(run: Run, since: float) -> None:
    """Wait until all nodes do, after `since`."""
    run.network.when(
        lambda: any(x["time"] > since and x["world"] == run.world for x in run.lines()),
        PATIENCE_S,
        "all nodes",
    )


Play = Callable[[Run], float]


def cut_for(seconds: float) -> Callable[[Run], float]:
    def play(run: Run) -> float:
        last = begin(run)[-1]
        run.network.cut(last)
        since = time.time()
        time.sleep(0.5)
        far = run.newest()
        time.sleep(max(0.0, seconds - 0.5))
        run.network.heal(last)
        healed = time.time()
        when = run.reach(far + 1)
        all_train(run, healed)
        return when - since

    return play


def killed(*victims: int, returns: bool = True, flags: tuple[str, ...] = ()) -> Play:
    """Kill nodes. Those that are left go on where they may; the others are started again."""

    def play(run: Run) -> float:
        nodes = begin(run, *flags)
        for victim in victims:
            nodes[victim].kill()
        since = time.time()
        survivors = len(nodes) - len(victims)
        alone = 2 * survivors > len(nodes) or "--witness" in flags
        if alone:
            taken = again(run, since, world=survivors * run.ranks)
        if returns or not alone:
            time.sleep(0 if alone else 15)
            for victim in victims:
                run.start(nodes[victim], *flags)
            all_train(run, time.time())
        return taken if alone else again(run, since)

    return play


def left(victim: int) -> Play:
    """A launcher is asked to end, as a preemption does: the other goes on alone."""

    def play(run: Run) -> float:
        nodes = begin(run)
        since = time.time()
        os.kill(nodes[victim].launcher, signal.SIGTERM)
        return again(run, since, world=run.world - run.ranks)

    return play


def killed_and_at_once_back(victim: int) -> Callable[[Run], float]:
    def play(run: Run) -> float:
        nodes = begin(run)
        nodes[victim].kill()
        since = time.time()
        run.start(nodes[victim])
        return again(run, since, world=run.world)

    return play


def rank_killed(victim: int) -> Callable[[Run], float]:
    def play(run: Run) -> float:
        nodes = begin(run)
        for pid in nodes[victim].pids():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if b"\0LOCAL_RANK=0\0" in environment:
                    os.kill(pid, 9)
                    break
            except OSError:
                continue
        return again(run, time.time(), world=run.world)

    return play


def power_cut_of_leader(run: Run) -> float:
    """Node 0 falls silent for good: the other cannot know, gives up, and is started again."""
    first, second = begin(run, "--recovery-timeout", "15")
    run.network.cut(first)
    first.kill()
    since = time.time()
    run.end([second])
    assert "--resume auto" in second.said, second.said
    assert second.code == 1, second.code
    far = run.newest()
    run.settings = json.dumps({**json.loads(run.settings), "resume": "auto"})
    hosts = ["--nnodes", "1:2", "--node-rank", 0, "--master-addr", second.address]
    source = str(Path(__file__).parent.parent / "src")
    command = ("-m", "multi_gpu_training", "run", *hosts, "--num-gpus", run.ranks)
    env = {"PYTHONPATH": source, "MGT_CLUSTER_TOKEN": TOKEN}
    second.start(*command, "train.py", run.settings, env=env)
    return run.reach(far + 1) - since


def cases() -> Iterator[Case]:
    yield Case("undisturbed", "two nodes, nothing happens", lambda run: begin(run) and None)
    yield Case("cut-5", "link cut for 5 s", cut_for(5))
    yield Case("cut-60", "link cut for 60 s", cut_for(60))
    yield Case("follower-returns", "node 1 killed, started again 15 s later", killed(1))
    yield Case("follower-at-once", "node 1 killed and started at once", killed_and_at_once_back(1))
    yield Case("leader-returns", "node 0 killed, started again 15 s later", killed(0))
    yield Case("follower-leaves", "node 1 asked to end (SIGTERM)", left(1), all_but(1))
    yield Case("leader-leaves", "node 0 asked to end (SIGTERM)", left(0), all_but(0))
    yield Case("witness-follower", "witness: node 1 killed",
               killed(1, returns=False, flags=WITNESS), all_but(1))  # fmt: skip
    yield Case("witness-leader", "witness: node 0 killed, started again",
               killed(0, flags=WITNESS))  # fmt: skip
    yield Case("leader-at-once", "node 0 killed and started at once", killed_and_at_once_back(0))
    yield Case("rank-killed", "a rank of node 1 killed", rank_killed(1))
    yield Case("leader-rank-killed", "a rank of node 0 killed", rank_killed(0))
    yield Case("shared-leader", "shared disk, node 0 killed, started again", killed(0), shared=True)
    yield Case("power-cut", "node 0 switched off without a word: needs --resume auto",
               power_cut_of_leader, all_but(0))  # fmt: skip
    yield Case("three", "three nodes, nothing happens", lambda run: begin(run) and None, nodes=3)
    yield Case("three-cut", "three nodes, link of one cut for 20 s", cut_for(20), nodes=3)
    yield Case("three-follower", "three nodes, node 1 killed, started again", killed(1), nodes=3)
    yield Case("three-leader", "three nodes, node 0 killed, started again", killed(0), nodes=3)
    yield Case("three-leaders", "three nodes, 0 and 1 killed, started again 15 s later",
               killed(0, 1), nodes=3)  # fmt: skip


def random_cases(count: int, seed: int) -> Iterator[Case]:
    chance = random.Random(seed)
    for number in range(count):
        if chance.random() < 0.5:
            seconds = chance.choice([1, 3, 8, 9.5, 11, 14, 20, 30])
            yield Case(f"random-{number}", f"link cut for {seconds} s", cut_for(seconds))
        else:
            victim = chance.randrange(2)
            play = chance.choice([killed, killed_and_at_once_back])(victim)
            yield Case(f"random-{number}", f"node {victim} killed and back", play)


def perform(case: Case, epochs: int, pause: float, ranks: int) -> dict[str, Any]:
    with Network(case.shared, case.nodes) as network:
        run = Run(network, epochs, pause, ranks)
        (network.folder / "witness").mkdir()
        row: dict[str, Any] = {"case": case.name, "what": case.what, "ok": False}
        try:
            taken = case.play(run)
            run.hurry()
            row["training_again_s"] = None if taken is None else round(taken, 1)
            row["codes"] = run.end(case.ends(run))
            row["weights"], row["orders"] = run.weights(), run.orders()
            row["repeated"] = run.repeated()
            row["steps"] = run.newest()
            row["attempts"] = len({line["attempt"] for line in run.lines()})
            row["ok"] = all(code == 0 for code in row["codes"])
        except (AssertionError, OSError, ValueError) as error:
            row["problem"] = str(error)[-6000:]
        if not row["ok"]:
            row.setdefault("problem", network.said())
        return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | training again after | attempts | steps repeated | same result |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        again = row.get("training_again_s")
        taken = "-" if again is None else f"{again:.1f} s"
        same = f"yes ({row['difference']:.0e})" if row["same"] else "NO"
        lines.append(
            f"| {row['what']} | {taken} | {row.get('attempts', '-')} | {row.get('repeated', '-')} "
            f"| {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="cases by name, with commas")
    parser.add_argument("--random", type=int, default=0, help="so many further cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=40, help="of ten steps")
    parser.add_argument(
        "--pause", type=float, default=0.2, help="seconds between steps until the case is played"
    )
    parser.add_argument("--ranks", type=int, default=1, help="of a node")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces are removed
    reason = why_not()
    if reason is not None:
        sys.exit(reason)
    chosen = [*cases(), *random_cases(given.random, given.seed)]
    if given.only:
        names = given.only.split(",")
        chosen = [case for case in chosen if case.name in names]
    rows: list[dict[str, Any]] = []
    references = {
        nodes: undisturbed(given.epochs, 4 * nodes * given.ranks)
        for nodes in {case.nodes for case in chosen}
    }
    for case in chosen:
        row = perform(case, given.epochs, given.pause, given.ranks)
        compare(row, references[case.nodes])
        print(json.dumps({k: v for k, v in row.items() if k != "problem"}), flush=True)
        if not row["same"]:
            print(row.get("problem", ""), flush=True)
        rows.append(row)
    print(table(rows))
    if given.out is not None:
        facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "cases": rows}
        given.out.write_text(json.dumps(facts, indent=1))
    if not all(row["same"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
