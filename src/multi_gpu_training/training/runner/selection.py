"""Chooses how steps run: as one CUDA graph, compiled, or operation by operation.

    warm-up      real steps, run eagerly; what the step reads and does is watched
    decide       the step is recorded, and compared with the eager step from the same state
    graph        steps are replayed; after 16, 64, ... steps, and before anyone uses the weights,
                 one is compared again
    eager        where a step cannot be recorded, or a comparison fails

A recorded step computes with the Python values of the time when it was recorded. Values that the
code visibly reads are guarded: a step that would read another one runs eagerly. What guards cannot
see, the comparison finds: then the last verified state is restored and the steps since then are
computed again, eagerly. Losses that `train_step` returned in between may be stale; the weights and
the metrics of the run are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.progress_slot import Phase, note_phase
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.nan_guard import LOOK_RECORDED, NanGuard
from multi_gpu_training.training.runner.comparison import Comparison
from multi_gpu_training.training.runner.compiled import try_compiled
from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.runner.graph import CudaGraphs, Graphs, resolve_kept
from multi_gpu_training.training.runner.graph_cache import (
    KEPT_BYTES,
    GraphCache,
    GraphRunner,
    is_planned,
    micro_key,
)
from multi_gpu_training.training.runner.graph_eligibility import (
    StepWatch,
    make_capturable,
    obstacle,
)
from multi_gpu_training.training.runner.graph_guards import Guards, step_guards
from multi_gpu_training.training.state_rollback import Fed, Window, own_copy, step_bytes
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

WARM_UP = 4
WARM_UP_DDP = 12  # DDP's logger looks at the clock of the GPU in its first ten steps
MOST_SHAPES = 8
MOST_MICRO_BATCHES = 32
FIRST_WINDOW = 16
LONGEST_WINDOW = 4096
LARGEST_STATE = 2**30
CLEARLY_FASTER = 0.8
WORTH_IT = 0.95
COMPILE_PAYS_AFTER_S = 15.0

# What a rank can do with a step. The smallest vote of all ranks is what all of them do.
STALE = 0  # a value that the step reads has changed: run this step eagerly, then stop replaying
FULL = 1  # no room to keep more batches: run this step eagerly, then compare
UNRECORDED = 2  # there is no recording of this shape: run this step eagerly
REPLAY = 3

_ELSEWHERE = "a Python value that another rank's step reads changed"


class StepExecution:
    """Runs the steps of one training.

    mode: what steps run as now. replayed of steps: how many were graphs. reason: why not all.
    active: whether steps must come through `run`; else the eager runner takes them.
    """

    def __init__(self, state: StepState, eager: EagerRunner, guard: NanGuard) -> None:
        self.state = state
        self.eager = eager
        self.guard = guard
        self.active = False
        self.mode = "eager"
        self.reason = "not started"
        self.say: Callable[[str], None] = lambda _: None
        # Given by the manager: how many steps are left, what else to take back.
        self.steps_left: Callable[[], int | None] = lambda: None
        self.snapshot_more: Callable[[], Callable[[], None]] | None = None
        # Around the eager step of a comparison, which shows the phases that a graph hides.
        self.check_begins: Callable[[], None] = lambda: None
        self.check_ends: Callable[[], None] = lambda: None
        self._cache = GraphCache(state, eager, guard)
        self._graph = GraphRunner(state, self._cache)
        self._comparison = Comparison(state, eager, self._cache, self._graph)
        self._copies = self._comparison.copies
        self._watch = StepWatch(state.placement.device)
        self._guards: Guards | None = None
        self._stale: str | None = None  # steps were replayed since this was seen to have changed
        self._first_step = 0
        self._seen = 0
        self._warm_up = WARM_UP
        self._sightings: dict[Any, int] = {}
        self._sizes: dict[Any, int] = {}
        self._window = Window()
        self._window_limit = FIRST_WINDOW
        self._tolerance = 0.0
        # The step under way: its micro-batches, their keys, and what all ranks do with it.
        self._step: list[Fed] = []
        self._keys: list[Any] = []
        self._verdict = REPLAY
        self._foreign = False
        self._outer_stream: torch.cuda.Stream | None = None

    @property
    def steps(self) -> int:
        """Steps that were taken since the run was started or resumed."""
        return self.state.step - self._first_step

    @property
    def replayed(self) -> int:
        """Steps that ran as a CUDA graph."""
        return self.state.replayed

    @replayed.setter
    def replayed(self, steps: int) -> None:
        self.state.replayed = steps

    # Starting

    def enter_stream(self) -> None:
        """Train on a stream that can be recorded. DDP must be built on it, too."""
        device = self.state.placement.device
        if device.type == "cuda" and self.state.config.step_execution in ("auto", "graph"):
            self._outer_stream = torch.cuda.current_stream(device)
            stream = recording_stream(device)
            stream.wait_stream(self._outer_stream)
            torch.cuda.set_stream(stream)

    def leave_stream(self) -> None:
        if self._outer_stream is not None:
            self._outer_stream.wait_stream(torch.cuda.current_stream(self._outer_stream.device))
            torch.cuda.set_stream(self._outer_stream)
            self._outer_stream = None

    def start(self, graphs: Graphs | None = None) -> None:
        """Decide what to try. Call it once model, optimizer and schedule are there."""
        state = self.state
        asked = state.config.step_execution
        self._first_step = state.step
        self._warm_up = WARM_UP_DDP if state.placement.group is not None else WARM_UP
        self.reason = "step_execution=eager" if asked == "eager" else ""
        if asked == "eager":
            return
        if graphs is None:
            problem = obstacle(state, asked)
            if problem is not None:
                self._stay_eager(problem, quiet=state.placement.device.type == "cpu")
                return
            if asked == "compile":
                self.active = True
                return
            graphs = CudaGraphs(state.placement.device)
        self._cache.graphs = graphs
        make_capturable(state.optimizer)
        state.rates.use_tensors()
        self.active = True

    def _set_mode(self, mode: str) -> None:
        self.mode = mode
        self.guard.recorded = mode == "graph"

    # Every micro-batch

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """Train on a micro-batch, by a recording where there is one."""
        if share.first:
            self._step, self._keys = [], []
            self._verdict = REPLAY
        self._keys.append(micro_key(self.state, batch, share))
        if self.mode == "graph":
            result = self._run_recorded(batch, samples, share)
        else:
            result = self._run_warming(batch, samples, share)
        if share.last and self.active:
            self._seen += 1
            if self.mode == "graph":
                self._after_graph_step()
            elif self._seen >= self._warm_up:
                self._after_warm_up()
        return result

    def _run_warming(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        self._remember(batch, samples, share)
        self._foreign = share.window_count == 0
        if self._guards is None and self._seen:
            # After a first step, which may set things up.
            state = self.state
            self._guards = step_guards(state.step_module.loss_fn, state.model, state.augment)
            self._guards.watch_settings(state.optimizer)
        if self._seen < self._warm_up - 2:
            return self.eager.run(batch, samples, share)
        with self._watch:
            return self.eager.run(batch, samples, share)

    def _run_recorded(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        place = len(self._step)
        before = self._verdict
        self._verdict = self._vote(place, share)
        if self._verdict == REPLAY:
            result = self._graph.run(batch, samples, share)
            if self._graph.kept is not None:
                self._step.append((self._graph.kept, samples, share))
            else:
                self._remember(batch, samples, share)
            return result
        if before == REPLAY and place:
            self._graph.give_gradients(place - 1)
        self._remember(batch, samples, share)
        return self.eager.run(batch, samples, share)

    def _vote(self, place: int, share: Share) -> int:
        """What to do with a micro-batch.

        All ranks must replay the same exchanges. Where the step follows from the global plan,
        every rank finds the same by itself. Elsewhere ranks agree on the last micro-batch, the
        only one in which they talk: before that each may do as it can.
        """
        key, before = self._keys[-1], self._verdict
        alone = self.state.placement.dp_size == 1
        agreed = alone or is_planned(key)
        mine = self._own_vote(place, key, share, agreed) if before == REPLAY else before
        if agreed:
            return mine
        if self.state.strategy.forward_exchanges:
            # BatchNorm over all ranks talks in every micro-batch: they agree until one says no.
            return self.state.placement.all_min(mine) if before == REPLAY else mine
        return self.state.placement.all_min(mine) if share.last else mine

    def _own_vote(self, place: int, key: Any, share: Share, agreed: bool) -> int:
        """What this rank can do with a micro-batch of a step that was replayed so far."""
        fits = self._graph.find(place, key)
        if share.first and self._stale is None:
            changed = self._changed()
            if changed is not None and agreed and self.state.placement.dp_size > 1:
                # The others cannot know: go on, and take the steps back at the next comparison.
                self._stale = changed
            elif changed is not None:
                return STALE
        # Ranks keep batches of different sizes: one that runs out of room tells the others.
        if not agreed and (self._graph.ring_is_full or self._window.kept_bytes > KEPT_BYTES):
            return FULL
        return REPLAY if fits else UNRECORDED

    def _remember(self, batch: Any, samples: Tensor | None, share: Share) -> None:
        # What has no known window is the user's own: they may fill its memory anew.
        self._step.append((own_copy(batch) if share.window_count == 0 else batch, samples, share))

    def _changed(self) -> str | None:
        return self._guards.changed() if self._guards is not None else None

    def _after_graph_step(self) -> None:
        key = self._keys[0]
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = step_bytes(self._step)
        window = self._window
        window.add(self._step, size)
        if self._verdict == STALE:
            self._leave(self._changed() or _ELSEWHERE, current=1)
            return
        if self._verdict == UNRECORDED:
            self._consider_shape()
        elif self._verdict == REPLAY:
            self._comparison.newest = (self._keys, self._step)
        if self.state.step % LOOK_RECORDED == 0 and self.guard.weights_were_spoilt():
            self._take_back()
        full = len(window.steps) >= self._window_limit or self._verdict == FULL
        if self.state.placement.dp_size == 1:
            full = full or window.kept_bytes > KEPT_BYTES or self._graph.ring_is_full
        if full and self.mode == "graph":
            self.verify()

    def _after_warm_up(self) -> None:
        note_phase(Phase.RECORDING)
        self._comparison.newest = (self._keys, self._step)
        if self._cache.graphs is None:
            self._compile("step_execution=compile")
        else:
            self._decide()

    # Deciding

    def _decide(self) -> None:
        """After the warm-up: record the step, compare it, time it."""
        self.guard.check_before_recording()
        problem = self._watch.finding or self._changed()
        if problem is None and any(key[0] is None for key in self._keys):
            problem = "the batch holds objects that are not tensors"
        if problem is None and len(self._step) > MOST_MICRO_BATCHES:
            problem = f"a step has {len(self._step)} micro-batches"
        if not self._all_agree(problem is None):
            self.give_up(problem or "another rank's step cannot be recorded")
            return
        if self._copies.size() > LARGEST_STATE:
            self._too_large()
            return
        problem = self._cache.record(self._keys, self._step, self._foreign)
        if not self._all_agree(problem is None):
            self.give_up(problem or "another rank could not record its step")
            return
        again, difference = self._comparison.first()
        self._tolerance = max(1e-6, 10 * again)
        if not self._all_agree(difference <= self._tolerance):
            self.give_up(
                f"the recorded step differs from the eager one by {difference:.1g}, "
                f"two eager ones by {again:.1g}"
            )
            return
        comparison = self._comparison
        eager = self._all_slowest(comparison.seconds(comparison.eager_step))
        recorded = self._all_slowest(comparison.seconds(comparison.replayed_step))
        self._copies.restore("before")
        self._cache.forget()
        if self.state.config.step_execution == "auto" and recorded > CLEARLY_FASTER * eager:
            self._gpu_bound(recorded, eager)
            return
        self._begin_graph(recorded, eager)

    def _begin_graph(self, recorded: float, eager: float) -> None:
        self._set_mode("graph")
        self.reason = ""
        self.say(f"step: one CUDA graph, {recorded * 1e6:,.0f} us instead of {eager * 1e6:,.0f} us")
        self._begin_window()

    def _begin_window(self, verified: str | None = None) -> None:
        """The state as it is now is verified. verified: the name of a copy of it."""
        if verified is None:
            self._copies.keep("verified")
        else:
            self._copies.rename(verified, "verified")
        more = self.snapshot_more() if self.snapshot_more is not None else None
        self._window.begin(self.state, more)
        self._cache.rewind_rings()
        self._stale = None

    def _gpu_bound(self, recorded: float, eager: float) -> None:
        """The GPU is the limit, not Python: a graph gains little, compiled kernels may."""
        left = self.steps_left()
        enough = left is None or left * eager >= COMPILE_PAYS_AFTER_S
        if enough and not self.state.config.deterministic:
            self._drop_graphs()
            self._compile("the GPU is the limit", against_s=eager)
        elif recorded <= WORTH_IT * eager:
            self._begin_graph(recorded, eager)
        else:
            self.give_up("the GPU is the limit, and the run is too short to compile for")

    def _too_large(self) -> None:
        """Comparing a recording takes three copies of the state; compiling takes one."""
        size = self._copies.size()
        room = self._all_agree(2 * size <= free_bytes(self.state.placement.device))
        if self.state.config.step_execution != "auto" or not room:
            self.give_up(f"the state has {size / 2**30:.1f} GB, too much to compare")
            return
        self._copies.keep("before")
        comparison = self._comparison
        eager = self._all_slowest(comparison.seconds(comparison.eager_step))
        self._copies.restore("before")
        self._gpu_bound(float("inf"), eager)

    def _compile(self, why: str, against_s: float | None = None) -> None:
        """Compile model and loss; keep it where it is faster and gives the same result."""
        module = self.state.step_module
        self._cache.graphs = None
        self.say("step: compiling, which can take a minute")
        noisy = self._watch.draws_noise
        problem, seconds = try_compiled(self.state, self._comparison, noisy)
        slowest = self._all_slowest(seconds if against_s is not None else 0.0)
        slower = against_s is not None and slowest > WORTH_IT * against_s
        if not self._all_agree(problem is None and not slower):
            module.compiled = module.loss_fn
            self._stay_eager(problem or f"{why}, and compiling does not help")
            return
        self.active, self.reason = False, why
        self._set_mode("compile")
        costs = self.guard.stay_eager()
        note = f", {slowest * 1e3:.1f} ms instead of {against_s * 1e3:.1f} ms" if against_s else ""
        self.say(f"step: compiled, {why}{note}" + (f"; {costs}" if costs else ""))

    # Giving recordings up

    def give_up(self, problem: str) -> None:
        """From now on steps run operation by operation."""
        self._copies.drop()
        self._stay_eager(problem)

    def _stay_eager(self, problem: str, quiet: bool = False) -> None:
        self._drop_graphs()
        self.active = False
        self._set_mode("eager")
        self.reason = problem
        note = self.guard.stay_eager()
        if not quiet:
            self.say(f"step: eager, {problem}" + (f"; {note}" if note else ""))

    def leave_graphs(self) -> None:
        """Free the recordings, without a word: the steps that follow are only measured."""
        if self.mode == "graph":
            self.active = False
            self._set_mode("eager")
            self._drop_graphs()

    def _drop_graphs(self) -> None:
        self.collect(self.state.metrics)
        self._cache.drop()
        self._window = Window()

    def went_back(self) -> None:
        """The state is that of an earlier checkpoint, in the same tensors: what was kept to take
        steps back is of no use any more."""
        self._step, self._keys = [], []
        if self.mode == "graph":
            self._cache.forget()
            self._begin_window()

    def mark(self) -> None:
        """What was verified is the state as it is now: an epoch was closed, metrics were reset."""
        if self.mode == "graph" and not self._window.steps:
            self._begin_window()

    def collect(self, metrics: MetricsCollector) -> None:
        """Add what recorded steps have summed up."""
        self._cache.collect(metrics)

    # Other shapes

    def _consider_shape(self) -> None:
        """A step of another shape was seen; the second time it is recorded as well."""
        note_phase(Phase.RECORDING)
        key = self._keys[0]
        known = self._cache.steps.get(key)
        # It may be recorded here, while another rank still lacks its own. A step that only begins
        # like a recorded one stays eager: which of them it is shows when half of it has run.
        recorded = known is not None and known.keys == self._keys
        sightings = self._sightings[key] = self._sightings.get(key, 0) + 1
        new = known is None and sightings >= 2 and len(self._cache.steps) < MOST_SHAPES
        wanted = recorded or new
        # What follows from the plan is the same on every rank: nobody has to ask.
        if not (wanted if is_planned(key) else self._all_agree(wanted)):
            return
        # A failed recording spoils the random numbers of those before it: compare them first.
        self.verify()
        if self.mode != "graph":
            return
        problem = None if recorded else self._cache.record(self._keys, self._step, self._foreign)
        if not self._all_agree(problem is None):
            self.give_up(problem or "another rank could not record its step")
            return
        self._comparison.newest = (self._keys, self._step)
        difference = self._newest_difference()
        if not self._all_agree(difference <= self._tolerance):
            self.give_up(f"a step of another shape differs by {difference:.1g} as a graph")
            return
        self.mark()

    # Comparing

    def verify(self) -> None:
        """Compare the newest recorded step with the eager one; go back where they differ.

        Call it where the weights are about to be used: saved, evaluated, given away.
        """
        if self.mode != "graph" or not self._window.steps:
            return
        changed = self._stale or self._changed()
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
                raise  # the other ranks wait inside the step
            self._copies.restore("before")
            self.state.drop_gradients()
            self._cache.forget()
            self.give_up("there is no memory to compare its recording")
            return
        if self.guard.weights_are_spoilt():
            self._take_back()
        elif not self._all_agree(difference <= self._tolerance):
            self._fall_back(_differs(difference))
        else:
            self._begin_window(verified="before")
            self._window_limit = min(LONGEST_WINDOW, 4 * self._window_limit)

    def _newest_difference(self) -> float:
        """How far the newest recorded step is from the eager one; "before" is the state now."""
        self.collect(self.state.metrics)
        self.guard.ask_about_weights()
        return self._comparison.again(self.check_begins, self.check_ends)

    def _leave(self, problem: str, current: int) -> None:
        """A value that steps read has changed just now: what was replayed before stands, if a
        comparison with the old value says so. The last `current` steps saw the new one."""
        assert self._guards is not None
        with self._guards.as_before():
            replayed = len(self._window.steps) > current
            difference = self._newest_difference() if replayed else 0.0
        if self.guard.weights_are_spoilt():
            self._take_back()
        elif not self._all_agree(difference <= self._tolerance):
            self._fall_back(_differs(difference), self._guards.as_before(), current)
        else:
            self.give_up(problem)

    def _fall_back(
        self,
        problem: str,
        values: AbstractContextManager[None] | None = None,
        current: int = 0,
    ) -> None:
        """Take back the steps since the last verified one, and compute them again, eagerly.

        values: holds Python values as they were; not around the last `current` steps.
        """
        steps = self._rewind()
        old = len(steps) - current
        with values or nullcontext():
            for step in steps[:old]:
                self._redo(step)
        for step in steps[old:]:
            self._redo(step)
        self.give_up(f"{problem}; {len(steps)} steps were computed again")

    def _take_back(self) -> None:
        """Recorded steps have moved the weights by something that is not finite: go back to the
        last verified step and on, one by one, to the step that is to blame. It raises."""
        guard = self.guard
        self._set_mode("eager")
        steps = self._rewind()
        try:
            with guard.one_by_one():
                for step in steps:
                    guard.keep_buffers()
                    self._redo(step)
                    guard.look(now=True)
        except BaseException:  # the recordings are as good as ever
            self._set_mode("graph")
            self._begin_window()
            raise
        self.give_up("as a graph its numbers were not finite")

    def _rewind(self) -> list[list[Fed]]:
        """Bring back the last verified state; returns the steps since."""
        state, window = self.state, self._window
        steps = list(window.steps)
        assert window.counters is not None
        state.drop_gradients()
        window.counters.restore(state)
        # What callbacks set after the verified step, they set again; what they count is put back.
        unknown = torch.full((), float("nan"))
        self._redo_callbacks(StepResult(unknown, state.step, True, None, False))
        self._copies.restore("verified")
        self._cache.forget()
        if window.restore_more is not None:
            window.restore_more()
        state.replayed = max(0, state.replayed - len(steps))
        return steps

    def _redo(self, step: list[Fed]) -> None:
        for batch, samples, share in step:
            result = self.eager.run(resolve_kept(batch), samples, share)
        self._redo_callbacks(result)

    def _redo_callbacks(self, result: StepResult) -> None:
        for call in self.state.callbacks.redo_step_end:
            call(result)

    # Among ranks

    def _all_agree(self, ok: bool) -> bool:
        return self.state.placement.all_min(int(ok)) == 1

    def _all_slowest(self, seconds: float) -> float:
        return -self.state.placement.all_min(-int(min(seconds, 1e6) * 1e9)) / 1e9


def _differs(difference: float) -> str:
    return (
        f"a later step differs from the recorded one by {difference:.1g}: it reads something "
        "that changes, on this rank or another"
    )


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses, including what torch holds in reserve."""
    if device.type != "cuda":
        return 2**62
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for all runs of a process: libraries keep work memory for each."""
    return torch.cuda.Stream(device)
