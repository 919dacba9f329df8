"""A loss that jumps far above what it was, found in the logged losses."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from multi_gpu_training.errors import LossSpikeError

REMEMBERED = 64
ENOUGH = 8
FAR = 10.0  # robust standard deviations above the median
TIMES = 2.0  # and so many times the median, which a flat curve would otherwise pass too easily


def threshold(losses: list[float]) -> float:
    """Above this a loss is a spike beside `losses`. The median and the median distance from it
    are what they are whatever one earlier spike was."""
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    return middle + max(FAR * spread, (TIMES - 1) * abs(middle))


class LossSpikes:
    """Looks at each logged loss, which is the same on every rank.

    tell: called with (kind, action, text, facts) for a spike that is only warned about.
    """

    def __init__(
        self, policy: str, tell: Callable[[str, str, str, dict[str, Any]], None] = lambda *_: None
    ) -> None:
        self.policy = policy
        self._tell = tell
        self._losses: deque[float] = deque(maxlen=REMEMBERED)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` is one. Later ones are not measured by a spike."""
        if not math.isfinite(loss):
            return False  # that is another fault
        if len(self._losses) >= ENOUGH and loss > threshold(list(self._losses)):
            return True
        self._losses.append(loss)
        return False

    def look(self, loss: float, step: int, epoch: int, position: int, steps: int) -> None:
        """Act on the loss of the `steps` steps up to `step`, which end before `position`."""
        if self.policy == "ignore" or not self.is_spike(loss):
            return
        usual = statistics.median(self._losses)
        text = (
            f"the loss jumped to {loss:.4g} over the {steps} steps up to {step}, from about "
            f"{usual:.4g}"
        )
        if self.policy == "warn":
            self._tell("loss_spike", "warn", text, {"step": step})
            return
        raise LossSpikeError(
            f"{text}; lower the learning rate, set max_grad_norm, or check the data",
            epoch,
            max(0, position - steps),
            position,
        )
