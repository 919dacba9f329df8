"""How well the forecast knows what published trainings reach, and the coefficients it ships.

    python benchmarks/forecast.py --data FOLDER [--write]

reads FOLDER/scaling_tables.csv (published throughputs of 1 to 256 GPUs, one row a point), predicts
every PyTorch data-parallel point from the points of *other* models (and of other source files,
machines, generations of GPU, repositories, frameworks), and prints the mean error of the efficiency
beside that of assuming linear scaling, the share of points inside the 80 % band, and the band's
width. `--write` puts the table into benchmarks/forecast.md and the coefficients of all points
into src/multi_gpu_training/planning/forecast/published.json.

    python benchmarks/forecast.py --points OTHER.csv

scores the coefficients that ship on any other CSV with these columns; nothing is fitted.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multi_gpu_training.planning.forecast import published
from multi_gpu_training.planning.forecast.published import MOST_EFFICIENT, Fit

HERE = Path(__file__).parent
PRODUCT = HERE.parent / "src/multi_gpu_training/planning/forecast/published.json"
TABLE = HERE / "forecast.md"

LEVEL = 0.8
# Points of one table agree with each other more than with a table nobody has seen. The band is
# set for this share of the points of models left out, to hold LEVEL on sources left out.
CALIBRATED = 0.88
FLOOR = 0.06
RIDGE = 1.0
Row = dict[str, str]
Array = NDArray[np.float64]

LEFT_OUT: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row["model"],
    "model family": lambda row: family(row["model"]),
    "source file": lambda row: row["source_file"],
    "machine": lambda row: row["hardware"],
    "GPU generation": lambda row: str(published.generation(row["hardware"])),
    "framework": lambda row: row["framework"],
    "repository": lambda row: row["source_repo"],
}


@dataclass(frozen=True)
class Points:
    """The rows to learn from, with what is asked of them."""

    rows: list[Row]
    terms: Array
    efficiency: Array
    weights: Array
    pytorch: NDArray[np.bool_]

    @staticmethod
    def of(rows: list[Row]) -> Points:
        counts = Counter(row["model"] for row in rows)
        # A model with 150 points says more than one with 3, but not fifty times: 2.7 times.
        weights = np.array([counts[row["model"]] ** -0.75 for row in rows])
        return Points(
            rows,
            np.array([published.kind_of(row).terms for row in rows]),
            np.array([float(row["efficiency"]) for row in rows]),
            weights / weights.mean(),
            np.array(["PyTorch" in row["framework"] for row in rows]),
        )

    def __getitem__(self, chosen: Any) -> Points:
        return Points(
            [row for row, take in zip(self.rows, chosen, strict=True) if take],
            self.terms[chosen],
            self.efficiency[chosen],
            self.weights[chosen],
            self.pytorch[chosen],
        )


@dataclass(frozen=True)
class Score:
    """How predictions of some points did; `linear` is what assuming efficiency 1 does."""

    points: int
    error: float
    linear: float
    covered: float
    width: float
    linear_width: float
    relative: float
    linear_relative: float

    @property
    def skill(self) -> float:
        return 1 - self.error / self.linear if self.linear else math.nan

    def line(self, name: str) -> str:
        return (
            f"| {name} | {self.points:,} | {self.error:.1%} | {self.linear:.1%} | {self.skill:.0%} "
            f"| {self.relative:.1%} ({self.linear_relative:.1%}) | {self.covered:.1%} "
            f"| {self.width:.3f} | {self.linear_width:.3f} |"
        )


HEAD = (
    "| left out | points | mean error | linear's | less than linear | relative (linear's) "
    "| inside the 80 % band | mean width | width of linear's residuals |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def family(model: str) -> str:
    """Models that are variants of one another."""
    name = model.lower()
    for pattern in ("bert|electra", "efficientnet", "efficientdet|ssd", "gpt", "u-net|unet|v-net"):
        if re.search(pattern, name):
            return pattern
    return re.split(r"[ -]", name)[0]


def fitted(points: Points, passes: int = 40) -> Array:
    """Coefficients with the smallest weighted sum of absolute errors of log efficiency, and a
    little ridge; by reweighted least squares."""
    x, y, weights = points.terms, np.log(points.efficiency), points.weights
    ridge = RIDGE * np.eye(x.shape[1])
    solution = np.zeros(x.shape[1])
    scale = weights
    for _ in range(passes):
        solution = np.linalg.solve(x.T @ (x * scale[:, None]) + ridge, x.T @ (scale * y))
        scale = weights / np.maximum(np.abs(y - x @ solution), 1e-3)
    return solution


def central(points: Points, coefficients: Array) -> Array:
    return np.exp(np.minimum(points.terms @ coefficients, 0.0))


def bounds(points: Points, predicted: Array) -> tuple[float, float]:
    """The band's ends in units of its width, from predictions of points that were left out."""
    scaled = (points.efficiency - predicted) / (FLOOR - np.log(predicted))
    tail = (1 - CALIBRATED) / 2
    return min(0.0, quantile(scaled, points.weights, tail)), max(
        0.0, quantile(scaled, points.weights, 1 - tail)
    )


