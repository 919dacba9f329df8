"""Loggers: where the metrics of a run go.

Every `NAME_logger.py` in this folder is one, chosen by `loggers: [NAME, ...]` in the config. It has
a function `open_logger(run: LoggedRun) -> Logger | None`; None means that it does not write on this
rank. `PACKAGE` names the package that it needs, which is also its extra; `OPTIONS` is a pydantic
model of what `logger_options.NAME` takes. Adding a logger means adding such a file. Objects of your
own with `log` and `close` are given to `fit(..., loggers=[...])`.

Names carry their group: `train/loss`, `val/accuracy`, and names of your own as you give them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from pydantic import ValidationError
from torch import Tensor

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.extras import install, installed
from multi_gpu_training.monitoring.events import EventFile
from multi_gpu_training.training.callbacks import Callback, Run

_SUFFIX = "_logger"


class Logger(Protocol):
    """Takes metrics as they come. One that raises is left out from then on."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggedRun:
    """What a logger may know of a run when it is opened.

    step: where the run stands; more than 0 after a resume. events: this rank's event file.
    settings: config and recipe options without secrets, for loggers that show hyperparameters.
    is_stopping: whether a signal has asked the run to end.
    """

    folder: Path
    config: MultiGPUConfig
    is_main: bool
    step: int
    events: EventFile
    settings: Mapping[str, Any]
    is_stopping: Callable[[], bool]

    def options(self, name: str) -> dict[str, Any]:
        """What the user set for this logger; `check_loggers` has checked it."""
        return dict(self.config.logger_options.get(name, {}))


def known_loggers() -> list[str]:
    """The names that `loggers` takes."""
    modules = pkgutil.iter_modules(__path__)
    return sorted(m.name.removesuffix(_SUFFIX) for m in modules if m.name.endswith(_SUFFIX))


def check_loggers(config: MultiGPUConfig, objects: Iterable[Any] = ()) -> None:
    """Raise an error for unknown loggers, missing packages, options that do not fit and `objects`
    that are no loggers, all at once."""
    known, problems = known_loggers(), []
    for one in objects:
        if not all(callable(getattr(one, name, None)) for name in ("log", "close")):
            problems.append(
                f"fit(loggers=[{one!r:.60}]): this is not a logger; give an object with "
                "log(metrics, step) and close(), and names in the config: loggers=['csv']"
            )
    for name in dict.fromkeys(config.loggers):
        if name not in known:
            problems.append(f"loggers: {name!r} is not a logger; there are {', '.join(known)}")
            continue
        module = _module(name)
        package = getattr(module, "PACKAGE", None)
        if package is not None and not installed(package):
            problems.append(
                f"loggers: {name} needs the package {package}, which is not installed; run "
                f"{install(name)}"
            )
        problems += _option_problems(name, module, config.logger_options.get(name, {}))
    for name in config.logger_options:
        if name not in config.loggers:
            problems.append(
                f"logger_options.{name} is set, but {name} is not among the loggers; add it to "
                "loggers, or drop its options"
            )
    if problems:
        raise ConfigError(problems)


def _option_problems(name: str, module: ModuleType, given: Mapping[str, Any]) -> list[str]:
    options = getattr(module, "OPTIONS", None)
    if options is None:
        return [f"logger_options.{name}: this logger takes no options"] if given else []
    try:
        options(**given)
    except ValidationError as error:
        takes = ", ".join(options.model_fields)
        return [
            f"logger_options.{name}.{'.'.join(map(str, found['loc']))}={found['input']!r}: "
            f"{found['msg'][0].lower()}{found['msg'][1:]}; it takes {takes}"
            for found in error.errors()
        ]
    return []


def chosen_loggers(config: MultiGPUConfig, say: Callable[[str], None]) -> list[str]:
    """All loggers of a run by name. The curves for TensorBoard are on by default, so that they are
    left out with a line where TensorBoard is not installed."""
    curves = config.tensorboard and "tensorboard" not in config.loggers
    if curves and not installed("tensorboard"):
        say(
            "TensorBoard is not installed, so no curves are written; run "
            f"{install('tensorboard')}, or set tensorboard=false"
        )
        curves = False
    return list(dict.fromkeys(["jsonl", *(["tensorboard"] if curves else []), *config.loggers]))


def open_loggers(names: Iterable[str], run: LoggedRun) -> list[Logger]:
    """The loggers of these names that write on this rank."""
    opened: list[Logger] = []
    try:
        for name in names:
            logger = _module(name).open_logger(run)
            if logger is not None:
                opened.append(logger)
    except BaseException:
        for logger in opened:
            logger.close()
        raise
    return opened


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}{_SUFFIX}")


class LoggerList(Callback):
    """All loggers of a run: fed by the events of training and by `manager.log`."""

    watches_only = True

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self.loggers = list(loggers)
        self._unread: list[tuple[int, dict[str, Tensor]]] = []

    def log(self, metrics: Mapping[str, float | Tensor], step: int) -> None:
        """Numbers go to the loggers now; a tensor on a GPU with the next log, so that nobody waits
        for the device."""
        now: dict[str, float] = {}
        later: dict[str, Tensor] = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.detach().reshape(())
                if value.is_cuda:
                    later[name] = value.clone()
                    continue
            now[name] = _number(name, value)
        if later:
            self._unread.append((step, later))
        self._write(now, step)

    def on_log(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        self._read()
        self._write({f"train/{name}": value for name, value in metrics.items()}, step)

    def on_validation(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._read()
        self._write({f"val/{name}": value for name, value in metrics.items()}, run.step)

    def close(self) -> None:
        self._read()
        for logger in self.loggers:
            try:
                logger.close()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                print(f"{type(logger).__name__} was not closed: {problem}", file=sys.stderr)
        self.loggers.clear()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for step, metrics in unread:
            self._write({name: float(value) for name, value in metrics.items()}, step)

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in list(self.loggers) if metrics else ():
            try:
                logger.log(metrics, step)
            except Exception as error:  # a logger must never end a training
                self.loggers.remove(logger)
                problem = f"{type(error).__name__}: {error}"
                print(f"{type(logger).__name__} failed and is left out: {problem}", file=sys.stderr)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        found = f"{type(value).__name__}{shape}"
        raise ConfigError(
            f"log({name}={found}) is not a number; give a number, or a tensor of one"
        ) from None
