"""What published trainings of this kind reach: learnt from tables that projects print.

Published trainings lose more than communication explains. `log efficiency` is a sum of seven terms
(`TERMS`), each a number that a table or a profile states times a coefficient; the coefficients and
the band come from `benchmarks/forecast.py` and lie in `published.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multi_gpu_training.errors import ConfigError

TERMS = ("exchanging", "newer", "shrunk", "image", "small_image", "small_other", "other_framework")

# Generations of hardware, A100 at 0. Beyond those with published points nothing is learnt.
GENERATIONS = (
    (r"B[123]00|GB[23]00|H[12]00|GH200|H20\b", 1.0),
    (r"ADA|L40|L4\b|RTX 4\d\d\d|\b4090", 0.5),
    (r"A100|A800|A10|A30|A40|A6000|A5000|A4000|RTX 3\d\d\d|\b3090", 0.0),
    (r"V100|TITAN|T4\b|RTX 8000|RTX 2\d\d\d|2080|P100|P40|GTX 10|1080|K80|M60|M40", -1.0),
)
IMAGE_UNITS = re.compile(r"im(a)?g|volume|frame|video|clip", re.IGNORECASE)
IMAGE_MODELS = re.compile(
    r"res-?ne[xt]|efficient(net|det)|vgg|inception|mobilenet|densenet|alexnet|convnext|swin|"
    r"\bvit\b|\bdeit|\bssd|yolo|mask.?r-?cnn|faster.?r-?cnn|u-?net|v-?net|segmentation|detr\b",
    re.IGNORECASE,
)
# Below this many parameters a step has little to do. Nothing is learnt of models smaller than the
# smallest published ones, about images and about anything else.
SMALL_MILLIONS = 50.0
SMALLEST_IMAGE_MILLIONS, SMALLEST_OTHER_MILLIONS = 1.8, 15.0
# Tables print up to 5 % more than linear: noise, and caches that fit better.
MOST_EFFICIENT = 1.05
# Up to here a doubling of the GPUs counts whole, beyond it half: tables of many GPUs are of
# trainings that were made to scale.
KNEE_GPUS, BEYOND_KNEE = 8, 0.5
# How many halvings of the batch per GPU published points go through.
MOST_SHRUNK = 4.0


@dataclass(frozen=True)
class Kind:
    """What the published model knows of a training."""

    gpus: int
    baseline_gpus: int = 1
    accumulation: float = 1.0
    generation: float = 0.0
    # 1 about images, 0 not, between where unknown.
    image: float = 0.5
    params_millions: float | None = None
    # The baseline's batch per GPU over this one's.
    batch_shrink: float = 1.0
    # Anything but PyTorch.
    other_framework: bool = False

    @property
    def terms(self) -> NDArray[np.float64]:
        """The numbers that the coefficients multiply, in the order of TERMS."""
        doublings = _doublings(self.gpus) - _doublings(self.baseline_gpus)
        exchanging = doublings if self.accumulation <= 1 else 0.0
        shrunk = min(max(0.0, math.log2(self.batch_shrink)), MOST_SHRUNK)
        return np.array(
            [
                exchanging,
                self.generation * doublings,
                shrunk,
                self.image * exchanging,
                self.image * exchanging * self._smallness(SMALLEST_IMAGE_MILLIONS),
                (1 - self.image) * exchanging * self._smallness(SMALLEST_OTHER_MILLIONS),
                self.other_framework * exchanging,
            ]
        )

    def _smallness(self, smallest: float) -> float:
        """Powers of ten below a model of ordinary size."""
        size = max(self.params_millions or SMALL_MILLIONS, smallest)
        return max(0.0, math.log10(SMALL_MILLIONS / size))


@dataclass(frozen=True)
class Fit:
    """The learnt numbers: a coefficient for each term, and the band around what they give."""

    coefficients: tuple[float, ...]
    # The band is efficiency + low * width .. + high * width, with width = floor - log efficiency:
    # the more is lost, the less sure it is.
    floor: float
    low: float
    high: float
    level: float

    def efficiency(self, kind: Kind) -> float:
        if kind.gpus <= kind.baseline_gpus:
            return 1.0
        return math.exp(min(0.0, float(kind.terms @ np.array(self.coefficients))))

    def band(self, efficiency: float) -> tuple[float, float]:
        """Never below half of what is expected, nor above what published points reach."""
        width = self.floor - math.log(efficiency)
        low = max(efficiency + self.low * width, efficiency / 2)
        return low, max(min(efficiency + self.high * width, MOST_EFFICIENT), efficiency)


@cache
def shipped() -> Fit:
    text = (files(__name__.rpartition(".")[0]) / "published.json").read_text()
    raw: dict[str, Any] = json.loads(text)
    return Fit(
        tuple(raw["coefficients"][term] for term in TERMS),
        raw["floor"],
        raw["low"],
        raw["high"],
        raw["level"],
    )


def predict_efficiency(
    point: Mapping[str, Any], fit: Fit | None = None
) -> tuple[float, float, float]:
    """Efficiency against the point's baseline, and the ends of its band.

    `point` is a row of a table of published throughputs: `gpus` is needed; `baseline_gpus`,
    `model`, `framework`, `unit`, `params_millions`, `hardware`, `grad_accum`, `batch_per_gpu` and
    `quality_flags` help where they are given. The point's own throughput and efficiency are never
    looked at.
    """
    fit = fit or shipped()
    kind = kind_of(point)
    if kind.gpus <= kind.baseline_gpus:
        return 1.0, 1.0, 1.0
    efficiency = fit.efficiency(kind)
    low, high = fit.band(efficiency)
    return efficiency, low, high


def kind_of(point: Mapping[str, Any]) -> Kind:
    """A row of a published table as the model sees it."""
    gpus = _number(point, "gpus")
    if not gpus or gpus < 1:
        raise ConfigError(f"a point needs 'gpus', a number from 1; found {point.get('gpus')!r}")
    return Kind(
        int(gpus),
        int(_number(point, "baseline_gpus") or 1),
        _number(point, "grad_accum") or 1.0,
        generation(str(point.get("hardware") or "")),
        image_share(str(point.get("unit") or ""), str(point.get("model") or "")),
        _number(point, "params_millions"),
        _shrink(point),
        "pytorch" not in str(point.get("framework") or "PyTorch").lower(),
    )


def _doublings(gpus: int) -> float:
    whole = math.log2(min(gpus, KNEE_GPUS))
    return whole + BEYOND_KNEE * math.log2(max(gpus / KNEE_GPUS, 1.0))


def generation(hardware: str) -> float:
    """0 for an A100 and its like, and where the name says nothing."""
    return next((g for names, g in GENERATIONS if re.search(names, hardware.upper())), 0.0)


def image_share(unit: str, model: str) -> float:
    if IMAGE_UNITS.search(unit) or IMAGE_MODELS.search(model):
        return 1.0
    return 0.0 if unit or model else 0.5


def _shrink(point: Mapping[str, Any]) -> float:
    batch = _number(point, "batch_per_gpu")
    flag = re.search(
        r"batch_per_gpu_differs_from_baseline\(([\d.]+)\)", str(point.get("quality_flags") or "")
    )
    return float(flag[1]) / batch if flag and batch else 1.0


def _number(point: Mapping[str, Any], column: str) -> float | None:
    try:
        value = float(point.get(column) or "nan")
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) and value > 0 else None
