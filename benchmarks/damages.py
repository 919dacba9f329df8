"""A thousand damages of a run folder: is each one found and named, or harmless?

    python benchmarks/damages.py --trials 1000
    python benchmarks/damages.py --trials 50 --seed 7
    python benchmarks/damages.py --trials 100 --mode fsdp

A run that was resumed twice, and once went back, lies in a folder. Each trial copies it, damages
one of its files (every kind of file in turn: those of checkpoints, manifests, lineage, lock,
config, environment, forecast, events, report, curves), and then does what a user does:
`mgt checkpoints`, `mgt report`, and training to the end with `--resume auto`. Looked at are raw
errors, the weights at the end against those of the undisturbed run, and whether the damaged file
was named.

With `--mode fsdp` the run was trained by two ranks that each hold a part of the state, only the
files of its checkpoints are damaged, and one process goes on without sharding: to 1e-5 of the
undisturbed weights, as sums over ranks are added up in another order.

    found      a command named the file (or its checkpoint), and the weights are right or the resume
               was refused
    harmless   the weights are right, and no figure of the report differs
    bad        anything else: a traceback, other weights, a wrong figure in silence
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.cli.checkpoints_command import show_checkpoints
from multi_gpu_training.cli.report_command import report, summary
from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.monitoring.report.html import page
from multi_gpu_training.monitoring.report.run_record import read_runs
from multi_gpu_training.monitoring.report.terminal import show

STEPS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=["single", "fsdp"], default="single")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)  # what the ranks run
    parser.add_argument("--out", type=Path, help="where the table goes, as Markdown")
    given = parser.parse_args()
    if given.train:
        folder, steps, resume = given.train
        train(Path(folder), int(steps), resume or None, "fsdp")
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="damages-") as name:
        campaign = Campaign(Path(name), random.Random(given.seed), given.mode == "fsdp")
        for number in range(given.trials):
            campaign.trial(number)
            if given.out is not None and (number % 50 == 49 or number + 1 == given.trials):
                given.out.write_text(campaign.table(time.monotonic() - began) + "\n")
    print(campaign.table(time.monotonic() - began))
    if campaign.bad:
        sys.exit(1)


# The training


def train(
    folder: Path, steps: int, resume: str | None = "auto", mode: str = "single"
) -> list[torch.Tensor]:
    """Train on one rank, or as `fsdp` on two; the weights. `unsharded` takes over from those."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 6, generator=generator)
    torch.manual_seed(2)
    middle = [nn.BatchNorm1d(8), nn.Dropout(0.2)] if mode == "single" else [nn.Linear(8, 8)]
    model = nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 2))
    ranks = {"training_mode": "fsdp", "world_size": 2} if mode == "fsdp" else {}
    config = MultiGPUConfig(
        **{"training_mode": "single", **ranks}, device="cpu", global_batch_size=4, epochs=3,
        max_steps=steps, checkpoint_frequency=3, keep_last=4, log_every=1, progress="lines",
        monitor=False, tensorboard=resume != "auto", loggers=["csv"], save_dir=str(folder),
        run_name="it", resume=resume, report=False,
        forecast=str(folder.parent / "forecast.json"), warmup_steps=5,
    )  # fmt: skip
    manager = MultiGPUTrainingManager(config)
    manager.fit(model, TensorDataset(inputs, (inputs.sum(1) > 0).long()))
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_sharded(folder: Path, steps: int, resume: str | None = "auto") -> None:
    command = [sys.executable, __file__, "--train", str(folder), str(steps), resume or ""]
    subprocess.run(command, check=True, capture_output=True)


# The damages: content, chance -> new content; None removes the file


