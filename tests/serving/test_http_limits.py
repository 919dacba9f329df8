"""Requests that are too large, too many, or from another web site do not reach the app."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from multi_gpu_training.serving.http_limits import Gate, RateLimit, RequestLimits, RequestRefused

HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def ask(
    gate: Gate, *parts: bytes, method: str = "POST", host: str = "localhost:8000", **headers: str
) -> tuple[int, bytes, list[bytes]]:
    """Status, body, and the parts of the request that nobody has read."""
    unread = list(parts)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not unread:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):
            unread_at_answer.extend(unread)

    unread_at_answer: list[bytes] = []
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": method,
        "path": "/predict",
        "client": ("127.0.0.1", 1),
        "headers": [(b"host", host.encode()), *named],
    }
    asyncio.run(gate(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body, unread_at_answer


def test_bodies_are_limited_by_announced_and_by_real_length() -> None:
    seen: list[tuple[str, int]] = []
    limits = RequestLimits(max_body_bytes=100)
    gate = Gate(echo, limits, HOSTS, lambda path, status, seconds: seen.append((path, status)))
    assert ask(gate, b"a" * 60, b"b" * 40)[:2] == (200, b"a" * 60 + b"b" * 40)
    status, body, unread = ask(gate, b"x", content_length="101")
    assert status == 413 and b"more than" in body and unread == [b"x"]
    status, _, unread = ask(gate, *[b"y" * 60] * 5)
    assert status == 413 and len(unread) == 3  # answered at once, not at the end
    assert seen == [("/predict", 200), ("/predict", 413), ("/predict", 413)]


def test_a_body_that_never_comes_ends_in_408() -> None:
    gate = Gate(echo, RequestLimits(body_timeout_s=0.01), HOSTS)
    assert ask(gate, method="POST")[0] == 408


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"host": "evil.example"}, 421),
        ({"host": ""}, 421),
    ],
)
def test_other_web_sites_cannot_use_the_server(headers: dict[str, str], status: int) -> None:
    gate = Gate(echo, RequestLimits(), HOSTS)
    found, body, _ = ask(gate, b"{}", **headers)
    assert found == status
    if status != 200:
        assert json.loads(body)["error"]


def test_each_client_has_its_own_rate() -> None:
    limit = RateLimit(rate=10, burst=2)
    limit.check("a", 0.0)
    limit.check("a", 0.0)
    with pytest.raises(RequestRefused) as refused:
        limit.check("a", 0.05)
    assert refused.value.status == 429 and refused.value.headers == {"retry-after": "1"}
    limit.check("b", 0.05)
    limit.check("a", 0.15)
