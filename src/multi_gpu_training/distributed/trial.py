"""One rank of `mgt check`: meet the others, exchange known values, train three steps, report.

`python -m multi_gpu_training.distributed.trial` reads a TrialRequest from its first line of input
and writes one JSON line for each thing that it begins or finds out. It may hang, crash or be
killed: whoever started it knows from these lines how far it got. Nothing is written to disk.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.distributed.sockets import LOOPBACK

STAGES = ("start", "meet", "join", "values", "curve", "training", "end")
# Exit codes: the answer was given in lines before.
FAILED, ABSENT = 1, 3


@dataclass(frozen=True)
class TrialRequest:
    """What one rank must do.

    `limit_s` is the longest that it waits for the others. `hosted`: a launcher like torchrun has
    the store where the ranks meet, else rank 0 has it. `key`, in hex, is what ranks on several
    machines must know. `facts` is what its machine tells rank 0.
    """

    rank: int
    world_size: int
    address: str
    port: int
    device: str
    backend: str
    limit_s: float
    sizes: list[int]
    hosted: bool = False
    key: str | None = field(default=None, repr=False)
    prefix: str = "mgt-check"
    facts: dict[str, Any] = field(default_factory=dict)


class Voice:
    """Writes what happens as lines, past whatever else prints to stdout."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # NCCL_DEBUG=INFO and others write there
        self._lock = threading.Lock()

    def say(self, **line: Any) -> None:
        with self._lock, suppress(OSError, ValueError):
            self._file.write(json.dumps({"time": time.monotonic(), **line}) + "\n")


