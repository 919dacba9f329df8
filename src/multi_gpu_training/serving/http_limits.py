"""Which requests come in: size of the body, rate per client, host and origin.

A plain ASGI middleware, so that a body is counted while it arrives: a client that sends 100 MB is
answered after the first bytes too many, not when they are all in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MIB = 2**20
MOST_CLIENTS = 10_000  # whose rate is remembered
LINGER_S = 2.0  # for which a refused body is read and dropped


@dataclass(frozen=True)
class RequestLimits:
    """What a client may ask for. `rate` counts requests per second and client, 0: any number."""

    max_body_bytes: int = 10 * MIB
    rate: float = 1000.0
    burst: float = 2000.0
    body_timeout_s: float = 30.0
    max_items: int = 256


class RequestRefused(Exception):
    """The request is answered with an error status and this text."""

    def __init__(self, status: int, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.status, self.text = status, text
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}


class RateLimit:
    """A token bucket per client."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, max(burst, 1.0)
        self._buckets: dict[str, tuple[float, float]] = {}

    def check(self, client: str, now: float) -> None:
        if self.rate <= 0:
            return
        tokens, at = self._buckets.pop(client, (self.burst, now))
        tokens = min(self.burst, tokens + (now - at) * self.rate)
        allowed = tokens >= 1
        # Popped and put back, the dict is ordered by last use: the oldest is forgotten first.
        self._buckets[client] = (tokens - 1 if allowed else tokens, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.pop(next(iter(self._buckets)))
        if not allowed:
            wait = max(1, round((1 - tokens) / self.rate))
            raise RequestRefused(
                429, f"more than {self.rate:g} requests per second; slow down", wait
            )


class Gate:
    """Refuses what the limits forbid, reads the body and hands both on to the app.

    `hosts`: names by which the server may be called, None for any. Without this check a web page
    elsewhere could point its own name at 127.0.0.1 and then read our answers (DNS rebinding).
    `observe(path, status, seconds)` hears about every answer.
    """

    def __init__(
        self,
        app: App,
        limits: RequestLimits,
        hosts: frozenset[str] | None,
        observe: Callable[[str, int, float], None] = lambda path, status, seconds: None,
    ) -> None:
        self.app, self.limits, self.hosts, self.observe = app, limits, hosts, observe
        self._rates = RateLimit(limits.rate, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.observe(scope["path"], message["status"], time.monotonic() - began)
            await send(message)

        body = BodyReader(receive, self.limits)
        try:
            self._check(scope)
            whole = await body.read(_header(scope, b"content-length"))
        except RequestRefused as refusal:
            await refuse(refusal, body, observed)
            return
        except ClientGone:
            return
        unread = [{"type": "http.request", "body": whole, "more_body": False}]

        async def receive_read() -> Message:
            return unread.pop() if unread else await receive()

        await self.app(scope, receive_read, observed)

    def _check(self, scope: Scope) -> None:
        client = scope.get("client")
        self._rates.check(client[0] if client else "", time.monotonic())
        host = _header(scope, b"host") or ""
        if self.hosts is not None and host_name(host) not in self.hosts:
            raise RequestRefused(
                421,
                f"host {host[:80]!r} is not one of this server's names "
                f"({', '.join(sorted(self.hosts))}); add it with --allow-host",
            )
        if scope["method"] in ("GET", "HEAD"):
            return
        origin = _header(scope, b"origin")
        # The scheme may differ behind a proxy that speaks TLS; the host may not.
        foreign = origin is not None and urlsplit(origin).netloc != host
        if foreign or _header(scope, b"sec-fetch-site") in ("cross-site", "same-site"):
            raise RequestRefused(403, "requests from other web sites are not accepted")


class BodyReader:
    """Reads the body of a request up to the limits."""

    def __init__(self, receive: Receive, limits: RequestLimits) -> None:
        self._receive, self._limits = receive, limits
        self._more = True

    async def read(self, announced: str | None) -> bytes:
        """The whole body. One that announces too great a length is refused unread."""
        limits, parts, size = self._limits, [], 0
        if announced is not None and not announced.isdecimal():
            raise RequestRefused(400, f"content-length {announced[:40]!r} is not a number")
        if announced is not None and int(announced[:20]) > limits.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                while self._more:
                    parts.append(await self._part())
                    size += len(parts[-1])
                    if size > limits.max_body_bytes:
                        raise self._too_large()
        except TimeoutError:
            self._more = False  # nothing comes that could be dropped
            late = f"the body did not arrive within {limits.body_timeout_s:g} s"
            raise RequestRefused(408, late) from None
        return b"".join(parts)

    async def drop(self) -> None:
        """Read on for a little while after a refusal. Closing at once resets the connection, and
        a client that is still sending then sees the reset instead of the answer."""
        with contextlib.suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(LINGER_S):
                while self._more:
                    await self._part()

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> RequestRefused:
        limit = self._limits.max_body_bytes / MIB
        return RequestRefused(413, f"the body has more than {limit:g} MiB; see --max-body-mib")


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def refuse(refusal: RequestRefused, body: BodyReader, send: Send) -> None:
    """Answer with the refusal as JSON, and close the connection after it."""
    text = json.dumps({"error": refusal.text}).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(text)),
        "connection": "close",
        **refusal.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": text, "more_body": True})
    await body.drop()
    await send({"type": "http.response.body", "body": b""})


def host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower()


def host_problems(names: Sequence[str]) -> list[str]:
    """What keeps names of this server from being such."""
    return [
        f"--allow-host {name!r:.80} is not the name of a host; give one such as gpu1.lab.example"
        for name in names
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?", name)
    ]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _header(scope: Scope, name: bytes) -> str | None:
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if found else None