def quantile(values: Array, weights: Array, share: float) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(len(order) - 1, int(np.searchsorted(below, share)))])


def left_out(points: Points, groups: NDArray[np.str_]) -> Array:
    """Each point's efficiency as predicted from all groups but its own."""
    predicted = np.ones(len(groups))
    for group in np.unique(groups):
        inside = groups == group
        predicted[inside] = central(points[inside], fitted(points[~inside]))
    return predicted


def cross_validated(points: Points, key: Callable[[Row], str]) -> Score:
    """PyTorch points, each predicted and given a band without its own group."""
    groups = np.array([key(row) for row in points.rows])
    predicted = left_out(points, groups)
    bands = np.ones((len(groups), 2))
    for group in np.unique(groups):
        inside = groups == group
        bands[inside] = banded(predicted[inside], bounds(points[~inside], predicted[~inside]))
    chosen = points.pytorch
    return scored(points.efficiency[chosen], predicted[chosen], bands[chosen])


def banded(predicted: Array, ends: tuple[float, float]) -> Array:
    """Low and high of each, as the product computes them."""
    fit = Fit((), FLOOR, ends[0], ends[1], LEVEL)
    return np.array([fit.band(each) for each in predicted])


def scored(actual: Array, predicted: Array, bands: Array) -> Score:
    low, high = bands.T
    error, linear = np.abs(predicted - actual), np.abs(1 - actual)
    # Half a unit of the last digit that tables print.
    inside = (actual >= low - 5e-5) & (actual <= high + 5e-5)
    tails = np.quantile(actual - 1, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Score(
        len(actual),
        float(error.mean()),
        float(linear.mean()),
        float(inside.mean()),
        float((high - low).mean()),
        float(tails[1] - tails[0]),
        float((error / actual).mean()),
        float((linear / actual).mean()),
    )


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def usable(row: Row) -> bool:
    """A data-parallel point with a baseline; tables without that column are taken whole."""
    if row.get("use_for_dp_validation", "yes") != "yes":
        return False
    try:
        return float(row["gpus"]) > float(row.get("baseline_gpus") or 1) and (
            float(row["efficiency"]) > 0
        )
    except (KeyError, ValueError):
        return False


def score_points(rows: Sequence[Row], fit: Fit | None = None) -> dict[str, Score]:
    """What ships (or `fit`), on points as they are: all of them, and the PyTorch ones."""
    result = {}
    pytorch = [row for row in rows if "PyTorch" in (row.get("framework") or "")]
    for name, chosen in (("none: all points", rows), ("none: PyTorch points", pytorch)):
        if not chosen:
            continue
        ends = np.array([published.predict_efficiency(row, fit) for row in chosen])
        actual = np.array([float(row["efficiency"]) for row in chosen])
        result[name] = scored(actual, ends[:, 0], ends[:, 1:])
    return result


def subsets(points: Points, predicted: Array, ends: tuple[float, float]) -> list[str]:
    """Leave-one-model-out again, by kind of point."""
    bands = banded(predicted, ends)
    kinds: dict[str, Callable[[Row], bool]] = {
        "2-4 GPUs": lambda row: int(row["gpus"]) <= 4,
        "8 GPUs": lambda row: int(row["gpus"]) == 8,
        "16 GPUs and more": lambda row: int(row["gpus"]) > 8,
        "several nodes": lambda row: int(row["nodes"]) > 1,
        "V100": lambda row: "V100" in row["hardware"],
        "A100": lambda row: "A100" in row["hardware"],
        "H100, H200": lambda row: "H100" in row["hardware"] or "H200" in row["hardware"],
        "PCIe": lambda row: "PCIe" in row["interconnect"],
        "no quality flag": lambda row: not row["quality_flags"],
        "framework exactly PyTorch": lambda row: row["framework"] == "PyTorch",
    }
    lines = []
    for name, test in kinds.items():
        chosen = points.pytorch & np.array([test(row) for row in points.rows])
        score = scored(points.efficiency[chosen], predicted[chosen], bands[chosen])
        lines.append(score.line(name))
    return lines


def learn(path: Path) -> tuple[str, dict[str, Any]]:
    """The tables, and what ships."""
    rows = read(path)
    points = Points.of([row for row in rows if usable(row)])
    models = np.array([row["model"] for row in points.rows])
    predicted = left_out(points, models)
    ends = bounds(points, predicted)
    document = shipping(points, fitted(points), ends)
    text = "\n".join(
        [
            HEAD,
            *(cross_validated(points, key).line(name) for name, key in LEFT_OUT.items()),
            "",
            per_model(points, predicted),
            "",
            sharded(rows, document),
            "",
            HEAD.replace("| left out |", "| model left out, of these points |"),
            *subsets(points, predicted, ends),
        ]
    )
    return text, document


def shipping(points: Points, coefficients: Array, ends: tuple[float, float]) -> dict[str, Any]:
    """What `published.json` holds."""
    return {
        "about": "written by benchmarks/forecast.py; log efficiency = sum of coefficient * term",
        "coefficients": {
            term: round(float(value), 4)
            for term, value in zip(published.TERMS, coefficients, strict=True)
        },
        "floor": FLOOR,
        "low": round(ends[0], 3),
        "high": round(ends[1], 3),
        "level": LEVEL,
        "points": len(points.rows),
        "models": len({row["model"] for row in points.rows}),
        "source": "published throughput tables of "
        + ", ".join(sorted({row["source_repo"] for row in points.rows})),
    }


def sharded(rows: Sequence[Row], document: dict[str, Any]) -> str:
    """Points of another kind, which nothing is learnt from."""
    fsdp = [{**row, "use_for_dp_validation": "yes"} for row in rows if is_fsdp(row)]
    fsdp = [row for row in fsdp if usable(row)]
    if not fsdp:
        return "No points of FSDP."
    fit = Fit(
        tuple(document["coefficients"].values()),
        FLOOR,
        document["low"],
        document["high"],
        LEVEL,
    )
    score = score_points(fsdp, fit)["none: all points"]
    repositories = ", ".join(sorted({row["source_repo"] for row in fsdp}))
    return (
        f"FSDP trainings, which nothing is learnt from ({score.points} points, {repositories}): "
        f"mean error {score.error:.1%}, linear's {score.linear:.1%}; {score.covered:.0%} inside "
        f"the band. {_without_superlinear(fsdp, fit)}"
    )


def _without_superlinear(fsdp: Sequence[Row], fit: Fit) -> str:
    """The same without points that no model of losses can reach, which are listed."""
    odd = [row for row in fsdp if float(row["efficiency"]) > MOST_EFFICIENT]
    score = score_points([row for row in fsdp if row not in odd], fit)["none: all points"]
    listed = ", ".join(
        f"{row['model']} on {row['gpus']} {row['hardware'].split('_')[0].upper()} "
        f"({float(row['efficiency']):.2f})"
        for row in odd
    )
    return (
        f"Without the {len(odd)} that scale better than linear by more than "
        f"{MOST_EFFICIENT - 1:.0%} ({listed}): {score.error:.2%}, linear's {score.linear:.1%}."
    )


def is_fsdp(row: Row) -> bool:
    return row.get("use_for_dp_validation") == "fsdp"


def per_model(points: Points, predicted: Array) -> str:
    """Every model counted once, however many points it has."""
    models = np.array([row["model"] for row in points.rows])
    error, linear = np.abs(predicted - points.efficiency), np.abs(1 - points.efficiency)
    chosen = [points.pytorch & (models == m) for m in np.unique(models[points.pytorch])]
    mine = np.mean([error[each].mean() for each in chosen])
    theirs = np.mean([linear[each].mean() for each in chosen])
    better = sum(error[each].mean() <= linear[each].mean() + 1e-9 for each in chosen)
    return (
        f"Model left out, each of the {len(chosen)} models counted once: {mine:.1%}, linear's "
        f"{theirs:.1%}; better than linear, or equal, for {better} of them."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with scaling_tables.csv: learn from it")
    parser.add_argument("--points", type=Path, help="score what ships on this CSV instead")
    parser.add_argument("--json", type=Path, help="of --points: the scores go there as well")
    parser.add_argument("--write", action="store_true", help="write forecast.md, published.json")
    options = parser.parse_args()
    if (options.data is None) == (options.points is None):
        parser.error("give either --data FOLDER or --points CSV")
    if options.points:
        rows = [row for row in read(options.points) if usable(row)]
        if not rows:
            parser.error(f"{options.points} has no point with gpus, efficiency and a baseline")
        scores = score_points(rows)
        print("\n".join([HEAD, *(score.line(name) for name, score in scores.items())]))
        if options.json:
            found = {name: {**asdict(s), "skill": s.skill} for name, s in scores.items()}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    text, document = learn(options.data / "scaling_tables.csv")
    print(text)
    print(json.dumps(document, indent=1))
    if options.write:
        PRODUCT.write_text(json.dumps(document, indent=1) + "\n")
        TABLE.write_text(page(text, document))


def page(text: str, document: dict[str, Any]) -> str:
    terms = "\n".join(f"| {name} | {value} |" for name, value in document["coefficients"].items())
    return f"""# Forecast against published trainings

    python benchmarks/forecast.py --data FOLDER --write

Error is the mean of |predicted - published efficiency|; linear's is that of assuming efficiency 1.
Each PyTorch data-parallel point is predicted by coefficients, and gets a band, learnt without any
point of its own group ({document["points"]:,} points of {document["models"]} models in all,
{document["source"]}). Relative: |predicted / published - 1|.

{text}

What ships, learnt from all of them:

| term | coefficient |
|---|---|
{terms}
"""


if __name__ == "__main__":
    main()
