"""`mgt bench`: which cases to measure, and what to print of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console

from multi_gpu_training.cli.measured_script import (
    MeasuringFlags,
    folder_problems,
    numbers,
    rank_problems,
    runner_for,
    too_small,
)
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.errors import ConfigError

if TYPE_CHECKING:
    from multi_gpu_training.measure.script_runner import ScriptRunner
    from multi_gpu_training.planning.bench.result_table import ResultTable

CPU_RANKS = 2  # without GPUs, enough to have an exchange
MODES = {
    "single": TrainingMode.SINGLE,
    "dp": TrainingMode.DATA_PARALLEL,
    "ddp": TrainingMode.DISTRIBUTED_DATA_PARALLEL,
    "fsdp": TrainingMode.FULLY_SHARDED,
}
REPEATS_OF_TUNE = 3


@dataclass(frozen=True)
class BenchFlags(MeasuringFlags):
    ranks: int | None
    modes: str
    batch_sizes: str | None
    precision: bool
    tune: bool
    allow_compression: bool
    repeats: int | None
    out: str | None


def bench(flags: BenchFlags) -> int:
    """0 if something could be measured, else 1."""
    check(flags)
    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal  # files and pipes get whole lines
    with runner_for("bench", flags, console) as runner:
        runner.ranks_at_hand = flags.ranks or runner.gpus or CPU_RANKS
        report = measure(flags, runner)
    report.show(console)
    if flags.tune and report.recommended:
        from multi_gpu_training.planning.bench.tuning import as_yaml

        console.print("\n# for your config file", markup=False)
        console.print(as_yaml(report.recommended), markup=False)
    files = report.save(flags.out or f"runs/bench/{datetime.now():%Y%m%d-%H%M%S}")
    console.print(f"written: {', '.join(map(str, files))}", markup=False)
    return 0 if any(row["samples_per_s"] for row in report.rows) else 1


def measure(flags: BenchFlags, runner: ScriptRunner) -> ResultTable:
    """The report that the flags ask for."""
    from multi_gpu_training.planning.bench import bench_tables
    from multi_gpu_training.planning.bench.tuning import tune

    ranks, repeats = runner.ranks_at_hand, flags.repeats or 1
    unit = "GPU" if runner.gpus else "CPU rank"
    mode = TrainingMode.SINGLE if ranks == 1 else TrainingMode.DISTRIBUTED_DATA_PARALLEL
    if flags.batch_sizes is not None:
        sizes = numbers("--batch-sizes", flags.batch_sizes)
        return bench_tables.compare_batch_sizes(runner, mode, ranks, sizes, repeats, unit)
    if flags.precision:
        return bench_tables.compare_precisions(runner, mode, ranks, repeats, unit)
    if flags.tune:
        rounds = flags.repeats or REPEATS_OF_TUNE
        return tune(runner, ranks, rounds, flags.allow_compression, unit=unit)
    return bench_tables.compare_modes(runner, ranks, modes_of(flags.modes), repeats, unit)


def check(flags: BenchFlags) -> None:
    """Raise one ConfigError with everything that is wrong with the flags."""
    problems = flags.problems()
    problems += too_small(("--ranks", flags.ranks, 1), ("--repeats", flags.repeats, 1))
    problems += rank_problems("--ranks", flags.ranks, flags.device)
    problems += folder_problems("--out", flags.out)
    tables = {
        "--batch-sizes": flags.batch_sizes is not None,
        "--precision": flags.precision,
        "--tune": flags.tune,
    }
    asked = [name for name, given in tables.items() if given]
    if len(asked) > 1:
        problems.append(f"{' and '.join(asked)} each make their own table; use one at a time")
    if flags.allow_compression and not flags.tune:
        problems.append("--allow-compression is for --tune; add it, or drop this")
    # One by one, so that the problems of both are reported together.
    for read, text in (
        (modes_of, flags.modes),
        (lambda text: numbers("--batch-sizes", text), flags.batch_sizes or "1"),
    ):
        try:
            read(text)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def modes_of(text: str) -> list[TrainingMode]:
    unknown = [name for name in text.split(",") if name not in MODES]
    if unknown:
        raise ConfigError(f"--modes {text}: {unknown[0]!r} is unknown; use {', '.join(MODES)}")
    return [MODES[name] for name in text.split(",")]
