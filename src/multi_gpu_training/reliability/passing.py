"""Batches that did harm and are not trained on again: saved with the run."""

from __future__ import annotations

from typing import Any

from multi_gpu_training.data.order import Share
from multi_gpu_training.errors import LossSpikeError, NonFiniteLossError


class PassedOver:
    """The (epoch, position) of global batches to leave out."""

    def __init__(self) -> None:
        self.places: set[tuple[int, int]] = set()

    def add(self, error: BaseException) -> None:
        """Leave out what an error says was to blame; other errors blame no batch."""
        if isinstance(error, NonFiniteLossError) and error.position >= 0:
            self.places.add((error.epoch, error.position))
        elif isinstance(error, LossSpikeError):
            self.places.update((error.epoch, place) for place in range(error.begin, error.end))

    def holds(self, share: Share | None) -> bool:
        return share is not None and (share.epoch, share.position) in self.places

    def state_dict(self) -> dict[str, Any]:
        return {"places": sorted([epoch, position] for epoch, position in self.places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places = {(int(epoch), int(position)) for epoch, position in state["places"]}
