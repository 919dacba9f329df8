"""Start a user's script or a recipe in child processes, and turn every end into a result.

What fails there, or fills the memory, ends there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.launch.launcher import available_gpus
from multi_gpu_training.measure.case import Case, CaseResult, Failure
from multi_gpu_training.measure.footprint import COUNTED
from multi_gpu_training.measure.request import ASKED, SIZES, VARIABLE, MeasureRequest
from multi_gpu_training.portability import usable_cores

MEMORY_IS_SHORT = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|bad_alloc|MemoryError|ALLOC_FAILED"
)
DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
TIMED_OUT = 124  # as timeout(1) ends
HOW = "train with manager.fit, manager.train_epoch or manager.trainer.train_step"


class MeasureError(MultiGPUError):
    """Nothing could be measured."""

    code = "MGT800"


@dataclass
class ScriptRunner:
    """Measures `command` (a script or `-m module`, with arguments), one case after the other."""

    command: Sequence[str]
    folder: Path
    steps: int = 50
    warmup: int | None = None
    device: str = "auto"
    timeout_s: float = 300.0
    ranks_at_hand: int = 1
    say: Callable[[str], None] = lambda text: None
    timeout_flag: str = "--timeout"  # that the command has, for its messages
    measured: int = field(default=0, init=False)
    count: int = field(default=0, init=False)

    @property
    def gpus(self) -> int:
        return 0 if self.device == "cpu" else available_gpus()

    @property
    def out(self) -> Path:
        """The folder of the newest case."""
        return self.folder / f"{self.count:03d}"

    def __call__(self, case: Case) -> CaseResult:
        """Train the case. An error is part of the result, unless the request itself is wrong and
        nothing has worked before."""
        self.count += 1
        request = self.request(case)
        log = self.out / "output.txt"
        code = self.start(request, log)
        found = self.read(case, code, log.read_text(errors="replace"))
        if code == 2 and not self.measured:
            error = MeasureError(found.error)
            error.exit_code = 2
            raise error
        self.say(describe(found))
        self.measured += found.ok
        return found

    def request(self, case: Case) -> MeasureRequest:
        gpus = self.gpus
        device_ids = None if case.gpu is None else [case.gpu]
        if case.mode is TrainingMode.DATA_PARALLEL and gpus:
            device_ids = list(range(min(gpus, case.ranks)))
        return MeasureRequest(
            kind=case.kind,
            out=str(self.out),
            ranks=case.ranks,
            steps=case.steps or self.steps,
            mode=case.mode.value,
            warmup=self.warmup,
            device=self.device,
            device_ids=device_ids,
            share_gpu=case.mode is DDP and 0 < gpus < case.ranks,
            settings=dict(case.settings),
            silent=case.silent,
            **case.more,
        )

    def start(self, request: MeasureRequest, log: Path) -> int:
        """The exit code of the case's processes, which write to `log`."""
        if TrainingMode(request.mode).has_ranks:
            main = ["multi_gpu_training.measure.case_launcher", str(request.ranks)]
        else:
            main = ["multi_gpu_training.launch.rank_main"]
        env = {**os.environ, VARIABLE: request.save(), "NO_COLOR": "1"}
        if not self.gpus:
            # A CPU rank gets the same part of the machine in every case, as a GPU rank does.
            cores = len(usable_cores())
            env.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.ranks_at_hand)))
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
                hint = f" ({self.timeout_flag})" if self.timeout_flag else ""
                file.write(f"\nnot done after {self.timeout_s:g} s{hint}\n")
                return TIMED_OUT
            finally:
                end(process)

    def read(self, case: Case, code: int, text: str) -> CaseResult:
        """What the ranks wrote, or why there is nothing."""
        out = self.out
        notes: dict[str, Any] = {
            "asked": _json(out / ASKED),
            "sizes": _json(out / SIZES),
            "counted": _json(out / COUNTED),
        }
        files = sorted(out.glob("rank-*.json"), key=lambda file: int(file.stem.split("-")[1]))
        if code == 0 and len(files) == case.processes:
            return _measured(case, [json.loads(file.read_text()) for file in files], notes)
        failure, error = self._failure(code, text, manager=bool(notes["asked"]))
        return CaseResult(case, failure=failure, error=error, **notes)

    def _failure(self, code: int, text: str, manager: bool) -> tuple[Failure, str]:
        what = " ".join(self.command)
        if code == 0 and not manager:
            return Failure.NO_MANAGER, (
                f"{what} ended without a MultiGPUTrainingManager, so nothing was measured; {HOW}"
            )
        if code == 0:
            return Failure.TOO_SHORT, (
                f"{what} ended before enough steps were trained through the manager; {HOW}, for "
                f"{self.steps} steps and a few to warm up"
            )
        if MEMORY_IS_SHORT.search(text):
            return Failure.OUT_OF_MEMORY, complaint(text, code)
        if code in (-9, 137):
            return Failure.CRASH, "the system killed it, probably because its memory was full"
        timed_out = code == TIMED_OUT
        return Failure.TIMEOUT if timed_out else Failure.CRASH, complaint(text, code)


def _measured(
    case: Case, records: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]
) -> CaseResult:
    first = dict(records[0])
    for name in ("peak_bytes", "reserved_bytes"):
        if name in first:
            first[name] = max(record[name] for record in records)
    times = tuple(first.get("step_times_s", ()))
    return CaseResult(
        case, times, first.get("samples_per_step", 0), first, records=records, **notes
    )


def _json(file: Path) -> dict[str, Any]:
    """What a rank noted there; empty where it did not get so far."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


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


def describe(found: CaseResult) -> str:
    name = found.case.name
    if found.ok and found.step_times_s:
        rate = f"{found.samples_per_s:,.0f} samples/s"
        ms = found.step_s * 1e3
        return f"{name}: {ms:{'.3g' if ms < 1000 else ',.0f'}} ms per step, {rate}"
    if found.ok:
        return f"{name}: done"
    return f"{name}: {'out of memory' if found.out_of_memory else found.error.splitlines()[0]}"
