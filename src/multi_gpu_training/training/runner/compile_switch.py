"""Switch from plain steps to compiled ones without stopping the training for the compiler.

    begin       another process compiles the step while this one trains (compile_ahead.py)
    ready       it has ended on every machine; checked between steps, at steps all ranks agree on
    compile     compile here from torch's cache on disk, and compare with the plain step

A checkpoint records that its steps were compiled: a resumed run then starts with compiled steps.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from multi_gpu_training.data.order import Share
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.probe import untouched
from multi_gpu_training.training.runner.compile_ahead import CompileAhead, fits_beside
from multi_gpu_training.training.runner.compiled import compiled_problem
from multi_gpu_training.training.runner.graph import resolve_kept
from multi_gpu_training.training.runner.rollback_window import Fed
from multi_gpu_training.training.step_state import StepState

PAYS_AFTER_S = 15.0  # seconds of training that must be left: compiling here takes up to five
LOOK_EVERY_S = 2.0
LONG_RUN_S = 300.0  # the same, if training must stop for the compiler


def _load_compiler() -> None:
    """Import what compiling will need in the background, so that training need not wait for it."""
    with suppress(Exception):  # compiling will report what is wrong
        importlib.import_module("torch._inductor.compile_fx")


class CompileSwitch:
    """Decides whether and when steps become compiled.

    compiled: the compiled loss that steps use; None for the plain loss. since: the first step that
    used it. look_every: steps between checks on the other process, the same on all ranks.
    """

    def __init__(self, state: StepState, say: Callable[[str], None]) -> None:
        self.compiled: LossFn | None = None
        self.since: int | None = None
        self.look_every = 0
        self._state = state
        self._say = say
        self._ahead: CompileAhead | None = None
        self._waits = False  # equal on all ranks, including those without their own child process
        self._window: int | None = None  # samples of a compiled step, over all ranks
        self._saved: dict[str, Any] | None = None
        self.untried = False  # the checkpoint's steps were compiled, which was not tried here yet

    # Next to the training

    def pays(self, step_s: float) -> bool:
        """Whether enough training is left for compiling to be worth it. Equal on all ranks."""
        left = self._state.steps_left()
        return left is None or left * step_s >= PAYS_AFTER_S

    def begin(self, step_s: float, micro: Fed) -> str | None:
        """Have another process compile; returns why that is impossible, if it is. Collective."""
        state = self._state
        problem = state.strategy.compile_obstacle()
        if problem is None and not fits_beside(state):
            problem = "the GPU has no room for a process that compiles"
        # One process per machine: the ranks of a machine share the cache.
        if problem is None and state.placement.identity.local_rank == 0 and micro[2].count:
            batch, samples, _ = micro
            with untouched(state):
                given = state.prepare(resolve_kept(batch), samples)
            self._ahead = CompileAhead(state, given)
            problem = self._ahead.problem
        problems = [p for p in state.placement.gather_json(problem) if p]
        if problems:
            self.close()
            return str(problems[0])
        self._waits = True
        threading.Thread(target=_load_compiler, name="load-compiler").start()
        self.look_every = max(1, round(LOOK_EVERY_S / max(step_s, 1e-6)))
        return None

    @property
    def waits(self) -> bool:
        """Whether another process is compiling, on any machine."""
        return self._waits

    def ready(self) -> bool:
        """Whether it has ended everywhere. Collective."""
        ended = self._ahead is None or self._ahead.done
        if not self._state.placement.all_agree(ended):
            return False
        self._waits = False
        return True

    def compile(self, step: list[Fed]) -> str | None:
        """Compile here what the other process has compiled, and compare it; returns why it cannot
        be used, if so. Collective."""
        state = self._state
        problem = None if self._ahead is None else self._ahead.problem
        self.close()
        compiled = state.strategy.compile(state.step_module.loss_fn)
        if state.placement.all_agree(problem is None):
            problem = compiled_problem(state, compiled, step)
        if not state.placement.all_agree(problem is None):
            return problem or "another rank cannot compile it"
        self.compiled, self.since = compiled, state.step + 1
        self._window = step[0][2].window_count
        return None

    def drop(self) -> None:
        """Return to plain steps."""
        self.compiled = self.since = self._window = None
        self.untried = False

    def close(self) -> None:
        ahead, self._ahead, self._waits = self._ahead, None, False
        if ahead is not None:
            ahead.close()

    # As the checkpoint's steps were

    def resume(self) -> None:
        """Start with compiled steps if the checkpoint's last step was compiled: compiled and plain
        steps round differently."""
        saved, self._saved = self._saved, None
        if saved is None or not saved.get("window"):
            return
        self.since, self._window, self.untried = int(saved["since"]), int(saved["window"]), True

    def try_resumed(self, step: list[Fed]) -> None:
        """Compile and compare before the first eligible step: this may be a different machine.
        Collective."""
        self._say("step: compiling, as in the steps before the checkpoint; this can take a minute")
        since = self.since
        problem = self.compile(step)
        if problem is None:
            self.since, self.untried = since, False
        else:
            self.drop()
            self._say(f"step: not compiled as before, {problem}")

    def suits(self, share: Share) -> bool:
        """Whether a step has the compiled size on all ranks; other steps stay plain."""
        return self._window == share.window_count

    def state_dict(self) -> dict[str, Any] | None:
        # Sizes of the user's own batches (no window) are not known in advance.
        return {"since": self.since, "window": self._window} if self._window else None

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        self._saved = saved
