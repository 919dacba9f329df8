"""How a step is run: as one CUDA graph, compiled, or operation by operation.

    warm-up      real steps, run eagerly; what the step reads and does is watched
    capture      the step is recorded, and compared with the eager step from the same state
    graph        steps are replayed; now and then one is compared again
    eager        where a step cannot be recorded, or a comparison fails

A step that was replayed with something stale in it is taken back: the state of the last verified
step is restored and everything since is computed again, eagerly.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.progress_slot import Phase, note_phase
from multi_gpu_training.training.capture import (
    CapturedMicro,
    CudaGraphs,
    Graphs,
    found,
    signature,
)
from multi_gpu_training.training.compiling import try_compiled
from multi_gpu_training.training.guards import Guards, step_guards
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.recordings import KEPT_BYTES, Chain, Recordings, apart
from multi_gpu_training.training.rewind import Fed, StateCopies, Window, own_copy, step_bytes
from multi_gpu_training.training.screening import StepWatch, make_capturable, obstacle
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.weight_watch import LOOK_RECORDED

if TYPE_CHECKING:
    from multi_gpu_training.training.trainer import MultiGPUTrainer

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


class StepExecution:
    """Runs the steps of one trainer.

    mode: what steps run as now. replayed of steps: how many were graphs. reason: why not all.
    """

    def __init__(self, trainer: MultiGPUTrainer) -> None:
        self.trainer = trainer
        self.active = False
        self.mode = "eager"
        self.reason = "not started"
        self.replayed = 0
        self._first_step = 0
        self._seen = 0
        self.say: Callable[[str], None] = lambda _: None
        # Given by the manager: how many steps are left, what else to take back.
        self.steps_left: Callable[[], int | None] = lambda: None
        self.snapshot_more: Callable[[], Callable[[], None]] | None = None
        # Around the eager step of a comparison, which shows the phases that a graph hides.
        self.check_begins: Callable[[], None] = lambda: None
        self.check_ends: Callable[[], None] = lambda: None
        self._recordings = Recordings(trainer)
        self._sightings: dict[Any, int] = {}
        self._sizes: dict[Any, int] = {}
        self._guards: Guards | None = None
        self._window = Window()
        self._window_limit = FIRST_WINDOW
        self._tolerance = 0.0
        self._step: list[Fed] = []
        self._keys: list[Any] = []
        self._chain: Chain | None = None
        self._broken = False
        self._foreign = False
        self._outer_stream: torch.cuda.Stream | None = None

    @property
    def steps(self) -> int:
        """Steps that were taken since the run was started or resumed."""
        return self.trainer.step - self._first_step

    # Starting

    def enter_stream(self) -> None:
        """Train on a stream that can be recorded: DDP must be built on it, too."""
        device = self.trainer.placement.device
        if device.type == "cuda" and self.trainer.config.step_execution in ("auto", "graph"):
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
        """Decide what to try. Call once model, optimizer and schedule are there."""
        trainer = self.trainer
        asked = trainer.config.step_execution
        self._first_step = trainer.step
        self._copies = StateCopies(trainer)
        self._watch = StepWatch(trainer)
        self._warm_up = WARM_UP_DDP if trainer.placement.group is not None else WARM_UP
        self.reason = "step_execution=eager" if asked == "eager" else ""
        if asked == "eager":
            return
        if graphs is None:
            problem = obstacle(trainer, asked)
            if problem is not None:
                self._stay_eager(problem, quiet=trainer.placement.device.type == "cpu")
                return
            if asked == "compile":
                self.active = True
                return
            graphs = CudaGraphs(trainer.placement.device)
        self._recordings.graphs = graphs
        make_capturable(trainer.optimizer)
        trainer.rates.use_tensors()
        self.active = True

    # Every micro-batch

    def run(self, batch: Any, samples: Tensor | None, share: Share, ours: bool) -> StepResult:
        """Train on a micro-batch, by a recording where there is one."""
        if self.mode == "graph":
            result = self._run_recorded(batch, samples, share, ours)
        else:
            result = self._run_warming(batch, samples, share, ours)
        if share.last and self.active:
            self._seen += 1
            self._after_step()
        return result

    def _run_recorded(
        self, batch: Any, samples: Tensor | None, share: Share, ours: bool
    ) -> StepResult:
        trainer = self.trainer
        if share.first:
            self._begin_step()
        key = (signature(batch), share.count, share.window_count, share.last)
        self._keys.append(key)
        place = len(self._keys) - 1
        if share.first:
            self._chain = self._recordings.find(key)
        micro: CapturedMicro | None = None
        if self._chain is not None and not self._broken:
            micro = self._chain.at(place, key)
        stale = self._stale() if share.first else None
        verdict = 0 if stale is not None else 1 if micro is None else 2
        verdict = trainer.placement.all_min(verdict)
        if verdict == 0:
            self._leave(stale or "a Python value that another rank's step reads changed")
            return trainer.eager_step(batch, samples, share)
        if verdict == 1 or micro is None:
            self._remember(batch, samples, share, ours)
            return self._run_unrecorded(batch, samples, share)
        self._recordings.keep_result()
        trainer.seed_noise()
        trainer.rates.send()
        micro.replay(batch, samples)
        if micro.ring is not None:
            self._step.append((micro.ring.newest(), samples, share))
        else:
            self._remember(batch, samples, share, ours)
        if share.last:
            self.replayed += 1
        result = trainer.advance(micro.mean, micro.norm, share, shared=True)
        self._recordings.result = weakref.ref(result)
        return result

    def _run_unrecorded(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """A micro-batch of another shape, or the rest of a step that has one."""
        place = len(self._step) - 1
        if place and not self._broken and self._chain is not None:
            self._recordings.give_gradients(self._chain.micros[place - 1])
        self._broken = True
        return self.trainer.eager_step(batch, samples, share)

    def _run_warming(
        self, batch: Any, samples: Tensor | None, share: Share, ours: bool
    ) -> StepResult:
        if share.first:
            self._begin_step()
        self._keys.append((signature(batch), share.count, share.window_count, share.last))
        self._remember(batch, samples, share, ours)
        self._foreign = not ours
        if self._guards is None and self._seen:
            self._guards = self._new_guards()  # after a first step, which may set things up
        if self._seen < self._warm_up - 2:
            return self.trainer.eager_step(batch, samples, share)
        with self._watch:
            return self.trainer.eager_step(batch, samples, share)

    def _after_step(self) -> None:
        if self.mode == "graph":
            size = self._sizes.get(self._keys[0])
            if size is None:
                size = self._sizes[self._keys[0]] = step_bytes(self._step)
            self._window.add(self._step, size)
            if self._broken:
                self._consider_shape()
            else:
                self._recordings.newest = (self._keys, self._step)
            if self.trainer.step % LOOK_RECORDED == 0 and self.trainer.weight_watch.look():
                self._take_back()
            full = len(self._window.steps) >= self._window_limit
            full = full or self._window.kept_bytes > KEPT_BYTES
            full = full or (self._chain is not None and self._chain.is_full)
            if full and self.mode == "graph":
                self.verify()
        elif self._seen >= self._warm_up:
            note_phase(Phase.RECORDING)
            self._recordings.newest = (self._keys, self._step)
            if self._recordings.graphs is None:
                self._compile("step_execution=compile")
            else:
                self._decide()

    def _begin_step(self) -> None:
        self._step, self._keys = [], []
        self._broken = False

    def _remember(self, batch: Any, samples: Tensor | None, share: Share, ours: bool) -> None:
        self._step.append((batch if ours else own_copy(batch), samples, share))

    def _new_guards(self) -> Guards:
        trainer = self.trainer
        loss_fn = trainer.step_module.loss_fn
        guards = step_guards(loss_fn, trainer.model, trainer.augment)
        guards.watch_settings(trainer.optimizer)
        return guards

    def _stale(self) -> str | None:
        return self._guards.changed() if self._guards is not None else None

    # Deciding

    def _decide(self) -> None:
        """After the warm-up: record the step, compare it, time it."""
        trainer = self.trainer
        trainer.weight_watch.check_before_recording()
        problem = self._watch.finding or self._stale()
        if problem is None and any(key[0] is None for key in self._keys):
            problem = "the batch holds objects that are no tensors"
        if problem is None and len(self._step) > MOST_MICRO_BATCHES:
            problem = f"a step has {len(self._step)} micro-batches"
        if not self._all_agree(problem is None):
            self._without_graph(problem or "another rank's step cannot be recorded")
            return
        if self._copies.size() > LARGEST_STATE:
            self._too_large()
            return
        problem = self._recordings.record(self._keys, self._step, self._foreign)
        if not self._all_agree(problem is None):
            self._without_graph(problem or "another rank could not record its step")
            return
        self._copies.keep("before")
        again, difference = self._compare_twice()
        self._tolerance = max(1e-6, 10 * again)
        if not self._all_agree(difference <= self._tolerance):
            self._without_graph(
                f"the recorded step differs from the eager one by {difference:.1g}, "
                f"two eager ones by {again:.1g}"
            )
            return
        eager = self._all_slowest(self._timed(self._recordings.eager_step))
        recorded = self._all_slowest(self._timed(self._recordings.replay_step))
        self._copies.restore("before")
        self._recordings.forget()
        if trainer.config.step_execution == "auto" and recorded > CLEARLY_FASTER * eager:
            self._gpu_bound(recorded, eager)
            return
        self._begin_graph(recorded, eager)

    def _begin_graph(self, recorded: float, eager: float) -> None:
        self.mode = "graph"
        self.reason = ""
        self.say(f"step: one CUDA graph, {recorded * 1e6:,.0f} us instead of {eager * 1e6:,.0f} us")
        self._copies.keep("verified")
        self._begin_window()

    def _begin_window(self) -> None:
        self._window.begin(self.trainer, self._snapshot())
        self._recordings.rewind_rings()

    def _gpu_bound(self, recorded: float, eager: float) -> None:
        """The GPU is the limit, not Python: a graph gains little, compiled kernels may."""
        left = self.steps_left()
        enough = left is None or left * eager >= COMPILE_PAYS_AFTER_S
        if enough and not self.trainer.config.deterministic:
            self._drop_graphs()
            self._compile("the GPU is the limit", against_s=eager)
        elif recorded <= WORTH_IT * eager:
            self._begin_graph(recorded, eager)
        else:
            self._copies.drop()
            self._stay_eager("the GPU is the limit, and the run is too short to compile for")

    def _too_large(self) -> None:
        """Recordings are compared with three copies of the state; compiling needs one."""
        size = self._copies.size()
        room = self._all_agree(2 * size <= free_bytes(self.trainer.placement.device))
        if self.trainer.config.step_execution != "auto" or not room:
            self._without_graph(f"the state has {size / 2**30:.1f} GB, too much to compare")
            return
        self._copies.keep("before")
        eager = self._all_slowest(self._timed(self._recordings.eager_step))
        self._copies.restore("before")
        self._gpu_bound(float("inf"), eager)

    def _without_graph(self, problem: str) -> None:
        self._copies.drop()
        self._stay_eager(problem)

    def _stay_eager(self, problem: str, quiet: bool = False) -> None:
        self._drop_graphs()
        self.active = False
        self.mode = "eager"
        self.reason = problem
        note = self.trainer.finite.stay_eager()
        if not quiet:
            self.say(f"step: eager, {problem}" + (f"; {note}" if note else ""))

    def give_up(self, problem: str) -> None:
        """From now on operation by operation: the step under way is computed again."""
        self._copies.drop()
        self._stay_eager(problem)

    def went_back(self) -> None:
        """The state is that of an earlier checkpoint, in the same tensors: what was kept to take
        steps back is of no use any more."""
        self._begin_step()
        if self.mode == "graph":
            self._recordings.forget()
            self._copies.keep("verified")
            self._begin_window()

    # Other shapes

    def _consider_shape(self) -> None:
        """A step of another shape was seen; the second time it is recorded as well."""
        note_phase(Phase.RECORDING)
        key = self._keys[0]
        recorded = key in self._recordings.chains  # here, while another rank may still lack its own
        sightings = self._sightings[key] = self._sightings.get(key, 0) + 1
        wanted = sightings >= 2 and len(self._recordings.chains) < MOST_SHAPES
        if not self._all_agree(wanted or recorded):
            return
        # A failed recording spoils the random numbers of those before it: compare them first.
        self.verify()
        if self.mode != "graph":
            return
        problem = (
            None if recorded else self._recordings.record(self._keys, self._step, self._foreign)
        )
        if not self._all_agree(problem is None):
            self._without_graph(problem or "another rank could not record its step")
            return
        self._recordings.newest = (self._keys, self._step)
        difference = self._newest_apart()
        if not self._all_agree(difference <= self._tolerance):
            self._without_graph(f"a step of another shape differs by {difference:.1g} as a graph")
            return
        self.mark()

    # Comparing

    def _compare_twice(self) -> tuple[float, float]:
        """How far two eager steps from one state are apart, and how far the recorded step is
        from them. Leaves the state where it was."""
        losses = self._recordings.eager_step()
        self._copies.keep("eager")
        self._copies.restore("before")
        again = self._difference(losses, self._recordings.eager_step())
        self._copies.restore("before")
        difference = self._difference(losses, self._recordings.replay_step())
        self._copies.restore("before")
        self._recordings.forget()
        return again, difference

    def _difference(self, losses: Tensor, others: Tensor) -> float:
        return max(self._copies.difference("eager"), apart(losses, others))

    def verify(self) -> None:
        """Compare the newest recorded step with the eager one; go back where they differ.

        Call it where the weights are about to be used: saved, evaluated, given away.
        """
        if self.mode != "graph" or not self._window.steps:
            return
        stale = self._stale()
        if not self._all_agree(stale is None):
            self._leave(stale or "a Python value that another rank's step reads changed")
            return
        try:
            difference = self._newest_apart()
        except torch.OutOfMemoryError:
            if self.trainer.placement.dp_size > 1:
                raise  # the other ranks wait inside the step
            self._copies.restore("before")
            self.trainer.drop_gradients()
            self._recordings.forget()
            self.give_up("there is no memory to compare its recording")
            return
        if self.trainer.weight_watch.are_spoilt():
            self._take_back()
            return
        if not self._all_agree(difference <= self._tolerance):
            self._fall_back(difference)
            return
        self._copies.rename("before", "verified")
        self._begin_window()
        self._window_limit = min(LONGEST_WINDOW, 4 * self._window_limit)

    def mark(self) -> None:
        """What was verified is the state as it is now: an epoch was closed, metrics were reset."""
        if self.mode == "graph" and not self._window.steps:
            self._copies.keep("verified")
            self._begin_window()

    def _newest_apart(self) -> float:
        """How far the newest recorded step is from the eager one; "before" is the state now."""
        self.collect(self.trainer.metrics)
        self._copies.keep("before")
        self.trainer.weight_watch.ask()
        self.check_begins()
        losses = self._recordings.eager_step()
        self.check_ends()
        self._copies.keep("eager")
        self._copies.restore("before")
        difference = self._difference(losses, self._recordings.replay_step())
        self._copies.restore("before")
        self._recordings.forget()
        return difference

    def _leave(self, problem: str) -> None:
        """A value that steps read changed just now: what was computed before it stands, if a
        comparison with the old value says so."""
        assert self._guards is not None
        with self._guards.as_before():
            difference = self._newest_apart() if self._window.steps else 0.0
            if self.trainer.weight_watch.are_spoilt():
                self._take_back()
                return
            if not self._all_agree(difference <= self._tolerance):
                self._fall_back(difference)
                return
        self._copies.drop()
        self._stay_eager(problem)

    def _fall_back(self, difference: float) -> None:
        """Take back what was computed since the last verified step, and compute it eagerly."""
        steps = self._rewind()
        for step in steps:
            self._redo(step)
        self._copies.drop()
        self._stay_eager(
            f"a later step differs from the recorded one by {difference:.1g}: it reads something "
            f"that changes, on this rank or another; {len(steps)} steps were computed again"
        )

    def _take_back(self) -> None:
        """Recorded steps have moved the weights by something that is not finite: go back to the
        last verified step and on, one by one, to the step that is to blame. It raises."""
        finite = self.trainer.finite
        self.mode = "eager"
        steps = self._rewind()
        try:
            with finite.one_by_one():
                for step in steps:
                    finite.keep_buffers()
                    self._redo(step)
                    finite.look(now=True)
        except BaseException:  # the recordings are as good as ever
            self.mode = "graph"
            self._copies.keep("verified")
            self._begin_window()
            raise
        self._copies.drop()
        self._stay_eager("as a graph its numbers were not finite")

    def _rewind(self) -> list[list[Fed]]:
        """Bring back the last verified state; the steps since."""
        trainer, window = self.trainer, self._window
        steps = list(window.steps)
        assert window.counters is not None
        trainer.drop_gradients()
        window.counters.restore(trainer)
        # What callbacks set after the verified step, they set again; what they count is put back.
        unknown = torch.full((), float("nan"))
        self._redo_callbacks(StepResult(unknown, trainer.step, True, None, False))
        self._copies.restore("verified")
        self._recordings.forget()
        if window.restore_more is not None:
            window.restore_more()
        self.replayed = max(0, self.replayed - len(steps))
        return steps

    def _redo(self, step: list[Fed]) -> None:
        for batch, samples, share in step:
            result = self.trainer.eager_step(found(batch), samples, share)
        self._redo_callbacks(result)

    def _redo_callbacks(self, result: StepResult) -> None:
        for call in self.trainer.callbacks.redo_step_end:
            call(result)

    def _snapshot(self) -> Callable[[], None] | None:
        return self.snapshot_more() if self.snapshot_more is not None else None

    # Compiling

    def _compile(self, why: str, against_s: float | None = None) -> None:
        """Compile model and loss; keep it where it is faster and says the same."""
        module = self.trainer.step_module
        self._recordings.graphs = None
        self.say("step: compiling, which can take a minute")
        problem, seconds = try_compiled(
            self.trainer,
            self._recordings,
            self._copies,
            self._watch.draws_noise,
            lambda: self._timed(self._recordings.eager_step),
        )
        slowest = self._all_slowest(seconds if against_s is not None else 0.0)
        slower = against_s is not None and slowest > WORTH_IT * against_s
        if not self._all_agree(problem is None and not slower):
            module.compiled = module.loss_fn
            self._stay_eager(problem or f"{why}, and compiling does not help")
            return
        self.active, self.mode, self.reason = False, "compile", why
        costs = self.trainer.finite.stay_eager()
        note = f", {slowest * 1e3:.1f} ms instead of {against_s * 1e3:.1f} ms" if against_s else ""
        self.say(f"step: compiled, {why}{note}" + (f"; {costs}" if costs else ""))

    # Small parts

    def collect(self, metrics: MetricsCollector) -> None:
        """Hand the sums of recorded steps over."""
        self._recordings.collect(metrics)

    def _drop_graphs(self) -> None:
        self.collect(self.trainer.metrics)
        self._recordings.drop()
        self._window = Window()

    def _timed(self, work: Callable[[], Any], times: int = 3) -> float:
        self._synchronise()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self._synchronise()
        return (time.perf_counter() - start) / times

    def _synchronise(self) -> None:
        if self.trainer.placement.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.placement.device)

    def _all_agree(self, ok: bool) -> bool:
        return self.trainer.placement.all_min(int(ok)) == 1

    def _all_slowest(self, seconds: float) -> float:
        return -self.trainer.placement.all_min(-int(min(seconds, 1e6) * 1e9)) / 1e9


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses, what torch keeps for itself included."""
    if device.type != "cuda":
        return 2**62
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream a device for all runs of a process: libraries keep work memory for each."""
    return torch.cuda.Stream(device)
