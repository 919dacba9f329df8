"""`mgt launch`: a few questions, the command they make, and a start."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import questionary
from questionary import Choice

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.portability import usable_cores
from multi_gpu_training.recipes import RECIPES

if TYPE_CHECKING:
    from multi_gpu_training.data.feeding import BatchSizes
    from multi_gpu_training.recipes.recipe import Recipe
    from multi_gpu_training.training.learning_rate import Scaling

Number = TypeVar("Number", int, float)

DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
DP = TrainingMode.DATA_PARALLEL
SINGLE = TrainingMode.SINGLE
FSDP = TrainingMode.FULLY_SHARDED
SHORT_NAMES = {DDP: "ddp", DP: "dp", SINGLE: "single", FSDP: "fsdp"}
CPU_RANKS = 2
CPU_RANKS_PER_CORE = 4  # a slip of the finger must not start thousands of processes


@dataclass(frozen=True)
class Answers:
    recipe: str = "image"
    mode: TrainingMode = DDP
    ranks: int = 2
    batch_size: int = 32
    epochs: int = 10
    learning_rate: float = 1e-3
    lr_scaling: str = "linear"

    def arguments(self) -> list[str]:
        """What follows `mgt` on the command line."""
        count = [] if self.mode is SINGLE else ["--num-gpus", str(self.ranks)]
        return [
            *("train", self.recipe, "--multi-gpu", SHORT_NAMES[self.mode], *count),
            *("--batch-size", str(self.batch_size), "--epochs", str(self.epochs)),
            *("--lr", repr(self.learning_rate), "--lr-scaling", self.lr_scaling),
        ]

    def command(self) -> str:
        return shlex.join(["mgt", *self.arguments()])


def launch(recipe: str | None = None, dry_run: bool = False) -> int:
    """Ask, show the command and become it. Returns an exit code where nothing was started."""
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout)):
        example = Answers(recipe if recipe in RECIPES else next(iter(RECIPES)))
        print(
            "mgt launch asks questions, so it needs a terminal.\n"
            f"Use the command itself, for example:\n  {example.command()}",
            file=sys.stderr,
        )
        return 2
    try:
        answers = ask_all(recipe)
        print(f"\n  {answers.command()}\n")
        if dry_run:
            print("Dry run: nothing was started.")
            return 0
        if not questionary.confirm("Start it now?").unsafe_ask():
            print(f"Nothing was started. To start it later:\n\n  {answers.command()}\n")
            return 0
    except (KeyboardInterrupt, EOFError):
        print("\nCancelled; nothing was started.", file=sys.stderr)
        return 130
    except ConfigError as error:
        print(error.shown(), file=sys.stderr)
        return 2
    return become(answers.arguments())


def become(arguments: list[str]) -> NoReturn:
    """Turn this process into `mgt ARGUMENTS`.

    Not a child process: looking at the GPUs took memory on each, which this gives back, and
    Ctrl-C, signals and the exit code are the run's own.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "multi_gpu_training", *arguments])


def ask_all(recipe: str | None) -> Answers:
    print("Enter accepts the suggestion, Ctrl-C quits. Looking for GPUs ...\n", flush=True)
    # torch takes seconds to import: after the first words, not before them.
    from multi_gpu_training.gpus import get_gpu_info, print_gpu_info
    from multi_gpu_training.recipes.recipe import find_recipe

    only = recipe or (next(iter(RECIPES)) if len(RECIPES) == 1 else None)
    known = find_recipe(only) if only else None
    print_gpu_info()
    gpus = len(get_gpu_info())
    if known:
        print(f"Recipe: {known.name}, {RECIPES[known.name]}")
    chosen = known or find_recipe(ask_recipe())
    mode = ask_select("Mode", mode_choices(chosen, gpus), proposed_mode(gpus))
    ranks = ask_ranks(mode, gpus)
    unit = "GPU" if gpus else "CPU rank"
    proposed = chosen.config({})
    batch = ask_number(f"Batch size per {unit}", proposed.batch_size, whole_number())
    epochs = ask_number("Epochs", proposed.epochs, whole_number())
    given: dict[str, Any] = {"training_mode": mode, "batch_size": batch, "epochs": epochs}
    sizes = batch_sizes_for(chosen.config(given), ranks)
    print(batch_text(sizes, unit))
    base = proposed.base_batch_size or batch
    rate = ask_number(f"Learning rate for a batch of {base}", proposed.learning_rate, rate_number)
    if sizes.global_batch == base:
        print(f"A step takes {base} samples, so the learning rate stays {rate:g}.")
        return Answers(chosen.name, mode, ranks, batch, epochs, rate, "none")
    choices = scaling_choices(base, sizes.global_batch, rate)
    rule = ask_select("Learning-rate scaling", choices, "linear")
    print(scaling(rule, base, sizes.global_batch, rate).describe().capitalize())
    return Answers(chosen.name, mode, ranks, batch, epochs, rate, rule)