def flip(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return b"\0"
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


def flip_several(content: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randrange(2, 20)):
        content = flip(content, chance)
    return content


def cut_short(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(max(1, len(content)))]


def cut_a_byte(content: bytes, chance: random.Random) -> bytes:
    return content[:-1]


def garbage(content: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(max(8, len(content)))


def zeros(content: bytes, chance: random.Random) -> bytes:
    """What a power cut leaves of pages that were never written."""
    at = chance.randrange(max(1, len(content)))
    return content[:at] + bytes(len(content) - at)


def nested(content: bytes, chance: random.Random) -> bytes:
    return b"[" * 100_000


def twice(content: bytes, chance: random.Random) -> bytes:
    return content + content


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "one bit": flip,
    "several bits": flip_several,
    "cut short": cut_short,
    "last byte gone": cut_a_byte,
    "emptied": lambda content, chance: b"",
    "garbage": garbage,
    "zeros to the end": zeros,
    "brackets": nested,
    "written twice": twice,
}
OTHERS = ("deleted", "swapped with another", "a folder", "a FIFO", "a link to nowhere")


class Campaign:
    """All trials on copies of one run."""

    def __init__(self, folder: Path, chance: random.Random, sharded: bool) -> None:
        self.folder = folder
        self.chance = chance
        self.mode = "unsharded" if sharded else "single"
        self.limit = 1e-5 if sharded else 0.0
        self.found: Counter[str] = Counter()
        self.harmless: Counter[str] = Counter()
        self.by_damage: Counter[tuple[str, bool]] = Counter()
        self.bad: list[str] = []
        self.original = folder / "original" / "runs"
        self._make()
        run = self.original / "custom" / "it"
        every = [path for path in run.rglob("*") if path.is_file() and not path.is_symlink()]
        kinds: dict[str, list[Path]] = {}
        for path in sorted(every):
            kinds.setdefault(kind_of(path, run), []).append(path.relative_to(run))
        if sharded:
            kinds = {kind: files for kind, files in kinds.items() if "/step-" in kind}
        self.kinds = kinds
        self.order = sorted(kinds)

    def _make(self) -> None:
        self.original.mkdir(parents=True)
        forecast = {"gpus": {"1": {"samples_per_s": 100.0}}}
        (self.original.parent / "forecast.json").write_text(json.dumps(forecast))
        with quiet():
            self.whole = train(self._fresh("whole"), STEPS, mode=self.mode)
            begin = train_sharded if self.limit else train
            begin(self.original, 9, None)
            steps = self.original / "custom" / "it" / "checkpoints"
            begin(self.original, 15)
            begin(self.original, 18, str(steps / "step-00000012"))  # step 15 is abandoned
            run = self.original / "custom" / "it"
            report([str(run)], None, False, True)
            self.figures = figures(run)

    def _fresh(self, name: str) -> Path:
        folder = self.folder / name / "runs"
        folder.mkdir(parents=True)
        shutil.copy(self.original.parent / "forecast.json", folder.parent)
        return folder

    def trial(self, number: int) -> None:
        kind = self.order[number % len(self.order)]
        file = self.chance.choice(self.kinds[kind])
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.original.parent, copy, symlinks=True)
        run = copy / "runs" / "custom" / "it"
        how, damaged = self._damage(run, file)
        # Drawing the picture takes longer than all the rest.
        full = number % 20 == 0 or file.name in ("report.html", "metrics.png")
        verdict, why = self._judge(run, damaged, full)
        {"found": self.found, "harmless": self.harmless}.get(verdict, Counter())[kind] += 1
        self.by_damage[how, verdict == "found"] += 1
        if verdict == "bad":
            self.bad.append(f"trial {number}: {file}, {how}: {why}")
            print(self.bad[-1], file=sys.stderr, flush=True)

    def _damage(self, run: Path, file: Path) -> tuple[str, list[Path]]:
        """Damage the file; returns how, and which files are damaged then: of a swap, two."""
        how = self.chance.choice([*DAMAGES, *OTHERS])
        target = run / file
        before = target.read_bytes()
        if how in DAMAGES:
            after = DAMAGES[how](before, self.chance)
            if after == before:
                after, how = flip(before, self.chance), "one bit"
            target.write_bytes(after)
            return how, [file]
        others = [p for p in run.rglob(f"*{file.suffix}") if p.is_file() and p != target]
        others = [p for p in others if not p.is_symlink() and p.read_bytes() != before]
        if how == "swapped with another" and others:
            other = self.chance.choice(others)
            target.write_bytes(other.read_bytes())
            other.write_bytes(before)
            return how, [file, other.relative_to(run)]
        target.unlink()
        if how == "a folder":
            target.mkdir()
        elif how == "a FIFO":
            os.mkfifo(target)
        elif how == "a link to nowhere":
            target.symlink_to(run.parent / "nowhere")
        else:
            how = "deleted"
        return how, [file]

    def _judge(self, run: Path, damaged: list[Path], full: bool) -> tuple[str, str]:
        said: list[str] = []
        shown: Any = None
        weights: list[torch.Tensor] | None = None

        def attempt(what: Callable[[], Any]) -> Any:
            with quiet() as out:
                try:
                    return what()
                except MultiGPUError as error:
                    said.append(f"refused: {error}")
                finally:
                    said.append(out.getvalue())

        try:
            attempt(lambda: show_checkpoints(str(run), as_json=False))
            if full:
                attempt(lambda: report([str(run)], None, False, True))
            shown = attempt(lambda: figures(run))
            weights = attempt(lambda: train(run.parent.parent, STEPS, mode=self.mode))
        except BaseException:
            return "bad", traceback.format_exc()
        text = "\n".join(said)
        names = {file.name for file in damaged}
        names |= {part for file in damaged for part in file.parts if part.startswith("step-")}
        if any(file.name.startswith("rank-") for file in damaged):
            names |= {"rank 0: a damaged line", "rank 0: the last line", "damaged lines"}
            names |= {"no event in them", "events/rank-*.jsonl"}
        # Of a checkpoint, the line that says so; its name alone is in every listing.
        hints = ("damaged", "missing", "cannot be", "cannot write", "changed", "unreadable",
                 "not a ", "not text", "no event", "refused", "torn", "are recorded", "symbolic",
                 "FIFO", "aliases")  # fmt: skip
        lines = [line for line in text.splitlines() if any(hint in line for hint in hints)]
        named = any(name in line for name in names for line in lines)
        if weights is None:
            return (
                ("found", "") if named else ("bad", f"refused without naming it:\n{text[-2000:]}")
            )
        if not self._are_right(weights):
            return "bad", f"other weights:\n{text[-2000:]}"
        if named:
            return "found", ""
        if shown != self.figures:
            return "bad", f"another report, and nothing said: {shown} != {self.figures}"
        return "harmless", ""

    def _are_right(self, weights: list[torch.Tensor]) -> bool:
        pairs = zip(weights, self.whole, strict=True)
        return all(float((a - b).norm()) <= self.limit * float(b.norm()) for a, b in pairs)

    def table(self, seconds: float) -> str:
        total = sum(self.found.values()) + sum(self.harmless.values()) + len(self.bad)
        good = total - len(self.bad)
        lines = [
            f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, Python "
            f"{platform.python_version()}: `python benchmarks/damages.py "
            f"{' '.join(sys.argv[1:])}`, {seconds:.0f} s.",
            "",
            f"**{good} of {total} damages were found or harmless.** After each: `mgt checkpoints`, "
            "`mgt report`, and training to the end with `--resume auto`; wherever a run went on, "
            f"it ended {'with every bit' if not self.limit else 'within 1e-5'} of the undisturbed "
            "weights.",
            "",
            "| file | damages | found and named | harmless |",
            "|---|---|---|---|",
        ]
        for kind in self.order:
            found, harmless = self.found[kind], self.harmless[kind]
            lines.append(f"| {kind} | {found + harmless} | {found} | {harmless} |")
        lines += ["", "| damage | found and named | harmless |", "|---|---|---|"]
        for how in (*DAMAGES, *OTHERS):
            lines.append(f"| {how} | {self.by_damage[how, True]} | {self.by_damage[how, False]} |")
        lines += [
            "",
            "Harmless are damages of what nobody reads back (`.lock`, the report and its picture, "
            "curves, `metrics.csv`), of the second copy of the lineage, and of the newline at the "
            "end of the events. A checkpoint that is older than the one resumed from is named by "
            "`mgt checkpoints` alone.",
        ]
        return "\n".join([*lines, *(f"- BAD: {line[:300]}" for line in self.bad)])


def kind_of(path: Path, run: Path) -> str:
    """What a file is, for the table: all checkpoints' files of a name are one kind."""
    if path.parent.name.startswith("step-"):
        return f"checkpoints/step-*/{path.name}"
    if path.parent.name == "tensorboard":
        return "tensorboard/*"
    return str(path.relative_to(run))


def figures(run: Path) -> Any:
    """Show the report in all its forms, as `mgt report` does, but for the picture. Returns what it
    computes, without what depends on the moment of looking."""
    runs = read_runs([run])
    print(*runs[0].problems, sep="\n")  # the panel below breaks lines
    show(runs, Console(highlight=False, width=160))
    page(runs)
    found = summary(runs[0])
    return {k: v for k, v in found.items() if k not in ("run", "notes", "headline", "causes")}


@contextlib.contextmanager
def quiet() -> Any:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


if __name__ == "__main__":
    main()
