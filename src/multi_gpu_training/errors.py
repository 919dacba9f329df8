"""What can go wrong, as one tree.

    MultiGPUError
      ConfigError         the request contradicts itself, the machine or the data (exit code 2)
        DataError         the dataset cannot serve the request
        ModelError        the model or the loss cannot be trained as asked
      ShardError          a shard of a stream broke off while it was read
      LaunchError         ranks could not be started or found each other
      RankFailure         a rank of a running job died
      CheckpointError     nothing intact to load, or it belongs to another model
      DivergenceError     replicas that should be equal are not
      NonFiniteLossError  the loss or a gradient became NaN or infinite
      LossSpikeError      the loss jumped far above what it was
      MemoryShortError    the smallest micro-batch does not fit into memory

Every message says what was asked, what was found and what to do next.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any


class MultiGPUError(Exception):
    """Uncaught, it ends a plain `python train.py` with its message alone and its `exit_code`."""

    exit_code = 1
    restart_helps = True  # whether the ranks may get further when they are started again

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Only now, when there is something to show: importing and configuring change nothing.
        _show_uncaught_errors_plainly()


class ConfigError(MultiGPUError):
    """The request cannot be carried out. `problems` holds all of them, not only the first."""

    exit_code = 2
    restart_helps = False

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self.under("This run cannot start:"))

    def under(self, heading: str) -> str:
        """The problems below this heading."""
        return "\n".join([heading, *(f"  - {problem}" for problem in self.problems)])


class DataError(ConfigError):
    pass


class ModelError(ConfigError):
    pass


class ShardError(MultiGPUError):
    pass


class LaunchError(MultiGPUError):
    pass


class RankFailure(MultiGPUError):
    pass


class CheckpointError(MultiGPUError):
    restart_helps = False


class DivergenceError(MultiGPUError):
    pass


class StaleStepsError(MultiGPUError):
    """Recorded steps turned out to differ from eager ones, and cannot be taken back in memory.
    `saved`: the newest saved step that is known to be right."""

    def __init__(self, problem: str, step: int, saved: int | None) -> None:
        super().__init__(
            f"recorded steps up to step {step} are wrong: {problem}. Checkpoints after step "
            f"{saved} are removed; the run goes on from there, without recording"
        )
        self.saved = saved


class NonFiniteLossError(MultiGPUError):
    """`step` would have moved the weights by NaN; it trained on the batch at (epoch, position)."""

    restart_helps = False  # the same steps from the same checkpoint give the same loss

    def __init__(self, step: int, epoch: int = 0, position: int = -1, text: str = "") -> None:
        super().__init__(text or f"step {step}: the gradient is not finite")
        self.step, self.epoch, self.position = step, epoch, position
        self.findings: list[Any] = []

    @property
    def ranks(self) -> list[int]:
        """The ranks whose micro-batches were bad; every rank raises the error alike."""
        return sorted({rank for rank, _ in self.findings})

    def describe(self, findings: Sequence[Any], names: Sequence[str], trainer: Any) -> None:
        """Add the diagnosis: (rank, (loss, samples, parameters)) of each bad micro-batch."""
        self.findings = list(findings)
        lines = [f"step {self.step}: the gradient is not finite; no weight was moved by it"]
        for rank, (loss, samples, bad) in findings[:4]:
            what = f"the loss is {loss}" if loss - loss != 0 else f"the loss is finite ({loss:g})"
            shown = ", ".join(map(str, samples[:64])) or "unknown"
            more = f" and {len(samples) - 64} more" if len(samples) > 64 else ""
            names = names or bad
            lines.append(f"rank {rank}: {what}; samples {shown}{more}")
        if not findings:
            lines.append("the loss is finite on every rank, also when the step is computed again")
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"parameters with such a gradient: {', '.join(names[:8])}{more}")
        rate = float(trainer.optimizer.param_groups[0]["lr"])
        lines.append(
            f"Lower the learning rate (now {rate:g}), set max_grad_norm, or check these samples; "
            "on_nonfinite=skip skips such steps, rollback returns to the last checkpoint"
        )
        self.args = ("\n  ".join(lines),)


class LossSpikeError(MultiGPUError):
    """The steps trained on the batches of `epoch` from position `begin` to `end`."""

    restart_helps = False  # the same steps from the same checkpoint give the same loss

    def __init__(self, text: str, epoch: int, begin: int, end: int) -> None:
        super().__init__(text)
        self.epoch, self.begin, self.end = epoch, begin, end


class MemoryShortError(MultiGPUError):
    pass


def _show_uncaught_errors_plainly() -> None:
    """Let Python print an uncaught error of this module without a traceback, once per process.

    MGT_DEBUG=1 (`mgt --debug`) shows the traceback.
    """
    if not isinstance(sys.excepthook, _PlainErrors):
        sys.excepthook = _PlainErrors(sys.excepthook)


class _PlainErrors:
    """An excepthook; what is not an error of ours goes to the one before it."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, MultiGPUError) or os.environ.get("MGT_DEBUG"):
            self._before(kind, error, trace)
            return
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        # Not sys.stderr: torch's hook in a rank replaces it by a buffer that is printed after us.
        print(f"{error}{notes}", file=sys.__stderr__ or sys.stderr, flush=True)
        sys.exit(error.exit_code)
