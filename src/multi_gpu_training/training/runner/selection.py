"""Chooses how steps run: as one CUDA graph, compiled, or operation by operation.

    warm-up      real steps, run eagerly, while watching what the step reads and does
    decide       the step is recorded, compared with the eager step from the same state, and timed
    graph        steps are replayed, and compared again at intervals (verified_graph.py)
    compiled graph  the same with compiled code, in long runs, once another process has compiled it
    compile      compiled, not recorded: when the GPU rather than Python is the limit
    eager        when a step cannot be recorded, or a comparison fails

Losses that `train_step` returned before a comparison failed may be stale. The run's weights and
metrics are not: those steps are recomputed.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.progress_slot import Phase, note_phase
from multi_gpu_training.training.learning_rate import holds_doubles
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.nan_guard import NanGuard
from multi_gpu_training.training.optimizer import make_capturable
from multi_gpu_training.training.runner.compile_switch import LONG_RUN_S, CompileSwitch
from multi_gpu_training.training.runner.compiled import try_compiled
from multi_gpu_training.training.runner.eager import EagerRunner
from multi_gpu_training.training.runner.graph import CudaGraphs, Graphs
from multi_gpu_training.training.runner.graph_cache import GraphCache, micro_key
from multi_gpu_training.training.runner.graph_eligibility import (
    StepWatch,
    obstacle,
)
from multi_gpu_training.training.runner.graph_guards import Guards, step_guards
from multi_gpu_training.training.runner.rollback_window import Fed, fed
from multi_gpu_training.training.runner.verified_graph import VerifiedGraph
from multi_gpu_training.training.step import StepResult
from multi_gpu_training.training.step_state import StepState

WARM_UP = 4  # steps; the last two are watched for what a recording could not repeat
WARM_UP_DDP = 12  # DDP's logger reads GPU timers in its first ten steps
MOST_MICRO_BATCHES = 32  # each gets a recording of its own
LARGEST_STATE = 2**30  # bytes; a comparison keeps three copies
CLEARLY_FASTER = 0.8  # of the eager time; above it the GPU, not Python, is the limit
WORTH_IT = 0.95  # of the time now; three timings do not tell smaller gains from noise
COMPARING = 0.005  # maximum fraction of the time spent on optional comparisons


class StepExecution:
    """Runs the steps of one training.

    mode: how steps run now. replayed of steps: how many were graphs. reason: why not all.
    active: whether steps must go through `run`; otherwise the eager runner takes them.
    record: writes an event.
    """

    def __init__(
        self,
        state: StepState,
        eager: EagerRunner,
        guard: NanGuard,
        say: Callable[[str], None],
        snapshot_other_state: Callable[[], Callable[[], None] | None],
        record: Callable[..., None] = lambda *_, **__: None,
        retract: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.state = state
        self.eager = eager
        self.guard = guard
        self.active = False
        self.mode = "eager"
        self.reason = "not started"
        self.say = say
        self.record = record
        self.switch = CompileSwitch(state, say)
        self._cache = GraphCache(state, eager, guard)
        self._verified = VerifiedGraph(
            state,
            eager,
            guard,
            self._cache,
            self.give_up,
            snapshot_other_state,
            self._between_windows,
            retract,
        )
        self._comparison = self._verified.comparison
        self._copies = self._comparison.copies
        self._watch = StepWatch(state)
        self._guards: Guards | None = None
        self._tolerance = 0.0
        self._step_s = float("inf")  # for the current form of steps
        self._next_look = 0
        self._first_step = 0
        self._seen = 0
        self._warm_up = WARM_UP
        self._step: list[Fed] = []
        self._keys: list[Any] = []
        self._outer_stream: torch.cuda.Stream | None = None

    @property
    def steps(self) -> int:
        """Steps taken since the run was started or resumed."""
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
        """Train on a stream that can be recorded. DDP must also be built on it."""
        device = self.state.placement.device
        if device.type == "cuda" and self.state.config.step_execution in ("auto", "graph"):
            self._outer_stream = torch.cuda.current_stream(device)
            stream = recording_stream(device)
            stream.wait_stream(self._outer_stream)
            torch.cuda.set_stream(stream)

    def leave_stream(self) -> None:
        if self._outer_stream is not None:
            # What the user does next must see the weights of the last step.
            self._outer_stream.wait_stream(torch.cuda.current_stream(self._outer_stream.device))
            torch.cuda.set_stream(self._outer_stream)
            self._outer_stream = None

    def start(self, graphs: Graphs | None = None) -> None:
        """Decide what to try. Call this once model, optimizer and schedule exist."""
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
                expected = asked == "auto" and state.placement.device.type == "cpu"
                self._stay_eager(problem, quiet=expected)
                return
            if asked == "compile":
                self.active = True
                if state.config.deterministic:
                    # The form must not change mid-run: a resumed run would do so at another step.
                    self._warm_up = 0
                return
            graphs = CudaGraphs(state.placement.device)
        if self._may_compile:
            self.switch.resume()
        self._cache.graphs = graphs
        # The optimizer creates its GPU counters in float32. With float64 weights, the first steps
        # run as usual, and the counters move to the GPU before the recording.
        fresh_doubles = not state.optimizer.state and any(
            holds_doubles(group) for group in state.optimizer.param_groups
        )
        if not fresh_doubles:
            self._use_device_state()
        self.active = True

    def _use_device_state(self) -> None:
        """Keep rates and counters in memory that a recorded step can read."""
        make_capturable(self.state.optimizer)
        self.state.rates.use_tensors()

    @property
    def _may_compile(self) -> bool:
        """Whether steps may become compiled mid-run. Not if every bit must repeat, because when
        that happens depends on the clock."""
        config = self.state.config
        return config.step_execution == "auto" and not config.deterministic

    @property
    def replays(self) -> bool:
        """Whether steps currently run as CUDA graphs."""
        return self._verified.active

    def close(self) -> None:
        """The run is over: stop any compilation."""
        self.switch.close()

    # Every micro-batch

    def run(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """Train on a micro-batch, by replaying a recording if there is one."""
        if self._verified.active:
            return self._verified.run(batch, samples, share)
        if share.first:
            self._step, self._keys = [], []
        self._keys.append(micro_key(self.state, batch, share))
        self._step.append(fed(batch, samples, share))
        if self.switch.waits:
            return self._run_and_look(batch, samples, share)
        if self._warm_up == 0:
            self._after_warm_up()
            return self.eager.run(batch, samples, share)
        suits = self.switch.suits(share)
        if suits and self.switch.untried:
            self.switch.try_resumed(self._step)
        compiled = self.switch.compiled if suits else None
        with self.state.step_module.computing(compiled):
            return self._run_warm_up(batch, samples, share)

    def _run_warm_up(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        if self._guards is None and self._seen:
            # Not the first step, which may set things up.
            state = self.state
            self._guards = step_guards(state.step_module.loss_fn, state.model, state.augment)
            self._guards.watch_settings(state.optimizer)
        if self._seen < self._warm_up - 2:
            result = self.eager.run(batch, samples, share)
        else:
            with self._watch:
                result = self.eager.run(batch, samples, share)
        if share.last:
            self._seen += 1
            if self._seen >= self._warm_up and self._shape_is_compiled(share):
                self._after_warm_up()
        return result

    def _shape_is_compiled(self, share: Share) -> bool:
        """Whether the step just trained has the size to be compiled, if any."""
        resumes = self.switch.compiled is not None or self.switch.untried
        return self.switch.suits(share) or not resumes

    def _run_and_look(self, batch: Any, samples: Tensor | None, share: Share) -> StepResult:
        """A step of a training that is waiting for its compiled form."""
        result = self.eager.run(batch, samples, share)
        if share.last and self.state.step >= self._next_look:
            self._next_look = self.state.step + self.switch.look_every
            if self.switch.ready():
                self._comparison.newest = (self._keys, self._step)
                self._compile("the GPU is the limit", against_s=self._step_s)
        return result

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
        problem = self._watch.finding or (self._guards and self._guards.changed())
        if problem is None and any(key[0] is None for key in self._keys):
            problem = "the batch holds objects that are not tensors"
        if problem is None and len(self._step) > MOST_MICRO_BATCHES:
            problem = f"a step has {len(self._step)} micro-batches"
        if not self.state.placement.all_agree(problem is None):
            self.give_up(problem or "another rank's step cannot be recorded")
            return
        if self._copies.size() > LARGEST_STATE:
            self._too_large()
            return
        self._use_device_state()
        self.state.replays_draw_noise = self._watch.draws_noise
        problem = self._cache.record(self._keys, self._step, self.switch.compiled)
        if not self.state.placement.all_agree(problem is None):
            self.give_up(problem or "another rank could not record its step")
            return
        again, difference = self._comparison.first()
        # Two eager steps may differ too: atomic additions come in any order.
        self._tolerance = max(1e-6, 10 * again)
        if not self.state.placement.all_agree(difference <= self._tolerance):
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
        slow = recorded > CLEARLY_FASTER * eager
        if slow and self._may_compile and self.switch.compiled is None:
            self._gpu_bound(recorded, eager)
            return
        self._begin_graph(recorded, eager)

    def _begin_graph(self, recorded: float, eager: float) -> None:
        self.mode, self.reason, self._step_s = "graph", "", recorded
        if self.switch.compiled is not None:
            self.mode = "compiled graph"
        self.say(f"step: one CUDA graph, {recorded * 1e6:,.0f} us instead of {eager * 1e6:,.0f} us")
        # So many steps that one comparison takes no more than its share of the time.
        spares = math.ceil(self._comparing_s() / (COMPARING * recorded))
        self._verified.start(self._guards, self._tolerance, spares)
        if self.mode == "graph" and self._may_compile and self.switch.pays(recorded):
            problem = self.switch.begin(recorded, self._step[0])
            if problem is None:
                self.say("step: another process is compiling it; training continues")
                self._verified.longest_window = self.switch.look_every
            else:
                self.say(f"step: not compiled, {problem}")

    def _comparing_s(self) -> float:
        """How long it takes to compare a recorded step, on the slowest rank."""
        begun = time.perf_counter()
        self._comparison.again()
        return self._all_slowest(time.perf_counter() - begun)

    def _between_windows(self) -> None:
        """Recorded steps have just been verified: the place to change their form."""
        if self.switch.waits and self.switch.ready():
            self._verified.longest_window = None
            if self.switch.pays(self._step_s):
                self._record_compiled()
            else:
                self.switch.close()

    def _record_compiled(self) -> None:
        """From now on, replay a recording of the compiled step if that is faster."""
        note_phase(Phase.RECORDING)
        begun = time.perf_counter()
        keys, step = self._comparison.newest
        before = self._cache.steps[keys[0]]  # to return to if compiled code is wrong or no faster
        problem = self.switch.compile(step)
        if problem is None:
            problem = self._cache.record(keys, step, self.switch.compiled)
            if not self.state.placement.all_agree(problem is None):
                # A failed recording corrupts the random numbers of the others.
                self.switch.drop()
                self.give_up(problem or "another rank could not record its step")
                return
            again, difference = self._comparison.first()
            same = difference <= max(self._tolerance, 10 * again)
            seconds = self._all_slowest(self._comparison.seconds(self._comparison.replayed_step))
            self._copies.restore("before")
            self._cache.forget()
            if not self.state.placement.all_agree(same):
                problem = f"recorded, the compiled step differs by {difference:.1g}"
            elif seconds > WORTH_IT * self._step_s:
                problem = f"compiled it takes {seconds * 1e6:,.0f} us, which gains nothing"
        if problem is not None:
            self.switch.drop()
            self._cache.steps[keys[0]] = before
            self.say(f"step: not compiled, {problem}")
            return
        # Compiled kernels round differently, so later comparisons must allow for it.
        self._verified.accept(10 * again)
        took = time.perf_counter() - begun
        text = f"{seconds * 1e6:,.0f} us instead of {self._step_s * 1e6:,.0f} us"
        self.mode, self._step_s = "compiled graph", seconds
        self.say(
            f"step {self.switch.since}: one CUDA graph of compiled code, {text} ({took:.1f} s)"
        )
        self.record("execution", mode=self.mode, since=self.switch.since, stall_s=took)

    def _gpu_bound(self, recorded: float, eager: float) -> None:
        """The GPU, not Python, is the limit: a graph gains little, compiled kernels may."""
        if self._may_compile and self.switch.pays(eager):
            self._verified.stop()
            self._cache.graphs = None
            self._step_s = eager
            problem = self.switch.begin(eager, self._step[0])
            left = self.state.steps_left()
            if problem is None:
                self.mode, self.reason = "eager", "the GPU is the limit"
                self.say("step: eager, while another process is compiling it")
            elif left is None or left * eager >= LONG_RUN_S:
                self._compile("the GPU is the limit", against_s=eager)
            else:
                self.give_up(f"the GPU is the limit, and it is not compiled: {problem}")
        elif recorded <= WORTH_IT * eager:
            self._begin_graph(recorded, eager)
        else:
            short = "the run is too short to compile for"
            fixed = "deterministic=true does not compile on the way"
            self.give_up(f"the GPU is the limit, and {short if self._may_compile else fixed}")

    def _too_large(self) -> None:
        """Comparing a recording takes three copies of the state; compiling takes one."""
        size = self._copies.size()
        room = self.state.placement.all_agree(2 * size <= free_bytes(self.state.placement.device))
        if self.state.config.step_execution != "auto" or not room:
            self.give_up(f"the state has {size / 2**30:.1f} GB, too much to compare")
            return
        self._copies.keep("before")
        comparison = self._comparison
        eager = self._all_slowest(comparison.seconds(comparison.eager_step))
        self._copies.restore("before")
        self._gpu_bound(float("inf"), eager)

    def _compile(self, why: str, against_s: float | None = None) -> None:
        """Compile model and loss; keep that if it is faster and gives the same result."""
        module = self.state.step_module
        self._cache.graphs = None
        self.switch.close()
        self.say("step: compiling, which can take a minute")
        compiled = self.state.strategy.compile(module.loss_fn)
        problem, seconds = try_compiled(self.state, self._comparison, compiled)
        slowest = self._all_slowest(seconds if against_s is not None else 0.0)
        slower = against_s is not None and slowest > WORTH_IT * against_s
        if not self.state.placement.all_agree(problem is None and not slower):
            self._stay_eager(problem or f"{why}, and compiling does not help")
            return
        module.compiled = compiled
        self.active, self.mode, self.reason = False, "compile", why
        self.record("execution", mode=self.mode, since=self.state.step + 1)
        costs = self.guard.stay_eager()
        note = f", {slowest * 1e3:.1f} ms instead of {against_s * 1e3:.1f} ms" if against_s else ""
        self.say(f"step: compiled, {why}{note}" + (f"; {costs}" if costs else ""))

    # Giving recordings up

    def take_new_parameters(self) -> None:
        """The user froze, unfroze or added parameters: train the new set from the next step. First
        verify the steps replayed with the old set. Collective."""
        state = self.state
        if self._verified.active:
            with state.parameters_as_before() as possible:
                if possible:
                    self.verify()
        if self.active:
            self.give_up("parameters were frozen, unfrozen or added")
        state.take_new_parameters()
        self.eager.take_new_parameters()

    def give_up(self, problem: str) -> None:
        """From now on, run steps operation by operation."""
        self._stay_eager(problem)

    def _stay_eager(self, problem: str, quiet: bool = False) -> None:
        self.switch.close()
        self.switch.drop()
        self._verified.stop()
        self.active, self.mode, self.reason = False, "eager", problem
        note = self.guard.stay_eager()
        if not quiet:
            self.say(f"step: eager, {problem}" + (f"; {note}" if note else ""))

    # What others may ask for at any time

    def verify(self, spare: bool = False, meanwhile: Callable[[], None] | None = None) -> None:
        """Compare the latest recorded step with the eager one; roll back if they differ.

        Call this before the weights are used: saved, evaluated, handed out. spare: skip it if it
        would cost too much and the last verified state is on disk. meanwhile: see `VerifiedGraph`.
        """
        self._verified.verify(spare, meanwhile)

    def mark(self) -> None:
        """An epoch begins: steps are not undone past this point."""
        self._verified.mark()

    def close_window(self) -> None:
        """An epoch is being closed: its steps can no longer be undone from memory."""
        self._verified.close_window()

    def saved(self) -> bool:
        """The state was saved. Returns whether recorded steps may have to go back to it."""
        return self._verified.active and self._verified.saved()

    def went_back(self) -> None:
        """The state was restored from an earlier checkpoint, in the same tensors."""
        self._step, self._keys = [], []
        self._verified.went_back()

    def collect(self, metrics: MetricsCollector) -> None:
        """Add the sums of recorded steps."""
        self._cache.collect(metrics)

    # Among ranks

    def _all_slowest(self, seconds: float) -> float:
        # Every rank must come to the same decision, and ranks agree on integers only.
        return -self.state.placement.all_min(-int(min(seconds, 1e6) * 1e9)) / 1e9


def free_bytes(device: torch.device) -> int:
    """Unused device memory, including what torch holds in reserve."""
    if device.type != "cuda":
        return 2**62
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for all runs of a process: libraries keep workspace for each stream."""
    return torch.cuda.Stream(device)
