"""From plain steps to compiled ones, without stopping the training for the compiler.

    begin       another process compiles the step while this one trains (compile_ahead.py)
    ready       it has ended, on every machine: looked at between steps, at steps all ranks agree on
    compile     the same here, from torch's cache on the disk, and compared with the plain step

A checkpoint remembers that its steps were compiled: a resumed run begins with compiled ones.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from multi_gpu_training.data.order import Share
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.probe import untouched
from multi_gpu_training.training.runner.compile_ahead import CompileAhead, fits_beside
from multi_gpu_training.training.runner.compiled import compile_loss, compiled_problem
from multi_gpu_training.training.runner.graph import resolve_kept
from multi_gpu_training.training.runner.rollback_window import Fed
from multi_gpu_training.training.step_state import StepState

PAYS_AFTER_S = 15.0  # of training that is left: compiling here takes up to five of them
LOOK_EVERY_S = 2.0
LONG_RUN_S = 300.0  # stands still for the compiler, where no other process can do its work


def _load_compiler() -> None:
    """Import what compiling here will need, beside the training: it would stand still for it."""
    with suppress(Exception):  # compiling says what is wrong
        importlib.import_module("torch._inductor.compile_fx")


class CompileSwitch:
    """When and whether steps become compiled ones.

    compiled: what steps compute the loss with since; None for the plain loss. since: the first
    step that did. look_every: steps between two looks at the other process, the same on all ranks.
    """

    def __init__(self, state: StepState, say: Callable[[str], None]) -> None:
        self.compiled: LossFn | None = None
        self.since: int | None = None
        self.look_every = 0
        self.took_s = 0.0
        self._state = state
        self._say = say
        self._ahead: CompileAhead | None = None
        self._waits = False  # equal on all ranks, also on those that have no process of their own
        self._shape: tuple[int, int] | None = None
        self._saved: dict[str, Any] | None = None

    # Beside the training

    def pays(self, step_s: float) -> bool:
        """Whether so much training is left that compiling is worth it. Equal on all ranks."""
        left = self._state.steps_left()
        return left is None or left * step_s >= PAYS_AFTER_S

    def begin(self, step_s: float, micro: Fed) -> str | None:
        """Have another process compile; why that cannot be. Collective."""
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
        """Whether another process compiles, on any machine."""
        return self._waits

    def ready(self) -> bool:
        """Whether it has ended everywhere. Collective."""
        ended = self._ahead is None or self._ahead.done
        if not self._state.placement.all_agree(ended):
            return False
        self._waits = False
        return True

    def compile(self, micro: Fed, draws_noise: bool) -> str | None:
        """Compile here what the other process has compiled, and compare it; why it cannot be used.
        Collective."""
        begun, state = time.perf_counter(), self._state
        problem = None if self._ahead is None else self._ahead.problem
        self.close()
        compiled = compile_loss(state.step_module.loss_fn)
        if state.placement.all_agree(problem is None):
            problem = compiled_problem(state, compiled, micro, draws_noise)
        if not state.placement.all_agree(problem is None):
            return problem or "another rank cannot compile it"
        self._use(compiled, micro[2])
        self.took_s = time.perf_counter() - begun
        return None

    def _use(self, compiled: LossFn, share: Share) -> None:
        self.compiled, self.since = compiled, self._state.step + 1
        self._shape = share.count, share.window_count

    def drop(self) -> None:
        """Steps are plain again."""
        self.compiled = self.since = self._shape = None

    def close(self) -> None:
        ahead, self._ahead, self._waits = self._ahead, None, False
        if ahead is not None:
            ahead.close()

    # As the checkpoint's steps were

    def resume(self) -> None:
        """Begin with compiled steps, where the checkpoint's last one was: compiled and plain
        steps round differently."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        self._say("step: compiled, as before; that can take a minute unless this was done here")
        self.compiled = compile_loss(self._state.step_module.loss_fn)
        self.since, self._shape = int(saved["since"]), (int(saved["count"]), int(saved["window"]))

    def suits(self, share: Share) -> bool:
        """Whether a micro-batch has the shape that was compiled: another one stays plain."""
        return self.compiled is not None and self._shape == (share.count, share.window_count)

    def state_dict(self) -> dict[str, Any] | None:
        if self.compiled is None or self._shape is None:
            return None
        return {"since": self.since, "count": self._shape[0], "window": self._shape[1]}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        self._saved = saved
