"""Run the app with uvicorn, and stop without losing an accepted request.

After SIGTERM or Ctrl-C the server first keeps listening for `drain_s`: /health and /predict answer
503, so that a load balancer looks elsewhere and clients are told rather than cut off. Then it
closes its port, finishes what it has accepted and exits with code 0.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import uvicorn

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.serving.http_limits import App, host_name, is_loopback

if TYPE_CHECKING:  # it needs more packages than a server that has no model
    from multi_gpu_training.serving.web_app import ModelServer

BACKLOG = 2048
POLL_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
FINISH_S = 60.0  # until requests that are still being computed are given up


class Drainable(Protocol):
    """An app that answers differently, or ends its streams, once `draining` is set."""

    app: App
    draining: bool


class Drain:
    """Turns signals into a stop in two parts: first say 503, then close the port."""

    def __init__(self, server: Drainable, drain_s: float) -> None:
        self.server, self.drain_s = server, drain_s
        self.leaves_at: float | None = None
        self.at_once = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.leaves_at is not None:
            self.at_once = number == signal.SIGINT  # Ctrl-C twice: do not wait for anything
            return
        self.server.draining = True
        self.leaves_at = time.monotonic() + self.drain_s

    @property
    def is_over(self) -> bool:
        return self.at_once or (self.leaves_at is not None and time.monotonic() >= self.leaves_at)


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address, or an error that says what to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {host[:80]}:{port} ({error}); choose another --port or --host",
            code="MGT501",
        ) from None
    return taken


def allowed_hosts(host: str, more: list[str]) -> frozenset[str] | None:
    """Names that clients may use; None: any, where the user opened the server to a network
    without naming any."""
    if is_loopback(host):
        return LOOPBACK_NAMES | {host, *map(host_name, more)}
    return LOOPBACK_NAMES | {host, *map(host_name, more)} if more else None


def serve(server: ModelServer, taken: socket.socket, drain_s: float = 1.0) -> int:
    """Serve until a signal comes. Returns the exit code: 1 if an accepted input got no answer."""
    serve_until_signal(server, taken, drain_s)
    finished = server.close(FINISH_S)
    counts = server.metrics
    open_inputs = counts.accepted - counts.answered - counts.failed
    print(
        f"stopped: {counts.accepted} inputs accepted, {counts.answered} answered, "
        f"{counts.failed} failed",
        file=sys.stderr,
        flush=True,
    )
    return 0 if finished and open_inputs == 0 else 1


def serve_until_signal(server: Drainable, taken: socket.socket, drain_s: float) -> None:
    """Serve until SIGTERM or Ctrl-C, and `drain_s` longer."""
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        h11_max_incomplete_event_size=64 * 1024,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(FINISH_S),
        backlog=BACKLOG,
        headers=list(HEADERS.items()),
    )
    running = uvicorn.Server(config)
    drain = Drain(server, drain_s)
    before = {number: signal.signal(number, drain.on_signal) for number in SIGNALS}
    # In a thread, uvicorn leaves signals alone: its own handling would end with code 143.
    thread = threading.Thread(target=running.run, args=([taken],), name="uvicorn", daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            running.should_exit = drain.is_over
            running.force_exit = drain.at_once
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
