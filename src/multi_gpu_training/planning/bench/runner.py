"""Runs each case in processes of its own: what fails there, or fills the memory, ends there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.launch.launcher import available_gpus
from multi_gpu_training.planning.bench.case import Case, Measurement
from multi_gpu_training.training.measurement import VARIABLE, Request

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|bad_alloc|MemoryError|ALLOC_FAILED"
)
DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL


class BenchError(MultiGPUError):
    """Nothing could be measured."""


@dataclass
class Runner:
    """Measures `command` (a script or `-m module`, with arguments)."""

    command: Sequence[str]
    folder: Path
    steps: int = 50
    warmup: int | None = None
    device: str = "auto"
    timeout_s: float = 300.0
    ranks_at_hand: int = 1
    say: Callable[[str], None] = lambda text: None
    measured: int = field(default=0, init=False)
    count: int = field(default=0, init=False)

    @property
    def gpus(self) -> int:
        return 0 if self.device == "cpu" else available_gpus()

    def __call__(self, case: Case) -> Measurement:
        """Train the case; an error is part of the result, unless it is the request that is wrong
        and nothing has worked before."""
        self.count += 1
        out = self.folder / f"{self.count:03d}"
        request = self.request(case, out)
        log = out / "output.txt"
        code = self.start(request, log)
        found = self.read(case, out, code, log.read_text(errors="replace"))
        if code == 2 and not self.measured:
            error = BenchError(found.error)
            error.exit_code = 2
            raise error
        self.say(describe(found))
        self.measured += found.ok
        return found

    def request(self, case: Case, out: Path) -> Request:
        gpus = self.gpus
        several = case.mode is TrainingMode.DATA_PARALLEL and gpus > 0
        return Request(
            out=str(out),
            mode=case.mode.value,
            ranks=case.ranks,
            steps=self.steps,
            warmup=self.warmup,
            device=self.device,
            device_ids=list(range(min(gpus, case.ranks))) if several else None,
            share_gpu=case.mode is DDP and 0 < gpus < case.ranks,
            silent=case.silent,
            settings=dict(case.settings),
        )

    def start(self, request: Request, log: Path) -> int:
        """The exit code of the case's processes, which write to `log`."""
        if request.mode == DDP:
            main = ["multi_gpu_training.planning.bench.start", str(request.ranks)]
        else:
            main = ["multi_gpu_training.launch.rank_main"]
        env = {**os.environ, VARIABLE: request.save(), "NO_COLOR": "1"}
        if not self.gpus:
            env.setdefault("OMP_NUM_THREADS", str(threads(self.ranks_at_hand)))
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *main, *self.command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                return process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                file.write(f"\nnot done after {self.timeout_s:g} s (--timeout)\n")
                return 124
            finally:
                end(process)

    def read(self, case: Case, out: Path, code: int, text: str) -> Measurement:
        files = sorted(out.glob("rank-*.json"))
        if code == 0 and len(files) == (case.ranks if case.mode is DDP else 1):
            records = [json.loads(file.read_text()) for file in files]
            first = records[0]
            peaks = {
                name: max(record[name] for record in records)
                for name in ("peak_bytes", "reserved_bytes")
            }
            times = tuple(first["step_times_s"])
            return Measurement(case, times, first["samples_per_step"], {**first, **peaks})
        full = bool(OUT_OF_MEMORY.search(text))
        if code == 0:
            reason = (
                f"ended before a step was measured; it must train with MultiGPUTrainingManager "
                f"and take more than the warm-up's steps (--warmup, --steps {self.steps})"
            )
        elif code in (-9, 137):
            reason = "was killed: by the system, where its memory was full"
        else:
            reason = complaint(text, code)
        return Measurement(case, out_of_memory=full, error=reason, ended=code == 0)


def complaint(text: str, code: int) -> str:
    """What a failed case said last; all of it where the request was wrong."""
    start = text.find("This run cannot start:")
    if code == 2 and start >= 0:
        return text[start:].strip()
    lines = [line.removeprefix("[rank0]: ").strip() for line in text.splitlines() if line.strip()]
    # The place of an error comes after it, in brackets.
    said = [line for line in lines if not line.startswith("(")]
    return said[-1] if said else f"ended with code {code}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Let a launcher end its ranks; they die with it in any case."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def threads(ranks: int) -> int:
    """A CPU rank is the same part of the machine in every case, like a GPU."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def describe(found: Measurement) -> str:
    name = found.case.name
    if found.ok:
        return f"{name}: {found.step_s * 1e3:.3g} ms a step, {found.samples_per_s:,.0f} samples/s"
    return f"{name}: {'out of memory' if found.out_of_memory else found.error.splitlines()[0]}"
