"""Does what people ask of a run, on every rank at the same step, and records it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.events import StructuredLogger
from multi_gpu_training.monitoring.run_requests import RunRequest
from multi_gpu_training.monitoring.step_log import IntervalLog
from multi_gpu_training.safe_files import parse_json
from multi_gpu_training.training.saving import Saving
from multi_gpu_training.training.step_state import StepState
from multi_gpu_training.training.stopping import Stopping


class RequestedActions:
    """Called with each request at the boundary that all ranks agreed on.

    A change is saved at once: whatever happens next, the run continues with it. What a request
    changed is part of the run's state, but not of what recorded steps take back: people do not
    ask twice.

    saves: None, or why this training cannot be saved between any two steps. rates: None, or why
    its learning rate cannot be set.
    """

    def __init__(
        self,
        state: StepState,
        log: IntervalLog,
        logger: StructuredLogger,
        say: Callable[[str], None],
        saving: Saving,
        stopping: Stopping,
        snapshot_memory: Callable[[], str],
        saves: Callable[[], str | None],
        rates: Callable[[], str | None],
    ) -> None:
        self._state, self._log, self._logger = state, log, logger
        self._saving, self._stopping = saving, stopping
        self._say, self._snapshot_memory = say, snapshot_memory
        self._saves, self._rates = saves, rates

    def __call__(self, text: str) -> None:
        request = parse_json(text, RunRequest, "the request")
        step, begun = self._state.step, time.perf_counter()
        outcome, done = "failed", False
        try:
            outcome, done = self._do(request), True
        except ConfigError as error:
            outcome = f"refused: {error.problems[0]}"
        finally:
            facts: dict[str, Any] = {"action": request.action, "value": request.value}
            facts |= {"by": request.by, "outcome": outcome, "done": done}
            facts["took_s"] = time.perf_counter() - begun
            self._logger.record("request", step=step, **facts)
        asked = request.action.replace("_", " ")
        value = "" if request.value is None else f" {request.value:g}"
        self._say(f"{request.by or 'asked'}: {asked}{value}: {outcome}")

    def _do(self, request: RunRequest) -> str:
        value = request.value
        if request.action == "memory_snapshot":
            return self._snapshot_memory()
        if request.action == "save":
            self._refuse(self._saves())
            self._saving.between_steps()
            return f"step {self._state.step} is being saved"
        self._log.flush()  # what was logged so far belongs to the settings so far
        if request.action == "stop_after_epoch":
            self._stopping.end_after_epoch()
            outcome = "the run ends after this epoch"
        elif request.action == "set_log_every":
            assert value is not None
            self._log.set_every(int(value))
            outcome = f"every {int(value)} steps from step {self._state.step + 1} on"
        else:
            assert value is not None
            self._refuse(self._rates())
            before = float(self._state.optimizer.param_groups[0]["lr"])
            self._state.schedule.set_rate(self._state.optimizer, value)
            outcome = f"{before:g} becomes {value:g} from step {self._state.step + 1} on"
        return outcome + self._keep()

    def _keep(self) -> str:
        """Save the change, so that a run that is killed next continues with it."""
        if self._saves() is not None or not self._state.config.enable_fault_tolerance:
            return "; in the next checkpoint"
        if self._state.step:
            self._saving.between_steps()
        return ""

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise ConfigError(reason)

    # Saved with the run

    def state_dict(self) -> dict[str, Any]:
        return {"log_every": self._log.asked_every, "last_epoch": self._stopping.last_epoch}

    state_to_save = state_dict

    def kept(self) -> Callable[[], None]:
        return lambda: None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("log_every") is not None:
            self._log.set_every(int(state["log_every"]))
        self._stopping.last_epoch = state.get("last_epoch")
        if self._stopping.asked_to_end:  # it did: whoever resumes the run wants more of it
            self._stopping.last_epoch = None
