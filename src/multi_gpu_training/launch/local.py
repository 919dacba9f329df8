"""The engine for one machine: ranks are children of this process and meet on loopback."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.cleanup import Scratch
from multi_gpu_training.distributed.identity import Identity, from_environment
from multi_gpu_training.distributed.sockets import LOOPBACK
from multi_gpu_training.distributed.stall import Hang, ProgressWatch, diagnose
from multi_gpu_training.distributed.store_relay import HostedStore
from multi_gpu_training.errors import RankFailure
from multi_gpu_training.launch.engine import Engine, Hosts, LaunchPlan, RankJob, RunOutcome
from multi_gpu_training.launch.rank_processes import STOPPED, RankProcesses
from multi_gpu_training.launch.restart_policy import (
    Fault,
    Limits,
    RestartPolicy,
    RestartVerdict,
)
from multi_gpu_training.launch.signals import AskedToEnd, LauncherSignals
from multi_gpu_training.portability import LOOPBACK_INTERFACE, usable_cores


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one attempt meet, and which of them are on this machine."""

    address: str
    port: int
    run_id: str
    attempt: int = 0
    first_rank: int = 0
    world: int = 0  # 0: the ranks here are all
    node: int = 0
    nodes: int = 1
    variables: dict[str, str] = field(default_factory=dict)


class LocalEngine(Engine):
    """Ends the other ranks soon after one has failed, and restarts all where the policy says so.

    A signal is passed on to the ranks, which then have the time they asked for to save. Ranks that
    ended because of a signal are not restarted.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self._policy = RestartPolicy(plan.limits)
        self._run_id = uuid.uuid4().hex
        self._attempt = -1
        self._begun = False  # whether any attempt has reached its first step
        self._store: HostedStore | None = None
        self._scratch: Scratch | None = None
        self._ranks: RankProcesses | None = None

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        return hosts.nodes == 1

    @classmethod
    def identity(cls, config: MultiGPUConfig) -> Identity | None:
        return from_environment()

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        # The ranks share the cores, unless the user says otherwise.
        cores = len(usable_cores())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self.plan.ranks_here)))
        signals.listen()
        self._job, self._signals = job, signals
        self._scratch = Scratch()
        self._start_attempt()

    def watch(self) -> RunOutcome | None:
        ranks = self._running
        asked = [found.asked for found in ranks.progress.values() if found.asked]
        if asked:
            return self._ranks_were_asked(asked[0])
        codes = ranks.codes()
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            return self._after_failure({rank: c for rank, c in codes.items() if c is not None})
        if codes and all(code == 0 for code in codes.values()):
            return self._after_success()
        self._stalls.look()
        return None

    def stop(self, number: int) -> None:
        if self._ranks is not None:
            self._ranks.ask(signal.Signals(number), lambda: self._signals.interrupts)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.end(signal.SIGTERM)
        if self._scratch is not None:
            self._scratch.remove()
        self._close_store()

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
        self._store = None

    # One attempt

    @property
    def _running(self) -> RankProcesses:
        assert self._ranks is not None, "start() comes first"
        return self._ranks

    def _meet(self) -> Meeting:
        """Open a place where the ranks of the next attempt meet."""
        self._attempt += 1
        self._close_store()  # the last attempt's, whose port may be the same
        port = self.plan.hosts.master_port or 0
        self._store = HostedStore(LOOPBACK, port, self.plan.recovery_timeout, None)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        return Meeting(
            LOOPBACK,
            self._store.port,
            self._run_id,
            self._attempt,
            variables={"GLOO_SOCKET_IFNAME": interface},
        )

    def _start_attempt(self) -> None:
        self._ranks = None
        meeting = self._meet()
        assert self._scratch is not None
        folder = self._scratch.path / f"attempt-{meeting.attempt}"
        self._ranks = self._start_ranks(meeting, folder)
        self._stalls = _StallWatch(self._ranks, all_here=meeting.nodes == 1)

    def _start_ranks(self, meeting: Meeting, folder: Path) -> RankProcesses:
        """Start the ranks of an attempt; `folder` is for their error reports."""
        here, first = self.plan.ranks_here, meeting.first_rank
        same = {**meeting.variables, "TORCHELASTIC_MAX_RESTARTS": str(self.plan.max_restarts or 0)}
        environments = {
            first + local: {**rank_variables(meeting, local, here), **same} for local in range(here)
        }
        return RankProcesses(self._job, environments, folder)

    def _after_success(self) -> RunOutcome | None:
        ranks = self._running
        ranks.forget()  # a run that ended well may leave processes of its own behind
        return RunOutcome(results=ranks.results)

    def _ranks_were_asked(self, number: int) -> RunOutcome | None:
        """A rank was asked to end, without the launcher: end the run."""
        raise AskedToEnd(number)

    def _after_failure(self, codes: dict[int, int]) -> RunOutcome | None:
        """End the other ranks, find out who failed first, and restart all or give up."""
        ranks = self._running
        ranks.end_after_failure()
        own = {code for rank, code in codes.items() if code and rank not in ranks.bystanders}
        # Ranks that were asked to end did so: no failure to start again after.
        if own and own <= STOPPED.keys():
            return self._ranks_were_asked(min(STOPPED[code] for code in own))
        for found in ranks.progress.values():
            # `mgt run` has not seen the config; its ranks have.
            if self._policy.limits is None and found.max_restarts is not None:
                self._policy.limits = Limits(found.max_restarts, found.restart_window_s)
        fault, error = self._stalls.verdict() or ranks.first_failure(codes, self._begun)
        self._begun |= any(found.begun for found in ranks.progress.values())
        verdict = self._decide(fault, error)
        if not verdict.restart:
            return RunOutcome(error=explained(verdict, error))
        print(error.shown(), file=sys.stderr)
        print(verdict.reason, file=sys.stderr, flush=True)
        self._signals.pause(verdict.pause_s)
        self._start_attempt()
        return None

    def _decide(self, fault: Fault, error: RankFailure) -> RestartVerdict:
        return self._policy.judge(fault, time.monotonic())


def rank_variables(meeting: Meeting, local: int, here: int) -> dict[str, str]:
    """The environment of one rank, in the words of torchrun, which scripts may read."""
    rank, world = meeting.first_rank + local, meeting.world or here
    values: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": meeting.node,
        "GROUP_WORLD_SIZE": meeting.nodes,
        "ROLE_NAME": "rank",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        "TORCHELASTIC_RUN_ID": meeting.run_id,
        "TORCHELASTIC_RESTART_COUNT": meeting.attempt,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # a launcher hosts the store, not rank 0
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {name: str(value) for name, value in values.items()}


def explained(verdict: RestartVerdict, error: RankFailure) -> RankFailure:
    """Why the run was given up, then the first failing rank's own words."""
    if not verdict.reason:
        return error
    found = RankFailure(f"{verdict.reason}\n{error}", code=error.code)
    found.exit_code = error.exit_code
    return found


