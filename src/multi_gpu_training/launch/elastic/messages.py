"""Small JSON messages between the launchers of a run: one question and answer per connection.

Each message has a new connection: after a network outage a new one works at once, where an old one
may wait for its next retransmission. What arrives is parsed as JSON and nothing else.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from multi_gpu_training.launch.sockets import listening_socket

LONGEST = 1 << 20  # bytes of a message
PATIENCE_S = 2.0

Message = dict[str, Any]


class Gone(ConnectionError):
    """The machine answers, but nobody listens there: the launcher has ended."""


def ask(address: str, port: int, message: Message, timeout_s: float = PATIENCE_S) -> Message:
    """The answer of the launcher at `address`. Gone: it has ended. OSError: no answer came."""
    try:
        with socket.create_connection((address, port), timeout_s) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            return _read(connection.makefile("rb"))
    except ConnectionRefusedError as error:
        raise Gone(str(error)) from None
    except ValueError as error:
        raise ConnectionError(
            f"what answers at {address}:{port} is not a launcher: {error}"
        ) from None


def _read(stream: Any) -> Message:
    line = stream.readline(LONGEST)
    message = json.loads(line) if line.endswith(b"\n") else None
    if not isinstance(message, dict):
        raise ConnectionError("the answer was cut short")
    return message


class MessageServer:
    """Answers messages at one address, in its own threads, until closed."""

    def __init__(self, address: str, port: int, answer: Callable[[Message], Message]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = PATIENCE_S

            def handle(self) -> None:
                try:
                    reply = answer(_read(self.rfile))
                    self.wfile.write(json.dumps(reply).encode() + b"\n")
                except (OSError, ValueError, KeyError, TypeError):
                    pass  # noise from elsewhere, or a launcher that is gone: it asks again

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128

            def __init__(self) -> None:
                super().__init__((address, port), Handler, bind_and_activate=False)
                self.socket.close()
                self.socket = listening_socket(address, port)

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server()
        self.port: int = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="launcher-messages", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