def ask_recipe() -> str:
    width = max(map(len, RECIPES))
    choices = [Choice(f"{name:{width}}  {what}", name) for name, what in RECIPES.items()]
    return str(ask_select("Recipe", choices, choices[0].value))


def ask_ranks(mode: TrainingMode, gpus: int) -> int:
    if mode is SINGLE:
        return 1
    if not gpus:
        cores = len(usable_cores())
        most = max(CPU_RANKS, CPU_RANKS_PER_CORE * cores)
        question = f"How many CPU ranks ({cores} cores here)"
        return ask_number(question, CPU_RANKS, whole_number(1, most))
    least = 2 if mode in (DP, FSDP) else 1
    if gpus == least:
        print(f"GPUs: {gpus}")
        return gpus
    return ask_number(f"How many GPUs ({least} to {gpus})", gpus, whole_number(least, gpus))


def proposed_mode(gpus: int) -> TrainingMode:
    return SINGLE if gpus == 1 else DDP


def mode_choices(recipe: Recipe, gpus: int) -> list[Choice]:
    """All modes; those that this machine or the recipe cannot do are there, with why."""
    if gpus > 1:
        titles = {
            DDP: "DDP     one process per GPU, scales to many GPUs and machines (recommended)",
            DP: "DP      one process drives all GPUs; for quick experiments on 2 to 4",
            SINGLE: "single  one GPU",
            FSDP: "FSDP    the model split over the GPUs; for models larger than one GPU",
        }
    elif gpus == 1:
        titles = {
            DDP: "DDP     one rank on the one GPU; computes what single computes",
            DP: "DP",
            SINGLE: "single  the one GPU (recommended: there is only one)",
            FSDP: "FSDP",
        }
    else:
        titles = {
            DDP: "DDP     ranks on CPU cores; computes what many GPUs would (recommended)",
            DP: "DP",
            SINGLE: "single  one CPU process",
            FSDP: "FSDP    the model split over CPU ranks",
        }
    return [Choice(titles[mode], mode, disabled=why_not(recipe, mode, gpus)) for mode in titles]


def why_not(recipe: Recipe, mode: TrainingMode, gpus: int) -> str | None:
    if (mode is DP and gpus < 2) or (mode is FSDP and gpus == 1):
        return f"needs at least 2 GPUs, found {gpus}"
    try:
        recipe.config({"training_mode": mode})
    except ConfigError as error:
        return error.problems[0]
    return None


def scaling_choices(base_batch: int, global_batch: int, rate: float) -> list[Choice]:
    why = {
        "linear": "grows with the batch (proposed)",
        "sqrt": "grows with its square root; more careful, often used with Adam",
        "none": "as it is",
    }
    results = {rule: scaling(rule, base_batch, global_batch, rate).rate for rule in why}
    return [Choice(f"{rule:6}  {results[rule]:<10.4g} {why[rule]}", rule) for rule in why]


def scaling(rule: str, base_batch: int, global_batch: int, rate: float) -> Scaling:
    """What the trainer will do with the rate: its own arithmetic, asked beforehand."""
    from multi_gpu_training.training.learning_rate import Scaling, scale_factor

    factor = scale_factor(rule, global_batch, base_batch)
    return Scaling(rule, base_batch, global_batch, rate, factor)


def batch_sizes_for(config: MultiGPUConfig, ranks: int) -> BatchSizes:
    from multi_gpu_training.data.feeding import batch_sizes

    return batch_sizes(config, ranks)


def batch_text(sizes: BatchSizes, unit: str) -> str:
    parts = [f"{sizes.per_rank} per {unit}", f"{sizes.ranks} {unit}{'s' * (sizes.ranks > 1)}"]
    if sizes.accumulation > 1:
        parts.append(f"{sizes.accumulation} accumulated")
    exact = sizes.per_rank * sizes.ranks * sizes.accumulation == sizes.global_batch
    return f"Effective batch: {' x '.join(parts)} {'=' if exact else '->'} {sizes.global_batch}"


def whole_number(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        wanted = f"a whole number from {least}" + (f" to {most}" if most else " on")
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {wanted}") from None
        if number < least or (most is not None and number > most):
            raise ValueError(f"{number} is not {wanted}")
        return number

    return parse


def rate_number(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number; write it as 0.001 or 1e-3") from None
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"{text} is not a learning rate; it is larger than 0")
    return rate


def ask_number(question: str, proposed: Number, parse: Callable[[str], Number]) -> Number:
    """The proposed number stands there in grey; typing replaces it."""

    def check(text: str) -> bool | str:
        try:
            parse(text or str(proposed))
        except ValueError as error:
            return str(error)
        return True

    grey = [("fg:ansibrightblack", str(proposed))]
    text = questionary.text(f"{question}:", validate=check, placeholder=grey).unsafe_ask()
    return parse(text or str(proposed))


def ask_select(question: str, choices: list[Choice], proposed: Any) -> Any:
    return questionary.select(question, choices, default=proposed).unsafe_ask()


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()
