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
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
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
from multi_gpu_training.distributed.sockets import (
    ANY_STATE,
    LOOPBACK,
    connected_users,
    is_loopback,
    listening_socket,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_TCP_MD5SIG_EXT = 32
_PREFIX = 1  # the key is for a range of addresses; of length 0: for all

# Whoever asks this wants to know whether a relay of ours is there; torch begins otherwise.
KNOCK = b"MGT: is rank 0 there?"

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
    """A TCPStore of this process that only holders of `key` can connect to.

    No key: this kernel cannot do that, and whoever is on this machine can.
    """

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
                if not guard(listening, self.key):
                    self.key = b""
                    _warn("this kernel has no TCP MD5 signatures")
                    return
            with suppress(OSError):  # `admission` warns
                if connected_users(0, self.port, ANY_STATE) != [os.geteuid()]:
                    self.store = None  # somebody came before the guard: begin again elsewhere
                    continue
            return

    def upstream(self) -> Upstream:
        return guarded_upstream(self.port, self.key)


def _warn(why: str) -> None:
    print(
        f"warning: {why}, so other users of this machine could reach the ranks' store and change "
        "or end the run; where there are others that you do not trust, use another kernel or "
        "container",
        file=sys.stderr,
        flush=True,
    )


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
    tells_users = local
    try:
        connected_users(0, listening.getsockname()[1])
    except OSError:
        tells_users = False
        if local:
            _warn("neither netlink nor /proc/net tells here who connects")

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream:
        if tells_users:
            ours, theirs = (writer.get_extra_info(end)[1] for end in ("sockname", "peername"))
            users = connected_users(theirs, ours)
            if not users:
                raise Refused("gone before it was asked")
            if users != [os.geteuid()]:
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
            first = await stream.receive()
            if first == KNOCK:
                await stream.send(first)
            elif first:
                async with upstream() as store:
                    await store.send(first)
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
        self._relay = StoreRelay(listening, self._guarded.upstream(), token)
        self.port = self._relay.port

    def close(self) -> None:
        self._relay.close()
        self._guarded.store = None


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
    # Slurm signals every process of a step: the ranks still need this one while they save.
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
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
