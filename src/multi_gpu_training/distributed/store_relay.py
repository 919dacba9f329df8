"""The ranks' store, out of reach for everybody else.

torch's TCPStore asks nobody who he is. Here it listens on loopback, guarded: the kernel drops every
packet that is not signed with a key that only this process knows (TCP MD5 signatures). What the
ranks connect to is a relay in front of it:

    on one machine       ranks -> relay on 127.0.0.1, which admits this user alone -> store
    on several machines  ranks -> relay on 127.0.0.1 -> HMAC -> gate of the leading node -> store

Ranks speak plain TCPStore to 127.0.0.1, so any script that calls `init_process_group` works.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multi_gpu_training.distributed.authenticated_channel import (
    HANDSHAKE_S,
    STORE,
    Admit,
    ChannelServer,
    PlainStream,
    Refusals,
    Refused,
    Stream,
    admit_with_token,
    call,
    relay,
)
from multi_gpu_training.distributed.sockets import LOOPBACK, is_loopback, listening_socket

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_TCP_MD5SIG_EXT = 32
_PREFIX = 1  # the key is for a range of addresses; of length 0: for all
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"

Upstream = Callable[[], AbstractAsyncContextManager[Stream]]


def guard(listening: socket.socket, key: bytes) -> bool:
    """Let the kernel drop what is not signed with `key`. False: this kernel cannot.

    Connections that exist stay.
    """
    anywhere = struct.pack("=H", listening.family).ljust(128, b"\0")
    option = struct.pack("=BBHi", _PREFIX, 0, len(key), 0)
    try:
        listening.setsockopt(
            socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, anywhere + option + key.ljust(80, b"\0")
        )
    except OSError:
        return False
    return True


class GuardedStore:
    """A TCPStore of this process that only holders of `key` can connect to."""

    def __init__(self, timeout_s: float) -> None:
        from torch._C._distributed_c10d import TCPStore

        self.key = secrets.token_bytes(32)
        while True:
            listening = listening_socket(LOOPBACK, 0)
            self.port: int = listening.getsockname()[1]
            self.store: TCPStore | None = TCPStore(
                LOOPBACK,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=os.dup(listening.fileno()),
            )
            # Its own client has connected by now and could not sign.
            with listening:
                self.guarded = guard(listening, self.key)
            if not self.guarded or not _strangers(self.port):
                return
            self.store = None  # somebody was there before the guard: begin again elsewhere

    def upstream(self) -> Upstream:
        return guarded_upstream(self.port, self.key if self.guarded else b"")


def guarded_upstream(port: int, key: bytes) -> Upstream:
    """Connections to the guarded store at `port`."""

    @asynccontextmanager
    async def connected() -> AsyncIterator[Stream]:
        connection = socket.socket()
        if key:
            guard(connection, key)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (LOOPBACK, port))
        except BaseException:
            connection.close()
            raise
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            yield PlainStream(reader, writer)
        finally:
            writer.close()

    return connected


def remote_upstream(address: str, port: int, token: bytes) -> Upstream:
    """Connections to the gate of the node that leads."""

    @asynccontextmanager
    async def connected() -> AsyncIterator[Stream]:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                stream, writer = await call(address, port, token, STORE)
        except Refused as error:
            print(f"the ranks' store at {address}:{port}: {error}", file=sys.stderr, flush=True)
            raise ConnectionError(str(error)) from None
        try:
            yield stream
        finally:
            writer.close()

    return connected


def admission(listening: socket.socket, token: bytes | None, purpose: bytes) -> Admit:
    """Who may talk to `listening`: on loopback this user alone, and who knows `token` if given."""
    local = is_loopback(listening.getsockname()[0])

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream:
        if local:
            uid = _peer_uid(writer.get_extra_info("socket"))
            if uid is None:
                raise Refused("gone before it was asked")
            if uid != os.geteuid():
                raise Refused("another user of this machine")
        if token is not None:
            return await admit_with_token(reader, writer, token, purpose)
        return PlainStream(reader, writer)

    assert local or token is not None, "whoever comes from elsewhere must prove who it is"
    return admit


class StoreRelay:
    """Passes the connections of ranks, or of other relays that know `token`, on to `upstream`."""

    def __init__(
        self, listening: socket.socket, upstream: Upstream, token: bytes | None = None
    ) -> None:
        async def serve(stream: Stream) -> None:
            async with upstream() as store:
                await relay(stream, store)

        admit = admission(listening, token, STORE)
        host, port = listening.getsockname()[:2]
        self._server = ChannelServer(
            listening, admit, serve, Refusals(f"the ranks' store at {host}:{port}")
        )
        self.port = self._server.port

    def close(self) -> None:
        self._server.close()


class HostedStore:
    """A store for the ranks of one attempt, and the relay in front of it; until closed.

    Without `token` ranks of this user connect to it, on loopback; with one, relays that know it.
    """

    def __init__(self, address: str, port: int, timeout_s: float, token: bytes | None) -> None:
        listening = listening_socket(address, port)  # says first if the port is taken
        self._guarded = GuardedStore(timeout_s)
        if not self._guarded.guarded:
            print(
                "warning: this kernel has no TCP MD5 signatures: other users of this machine "
                "can reach the ranks' store",
                file=sys.stderr,
            )
        self._relay = StoreRelay(listening, self._guarded.upstream(), token)
        self.port = self._relay.port

    def close(self) -> None:
        self._relay.close()
        self._guarded.store = None


# Who is at the other end, on this machine


def _peer_uid(connection: Any) -> int | None:
    """The user at the other end of a loopback connection, from the kernel's own table."""
    ours, theirs = _hex(connection.getsockname()), _hex(connection.getpeername())
    for prefix, table in _tables():
        _, found, rest = table.partition(f" {prefix}{theirs} {prefix}{ours} {_ESTABLISHED} ")
        if found:
            return int(rest.split(maxsplit=4)[3])
    return None


