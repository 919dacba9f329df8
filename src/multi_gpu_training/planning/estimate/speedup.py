"""Guide 002's `estimate_training_speedup` and `print_training_speedup_estimates`.

The guide assumes an efficiency. These start from what `mgt estimate` has measured.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.estimate.outcome import Outcome
from multi_gpu_training.planning.estimate.training_length import training_length
from multi_gpu_training.planning.forecast import (
    Interconnect,
    Price,
    StepProfile,
    measured,
    named,
    predict,
    price_per_gpu,
)
from multi_gpu_training.planning.forecast.result import Scaling

GUIDE_GPUS = (1, 2, 4, 8)
PROFILES = Path("runs/estimate")  # where `mgt estimate` writes by default
ONE_GPU = Interconnect("one GPU", "nothing is exchanged", ())


def estimate_training_speedup(
    world_size: int,
    profile: StepProfile | str | Path | None = None,
    interconnect: Interconnect | str | Path | None = None,
    *,
    price: Price | float | None = None,
    epochs: float | None = None,
    scaling: Scaling | None = None,
    gpus_per_node: int = 8,
) -> dict[str, Any]:
    """Forecast `world_size` GPUs: `theoretical_speedup`, `actual_speedup`, `efficiency`,
    `training_s`, `cost`, and everything else that a row of `forecast.json` holds.

    `profile` is what `mgt estimate` measured (its profile.json or folder; by default the newest
    under runs/estimate), `interconnect` one of its names or your own CSV, `price` the
    price per GPU-hour. Without one, `cost` is None. `scaling` is weak (same batch per GPU) or
    strong (same global batch), by default as in the measured config.
    """
    outcome = _outcome([world_size], profile, interconnect, price, epochs, scaling, gpus_per_node)
    return {"world_size": world_size, **outcome.rows[0]}


def print_training_speedup_estimates(
    gpus: Sequence[int] = GUIDE_GPUS,
    profile: StepProfile | str | Path | None = None,
    interconnect: Interconnect | str | Path | None = None,
    *,
    price: Price | float | None = None,
    epochs: float | None = None,
    scaling: Scaling | None = None,
    gpus_per_node: int = 8,
) -> None:
    """Print guide 002's table: GPUs, theoretical, actual, efficiency, time, cost."""
    from rich.console import Console

    outcome = _outcome(gpus, profile, interconnect, price, epochs, scaling, gpus_per_node)
    for table in outcome.tables():
        console = Console(highlight=False)
        console.soft_wrap = not console.is_terminal
        table.show(console)


def _outcome(
    gpus: Sequence[int],
    profile: StepProfile | str | Path | None,
    interconnect: Interconnect | str | Path | None,
    price: Price | float | None,
    epochs: float | None,
    scaling: Scaling | None,
    gpus_per_node: int,
) -> Outcome:
    counts = [_whole("world_size", count) for count in gpus]
    if not counts:
        raise ConfigError("world_size=nothing: use 1 or more")
    if epochs is not None:
        epochs = _amount("epochs", epochs)
    if price is not None and not isinstance(price, Price):
        price = price_per_gpu(_amount("price", price), source="price")
    if not isinstance(profile, StepProfile):
        profile = load_profile(profile)
    length = training_length(profile, epochs)
    result = predict(
        profile,
        _link(interconnect, max(counts)),
        counts,
        gpus_per_node=_whole("gpus_per_node", gpus_per_node),
        scaling=scaling,
        epochs=length.epochs,
        samples=length.samples,
        price=price,
        images=profile.images,
    )
    return Outcome(profile, result, length.words, length.notes)


def _whole(name: str, value: object) -> int:
    """Also of numpy's integers."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 1:
        raise ConfigError(f"{name}={value!r}: use a whole number, 1 or more")
    return count


def _amount(name: str, value: object) -> float:
    # True is a Real too, and would be read as a price of 1.
    amount = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.0
    if not 0 < amount < math.inf:
        raise ConfigError(f"{name}={value!r}: give a number above 0")
    return amount


def load_profile(path: str | Path | None) -> StepProfile:
    """A profile.json, that of a folder, or by default the newest under runs/estimate."""
    if path is None:
        there = sorted(PROFILES.glob("*/profile.json"), key=lambda file: file.stat().st_mtime)
        if not there:
            raise ConfigError(
                "nothing was measured yet, and speed-up is not guessed: run `mgt estimate SCRIPT` "
                f"once (it writes {PROFILES}/*/profile.json), or give profile=FILE"
            )
        path = there[-1]
    file = Path(path) / "profile.json" if Path(path).is_dir() else Path(path)
    try:
        return StepProfile.load(file)
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{path} is not a profile ({type(error).__name__}: {error!s:.200}); give the "
            "profile.json that `mgt estimate` writes"
        ) from None


def _link(interconnect: Interconnect | str | Path | None, most: int) -> Interconnect:
    if isinstance(interconnect, Interconnect):
        return interconnect
    if isinstance(interconnect, Path) or (interconnect or "").endswith(".csv"):
        return measured(Path(interconnect or ""))
    if interconnect is not None:
        return named(interconnect)
    if most == 1:
        return ONE_GPU
    raise ConfigError(
        f"{most} GPUs: what connects them decides how fast they exchange gradients, and that is "
        "not guessed; give interconnect=NAME (`mgt estimate` lists them) or your own CSV file"
    )
