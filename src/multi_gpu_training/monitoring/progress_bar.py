"""What a person sees of the steps: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.report import wording
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.step import StepResult


class ProgressLines(Callback):
    """A line now and then with the loss and speed last logged, and one at the end of each epoch.

    position: steps taken in the epoch. total: of how many, where that is known.
    """

    watches_only = True

    def __init__(
        self, console: Console, position: Callable[[], int], total: Callable[[], int | None]
    ) -> None:
        self._console = console
        self._position = position
        self._total = total
        self._in_epoch = False
        self._has_begun = False  # iterations of PPO end like epochs, and have lines of their own

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        self._in_epoch = self._has_begun = True
        title = f"Epoch {epoch + 1}/{run.config.epochs}"
        self._console.start_bar(title, self._total(), self._position())

    def on_log(self, run: Run, metrics: Mapping[str, float], step: int) -> None:
        note = f"loss {wording.metric('loss', metrics.get('loss', float('nan')))}"
        if "accuracy" in metrics:
            note += f"  acc {metrics['accuracy']:.2%}"
        if "samples_per_s" in metrics:
            note += f"  {wording.number(metrics['samples_per_s'])} samples/s"
        if self._in_epoch:
            self._console.advance(self._position(), self._total(), note)
        else:  # a loop of the user's own
            self._console.note(f"step {step}  {note}")

    def on_data_end(self, run: Run) -> None:
        self._in_epoch = False
        self._console.end_bar()

    def on_epoch_end(self, run: Run, epoch: int, metrics: Mapping[str, float]) -> None:
        if not self._has_begun:
            return
        self._has_begun, last = False, run.progress.last
        self._console.line(epoch_line(epoch, run.config.epochs, last["train"], last["val"]))

    def on_end(self, run: Run) -> None:
        self._console.end_bar()


class ProgressBar(ProgressLines):
    """The same with a bar for each epoch, which moves with every step."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._console.tick(self._position)


class NodeLines(Callback):
    """On a machine without rank 0: where the run stands, in a line per epoch, and who tells the
    rest. `ranks` are those of this machine."""

    watches_only = True

    def __init__(self, host: str, ranks: str, main_host: str) -> None:
        self._host, self._ranks, self._main_host = host, ranks, main_host

    def on_setup(self, run: Run) -> None:
        where = f"from step {run.step}" if run.step else "from the start"
        train = "train" if self._ranks.startswith("ranks") else "trains"
        self._say(f"{self._ranks} {train} here {where}; rank 0 on {self._main_host} logs the rest")

    def on_epoch_end(self, run: Run, epoch: int, metrics: Mapping[str, float]) -> None:
        self._say(f"epoch {epoch + 1}/{run.config.epochs} is done, step {run.step}")

    def on_end(self, run: Run) -> None:
        self._say(f"ended at step {run.step}; summary and errors are in the log of rank 0")

    def _say(self, text: str) -> None:
        print(f"{self._host}: {text}", flush=True)


def epoch_line(
    epoch: int, epochs: int, train: dict[str, float], val: dict[str, float] | None
) -> str:
    """Epoch 3/10 - train loss 0.4521, acc 78.23% | val loss 0.5234, acc 74.56%, F1 0.6821"""
    text = f"Epoch {epoch + 1}/{epochs} - train {_metrics(train)}"
    return text + (f" | val {_metrics(val)}" if val else "")


def _metrics(values: dict[str, float]) -> str:
    shown = []
    for name, value in values.items():
        *sets, metric = name.split("/")
        short = {"accuracy": "acc", "f1": "F1"}.get(metric, metric)
        shown.append(f"{' '.join([*sets, short])} {wording.metric(name, value)}")
    return ", ".join(shown)
