"""What goes wrong in a run, by kind, and what is done about it: one table (docs/faults.md)."""

from __future__ import annotations

from dataclasses import dataclass

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    LaunchError,
    LossSpikeError,
    MemoryShortError,
    NonFiniteLossError,
    RankFailure,
)
from multi_gpu_training.training.oom import is_out_of_memory

ROLLBACK, RESTART, STOP = "rollback", "restart", "stop"


@dataclass(frozen=True)
class Policy:
    """kind: of the fault. action: `stop` ends the run, `restart` ends the ranks and lets the
    launcher start them again from the last checkpoint, `rollback` goes back to it right here."""

    kind: str
    action: str


def judge(error: BaseException, config: MultiGPUConfig) -> Policy:
    """The kind of an error that came out of a training step, and what the config says to do."""
    if isinstance(error, NonFiniteLossError):
        # A skipped step is no error: it never comes here.
        asked = config.on_nonfinite
        return Policy("nonfinite", ROLLBACK if asked == ROLLBACK else STOP)
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
