"""Record chosen steps of chosen ranks with torch.profiler, as they run."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.monitoring.profiling.trace_summary import STEP, write_summary
from multi_gpu_training.step_ranges import chosen_ranks, step_spans
from multi_gpu_training.training.callbacks import Callback, CallbackList, Run, RunLog
from multi_gpu_training.training.step import StepResult

VARIABLE = "MGT_PROFILE"  # how `mgt profile` reaches a script: a file with a ProfileRequest
FOLDER = "profile"


@dataclass(frozen=True)
class ProfileRequest:
    """Steps and ranks to trace, as the settings write them.

    With `out`, `mgt profile` started the run: it trains on `device`, ends after the last traced
    step, and rank 0 writes the path of its run folder to the file `out`.
    """

    steps: str
    ranks: str = "0"
    out: str | None = None
    device: str = "auto"

    @classmethod
    def of(cls, config: MultiGPUConfig) -> ProfileRequest | None:
        """What the command that started this process asks for, else the config; None: nothing."""
        path = os.environ.get(VARIABLE)
        if path:
            return cls(**json.loads(Path(path).read_text()))
        if config.profile_steps is None:
            return None
        return cls(config.profile_steps, config.profile_ranks)

    def includes(self, rank: int) -> bool:
        ranks = chosen_ranks(self.ranks)
        return ranks is None or rank in ranks

    @property
    def last_step(self) -> int:
        return step_spans(self.steps)[-1][1]

    def adapt(self, config: MultiGPUConfig) -> MultiGPUConfig:
        """The config of a run that `mgt profile` started: a fresh one that ends soon."""
        if self.out is None:
            return config
        given = {name: getattr(config, name) for name in config.model_fields_set}
        given |= {"max_steps": self.last_step, "resume": None, "run_name": None}
        if self.device != "auto":
            given["device"] = self.device
        return MultiGPUConfig(**given)

    def tell(self, run_folder: Path) -> None:
        """Let `mgt profile` know where the run is."""
        if self.out is not None:
            Path(self.out).write_text(str(run_folder))

    def save(self, folder: Path) -> str:
        """Write the request into `folder`; the result belongs into MGT_PROFILE."""
        path = folder / "profile.json"
        path.write_text(json.dumps(asdict(self)))
        return str(path)


class StepTracer(Callback):
    """Records from the end of the step before a span to the end of its last step, so that waiting
    for the batch is in it. Once the last span is done it takes itself out of the run."""

    watches_only = True

    def __init__(self, request: ProfileRequest, callbacks: CallbackList, logger: RunLog) -> None:
        self.request = request
        self._spans = list(step_spans(request.steps))
        self._callbacks = callbacks
        self._logger = logger
        self._profiler: profile | None = None
        self._mark: record_function | None = None
        self._begun = 0  # the first step of the trace under way
        self._traces: list[Path] = []

    def on_setup(self, run: Run) -> None:
        # A run that resumes behind a span does not go back to it.
        self._spans = [span for span in self._spans if span[1] > run.step]
        self._look(run, run.step)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._profiler is not None:
            self._end_step()
            if result.step >= self._spans[0][1]:
                self._stop(run, result.step)
        self._look(run, result.step)

    def on_end(self, run: Run) -> None:
        if self._profiler is not None:
            with contextlib.suppress(Exception):  # a device that failed has no trace
                self._end_step()
                if run.step >= self._begun:
                    self._stop(run, run.step)
                else:  # training ended before the first of them
                    self._profiler.stop()
        for trace in self._traces:
            try:
                write_summary(trace)
            except Exception as error:  # training is over and well, whatever a trace holds
                self._logger.warning(f"profile/{trace.name} cannot be read: {error}")
        self._traces = []

    def _look(self, run: Run, done: int) -> None:
        """Record the step that follows, if it is asked for."""
        if not self._spans:
            self._callbacks.remove(self)
            self._callbacks.add(_Ending(self))
        elif self._profiler is not None:
            self._begin_step(done + 1)
        elif done + 1 >= self._spans[0][0]:
            self._start(run)
            self._begun = done + 1
            self._begin_step(done + 1)

    def _start(self, run: Run) -> None:
        cuda = run.placement.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        # Memory of the host is not asked for: its allocator warns of every older block.
        # One trace per object: there is nothing to accumulate, but torch 2.11 warns without it.
        self._profiler = profile(activities=activities, profile_memory=cuda, acc_events=True)
        if cuda:
            torch.cuda.synchronize()
        self._profiler.start()

    def _begin_step(self, step: int) -> None:
        self._mark = record_function(f"{STEP}{step}")
        self._mark.__enter__()

    def _end_step(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None

    def _stop(self, run: Run, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        if run.placement.device.type == "cuda":
            torch.cuda.synchronize()
        profiler.stop()
        self._spans.pop(0)
        folder = run.folder / FOLDER
        rank = run.placement.identity.rank
        path = folder / f"rank-{rank}.steps-{self._begun}-{step}.json.gz"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._logger.warning(f"the trace of steps {self._begun} to {step} is lost: {error}")
            return
        self._traces.append(path)
        facts: dict[str, Any] = {"first": self._begun, "last": step, "file": path.name}
        self._logger.record("profile", **facts)


class _Ending(Callback):
    """Listens to nothing but the end of the run: traces are read when training is over."""

    watches_only = True

    def __init__(self, tracer: StepTracer) -> None:
        self._tracer = tracer

    def on_end(self, run: Run) -> None:
        self._tracer.on_end(run)
