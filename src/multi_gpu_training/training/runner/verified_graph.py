"""A graph runner that is checked against the eager step, and rolled back if it differs.

A recorded step computes with the Python values it saw when it was recorded. Values that the code
visibly reads are guarded: a step that would read a different value runs eagerly. Comparisons catch
what guards miss, after 16, 64, ... steps and before anyone uses the weights: the last verified
state is restored, and the steps since then are recomputed eagerly.

A comparison takes longer than many recorded steps. If epochs or saves come so fast that comparing
before each would cost more than half a percent of the time, some are skipped: the last verified
state is on disk, and if a later comparison fails, the run goes back to it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.progress_slot import Phase, note_phase
from multi_gpu_training.errors import StaleStepsError
from multi_gpu_training.training.nan_guard import LOOK_RECORDED, NanGuard
from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.runner.graph import resolve_kept
from multi_gpu_training.training.runner.graph_cache import (
    KEPT_BYTES,
    GraphCache,
    GraphRunner,
    is_planned,
    micro_key,
)
from multi_gpu_training.training.runner.graph_guards import Guards
from multi_gpu_training.training.runner.rollback_window import Fed, RollbackWindow, fed, step_bytes
from multi_gpu_training.training.runner.step_comparison import StepComparison
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

MOST_SHAPES = 8  # recordings; each holds memory of the device for good
FIRST_WINDOW = 16  # steps until the first comparison; then four times as many each time
LONGEST_WINDOW = 4096  # a rollback computes at most so many steps again

# What a rank can do with a step. All ranks do what the smallest vote says.
STALE = 0  # a value the step reads has changed: run this step eagerly, then stop replaying
FULL = 1  # no room to keep more batches: run this step eagerly, then compare
UNRECORDED = 2  # there is no recording of this shape: run this step eagerly
REPLAY = 3

_ELSEWHERE = "a Python value that another rank's step reads changed"


class VerifiedGraph:
    """Replays steps as long as that is known to be correct.

    active: whether it takes steps. give_up: called with the reason when it stops doing so.
    snapshot_other_state: copies what else a rollback must restore; returns a function that does.
    between_windows: called after each successful comparison. longest_window: at most this many
    steps until the next one, on top of the usual limits. retract: called with a step if later ones
    were wrong and may have been saved. verified_step: all steps up to it are known to be correct.
    anchor: the latest of these that was saved, or None.
    """

    def __init__(
        self,
        state: StepState,
        eager: EagerRunner,
        guard: NanGuard,
        cache: GraphCache,
        give_up: Callable[[str], None],
        snapshot_other_state: Callable[[], Callable[[], None] | None],
        between_windows: Callable[[], None] = lambda: None,
        retract: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.state = state
        self.retract = retract
        self.verified_step = 0
        self.anchor: int | None = None
        self._closed = False
        self._spared_at: int | None = None
        self._kept_at: int | None = None  # the step whose state is already kept as "before"
        self._spares = 0  # steps between two optional comparisons
        self.between_windows = between_windows
        self.longest_window: int | None = None
        self.eager = eager
        self.guard = guard
        self.cache = cache
        self.give_up = give_up
        self.active = False
        self.snapshot_other_state = snapshot_other_state
        self.graph = GraphRunner(state, cache)
        self.comparison = StepComparison(state, eager, cache, self.graph)
        self._guards: Guards | None = None
        self._stale: str | None = None  # a value that changed, if steps were replayed since
        self._sightings: dict[Any, int] = {}
        self._sizes: dict[Any, int] = {}
        self._window = RollbackWindow()
        self._window_limit = FIRST_WINDOW
        self._tolerance = 0.0
        # The current step: its micro-batches, their keys, and what all ranks do with it.
        self._step: list[Fed] = []
        self._keys: list[Any] = []
        self._rates: list[float] = []
        self._verdict = REPLAY

    def start(self, guards: Guards | None, tolerance: float, spares: int = 0) -> None:
        """The latest step is recorded and was compared: replay from here on."""
        self._guards = guards
        self._tolerance = tolerance
        self._spares = spares
        self._set_active(True)
        self._begin_window()

    def stop(self) -> None:
        """Free the recordings and everything kept for comparing them."""
        self._set_active(False)
        self.cache.collect(self.state.metrics)
        self.cache.drop()
        self.comparison.copies.drop()
        self._window = RollbackWindow()

    def _set_active(self, active: bool) -> None:
        self.active = self.guard.recorded = active

    # Every micro-batch

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        if share.first:
            self._step, self._keys = [], []
            self._rates = self._rates_now()
            self._verdict = REPLAY
        self._keys.append(micro_key(self.state, batch, share))
        result = self._run_micro(batch, samples, share)
        if share.last:
            self._after_step()
        return result

    def _run_micro(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        place = len(self._step)
        before = self._verdict
        self._verdict = self._vote(place, share)
        if self._verdict == REPLAY:
            result = self.graph.run(batch, samples, share)
            if self.graph.kept is not None:
                self._step.append((self.graph.kept, samples, share))
            else:
                self._step.append(fed(batch, samples, share))
            return result
        # The micro-batches before this one were replayed: their gradients lie in the recording, and
        # the eager rest must add to them.
        if before == REPLAY and place:
            self.graph.give_gradients(place - 1)
        self._step.append(fed(batch, samples, share))
        return self.eager.run(batch, samples, share)

    def _vote(self, place: int, share: Share) -> int:
        """What to do with a micro-batch.

        All ranks must replay the same exchanges. If the step follows from the global plan, every
        rank reaches the same decision by itself. Otherwise ranks agree at the last micro-batch,
        the only one in which they communicate; before that each does what it can.
        """
        key, before = self._keys[-1], self._verdict
        alone = self.state.placement.dp_size == 1
        agreed = alone or is_planned(key)
        mine = self._own_vote(place, key, share, agreed) if before == REPLAY else before
        if agreed:
            return mine
        if self.state.strategy.forward_exchanges:
            # SyncBatchNorm communicates in every micro-batch: they agree until one says no.
            return self.state.placement.all_min(mine) if before == REPLAY else mine
        return self.state.placement.all_min(mine) if share.last else mine

    def _own_vote(self, place: int, key: Any, share: Share, agreed: bool) -> int:
        """What this rank can do with a micro-batch of a step replayed so far."""
        fits = self.graph.find(place, key)
        if share.first and self._stale is None:
            changed = self._changed()
            if changed is not None and agreed and self.state.placement.dp_size > 1:
                # The others cannot know: continue, and undo the steps at the next comparison.
                self._stale = changed
            elif changed is not None:
                return STALE
        # Ranks keep batches of different sizes: one that runs out of room tells the others.
        if not agreed and (self.graph.ring_is_full or self._window.kept_bytes > KEPT_BYTES):
            return FULL
        return REPLAY if fits else UNRECORDED

    def _changed(self) -> str | None:
        return self._guards.changed() if self._guards is not None else None

    def _after_step(self) -> None:
        key = self._keys[0]
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = step_bytes(self._step)
        window = self._window
        window.add(self._step, self._rates, size)
        if self._verdict == STALE:
            self._leave(self._changed() or _ELSEWHERE, current=1)
            return
        if self._verdict == UNRECORDED:
            self._consider_shape()
        elif self._verdict == REPLAY:
            self.comparison.newest = (self._keys, self._step)
        if self.state.step % LOOK_RECORDED == 0 and self.guard.weights_were_spoilt():
            self._take_back()
        limit = min(self._window_limit, self.longest_window or LONGEST_WINDOW)
        since = self.state.step - self.verified_step
        full = since >= max(limit, FIRST_WINDOW) or self._verdict == FULL
        # Several ranks have voted on this before the step, so that they compare at the same one.
        if self.state.placement.dp_size == 1:
            full = full or window.kept_bytes > KEPT_BYTES or self.graph.ring_is_full
        if full and self.active:
            self.verify()

    def _begin_window(self, verified: str | None = None) -> None:
        """The current state is verified. verified: the name of a copy of it."""
        if verified is None:
            self.comparison.copies.keep("verified")
        else:
            self.comparison.copies.rename(verified, "verified")
        self.verified_step = self.state.step
        self._keep_window()

    def _keep_window(self) -> None:
        """Steps from here on can be undone."""
        self._window.begin(self.state, self.snapshot_other_state())
        self.cache.rewind_rings()
        self._stale = self._spared_at = self._kept_at = None
        self._closed = False

    def close_window(self) -> None:
        """An epoch is being closed: its steps can no longer be undone from memory."""
        self._closed = True

    def went_back(self) -> None:
        """The state was restored from an earlier checkpoint, in the same tensors: discard what was
        kept for undoing steps."""
        self._step, self._keys = [], []
        if self.active:
            self.cache.forget()
            self._begin_window()

    def mark(self) -> None:
        """An epoch begins: steps are not undone past this point."""
        if not self.active:
            return
        if not self._window.steps:
            self._begin_window()
        else:  # a comparison was skipped
            copies = self.comparison.copies
            self.cache.collect(self.state.metrics)
            if self._kept_at == self.state.step and copies.untouched:
                copies.rename("before", "verified")  # a save copied this very state a moment ago
            else:
                copies.keep("verified")
            self._keep_window()

    def saved(self) -> bool:
        """The current state was saved. Returns whether every step in it is known to be correct."""
        known = self.verified_step == self.state.step
        if known:
            self.anchor = self.verified_step
        return known

    # Other shapes

    def _consider_shape(self) -> None:
        """A step of another shape was seen; record it too the second time."""
        note_phase(Phase.RECORDING)
        key = self._keys[0]
        known = self.cache.steps.get(key)
        # It may be recorded here while another rank still lacks its recording. A step that only
        # begins like a recorded one stays eager: the difference shows when half of it has run.
        recorded = known is not None and known.keys == self._keys
        sightings = self._sightings[key] = self._sightings.get(key, 0) + 1
        new = known is None and sightings >= 2 and len(self.cache.steps) < MOST_SHAPES
        wanted = recorded or new
        # Anything that follows from the plan is the same on every rank: no need to ask.
        if not (wanted if is_planned(key) else self.state.placement.all_agree(wanted)):
            return
        # A failed recording corrupts the random numbers of earlier ones: compare them first.
        self.verify()
        if not self.active:
            return
        problem = None if recorded else self.cache.record(self._keys, self._step)
        if not self.state.placement.all_agree(problem is None):
            self.give_up(problem or "another rank could not record its step")
            return
        self.comparison.newest = (self._keys, self._step)
        difference = self._newest_difference()
        if not self.state.placement.all_agree(difference <= self._tolerance):
            self.give_up(f"a step of another shape differs by {difference:.1g} as a graph")
            return
        self.mark()

    # Comparing

    def verify(self, spare: bool = False, meanwhile: Callable[[], None] | None = None) -> None:
        """Compare the latest recorded step with the eager one; roll back if they differ.

        Call this before the weights are used: saved, evaluated, handed out. spare: skip it if it
        would cost too much and a rollback is possible without it. meanwhile: called while the
        device still computes; give it only where no code of the user's runs before the next step.
        """
        if not self.active or not self._window.steps or (spare and self._may_spare(meanwhile)):
            return
        changed = self._stale or self._changed()
        # Steps after a change cannot be kept, those before it may be; ranks follow the worst case.
        vote = 0 if self._stale is not None else 1 if changed is not None else 2
        verdict = self.state.placement.all_min(vote)
        if verdict == 0:
            self._fall_back(changed or _ELSEWHERE)
            return
        if verdict == 1:
            self._leave(changed or _ELSEWHERE, current=0)
            return
        try:
            difference = self._newest_difference()
        except torch.OutOfMemoryError:
            if self.state.placement.dp_size > 1:
                raise  # the other ranks are waiting inside the step
            self.comparison.copies.restore("before")
            self.state.drop_gradients()
            self.cache.forget()
            self.give_up("there is not enough memory to compare its recording")
            return
        if self.guard.weights_are_spoilt():
            self._take_back()
        elif not self.state.placement.all_agree(difference <= self._tolerance):
            self._fall_back(_differs(difference))
        else:
            # The comparison has copied this state already.
            self._begin_window(verified="before")
            self._window_limit = min(LONGEST_WINDOW, 4 * self._window_limit)
            self.between_windows()

    def _may_spare(self, meanwhile: Callable[[], None] | None) -> bool:
        """Whether a comparison may be skipped here. Collective."""
        since = self.state.step - self.verified_step
        if self._spared_at == self.state.step:
            return True
        if self.anchor is None or since >= self._spares:
            return False
        self.guard.ask_about_weights()
        if meanwhile is not None:
            self.cache.collect(self.state.metrics)
            self.comparison.copies.keep("before")
            self._kept_at = self.state.step
            meanwhile()
        well = self._stale is None and self._changed() is None
        spared = self.state.placement.all_agree(well and not self.guard.weights_are_spoilt())
        self._spared_at = self.state.step if spared else None
        return spared

    def accept(self, tolerance: float) -> None:
        """Recordings may now also differ from eager steps by this much."""
        self._tolerance = max(self._tolerance, tolerance)

    def _newest_difference(self) -> float:
        """How far the latest recorded step is from the eager one; "before" is the current state."""
        self.cache.collect(self.state.metrics)
        self.guard.ask_about_weights()
        return self.comparison.again()

    def _leave(self, problem: str, current: int) -> None:
        """A value that steps read has just changed: earlier replays remain valid if a comparison
        with the old value agrees. The last `current` steps saw the new value."""
        assert self._guards is not None
        with self._guards.as_before():
            replayed = len(self._window.steps) > current
            difference = self._newest_difference() if replayed else 0.0
        if self.guard.weights_are_spoilt():
            self._take_back()
        elif not self.state.placement.all_agree(difference <= self._tolerance):
            self._fall_back(_differs(difference), self._guards.as_before(), current)
        else:
            self.give_up(problem)

    def _fall_back(
        self,
        problem: str,
        values: AbstractContextManager[None] | None = None,
        current: int = 0,
    ) -> None:
        """Undo the steps since the last verified one and recompute them eagerly.

        values: a context that restores old Python values; not used for the last `current` steps.
        """
        assert self._window.counters is not None
        # A save since then holds wrong weights.
        self.retract(self.verified_step)
        # A recorded epoch, or a window that began since, already rests on the wrong steps.
        if self._closed or self._window.counters.step > self.verified_step:
            self.give_up(problem)
            raise StaleStepsError(problem, self.state.step, self.anchor)
        rates = self._rates_now()
        steps = self._rewind()
        old = len(steps) - current
        with values or nullcontext():
            for step in steps[:old]:
                self._redo(*step)
        for step in steps[old:]:
            self._redo(*step)
        self._set_rates(rates)  # the user may have set a rate since the last step
        self.give_up(f"{problem}; {len(steps)} steps were computed again")

    def _take_back(self) -> None:
        """Recorded steps made the weights non-finite: go back to the last verified step and
        recompute one by one up to the faulty step, which raises."""
        guard = self.guard
        self._set_active(False)
        steps = self._rewind()
        try:
            with guard.one_by_one():
                for step in steps:
                    guard.keep_buffers()
                    self._redo(*step)
                    guard.look(now=True)
        except BaseException:  # the recordings themselves are fine
            self._set_active(True)
            self._begin_window()
            raise
        self.give_up("as a graph its numbers were not finite")

    def _rewind(self) -> list[tuple[list[Fed], list[float]]]:
        """Restore the last verified state; returns the steps since then, with their rates."""
        state, window = self.state, self._window
        steps = list(zip(window.steps, window.rates, strict=True))
        assert window.counters is not None
        state.drop_gradients()
        window.counters.restore(state)
        # Callbacks set their values again in the recomputed steps; restore what they count.
        unknown = torch.full((), float("nan"))
        self._redo_callbacks(StepResult(unknown, state.step, True, None, False))
        self.comparison.copies.restore("verified")
        self.cache.forget()
        if window.restore_more is not None:
            window.restore_more()
        state.replayed = max(0, state.replayed - len(steps))
        return steps

    def _redo(self, step: list[Fed], rates: list[float]) -> None:
        self._set_rates(rates)
        for batch, samples, share in step:
            result = self.eager.run(resolve_kept(batch), samples, share)
        self._redo_callbacks(result)

    def _rates_now(self) -> list[float]:
        return [group["lr"] for group in self.state.optimizer.param_groups]

    def _set_rates(self, rates: list[float]) -> None:
        """Set the recorded rates: recomputing a step does not repeat what a user's loop set."""
        for group, rate in zip(self.state.optimizer.param_groups, rates, strict=False):
            group["lr"] = rate

    def _redo_callbacks(self, result: StepResult) -> None:
        for call in self.state.callbacks.redo_step_end:
            call(result)


def _differs(difference: float) -> str:
    return (
        f"a later step differs from the recorded one by {difference:.1g}: it reads something "
        "that changes, on this rank or another"
    )
