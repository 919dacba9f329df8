"""Kill raylets, actors and drivers of a run on a Ray cluster: what follows, and how soon it trains.

    python benchmarks/ray_faults.py --kills 20 --out ray_faults.json

needs the extra `ray`. Two raylets on this machine with a CPU rank each train a small model in
float64, `mgt run --engine ray --nnodes 1:2`, with a checkpoint every five steps. After each kill
is measured how long it takes until a step further than any before is done, and after that of a
driver also whether any process of it is left. In the end the weights and the samples of every step
are compared with those of an undisturbed run of two ranks with the engine for one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from ray_nodes import RayRun, add_node, quick_nodes, ray_nodes

PATIENCE_S = 900.0
RANKS = 1  # on each node
FLAGS = ("--nnodes", "1:2", "--num-gpus", RANKS, "--max-restarts", 100, "--recovery-timeout", 900)


class Killing:
    """One run, which is killed again and again."""

    def __init__(self, cluster: Any, run: RayRun, chance: random.Random) -> None:
        self.cluster, self.run, self.chance = cluster, run, chance
        self.driver = self._start()
        self.starts = 1

    def _start(self) -> Any:
        return self.run.start("--engine", "ray", "--ray-address", self.cluster.address, *FLAGS)

    def furthest(self) -> int:
        return max((line["step"] for line in self.run.steps), default=-1)

    def wait_for(
        self, step: int, world: int | None = None, pids: frozenset[int] = frozenset()
    ) -> None:
        """Until `step` or a later one is done, on `world` ranks, by other processes than `pids`."""
        self.driver.when(
            lambda: any(
                line["step"] >= step and world in (None, line["world"]) and line["pid"] not in pids
                for line in self.run.steps
            ),
            PATIENCE_S,
        )

    def kill(self, what: str) -> dict[str, Any]:
        time.sleep(self.chance.uniform(0.0, 3.0))
        before, old = self.furthest(), frozenset(line["pid"] for line in self.run.steps)
        began = time.monotonic()
        left = getattr(self, f"_kill_{what}")()
        self.wait_for(before + 1, pids=old)
        took = time.monotonic() - began
        again = min(line["step"] for line in self.run.steps if line["pid"] not in old)
        found = {"killed": what, "at step": before, "training again after s": round(took, 1)}
        found |= {"steps repeated": max(0, before - again + 1), "left behind": left}
        if what == "raylet":
            add_node(self.cluster, RANKS)
            old = frozenset(line["pid"] for line in self.run.steps)
            self.wait_for(self.furthest() + 1, world=2 * RANKS, pids=old)
            found["on both nodes again after s"] = round(time.monotonic() - began, 1)
        print(json.dumps(found), flush=True)
        return found

    def _kill_raylet(self) -> int:
        node = self.chance.choice(sorted(self.cluster.worker_nodes, key=lambda n: n.unique_id))
        raylet = node.all_processes["raylet"][0].process.pid
        actors = [p for p in _actors() if p.ppid() == raylet]
        os.kill(raylet, signal.SIGKILL)
        self.cluster.worker_nodes.discard(node)
        return len(psutil.wait_procs(actors, timeout=5)[1])

    def _kill_actor(self) -> int:
        self.chance.choice(_actors()).kill()
        return 0

    def _kill_driver(self) -> int:
        self.driver.process.kill()
        self.driver.process.wait()
        deadline = time.monotonic() + 30
        while self.driver.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = len(self.driver.alive())
        self.driver = self._start()
        self.starts += 1
        return left


def _actors() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::RankActor"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within-s", type=float, default=float("inf"), help="then no more kills")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    whom = [("raylet", "actor", "driver")[i % 3] for i in range(asked.kills)]
    chance.shuffle(whom)
    quick_nodes()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="mgt-ray-faults-"))
    rows = []
    with ray_nodes(2, RANKS) as cluster:
        run = RayRun(folder, "ray", asked.epochs, pause=0.7)
        killing = Killing(cluster, run, chance)
        killing.wait_for(6)
        for what in whom:
            if time.monotonic() - began > asked.within_s:
                break
            rows.append(killing.kill(what))
        (folder / "hurry").touch()
        code = killing.driver.end_of_run(PATIENCE_S)
        nothing_left = killing.driver.nothing_left(10)
    reference = RayRun(folder, "local", asked.epochs)
    with reference.start("--num-gpus", 2 * RANKS) as program:
        assert program.end_of_run(PATIENCE_S) == 0, program
    samples, expected = run.samples(), reference.samples()
    result = {
        "kills": rows,
        "exit code": code,
        "nothing left at the end": nothing_left,
        "steps": len(samples),
        "same samples in every step": samples == expected,
        "largest difference of a weight": _apart(run.weights, reference.weights),
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        "load": os.getloadavg()[1],
    }
    print(json.dumps({k: v for k, v in result.items() if k != "kills"}, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)


def _apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    import torch

    return max(
        float(
            torch.dist(
                torch.tensor(found[k], dtype=torch.float64), torch.tensor(v, dtype=torch.float64)
            )
        )
        for k, v in expected.items()
    )


if __name__ == "__main__":
    main()
