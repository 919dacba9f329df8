"""Flower's grid without Flower's engine: every message is handed to the ClientApp at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid:
    """Nodes 101, 102, ... of one process. `before` may raise in a client's place, or return a
    reply instead of its own, or None."""

    def __init__(
        self,
        app: Any,
        clients: int,
        before: Callable[[int, Message], Message | None] = lambda client, message: None,
        after: Callable[[int, Message], Message | None] = lambda client, reply: reply,
    ) -> None:
        self.app, self.before, self.after = app, before, after
        self.contexts = {
            101 + client: Context(1, 101 + client, {"partition-id": client}, RecordDict(), {})
            for client in range(clients)
        }
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.received: list[tuple[int, Message]] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        for sent in messages:
            node = sent.metadata.dst_node_id
            message = copy.deepcopy(sent)
            try:
                reply = self.before(node - 101, message) or self.app(message, self.contexts[node])
            except Exception as error:
                text = f"{type(error)}:<'{error}'>"
                reply = Message(Error(code=1, reason=text), reply_to=message)
            kept = self.after(node - 101, reply)
            if kept is not None:
                self.received.append((node - 101, kept))
                replies.append(kept)
        return replies
