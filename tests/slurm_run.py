"""One run on the Slurm of tests/slurm_cluster.py, submitted as a user submits it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from node_run import TRAIN, Run
from processes import quickly
from slurm_cluster import SlurmCluster

SOURCE = Path(__file__).parent.parent / "src"
# Bits are compared between runs of as many ranks; between others 1e-12 needs float64.
SCRIPT = f"import torch\ntorch.set_default_dtype(torch.float64)\n{TRAIN}"
PATIENCE_S = 600.0  # nodes share the few cores of this machine


def environment(slurm: SlurmCluster) -> dict[str, str]:
    inherited = {k: v for k, v in slurm.environment.items() if not k.startswith("MGT_")}
    return quickly({**inherited, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"})


def local_run(folder: Path, epochs: int, ranks: int = 4) -> SlurmRun:
    """The same training on this machine, undisturbed."""
    found = SlurmRun(None, folder, epochs, 0.0)
    done = subprocess.run(
        [*MGT, "run", "--num-gpus", str(ranks), "train.py", found.settings],
        cwd=folder,
        env=quickly({**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return found


MGT = [sys.executable, "-m", "multi_gpu_training"]


class SlurmRun(Run):
    """A training that `mgt run --engine slurm` submitted and follows."""

    def __init__(
        self, slurm: SlurmCluster | None, folder: Path, epochs: int, pause: float, ranks: int = 2
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.slurm = slurm
        self.folder = folder
        self.nodes = [self]
        self.disk = folder
        self._follower: subprocess.Popen[bytes] | None = None
        super().__init__(self, epochs, pause, ranks)  # type: ignore[arg-type]
        (folder / "train.py").write_text(SCRIPT)

    def submit(self, *flags: str) -> str:
        """Start and follow it; the number of the job."""
        assert self.slurm is not None
        with (self.folder / "follow.txt").open("wb") as out:
            self._follower = subprocess.Popen(
                [
                    *MGT,
                    *("run", "--engine", "slurm", *flags),
                    *(() if "--gpus-per-node" in flags else ("--num-gpus", str(self.ranks))),
                    *("train.py", self.settings),
                ],
                cwd=self.folder,
                env=environment(self.slurm),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

        def number() -> str | None:
            found = re.search(r"submitted job (\d+)", self.said())
            assert found or self.code is None, self.said()
            return found[1] if found else None

        self.job = str(self.when(number, 60, "submission"))
        return self.job

    @property
    def code(self) -> int | None:
        return None if self._follower is None else self._follower.poll()

    def send(self, number: int) -> None:
        assert self._follower is not None
        self._follower.send_signal(number)

    def said(self) -> str:
        file = self.folder / "follow.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def when(self, happened: Any, within_s: float, what: str) -> Any:
        deadline = time.monotonic() + within_s
        while not (found := happened()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {within_s:g} s\n{self.said()[-6000:]}")
            time.sleep(0.1)
        return found

    def after(self, restarts: int, step: int = 0) -> float:
        """When the attempt with this number, or a later one, went beyond `step`."""

        def trains() -> float | None:
            assert self.code is None, f"ended\n{self.said()[-6000:]}"
            found = [
                line["time"]
                for line in self.lines()
                if line["attempt"] // 1000 >= restarts and line["step"] > step
            ]
            return min(found, default=None)

        return float(self.when(trains, PATIENCE_S, f"restart {restarts} beyond step {step}"))

    def allocated(self) -> list[int]:
        """The numbers of the nodes that it has now."""
        assert self.slurm is not None
        hosts = self.slurm.run(
            "scontrol", "show", "hostnames", self.slurm.job(self.job)["NodeList"]
        )
        return [self.slurm.names.index(name) + 1 for name in hosts.split()]

    def restarts(self) -> int:
        assert self.slurm is not None
        return int(self.slurm.job(self.job)["Restarts"])

    def finish(self) -> int:
        """Without pauses to the end; the exit code of the command that follows it."""
        self.hurry()
        self.when(lambda: self.code is not None, PATIENCE_S, "the end")
        assert self.code is not None
        return self.code

    def close(self) -> None:
        if self._follower is not None and self._follower.poll() is None:
            self._follower.kill()
            self._follower.wait()
        if self.slurm is not None and hasattr(self, "job"):
            subprocess.run(["scancel", self.job], env=self.slurm.environment, capture_output=True)
            self.slurm.when(
                lambda: self.slurm.job(self.job).get("JobState") not in ("RUNNING", "COMPLETING"),  # type: ignore[union-attr]
                60,
                "cancelled",
            )

    def __enter__(self) -> SlurmRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two sets of weights."""
    assert one.keys() == other.keys()

    def flat(value: Any) -> Iterable[float]:
        return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]

    return max(
        abs(a - b) for name in one for a, b in zip(flat(one[name]), flat(other[name]), strict=True)
    )


def same_order(one: Run, other: Run) -> bool:
    """Whether every step of both was made of the same samples, however often it was made."""
    first, second = one.orders(), other.orders()
    return first.keys() == second.keys() and all(
        first[step] == second[step] and len(first[step]) == 1 for step in first
    )


def dumps(found: Any) -> str:
    return json.dumps(found, indent=1)
