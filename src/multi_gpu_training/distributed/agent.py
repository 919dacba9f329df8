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

from multi_gpu_training.distributed import whereabouts
from multi_gpu_training.distributed.diagnosis import first_failure
from multi_gpu_training.distributed.launch import GRACE_S, LaunchPlan
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
    each rank of the last attempt says what went wrong.
    """

    bystanders: frozenset[int] = frozenset()
    error_files: dict[int, str] = {}

    def __init__(self, spec: WorkerSpec, logs: Any, limits: Limits | None) -> None:
        super().__init__(spec, logs)
        self._policy = RestartPolicy(limits)
        self._verdict = Verdict(False, "")
        self._error: RankFailure | None = None
        self._begun = False  # whether any attempt has come to its first step

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert context is not None
        self.bystanders, self.error_files = frozenset(), dict(context.error_files)
        pids, stock = context.pids(), context.close
        closed = False

        def close(death_sig: signal.Signals | None = None, timeout: float = GRACE_S) -> None:
            nonlocal closed
            if not closed:
                closed = True
                self.bystanders = frozenset(rank for rank, pid in pids.items() if _is_alive(pid))
            stock(death_sig, GRACE_S)

        context.close = close  # type: ignore[method-assign]
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
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
        fault, self._error = first_failure(
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
        if self._verdict.restart:
            print(self._error, file=sys.stderr)
            print(self._verdict.reason, file=sys.stderr, flush=True)
            self._stop_workers(worker_group)
            self._pcontext = None  # once is enough: its process numbers may be given out anew
            time.sleep(self._verdict.pause_s)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown(signal.SIGTERM)

    # Its arguments changed between torch 2.11 and 2.13.
    def _shutdown(self, death_sig: signal.Signals | None = None, *_: Any, **__: Any) -> None:
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
    """Whether a child runs still; it is left to be waited for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


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
