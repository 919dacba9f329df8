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
# And so much of the largest loss level of the run. A loss near zero jumps by factors of a thousand
# in a healthy training, from nothing to next to nothing.
FLOOR = 0.2
# And twice the largest of so many losses before it: where single hard batches stand out now and
# then, one more of them is no news.
PEAKS = 1024
# Of a level that stays, rather than of a spike: so many losses above the threshold in a row.
LASTING = 16
QUIET = 64  # logged losses after a warning before the next one, doubled each time


def threshold(losses: list[float], scale: float = 0.0) -> float:
    """Above this a loss is a spike beside `losses`, in a run whose losses were once about `scale`.
    The median and the median distance from it are what they are whatever one earlier spike was."""
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    return middle + max(FAR * spread, (TIMES - 1) * abs(middle), FLOOR * scale)


class LossSpikes:
    """Looks at each logged loss, which is the same on every rank. Saved with the run, so that a
    resumed one judges as the undisturbed one would.

    tell: called with (kind, action, text, facts) for a spike that is only warned about.
    """

    def __init__(
        self, policy: str, tell: Callable[[str, str, str, dict[str, Any]], None] = lambda *_: None
    ) -> None:
        self.policy = policy
        self._tell = tell
        self._losses: deque[float] = deque(maxlen=REMEMBERED)
        self._scale = 0.0  # the largest median of losses so far
        self._peaks: deque[float] = deque(maxlen=PEAKS)
        self._in_a_row: list[float] = []
        self._first = (-1, 0)  # epoch and position where the last spike began
        self._quiet = 0  # losses until the next warning may come
        self._pause = QUIET
        self._untold = 0

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` is one. Later ones are not measured by a spike."""
        if not math.isfinite(loss):
            return False  # that is another fault
        known = self._losses
        # The cheap comparison first: nearly every loss ends here.
        far = len(known) >= ENOUGH and loss > TIMES * max(self._peaks)
        if far and loss > threshold(list(known), self._scale):
            self._in_a_row.append(loss)
            if len(self._in_a_row) >= LASTING:  # the loss has a new level: measure by that
                known.clear()
                known.extend(self._in_a_row)
                self._end_of_spikes()
            return True
        self._end_of_spikes()
        known.append(loss)
        self._peaks.append(loss)
        if len(known) >= ENOUGH:
            self._scale = max(self._scale, abs(statistics.median(known)))
        return False

    def _end_of_spikes(self) -> None:
        """The loss came back, or stays: from now on such a loss has been seen."""
        self._peaks.extend(self._in_a_row)
        self._in_a_row.clear()

    def look(self, loss: float, step: int, epoch: int, position: int, steps: int) -> None:
        """Act on the loss of the `steps` steps up to `step`, which end before `position`."""
        self._quiet = max(0, self._quiet - 1)
        usual = statistics.median(self._losses) if self._losses else 0.0
        if self.policy == "ignore" or not self.is_spike(loss):
            return
        text = (
            f"the loss jumped to {loss:.4g} over the {steps} steps up to {step}, from about "
            f"{usual:.4g}"
        )
        if self.policy == "warn":
            self._warn(text, step)
            return
        # One hard batch does not end or rewind a training that is well the moment after, unless
        # the loss is worse than it ever was.
        before, self._first = self._first, (epoch, max(0, position - steps))
        if loss <= TIMES * self._scale and len(self._in_a_row) < 2:
            return
        begun = before if before[0] == epoch and len(self._in_a_row) > 1 else self._first
        raise LossSpikeError(
            f"{text}; lower the learning rate, set max_grad_norm, or check the data",
            epoch,
            begun[1],
            position,
        )

    def _warn(self, text: str, step: int) -> None:
        """Warn, but ever more rarely: a curve that jumps all the time has been reported."""
        if self._quiet:
            self._untold += 1
            return
        if self._untold:
            text += f" ({self._untold} more since the last warning)"
        self._quiet, self._pause, self._untold = self._pause, 2 * self._pause, 0
        self._tell("loss_spike", "warn", text, {"step": step})

    # Saved with a run

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "scale": self._scale,
            "peaks": list(self._peaks),
            "in_a_row": list(self._in_a_row),
            "warnings": [self._quiet, self._pause, self._untold],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(float(loss) for loss in state["losses"])
        self._peaks.clear()
        self._peaks.extend(float(loss) for loss in state["peaks"])
        self._scale = float(state["scale"])
        self._in_a_row = [float(loss) for loss in state["in_a_row"]]
        self._quiet, self._pause, self._untold = (int(number) for number in state["warnings"])
