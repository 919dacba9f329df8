"""Small JSON messages between the launchers of a run: one question and answer per connection.

Each message has a new connection: after a network outage a new one works at once, where an old one
may wait for its next retransmission. Both sides prove that they know the cluster token before
anything is parsed, and then it is parsed as JSON and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from multi_gpu_training.distributed.authenticated_channel import (
    MESSAGES,
    Channel,
    ChannelServer,
    Refusals,
    Stream,
)
from multi_gpu_training.distributed.sockets import listening_socket
from multi_gpu_training.distributed.store_relay import admission

PATIENCE_S = 2.0

Message = dict[str, Any]


class Gone(ConnectionError):
    """The machine refuses: the launcher has ended, or a firewall says so (REJECT)."""


def ask(
    address: str, port: int, message: Message, key: bytes, timeout_s: float = PATIENCE_S
) -> Message:
    """The answer of the launcher at `address`. Gone: refused. OSError: no answer came."""
    try:
        with Channel(address, port, key, MESSAGES, timeout_s) as channel:
            channel.send(json.dumps(message).encode())
            return _parse(channel.receive())
    except ConnectionRefusedError as error:
        raise Gone(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"the answer of {address}:{port} cannot be read: {error}") from None


def _parse(raw: bytes) -> Message:
    message = json.loads(raw)
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message


class MessageServer:
    """Answers messages at one address, in its own thread, until closed.

    `answer` may raise: what it cannot read is counted and not answered. Bytes are JSON already.
    """

    def __init__(
        self,
        address: str,
        port: int,
        answer: Callable[[Message], Message | bytes],
        key: bytes,
        who: str = "this launcher",
    ) -> None:
        async def serve(stream: Stream) -> None:
            reply = answer(_parse(await stream.receive()))
            await stream.send(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

        listening = listening_socket(address, port)
        found = listening.getsockname()[1]
        self.refusals = Refusals(f"{who} at {address}:{found}")
        admit = admission(listening, key, MESSAGES)
        self._server = ChannelServer(listening, admit, serve, self.refusals, PATIENCE_S)
        self.port: int = self._server.port

    def close(self) -> None:
        self._server.close()
