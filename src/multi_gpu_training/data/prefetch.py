"""Batches on their way to the GPU while the one before them is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.data.batch import map_tensors, to_device
from multi_gpu_training.data.order import Share

Fed = tuple[Share, Any]


def on_device(batches: Iterable[Fed], device: torch.device) -> Iterator[Fed]:
    """The same batches on `device`; on a GPU each is sent one step ahead, on a stream of its own.

    What goes wrong while a batch is loaded is raised when its turn comes, not a step early.
    """
    if device.type != "cuda":
        for share, batch in batches:
            yield share, to_device(batch, device)
        return
    stream = torch.cuda.Stream(device)
    source = iter(batches)
    waiting = _fetch(source, device, stream)
    while True:
        following = _fetch(source, device, stream) if waiting.ok else waiting
        fed = waiting.take()
        if fed is None:
            return
        yield fed
        waiting = following


class _Sent:
    """A batch on its way, the end of the data, or what went wrong."""

    def __init__(
        self, fed: Fed | None, error: Exception | None, event: torch.cuda.Event | None
    ) -> None:
        self.fed = fed
        self.error = error
        self.event = event

    @property
    def ok(self) -> bool:
        return self.fed is not None

    def take(self) -> Fed | None:
        if self.error is not None:
            raise self.error
        if self.fed is not None and self.event is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self.event)
            # Its memory belongs to the other stream: not to be reused before we are done with it.
            map_tensors(self.fed[1], _used_by(current))
        return self.fed


def _used_by(stream: torch.cuda.Stream) -> Callable[[Tensor], Tensor]:
    def mark(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    return mark


def _fetch(source: Iterator[Fed], device: torch.device, stream: torch.cuda.Stream) -> _Sent:
    try:
        share, batch = next(source)
        with torch.cuda.stream(stream):
            moved = to_device(batch, device)
        return _Sent((share, moved), None, stream.record_event())
    except StopIteration:
        return _Sent(None, None, None)
    except Exception as error:
        return _Sent(None, error, None)
