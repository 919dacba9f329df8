"""What goes wrong in a run, by kind, and what is done about it: one table (docs/faults.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.order import Share
from multi_gpu_training.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    LaunchError,
    LossSpikeError,
    MemoryShortError,
    NonFiniteLossError,
    RankFailure,
    StaleStepsError,
)
from multi_gpu_training.training.oom import is_out_of_memory

ROLLBACK, RESTART, STOP = "rollback", "restart", "stop"


@dataclass(frozen=True)
class Policy:
    """The kind of a fault and what to do about it.

    `stop` ends the run, `restart` ends the ranks so that the launcher starts them again from the
    last checkpoint, `rollback` returns to that checkpoint in this very process.
    """

    kind: str
    action: str


def judge(error: BaseException, config: MultiGPUConfig) -> Policy:
    """Return the kind of an error that a training step raised, and what the config says to do."""
    if isinstance(error, NonFiniteLossError):
        # on_nonfinite=skip never raises: such a step is left out where it is found.
        asked = config.on_nonfinite
        return Policy("nonfinite", ROLLBACK if asked == ROLLBACK else STOP)
    if isinstance(error, StaleStepsError):
        return Policy("recording", ROLLBACK)
    if isinstance(error, LossSpikeError):
        return Policy("loss_spike", config.on_loss_spike)
    if isinstance(error, DivergenceError):
        return Policy("divergence", config.on_divergence)
    if isinstance(error, MemoryShortError):
        return Policy("out_of_memory", RESTART if error.restart_helps else STOP)
    if isinstance(error, (ConfigError, CheckpointError)):
        return Policy("config" if isinstance(error, ConfigError) else "checkpoint", STOP)
    if is_out_of_memory(error):
        return Policy("out_of_memory", RESTART)
    return Policy(_kind(error), RESTART)


def _kind(error: BaseException) -> str:
    text = str(error)
    exchange = "/gloo/" in text or type(error).__name__.startswith("Dist")
    if isinstance(error, TimeoutError) or (exchange and "imed out" in text):
        return "timeout"
    if exchange or isinstance(error, (ConnectionError, LaunchError, RankFailure)):
        return "lost_rank"
    if "DataLoader worker" in text:
        return "loader"
    return "user_code"


class SkippedBatches:
    """Global batches that did harm and are not trained on again: saved with the run."""

    def __init__(self) -> None:
        self.places: set[tuple[int, int]] = set()  # (epoch, position)

    def add(self, error: BaseException) -> None:
        """Leave out the batches that an error blames; most errors blame none."""
        if isinstance(error, NonFiniteLossError) and error.position >= 0:
            self.places.add((error.epoch, error.position))
        elif isinstance(error, LossSpikeError):
            self.places.update((error.epoch, place) for place in range(error.begin, error.end))

    def holds(self, share: Share | None) -> bool:
        """Whether a batch is one of them."""
        return share is not None and (share.epoch, share.position) in self.places

    def state_dict(self) -> dict[str, Any]:
        return {"places": sorted([epoch, position] for epoch, position in self.places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places = {(int(epoch), int(position)) for epoch, position in state["places"]}
