"""What a run says about its classes: their counts before it, how well each is told after it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from multi_gpu_training.extras import can_draw, installed
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.metrics import classification_scores

RULE = "=" * 60


def distribution(names: Sequence[str], counts: Tensor, weights: Tensor) -> list[str]:
    """The table of class counts and weights of the training clips."""
    total = int(counts.sum())
    width = max(15, *(len(name) for name in names))
    rows = [
        f"Class {label} ({name:<{width}}): {count:6d} samples ({count / total:6.2%}) "
        f"-> weight: {weight:.4f}"
        for label, (name, count, weight) in enumerate(
            zip(names, counts.tolist(), weights.tolist(), strict=True)
        )
    ]
    return [RULE, "Class Distribution and Weights", RULE, *rows, RULE]


@dataclass(eq=False)
class ClassReport(Callback):
    """Prints what is trained on; keeps the per-class table and picture of the best epoch.

    The run folder then holds classes.csv (precision, recall, F1 and clips of each class) and
    confusion.csv and confusion.png (row: true class, column: predicted), over all ranks.
    """

    names: Sequence[str]
    lines: Sequence[str]

    def on_setup(self, run: Run) -> None:
        for line in self.lines:
            run.say(line)

    def on_epoch_end(self, run: Run, epoch: int, metrics: Mapping[str, float]) -> None:
        # Every rank takes part in summing it, also where the epoch is not the best.
        matrix = run.evaluated.confusion_matrix(run.placement, len(self.names))
        best = run.progress.best_epoch == epoch
        if best and matrix is not None and run.placement.is_main:
            self.write(matrix, run.folder, epoch)

    def on_end(self, run: Run) -> None:
        path = run.folder / "classes.csv"
        if not run.placement.is_main or not path.is_file():
            return
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        run.show_table("Classes in validation, best epoch", header, rows)
        picture = run.folder / "confusion.png"
        shown = picture if can_draw(picture) else picture.with_suffix(".csv")
        run.say(f"confusion matrix: {shown}")

    def write(self, matrix: Tensor, folder: Path, epoch: int) -> None:
        """The three files, from a matrix over all ranks."""
        with (folder / "classes.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["class", "precision", "recall", "f1", "clips"])
            table.writerows(class_scores(matrix, self.names))
        with (folder / "confusion.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["true \\ predicted", *self.names])
            table.writerows(
                [name, *row] for name, row in zip(self.names, matrix.tolist(), strict=True)
            )
        title = f"epoch {epoch + 1}, macro F1 {classification_scores(matrix)['f1']:.3f}"
        if installed("matplotlib"):
            picture(matrix, self.names, title, folder / "confusion.png")


def class_scores(matrix: Tensor, names: Sequence[str]) -> list[list[str]]:
    """Name, precision, recall, F1 and clips of each class; 0 where nothing was predicted."""
    counts = matrix.double()
    hits, support, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    precision = hits / predicted.clamp(min=1)
    recall = hits / support.clamp(min=1)
    f1 = 2 * hits / (support + predicted).clamp(min=1)
    scores = zip(
        names, precision.tolist(), recall.tolist(), f1.tolist(), support.tolist(), strict=True
    )
    return [[name, f"{p:.3f}", f"{r:.3f}", f"{f:.3f}", f"{int(n)}"] for name, p, r, f, n in scores]


def picture(matrix: Tensor, names: Sequence[str], title: str, path: Path) -> None:
    """The confusion matrix, each row as shares of its true class, with the counts in the cells."""
    from matplotlib.figure import Figure

    shares = matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)
    side = 2.5 + 0.5 * len(names)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(title)
    for row, counts in enumerate(matrix.tolist()):
        for column, count in enumerate(counts):
            if count:
                dark = float(shares[row, column]) > 0.5
                axes.text(
                    column, row, count, ha="center", va="center", color="white" if dark else "black"
                )
    figure.savefig(path, dpi=120)
