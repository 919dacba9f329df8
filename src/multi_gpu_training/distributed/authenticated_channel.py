"""Connections between machines that prove on both sides that they know the cluster token.

    caller    "MGT", version, purpose, its time, 16 random bytes
    server    status, its time, 16 random bytes, HMAC(token, "server" + all of that)
    caller    HMAC(token, "caller" + all of that); zeros where the server's was wrong

then frames: length, HMAC(key of this connection and direction, number of the frame + bytes),
bytes. Random bytes of both sides are in every key, so nothing that was recorded can be sent again,
to this or another server, and no clock is needed for that. The times bound how long a message can
be held back. Contents are not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any, Protocol

VERSION = 1
MAX_SKEW_S = 300.0
LONGEST = 1 << 20  # bytes of a frame
HANDSHAKE_S = 5.0  # for all of it, not for each byte
MOST_CONNECTIONS = 2048
MOST_PENDING = 64  # that have not proved anything yet
LOG_EVERY_S = 10.0

MESSAGES, STORE = b"m", b"s"
_HELLO = struct.Struct("!3sBcd16s")
_REPLY = struct.Struct("!Bd16s")
_MAC = sha256().digest_size
_LENGTH = struct.Struct("!I")
_OK, _OTHER_VERSION, _CLOCK = range(3)
# In place of a proof: the caller has another token. One that is cut off, or whose patience ends,
# leaves at the same point without a word.
_DECLINED = bytes(_MAC)


class Refused(ConnectionError):
    """The other side did not prove who it is. `reason` is one of a few fixed texts."""

    def __init__(self, reason: str, advice: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}; {advice}" if advice else reason)


class OtherToken(Refused):
    """The server has another cluster token."""


def printable(text: str, longest: int = 500) -> str:
    """What may be shown of a text from elsewhere: it must not control the terminal."""
    kept = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text[:longest])
    return kept + (" ..." if len(text) > longest else "")


class Refusals:
    """Counts what was refused, and says so without filling the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self._next = 0.0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        return self._counts.total()

    def note(self, reason: str, peer: object = None) -> None:
        with self._lock:
            self._counts[reason] += 1
            now = time.monotonic()
            if now >= self._next:
                self._next = now + LOG_EVERY_S
                self._say(f", the last from {printable(str(peer), 80)}" if peer else "")

    def close(self) -> None:
        """Say what has not been said yet."""
        with self._lock:
            if self._said != self._counts:
                self._say("")

    def _say(self, more: str) -> None:
        self._said = self._counts.copy()
        reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(self._counts.items()))
        with suppress(OSError, ValueError):
            text = f"refused {self.total} connections to {self._what} so far: {reasons}{more}"
            print(text, file=sys.stderr, flush=True)


# The handshake and the frames, as bytes


class _Keys:
    def __init__(self, token: bytes, greeting: bytes, caller: bool) -> None:
        keys = [_mac(token, side + greeting) for side in (b"from caller", b"from server")]
        self._mine, self._theirs = keys if caller else keys[::-1]
        self._sent = self._received = 0

    def seal(self, data: bytes) -> bytes:
        number = struct.pack("!Q", self._sent)
        self._sent += 1
        return _LENGTH.pack(len(data)) + _mac(self._mine, number + data) + data

    def check(self, mac: bytes, data: bytes) -> bytes:
        number = struct.pack("!Q", self._received)
        self._received += 1
        if not hmac.compare_digest(mac, _mac(self._theirs, number + data)):
            raise Refused("wrong HMAC of a message")
        return data


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _length(raw: bytes) -> int:
    (length,) = _LENGTH.unpack(raw)
    if not 0 < length <= LONGEST:
        raise Refused("length of a message out of range")
    return int(length)


def _skewed(then: float) -> bool:
    return not abs(time.time() - then) <= MAX_SKEW_S  # NaN is skewed, too


# The caller


