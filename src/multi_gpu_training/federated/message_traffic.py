"""Flower's grid with a count of what goes through it, and with a choice of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

Seen = Callable[[Message], None]


class CountedGrid:
    """Sends messages and waits for replies. `on_receive` sees all that reaches the server."""

    on_receive: Seen | None = None

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.bytes_out = self.bytes_in = 0

    def get_node_ids(self) -> Iterable[int]:
        return list(self.grid.get_node_ids())

    def only(self, nodes: Sequence[int]) -> Any:
        """A grid in which only these nodes are connected, for a strategy that asks it."""
        return _ChosenNodes(nodes)

    def ask(self, messages: Sequence[Message], timeout: float) -> list[Message]:
        """The replies that come in time."""
        return list(self.send_and_receive(messages, timeout=timeout))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As Flower's grid has it, for its workflows."""
        sent = list(messages)
        self.bytes_out += sum(map(size_of, sent))
        replies = list(self.grid.send_and_receive(sent, timeout=timeout))
        self.bytes_in += sum(map(size_of, replies))
        if CountedGrid.on_receive is not None:
            for reply in replies:
                CountedGrid.on_receive(reply)
        return replies


class _ChosenNodes:
    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = list(nodes)

    def get_node_ids(self) -> Iterable[int]:
        return self._nodes


def size_of(message: Message) -> int:
    """Bytes of the content: arrays, and what configs and metrics hold."""
    if not message.has_content():
        return 0
    total = 0
    for record in message.content.array_records.values():
        total += sum(len(array.data) for array in record.values())
    for other in message.content.config_records.values():
        total += sum(map(_size, other.values()))
    for metrics in message.content.metric_records.values():
        total += 8 * len(metrics)
    return total


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, (bytes, str)) else 8
