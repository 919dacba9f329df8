"""The ranks of one attempt, each held by a Ray actor, as the driver sees them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from multi_gpu_training.distributed.stacks import Stack
from multi_gpu_training.errors import LaunchError, RankFailure
from multi_gpu_training.launch.rank_processes import GRACE_S, RankProcesses
from multi_gpu_training.launch.ray_cluster.rank_actor import LEASE_S, RankLook, Site
from multi_gpu_training.launch.restart_policy import Fault

_ANSWER_S = 10.0  # an actor that is well answers at once


class ActorRanks(RankProcesses):
    """Keeps the newest look at each rank, and copies its reports to `folder`, where launchers look.

    `lost` says of ranks whose actor is gone whether the whole node is.
    """

    def __init__(self, actors: Sequence[Any], sites: Sequence[Site], folder: Path) -> None:
        self.bystanders = frozenset()
        self.results = {}
        self.lost: dict[int, bool] = {}
        self.error_files = {}
        self._actors, self._sites = dict(enumerate(actors)), sites
        self._codes: dict[int, int | None] = dict.fromkeys(self._actors)
        self._states = dict.fromkeys(self._actors, "")
        self._heard = dict.fromkeys(self._actors, time.monotonic())
        self._lines = {rank: _Lines() for rank in self._actors}
        for rank in self._actors:
            file = folder / f"rank-{rank}" / "error.json"
            file.parent.mkdir(parents=True)
            self.error_files[rank] = str(file)
        self._calls: dict[Any, int] = {a.look.remote(): rank for rank, a in self._actors.items()}

    # Looking

    def codes(self) -> dict[int, int | None]:
        self._refresh()
        return dict(self._codes)

    @property
    def alive(self) -> dict[int, int]:
        return {rank: 0 for rank, code in self._codes.items() if code is None}

    def host(self, rank: int) -> str:
        return f"{self._sites[rank].host} ({self._sites[rank].address})"

    def states(self) -> dict[int, str]:
        return dict(self._states)

    def stacks(self, ranks: Iterable[int]) -> dict[int, Stack]:
        found = {}
        calls = {rank: self._actors[rank].stacks.remote() for rank in ranks}
        for rank, call in calls.items():
            stack = self._answer(call)
            if stack is not None:
                found[rank] = stack
        return found

    def first_failure(self, codes: Mapping[int, int], begun: bool) -> tuple[Fault, RankFailure]:
        if not self.lost:
            return super().first_failure(codes, begun)
        # Ranks beside a lost one fail too; what they say is not the cause.
        ranks = sorted(self.lost)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        places = ", ".join(dict.fromkeys(self.host(rank) for rank in ranks))
        node = all(self.lost.values())
        what = (
            "the Ray node was lost (the machine, its network or its raylet)"
            if node
            else "the Ray actor was killed (ray.kill, out of memory, or a signal)"
        )
        found = self.progress[ranks[0]]
        at = "" if found.step is None else f", step {found.step}"
        kind = "a lost Ray node" if node else "a killed Ray actor"
        fault = Fault(ranks[0], kind, found.step, found.begun)
        return fault, RankFailure(f"[rank{ranks[0]}]: {who} on {places}{at}: {what}", code="MGT601")

    def _refresh(self, timeout_s: float = 0.0) -> None:
        """Take in the looks that have come, and ask anew."""
        import ray

        if not self._calls:
            return
        ready, _ = ray.wait(
            list(self._calls), num_returns=len(self._calls), timeout=timeout_s, fetch_local=False
        )
        for call in ready:
            rank = self._calls.pop(call)
            try:
                look = ray.get(call, timeout=_ANSWER_S)
            except _unheard() as error:
                self._no_answer(rank, error)
                continue
            except ray.exceptions.RayError as error:
                raise LaunchError(
                    f"the Ray actor of rank {rank} on {self.host(rank)} failed: {error}",
                    code="MGT505",
                ) from None
            self._take(rank, look)
            if look.code is None or look.more:
                self._ask_again(rank)

    def _ask_again(self, rank: int) -> None:
        self._calls[self._actors[rank].look.remote()] = rank

    def _take(self, rank: int, look: RankLook) -> None:
        self._heard[rank] = time.monotonic()
        file = Path(self.error_files[rank])
        if look.progress:
            file.with_name("progress").write_bytes(look.progress)
        if look.report:
            file.write_bytes(look.report)
        ended = look.code is not None and not look.more
        self._lines[rank].write(look.output, look.errors, ended)
        self.results.update(look.results)
        self._states[rank] = look.state
        if ended:
            self._codes[rank] = look.code

    def _no_answer(self, rank: int, error: Exception) -> None:
        """An actor did not answer: it is gone, or cannot be reached now.

        Where its node is well, Ray has seen its process end. Otherwise nobody has, and its rank
        counts as running until the lease that every look renews is over.
        """
        import ray

        node = self._sites[rank].node
        dead = isinstance(error, ray.exceptions.ActorDiedError)
        node_well = False
        with suppress(Exception):  # Ray's head is gone, too
            node_well = any(found["NodeID"] == node and found["Alive"] for found in ray.nodes())
        if not (dead and node_well) and time.monotonic() - self._heard[rank] < LEASE_S:
            time.sleep(0.1)
            self._ask_again(rank)
            return
        self.lost[rank] = not node_well
        self._codes[rank] = -signal.SIGKILL

    def _answer(self, call: Any) -> Any:
        import ray

        try:
            return ray.get(call, timeout=_ANSWER_S)
        except ray.exceptions.RayError:  # its looks say what is wrong
            return None

    # Ending

    def send(self, rank: int, number: signal.Signals) -> None:
        self._actors[rank].send.remote(int(number))  # before the look that follows

    def end(self, number: signal.Signals) -> None:
        """End every rank, and return only when none can run any more."""
        import ray

        calls = {rank: a.end.remote(int(number)) for rank, a in self._actors.items()}
        deadline = time.monotonic() + GRACE_S + _ANSWER_S
        self._calls = {}
        for rank, call in calls.items():
            if rank in self.lost:
                continue
            try:
                look = ray.get(call, timeout=max(0.1, deadline - time.monotonic()))
                if look is not None:
                    self._take(rank, look)
            except ray.exceptions.GetTimeoutError:
                self._ask_again(rank)
            except _unheard() as error:
                self._no_answer(rank, error)
            except ray.exceptions.RayError:
                continue
        while self._calls:
            self._refresh(1.0)
            for call, rank in list(self._calls.items()):
                if time.monotonic() - self._heard[rank] > LEASE_S + 1:
                    self.lost[rank] = True
                    del self._calls[call]
        self.forget()

    def forget(self) -> None:
        import ray

        for actor in self._actors.values():
            with suppress(Exception):
                ray.kill(actor)
        self._actors, self._calls, self._codes = {}, {}, {}


def _unheard() -> tuple[type[Exception], ...]:
    """What Ray raises where an actor, or an answer that it gave, is out of reach."""
    from ray import exceptions

    # A long answer stays on the actor's node until it is fetched, and is lost with it.
    return exceptions.RayActorError, exceptions.ObjectLostError, exceptions.GetTimeoutError


class _Lines:
    """Writes what a rank printed to this process's own output, whole lines at a time."""

    def __init__(self) -> None:
        self._rest = [b"", b""]

    def write(self, output: bytes, errors: bytes, ended: bool) -> None:
        self._write(0, output, sys.stdout, ended)
        self._write(1, errors, sys.stderr, ended)

    def _write(self, which: int, new: bytes, stream: TextIO, ended: bool) -> None:
        whole, newline, rest = (self._rest[which] + new).rpartition(b"\n")
        if ended:
            whole, newline, rest = whole + newline + rest, b"", b""
        self._rest[which] = rest
        if whole or newline:
            stream.write((whole + newline).decode(errors="replace"))
            stream.flush()