def _strangers(port: int) -> bool:
    """Whether another user is connected to this port."""
    rows = [line.split() for _, table in _tables() for line in table.splitlines()[1:]]
    return any(r[2].endswith(f":{port:04X}") and int(r[7]) != os.geteuid() for r in rows)


def _tables() -> Iterator[tuple[str, str]]:
    """The TCP connections of this machine, each table with what IPv4 addresses begin with in it.

    torch's client is an IPv6 socket, also where it talks IPv4.
    """
    for prefix, name in (("", "tcp"), (_MAPPED, "tcp6")):
        with suppress(OSError):
            yield prefix, Path(f"/proc/net/{name}").read_text()


def _hex(address: tuple[Any, ...]) -> str:
    """An address as the kernel writes it: words of 32 bits in the machine's own order."""
    host, port = str(address[0]).removeprefix("::ffff:"), int(address[1])
    raw = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(raw) // 4}I", raw)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


# Ranks without a launcher of ours: the relay is a process, because a rank may be busy


@dataclass(frozen=True)
class RelayRequest:
    """What the relay of a rank does. `listen` are descriptors that it inherits."""

    listen: list[int]
    address: str
    port: int
    key: str | None = None  # of the guarded store, in hex; None: a gate elsewhere is called
    token: str | None = None


class RelayProcess:
    """A relay that ends with this process."""

    def __init__(self, listening: list[socket.socket], **request: Any) -> None:
        numbers = [found.fileno() for found in listening]
        asked = RelayRequest(numbers, **request)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C is for the rank
        )
        for found in listening:
            found.close()
        assert self._process.stdin is not None
        # The key must not be seen in `ps`; the open pipe says that the rank lives.
        self._process.stdin.write(json.dumps(asked.__dict__).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(HANDSHAKE_S)
        self._process.kill()
        self._process.wait()


def main() -> None:
    request = RelayRequest(**json.loads(sys.stdin.readline()))
    token = None if request.token is None else bytes.fromhex(request.token)
    if request.key is not None:
        upstream = guarded_upstream(request.port, bytes.fromhex(request.key))
    else:
        assert token is not None
        upstream = remote_upstream(request.address, request.port, token)
    relays = []
    for number in request.listen:
        listening = socket.socket(fileno=number)
        local = is_loopback(listening.getsockname()[0])
        relays.append(StoreRelay(listening, upstream, None if local else token))
    sys.stdin.read()
    for found in relays:
        found.close()


if __name__ == "__main__":
    main()