class RankTrial:
    def __init__(self, request: TrialRequest, voice: Voice) -> None:
        self.request = request
        self.voice = voice
        self.store: Any = None
        self._key = None if request.key is None else bytes.fromhex(request.key)
        self._where = (request.address, request.port)

    def run(self) -> int:
        """The exit code."""
        from multi_gpu_training.distributed import exercises

        request = self.request
        try:
            self._begin("meet")
            self.store = self._meet()
            missing = self._absent()
            if missing:
                self.voice.say(absent=missing)
                return ABSENT
            if request.rank == 0:
                threading.Thread(target=self._listen, daemon=True).start()
            self._stage("join", self._join)
            me = exercises.Rank(request.rank, request.world_size, self.device, self.wire)
            self._stage("values", lambda: exercises.exchange_values(me))
            self._stage("curve", lambda: exercises.measure_curve(me, request.sizes, self._at))
            self._stage("training", lambda: exercises.train(me))
            self._begin("end")
        except Exception as error:
            self._fail(error)
            return FAILED
        return 0

    def verdict(self) -> None:
        """Rank 0 hands its launcher's verdict out; the others wait for it."""
        request = self.request
        others = range(1, request.world_size)
        with suppress(Exception):  # who does not hear it judges by what it saw itself
            if request.rank == 0:
                line = _line_of_input(request.limit_s)
                if line:
                    self.store.set("verdict", line)
                    self._wait([f"bye/{rank}" for rank in others], min(5.0, request.limit_s))
            else:
                if not self._wait(["verdict"], request.limit_s):
                    self.voice.say(verdict=int(self.store.get("verdict")))
                    self.store.set(f"bye/{request.rank}", "1")

    # Meeting

    def _meet(self) -> Any:
        """The store through which the ranks find each other."""
        from torch._C._distributed_c10d import PrefixStore

        from multi_gpu_training.distributed.meeting_place import choose_interface, way_in

        request = self.request
        choose_interface(request.address)
        if not request.hosted:
            limit_s = request.limit_s
            port = way_in(request.rank, request.address, request.port, limit_s, self._key)
            self._where = (LOOPBACK, port)
        store = self._connect()
        self.voice.say(met=f"{request.address}:{request.port}")
        return PrefixStore(request.prefix, store)

    def _connect(self) -> Any:
        from torch._C._distributed_c10d import TCPStore

        limit = timedelta(seconds=self.request.limit_s)
        return TCPStore(*self._where, is_master=False, timeout=limit)

    def _absent(self) -> list[int]:
        """The ranks that did not come; none where all did, with what each had to say."""
        request = self.request
        hello = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "backend": request.backend,
            "facts": request.facts,
        }
        self.store.set(f"hello/{request.rank}", json.dumps(hello))
        names = {rank: f"hello/{rank}" for rank in range(request.world_size)}
        missing = self._wait(list(names.values()), request.limit_s)
        for rank, name in names.items():
            if name in missing:
                continue
            said = json.loads(self.store.get(name))
            if request.rank == 0:
                self.voice.say(hello=rank, **said)
            if said["backend"] != request.backend:
                raise RuntimeError(
                    f"rank {request.rank} here uses {request.backend} and rank {rank} on "
                    f"{said['host']} {said['backend']}: one sees GPUs and the other does not"
                )
        if not missing:
            self.voice.say(all_came=True)
        return [rank for rank, name in names.items() if name in missing]

    def _wait(self, keys: list[str], limit_s: float) -> set[str]:
        """The keys that were not set in time."""
        missing, deadline = set(keys), time.monotonic() + limit_s
        while True:
            missing -= {key for key in missing if self.store.check([key])}
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.05)

    def _listen(self) -> None:
        """Rank 0: where the others are, while this rank may hang in an exchange with them."""
        from torch._C._distributed_c10d import PrefixStore

        known: dict[int, str] = {}
        with suppress(Exception):  # the store may go before this process does
            store = PrefixStore(self.request.prefix, self._connect())
            while True:
                for rank in range(1, self.request.world_size):
                    key = f"at/{rank}"
                    place = store.get(key).decode() if store.check([key]) else "meet"
                    if known.get(rank) != place:
                        known[rank] = place
                        self.voice.say(peer=rank, **json.loads(place) if place[0] == "{" else {})
                time.sleep(0.2)

    # Stages

    def _begin(self, stage: str, **more: Any) -> None:
        self.voice.say(stage=stage, **more)
        if self.store is not None:
            self.store.set(f"at/{self.request.rank}", json.dumps({"at": stage}))

    def _at(self, size: int) -> None:
        self._begin("curve", bytes=size)

    def _stage(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        self._begin(name)
        self.voice.say(done=name, **work())

    def _fail(self, error: Exception) -> None:
        text = "".join(traceback.format_exception_only(error)).strip()
        self.voice.say(error=text)
        if self.store is not None:
            with suppress(Exception):
                place = json.dumps({"error": text, "time": time.time()})
                self.store.set(f"at/{self.request.rank}", place)
                time.sleep(0.5)  # for rank 0 to read it where this process holds the store
        traceback.print_exc()

    def _join(self) -> dict[str, Any]:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        from multi_gpu_training.distributed.meeting_place import prove_membership

        request = self.request
        self.device = torch.device(request.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        begun = time.monotonic()
        dist.init_process_group(
            request.backend,
            store=PrefixStore("group", self.store),
            rank=request.rank,
            world_size=request.world_size,
            # Whoever watches this process ends it before, and knows which rank is behind.
            timeout=timedelta(seconds=3 * request.limit_s + 30),
            device_id=self.device if request.backend == "nccl" else None,
        )
        if self._key is not None:
            prove_membership(request.rank, self._key, self._gather, socket.gethostname())
        dist.all_reduce(torch.ones(1, device=self.wire))
        return {"seconds": time.monotonic() - begun}

    def _gather(self, tensor: Any) -> Any:
        """The tensors of all ranks, stacked."""
        import torch
        import torch.distributed as dist

        mine = tensor.to(self.wire)
        parts = [torch.empty_like(mine) for _ in range(self.request.world_size)]
        dist.all_gather(parts, mine)
        return torch.stack(parts).cpu()

    @property
    def wire(self) -> Any:
        """Where a tensor lies that is exchanged: gloo goes through host memory."""
        import torch

        return self.device if self.request.backend == "nccl" else torch.device("cpu")


def _line_of_input(limit_s: float) -> str:
    """The next line of input, or nothing where none comes in time."""
    ready, _, _ = select.select([sys.stdin], [], [], limit_s)
    return sys.stdin.readline().strip() if ready else ""


def main() -> None:
    die_with_parent()
    voice = Voice()
    request = TrialRequest(**json.loads(sys.stdin.readline()))
    voice.say(stage="start", pid=os.getpid())
    trial = RankTrial(request, voice)
    code = trial.run()
    if code == 0:
        trial.verdict()
    sys.stderr.flush()
    os._exit(code)  # gloo and NCCL may hang in their own teardown


if __name__ == "__main__":
    main()