class Channel:
    """The calling end, for a thread that may wait. `timeout_s` is for the whole exchange."""

    def __init__(
        self, address: str, port: int, token: bytes, purpose: bytes, timeout_s: float
    ) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._socket = socket.create_connection((address, port), timeout_s)
        try:
            self._keys = self._greet(token, purpose)
        except BaseException:
            self._socket.close()
            raise

    def send(self, data: bytes) -> None:
        self._socket.settimeout(self._left)
        self._socket.sendall(self._keys.seal(data))

    def receive(self) -> bytes:
        length = _length(self._read(_LENGTH.size))
        return self._keys.check(self._read(_MAC), self._read(length))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self, token: bytes, purpose: bytes) -> _Keys:
        hello = caller_hello(purpose)
        self._socket.sendall(hello)
        try:
            proof, greeting = caller_proof(
                token, hello, self._read(_REPLY.size), lambda: self._read(_MAC)
            )
        except OtherToken:
            self._socket.sendall(_DECLINED)
            raise
        self._socket.sendall(proof)
        return _Keys(token, greeting, caller=True)

    @property
    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            self._socket.settimeout(self._left)
            part = self._socket.recv(count - len(found))
            if not part:
                raise ConnectionError("the connection was closed")
            found += part
        return found


def caller_hello(purpose: bytes) -> bytes:
    return _HELLO.pack(b"MGT", VERSION, purpose, time.time(), os.urandom(16))


def caller_proof(
    token: bytes, hello: bytes, reply: bytes, mac: Callable[[], bytes]
) -> tuple[bytes, bytes]:
    """Check the server's proof and give this side's, with what both have said."""
    status, their_time, _ = _REPLY.unpack(reply)
    if status == _OTHER_VERSION:
        raise Refused("the other machine speaks another version", "install the same mgt on all")
    if status == _CLOCK:
        raise Refused(
            f"the clocks differ by {abs(their_time - time.time()):.0f} s",
            f"{MAX_SKEW_S:g} s are allowed: synchronise them (NTP)",
        )
    if status != _OK:
        raise Refused("another program answers there", "choose another port")
    greeting = hello + reply
    if not hmac.compare_digest(mac(), _mac(token, b"server" + greeting)):
        raise OtherToken("the other machine has another cluster token", "give the same file to all")
    return _mac(token, b"caller" + greeting), greeting


# The server


class Stream(Protocol):
    """Two ends that are relayed into each other; b"" is the end."""

    async def receive(self) -> bytes: ...

    async def send(self, data: bytes) -> None: ...


