"""PyTorch's elastic agent, set up for one run on this machine and quick to let go."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler

from multi_gpu_training.distributed import preemption, whereabouts
from multi_gpu_training.distributed.diagnosis import first_failure
from multi_gpu_training.distributed.hang_watch import HangWatch
from multi_gpu_training.distributed.launch import GRACE_S, LaunchPlan
from multi_gpu_training.distributed.preemption import LauncherSignals, ask_ranks
from multi_gpu_training.distributed.restarts import Fault, Limits, RestartPolicy, Verdict
from multi_gpu_training.errors import RankFailure

# The agent's own count of restarts has no window: ours decides, and this one never runs out.
_ENDLESS = 10**6

# Its own account of failures would stand between the user and the failing rank's traceback.
for name in list(logging.root.manager.loggerDict):
    if name.startswith("torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


class RankAgent(LocalElasticAgent):
    """Ends the other ranks soon after one has failed, and starts all of them again where our
    policy says so; the stock agent waits 30 s for each and counts restarts for ever.

    `bystanders` are the local ranks that were well until we ended them; `error_files` is where
    each rank of the last attempt says what went wrong. A signal is passed on to the ranks, which
    then have the time they have declared; ranks that ended because of one are not restarted.
    """

    bystanders: frozenset[int] = frozenset()
    error_files: dict[int, str] = {}

    def __init__(self, spec: WorkerSpec, logs: Any, limits: Limits | None) -> None:
        super().__init__(spec, logs)
        self._policy = RestartPolicy(limits)
        self._verdict = Verdict(False, "")
        self._error: RankFailure | None = None
        self._begun = False  # whether any attempt has come to its first step
        self._signals = LauncherSignals(lambda: self._runs and not self._in_exit_barrier)
        self._runs = False
        self._hangs: HangWatch

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert context is not None
        self.bystanders, self.error_files = frozenset(), dict(context.error_files)
        pids, stock = context.pids(), context.close
        closed = False

        def close(death_sig: signal.Signals | None = None, timeout: float = GRACE_S) -> None:
            nonlocal closed
            grace_s = preemption.longest_grace(self.error_files)
            if not closed:
                closed = True
                preemption.let_stop(pids.values(), grace_s)
                self.bystanders = frozenset(rank for rank, pid in pids.items() if _is_alive(pid))
            if death_sig is None and grace_s:
                death_sig = signal.SIGKILL  # they would take SIGTERM for a wish to save
            stock(death_sig, GRACE_S)

        context.close = close  # type: ignore[method-assign]
        self._runs = True
        self._signals.install()
        ranks = [worker.global_rank for worker in worker_group.workers]
        self._hangs = HangWatch(pids, self.error_files, ranks)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._signals.check(self.error_files)
        result: RunResult = super()._monitor_workers(worker_group)
        preemption.check_stopped(result.failures.values(), self.bystanders)
        if result.state is WorkerState.HEALTHY:
            self._hangs.look(all_here=worker_group.group_world_size in (1, None))
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._judge(result)
            if not self._verdict.restart:
                self._remaining_restarts = 0
        return result

    def _judge(self, result: RunResult) -> None:
        """Find out what happened and decide what follows; every rank has ended."""
        self._verdict = Verdict(False, "")
        if not result.failures:
            return
        for file in self.error_files.values():
            found = whereabouts.of_rank(file)
            if self._policy.limits is None and found.max_restarts is not None:
                self._policy.limits = Limits(found.max_restarts, found.restart_window_s)
        fault, self._error = self._hangs.verdict() or first_failure(
            result.failures, self.error_files, self.bystanders, self._begun
        )
        self._begun |= any(whereabouts.of_rank(file).begun for file in self.error_files.values())
        self._verdict = self._decide(fault)

    def _decide(self, fault: Fault) -> Verdict:
        return self._policy.judge(fault, time.monotonic())

    def error(self, result: RunResult) -> RankFailure:
        """What ended the run: why it was given up, then the first failing rank's own words."""
        if self._error is None:
            return RankFailure(f"the ranks ended in state {result.state.name} without a reason")
        if not self._verdict.reason:
            return self._error
        error = RankFailure(f"{self._verdict.reason}\n{self._error}")
        error.exit_code = self._error.exit_code
        return error

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._runs = False
        if self._verdict.restart:
            print(self._error, file=sys.stderr)
            print(self._verdict.reason, file=sys.stderr, flush=True)
            self._stop_workers(worker_group)
            self._pcontext = None  # once is enough: its process numbers may be given out anew
            time.sleep(self._verdict.pause_s)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._end(signal.SIGTERM)

    # Its arguments changed between torch 2.11 and 2.13.
    def _shutdown(self, death_sig: signal.Signals | None = None, *_: Any, **__: Any) -> None:
        if death_sig is not None and self._pcontext is not None:
            pids = self._pcontext.pids().values()
            interrupts = self._signals.interrupts
            death_sig = ask_ranks(pids, death_sig, self.error_files, GRACE_S, interrupts)
        self._end(death_sig)

    def _end(self, death_sig: signal.Signals | None) -> None:
        if self._pcontext is None:
            return
        self._pcontext.close(death_sig, GRACE_S)
        if death_sig is None:
            return  # a run that ended well may leave something of its own behind
        for pid in self._pcontext.pids().values():
            # What a rank started ends with it, also where the rank itself was gone before.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    return preemption.exit_code(pid) is None


def make_spec(
    plan: LaunchPlan, entrypoint: Any, args: tuple[Any, ...], meeting: RendezvousHandler
) -> WorkerSpec:
    return WorkerSpec(
        role="rank",
        local_world_size=plan.ranks_here,
        entrypoint=entrypoint,
        args=args,
        rdzv_handler=meeting,
        max_restarts=_ENDLESS,
        monitor_interval=0.1,
    )
