"""The witness of a run: a third party that keeps to one leader at a time.

With it one of two nodes can continue alone, and the other cannot. It is either a small server
(`mgt cluster witness HOST:PORT`, launchers prove to it that they know the cluster token), or a file
on storage that all nodes share. Both remember who leads and until when, nothing else: the file
survives everything; a server that was started again grants nothing new until all it may have
promised before is over.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field, TypeAdapter

from multi_gpu_training.distributed import sockets
from multi_gpu_training.distributed.round_lease import now
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.elastic.membership import PlainName, Title
from multi_gpu_training.launch.elastic.messages import Message, MessageServer, ask
from multi_gpu_training.launch.elastic.quorum import LEASE_S, PROMISE_S

ASK_S = 1.0
_MOST_RUNS = 10_000
_FREE = b"released"


class Witness(Protocol):
    """What a launcher asks. Answers that do not come are OSError."""

    def hold(self, name: str, holds: bool) -> bool:
        """Ask to be the leader that it keeps to, or to stay so; `holds`: the lease is not over.

        True: it keeps to `name` for PROMISE_S or longer, counted from this call.
        """
        ...

    def release(self, name: str) -> None:
        """Let another one lead at once."""
        ...


def find_witness(text: str, master: str, key: bytes) -> Witness:
    """The witness that `--witness` names. `master` tells this run from others at its server."""
    place = re.fullmatch(r"\[?([^/\]]+)\]?:([0-9]{1,5})", text)
    if place is not None:
        if not 1 <= int(place[2]) <= 65535:
            raise ConfigError(
                f"--witness {text}: {place[2]} is not a valid port; use 1 to 65535", code="MGT501"
            )
        return WitnessClient(sockets.resolved(place[1]), int(place[2]), master, key)
    if "://" in text or "/" not in text:
        raise ConfigError(
            f"--witness {text}: give HOST:PORT of `mgt cluster witness`, or the path of a file in "
            "a folder that all nodes share, such as /shared/run.witness"
        )
    path = Path(text)
    if not path.parent.is_dir():
        raise ConfigError(
            f"--witness {text}: there is no folder {path.parent}; make it, on storage that every "
            "node shares"
        )
    return WitnessFile(path)


# The server


@dataclass(frozen=True)
class _Claim:
    group: Title
    name: PlainName
    holds: Annotated[bool, Field(strict=True)] = False


_CLAIM = TypeAdapter(_Claim)


class WitnessClient:
    """A witness that listens somewhere."""

    def __init__(self, address: str, port: int, group: str, key: bytes) -> None:
        self._where, self._group, self._key = (address, port), group, key

    def hold(self, name: str, holds: bool) -> bool:
        claim = {"op": "hold", "group": self._group, "name": name, "holds": holds}
        return ask(*self._where, claim, self._key, ASK_S).get("held") is True

    def release(self, name: str) -> None:
        with suppress(OSError):
            ask(*self._where, {"op": "release", "group": self._group, "name": name}, self._key, 1.0)


class WitnessServer:
    """Keeps to one leader of each run, in its own thread, until closed."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        self._kept: dict[str, tuple[str, float]] = {}  # run -> leader, until when
        self._started = now()
        self._server = MessageServer(address, port, self._answer, key, "this witness")
        self.port = self._server.port

    def close(self) -> None:
        self._server.close()

    def _answer(self, message: Message) -> Message:
        operation = message["op"]
        claim = _CLAIM.validate_python({k: v for k, v in message.items() if k != "op"})
        name, until = self._kept.get(claim.group, ("", 0.0))
        if operation == "release":
            if name == claim.name:
                del self._kept[claim.group]
            return {}
        if operation != "hold":
            raise ValueError("neither hold nor release")
        at = now()
        # What was promised before this start is not known: only its holder may go on at once.
        unknown = not claim.holds and at - self._started < PROMISE_S
        if (name != claim.name and at < until) or (name != claim.name and unknown):
            return {"held": False}
        if claim.group not in self._kept and len(self._kept) >= _MOST_RUNS:
            self._kept = {run: kept for run, kept in self._kept.items() if at < kept[1]}
        self._kept[claim.group] = (claim.name, at + PROMISE_S)
        return {"held": True}


# The file


class WitnessFile:
    """Numbered files beside `path`: who made the highest one leads while it keeps changing it.

    A number is created once (O_EXCL), so only one node gets it. Others take the next number when
    the newest file has not changed for PROMISE_S of their own clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mine = 0  # the number that this node made
        self._beat = 0
        self._seen: tuple[int, bytes] | None = None
        self._seen_at = 0.0

    def hold(self, name: str, holds: bool) -> bool:
        began = now()
        number, content = self._newest()
        if number and number == self._mine and holds:
            self._draft(name).replace(self._place(number))
            # A write that took long may have come after another node lost its patience.
            return now() - began < PROMISE_S - LEASE_S and self._newest()[0] == number
        if number and content != _FREE:
            if self._seen != (number, content):
                self._seen, self._seen_at = (number, content), now()
                return False
            # A second more than a server waits: the file may show what was written a while ago.
            if now() - self._seen_at < PROMISE_S + 1.0:
                return False
        return self._take(number + 1, name) and now() - began < PROMISE_S - LEASE_S

    def release(self, name: str) -> None:
        if self._mine and self._newest()[0] == self._mine:
            self._place(self._mine).write_bytes(_FREE)

    def _take(self, number: int, name: str) -> bool:
        draft = self._draft(name)
        try:
            os.link(draft, self._place(number))  # whole, or not at all
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        self._mine = number
        for old in range(max(1, number - 3), number):
            self._place(old).unlink(missing_ok=True)
        return True

    def _draft(self, name: str) -> Path:
        self._beat += 1
        draft = self._path.with_name(f".{self._path.name}-{name}")
        with draft.open("wb") as file:
            file.write(json.dumps({"leader": name, "beat": self._beat}).encode())
            os.fsync(file.fileno())
        return draft

    def _newest(self) -> tuple[int, bytes]:
        found = self._path.parent.glob(f"{self._path.name}.*")
        numbers = [int(file.suffix[1:]) for file in found if file.suffix[1:].isdecimal()]
        number = max(numbers, default=0)
        # A listing may be old where a network keeps it in memory; opening a file asks the server.
        while True:
            with suppress(FileNotFoundError):
                self._place(number + 1).open("rb").close()
                number += 1
                continue
            break
        if not number:
            return 0, b""
        with suppress(FileNotFoundError), self._place(number).open("rb") as file:
            return number, file.read(10_000)
        return number, b"gone meanwhile"

    def _place(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