class PlainStream:
    """Bytes as they come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes:
        return await self._reader.read(1 << 16)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


class SealedStream:
    """Frames with an HMAC each."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: _Keys
    ) -> None:
        self._reader, self._writer, self._keys = reader, writer, keys

    async def receive(self) -> bytes:
        try:
            raw = await self._reader.readexactly(_LENGTH.size)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Refused("a message was cut short") from None
            return b""
        length = _length(raw)
        try:
            mac = await self._reader.readexactly(_MAC)
            return self._keys.check(mac, await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            raise Refused("a message was cut short") from None

    async def send(self, data: bytes) -> None:
        self._writer.write(self._keys.seal(data))
        await self._writer.drain()


async def admit_with_token(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, purpose: bytes
) -> Stream:
    """The server's side of the handshake."""
    try:
        hello = await reader.readexactly(_HELLO.size)
        magic, version, asked, then, _ = _HELLO.unpack(hello)
        if magic != b"MGT":
            raise Refused("not a message of ours")
        status = _OTHER_VERSION if version != VERSION else _CLOCK if _skewed(then) else _OK
        reply = _REPLY.pack(status, time.time(), os.urandom(16))
        writer.write(reply + _mac(token, b"server" + hello + reply))
        await writer.drain()
        if status != _OK:
            raise Refused("wrong version" if status == _OTHER_VERSION else "clock too far off")
    except asyncio.IncompleteReadError:
        raise Refused("handshake cut short") from None
    try:
        proof = await reader.readexactly(_MAC)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise Refused("left before its proof: cut off, or out of patience") from None
    if proof == _DECLINED:
        raise Refused("another cluster token: it declined our proof")
    greeting = hello + reply
    if asked != purpose or not hmac.compare_digest(proof, _mac(token, b"caller" + greeting)):
        raise Refused("wrong HMAC in the handshake")
    return SealedStream(reader, writer, _Keys(token, greeting, caller=False))


async def call(address: str, port: int, token: bytes, purpose: bytes) -> tuple[Stream, Any]:
    """The calling end inside an event loop; also what closes it."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        hello = caller_hello(purpose)
        writer.write(hello)
        reply = await reader.readexactly(_REPLY.size)
        mac = await reader.readexactly(_MAC)
        proof, greeting = caller_proof(token, hello, reply, lambda: mac)
        writer.write(proof)
        await writer.drain()
    except BaseException as error:
        if isinstance(error, OtherToken):
            writer.write(_DECLINED)
        writer.close()
        if isinstance(error, asyncio.IncompleteReadError):
            raise ConnectionError("the connection was closed") from None
        raise
    return SealedStream(reader, writer, _Keys(token, greeting, caller=True)), writer


Admit = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Stream]]
Serve = Callable[[Stream], Awaitable[None]]


class ChannelServer:
    """Serves connections in one thread, whatever their number, until closed.

    `admit` has HANDSHAKE_S to find out who calls; `serve` then has the connection, for `serve_s`
    seconds at most. Of those that have not proved anything the oldest makes room for new ones.
    """

    def __init__(
        self,
        listening: socket.socket,
        admit: Admit,
        serve: Serve,
        refusals: Refusals,
        serve_s: float | None = None,
    ) -> None:
        self._admit, self._serve, self._serve_s = admit, serve, serve_s
        self._refusals = refusals
        self._pending: dict[asyncio.Task[Any], None] = {}
        self._admitted: set[asyncio.Task[Any]] = set()
        self._listening = listening
        self.port: int = listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        name = f"serve-{self.port}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait(HANDSHAKE_S)

    def close(self) -> None:
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._refusals.close()

    def _run(self) -> None:
        # A flood must not end it: whatever happens in one connection stays there.
        self._loop.set_exception_handler(
            lambda _, context: self._refusals.note(f"error: {type(context.get('exception'))}")
        )
        try:
            self._loop.run_until_complete(self._listen())
        finally:
            self._listening.close()
            self._loop.close()

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listening)
        self._ready.set()
        await self._stopping.wait()
        # asyncio loses a connection that it accepted right before the end: accept no more, and
        # wait until the last one has its task.
        self._loop.remove_reader(self._listening)
        for _ in range(5):
            await asyncio.sleep(0)
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports that were closed just now let go of their sockets

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer = writer.get_extra_info("peername")
        self._pending[task] = None
        if len(self._pending) > MOST_PENDING:
            oldest = next(iter(self._pending))
            del self._pending[oldest]  # at once: its task may run late
            oldest.cancel()
        try:
            try:
                if len(self._admitted) >= MOST_CONNECTIONS:
                    raise Refused("too many connections")
                async with asyncio.timeout(HANDSHAKE_S):
                    stream = await self._admit(reader, writer)
            except asyncio.CancelledError:
                if not self._stopping.is_set():
                    self._refusals.note("too slow among too many", peer)
                return
            finally:
                self._pending.pop(task, None)
            self._admitted.add(task)
            async with asyncio.timeout(self._serve_s):
                await self._serve(stream)
        except Refused as error:
            self._refusals.note(error.reason, peer)
        except TimeoutError:
            self._refusals.note("too slow", peer)
        except OSError:
            if task not in self._admitted:  # else a rank or launcher that ended
                self._refusals.note("connection lost", peer)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # nothing from elsewhere may end this thread
            self._refusals.note(f"unreadable ({type(error).__name__})", peer)
        finally:
            self._admitted.discard(task)
            writer.close()


async def relay(one: Stream, other: Stream) -> None:
    """Pass bytes both ways until either end closes."""

    async def pump(source: Stream, target: Stream) -> None:
        while data := await source.receive():
            await target.send(data)

    tasks = [asyncio.create_task(pump(*pair)) for pair in ((one, other), (other, one))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