class _StallWatch:
    """Looks for ranks that stand still, reports them, and kills the one to blame.

    What follows is as after any other death of a rank: the restart policy decides.
    """

    EVERY_S = 0.25

    def __init__(self, ranks: RankProcesses, all_here: bool) -> None:
        self._ranks = ranks
        self._all_here = all_here  # the run has no ranks on other machines
        self._progress = ProgressWatch()
        self._next = 0.0
        self._found: Hang | None = None

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next or self._found is not None:
            return
        self._next = now + self.EVERY_S
        ranks = self._ranks
        states = ranks.states()
        stopped = {rank for rank, state in states.items() if state in ("T", "t")}
        stall = self._progress.look(ranks.progress, now, stopped)
        if stall is None:
            return
        stacks = ranks.stacks(ranks.alive.keys() - stopped)
        hang = diagnose(stall, ranks.progress, stacks, states, self._all_here)
        if not hang.ours and stall.for_s < 2 * stall.limit_s:
            return  # the launcher beside the rank to blame is about to act
        self._found = hang
        print(hang.report, file=sys.stderr, flush=True)
        ranks.send(hang.rank, signal.SIGKILL)

    def verdict(self) -> tuple[Fault, RankFailure] | None:
        """What ended the attempt, where it was a stall."""
        if self._found is None:
            return None
        found = self._found
        fault = Fault(found.rank, found.kind, found.step, found.begun)
        text = f"rank {fault.rank} on {self._ranks.host(fault.rank)}, {fault.place}: {fault.kind}"
        return fault, RankFailure(f"[rank{fault.rank}]: {text}", code="MGT602")
