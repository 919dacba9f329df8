"""Event folders as runs write them, made from plain numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

PHASES = ("input", "forward", "backward", "comm", "optimizer", "checkpoint", "other")


class Folder:
    """A run's folder. `add` writes one line as a rank does."""

    def __init__(self, path: Path, ranks: int = 2, **config: Any) -> None:
        self.path = path
        self.ranks = ranks
        (path / "events").mkdir(parents=True)
        settings = {"training_mode": "distributed_data_parallel", "num_workers": 0, **config}
        (path / "config.yaml").write_text(yaml.safe_dump(settings))
        (path / "environment.json").write_text(json.dumps({"host": "machine", "gpus": []}))

    def add(self, rank: int, event: str, at: float = 0.0, attempt: int = 0, **fields: Any) -> None:
        record = {"v": 1, "run": self.path.name, "attempt": attempt, "rank": rank}
        record |= {"world_size": self.ranks, "host": "machine", "time": 1.79e9 + at, "clock": at}
        line = json.dumps({**record, "event": event, **fields}) + "\n"
        with (self.path / "events" / f"rank-{rank}.jsonl").open("a") as file:
            file.write(line)

    def start(self, step: int = 0, at: float = 0.0, attempt: int = 0, **facts: Any) -> None:
        for rank in range(self.ranks):
            known = {"device": "cpu", "device_uuid": None, "cores": [0, 1], "machine_cores": 2}
            known |= {"per_rank_batch": 32, "accumulation": 1, "global_batch": 32 * self.ranks}
            known |= {"gradient_bytes": 1_000_000, "peak_flops": 2e10, **facts}
            own = {k: v[rank] if isinstance(v, tuple) else v for k, v in known.items()}
            self.add(rank, "rank", at, attempt, step=step, **own)

    def log(self, step: int, at: float = 0.0, attempt: int = 0, **fields: Any) -> None:
        for rank in range(self.ranks):
            logged = {"epoch": 0, "loss": 1.0 / step, "samples_per_s": 640.0, "lr": 0.1, **fields}
            self.add(rank, "step", at, attempt, step=step, **logged)

    def end(self, step: int, at: float = 10.0, **fields: Any) -> None:
        for rank in range(self.ranks):
            self.add(rank, "run_end", at, step=step, steps=step, elapsed_s=at, **fields)

    def time_steps(
        self,
        own: list[dict[str, float]],
        transfer: float = 0.002,
        steps: int = 40,
        noise: float = 0.0,
        first: int = 1,
        checkpoint_s: float = 0.0,
        begin: float = 0.0,
    ) -> None:
        """Timed steps of ranks that do `own` milliseconds of each phase themselves, and then wait
        for the slowest and for the network (seconds), all with so much noise."""
        draw = random.Random(first)
        for step in range(first, first + steps):
            mine = []
            for phases in own:
                shaken = {p: v / 1e3 * (1 + noise * draw.random()) for p, v in phases.items()}
                mine.append(shaken)
            together = max(sum(v for k, v in m.items() if k != "queued") for m in mine)
            for rank, phases in enumerate(mine):
                spent = {f"{p}_s": phases.get(p, 0.0) for p in PHASES}
                busy = sum(spent.values())
                spent["comm_s"] = together - busy + transfer * (1 + noise * draw.random())
                total = together + transfer
                facts = {"source": "step", **spent, "step_s": total, "cpu_s": 0.9 * busy}
                forward = min(phases.get("queued", 0.0), spent["forward_s"])
                facts |= {"queued_forward_s": forward, "interval_steps": 1}
                facts["queued_backward_s"] = phases.get("queued", 0.0) - forward
                facts |= {"interval_s": total + checkpoint_s, "interval_input_s": spent["input_s"]}
                facts["interval_checkpoint_s"] = checkpoint_s
                self.add(rank, "phases", begin + step * total, step=step, **facts)


def healthy(**more: float) -> dict[str, float]:
    """Milliseconds of a rank that has nothing to complain about."""
    usual = {"input": 0.5, "forward": 6.0, "backward": 12.0, "optimizer": 2.0, "other": 0.3}
    return {phase: usual.get(phase, 0.0) + more.get(phase, 0.0) for phase in {**usual, **more}}
