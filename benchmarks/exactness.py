"""N ranks against a plain loop, for many kinds of models, losses, samplers, optimizers and loops.

    python benchmarks/exactness.py --out benchmarks/exactness.md
    python benchmarks/exactness.py --only gpt2,vit --ranks 1,3
    python benchmarks/exactness.py --list

Each case of exactness_*.py is a training in two forms: a plain PyTorch loop on one process, and the
same with this package on 1, 2, 3 and 4 CPU ranks. Compared are all tensors of the model on every
rank, by ||a - b|| / ||b||, and the mean loss of each epoch. The limit is 1e-12 in float64 and 1e-5
in float32. A case ends with the largest difference, "refused" with the package's error, "crash"
with any other error, or "hang" where a rank is silent for too long.

The ranks of one number stay up for all cases; after an error they are started anew.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
LIMIT = {"float64": 1e-12, "float32": 1e-5}
HAND = 0  # in place of a number of ranks: the plain loop
MODULES = (
    "exactness_models",
    "exactness_losses",
    "exactness_data",
    "exactness_loops",
    "exactness_own_backward",
    "exactness_attacks",
    "exactness_blind",
    "exactness_sharded",
    "exactness_fit",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="cases whose group or name contains one of these words"
    )
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--float32", action="store_true", help="float32 only, for every case")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--errors", action="store_true", help="print whole tracebacks")
    parser.add_argument(
        "--patience-s", type=float, default=60.0, help="a rank that is silent for longer hangs"
    )
    parser.add_argument("--out", type=Path, help="write the table there, as Markdown")
    given = parser.parse_args()
    cases = load_cases()
    words = [word for word in given.only.split(",") if word]
    titles = {n: f"{case.group}: {n}".lower() for n, case in cases.items()}
    names = [n for n in cases if not words or any(word.lower() in titles[n] for word in words)]
    if given.list:
        print("\n".join(f"{cases[n].group}: {n}" for n in names))
        return
    jobs = [(n, "float32" if given.float32 else cases[n].only or "float64") for n in names]
    if not given.float32:
        jobs += [(n, "float32") for n in names if cases[n].float32]
    worlds = [int(word) for word in given.ranks.split(",")]
    begun = time.monotonic()
    rows = Comparison(cases, worlds, given.patience_s).run(jobs, given.errors)
    table = markdown(rows, worlds, time.monotonic() - begun)
    print(table)
    if given.out:
        given.out.write_text(table)
    if not all(row.well for row in rows):
        sys.exit(1)


def load_cases() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    import importlib

    from exactness_trial import CASES

    for module in MODULES:
        importlib.import_module(module)
    return CASES


# Ranks


@dataclass
class Answer:
    """tensors and numbers of a training, or what ended it: "refused", "crash" or "hang"."""

    tensors: dict[str, Any] | None = None
    numbers: dict[str, float] | None = None
    kind: str = ""
    text: str = ""
    trace: str = ""


class Ranks:
    """As many processes as ranks, one gloo group; one rank and the plain loop have none."""

    def __init__(self, world: int, patience_s: float) -> None:
        self.world = world
        self.patience_s = patience_s
        self.lock = threading.Lock()
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.store: str | None = None

    def start(self) -> None:
        self.store = tempfile.mkdtemp(prefix="mgt-exactness-")
        for rank in range(max(1, self.world)):
            ours, theirs = CONTEXT.Pipe()
            args = (rank, self.world, self.store, theirs)
            process = CONTEXT.Process(target=serve, args=args, daemon=False)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        if self.store is not None:
            shutil.rmtree(self.store, ignore_errors=True)
        self.processes, self.pipes, self.store = [], [], None

    def run(self, name: str, dtype: str, folder: Path, begin: bool = False) -> list[Answer]:
        """One answer per rank; after anything but a result the ranks are new ones."""
        with self.lock:
            if not self.processes:
                self.start()
            for pipe in self.pipes:
                pipe.send((name, dtype, str(folder), begin))
            answers = self._collect()
            if any(answer.kind for answer in answers):
                self.end()
            return answers

    def _collect(self) -> list[Answer]:
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + self.patience_s
        while len(found) < len(self.pipes):
            silent = [r for r in range(len(self.pipes)) if r not in found]
            ready = wait([self.pipes[r] for r in silent], max(0.0, deadline - time.monotonic()))
            if not ready:
                for r in silent:
                    text = f"rank {r} silent for {self.patience_s:g} s"
                    found[r] = Answer(kind="hang", text=text)
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    found[rank] = Answer(kind="crash", text=f"rank {rank} died")
                if found[rank].kind:  # the others may wait for it
                    deadline = min(deadline, time.monotonic() + 4)
        return [found[r] for r in range(len(self.pipes))]


def serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    multiprocessing.set_start_method(
        "fork", force=True
    )  # as in a user's script, for loader workers
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    cases = load_cases()
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            GLOO_SOCKET_IFNAME="lo",
        )
        dist.init_process_group(
            "gloo", init_method=f"file://{store}/store", rank=rank, world_size=world
        )
        dist.barrier()
    while True:
        try:
            name, dtype, folder, begin = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(answer(cases[name], dtype, Path(folder), rank, world, begin))


def answer(case: Any, dtype: str, folder: Path, rank: int, world: int, begin: bool) -> Answer:
    import random

    import numpy as np
    import torch
    from exactness_trial import Trial

    from multi_gpu_training.errors import MultiGPUError

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    trial = Trial(getattr(torch, dtype), world == HAND, folder, rank, max(1, world))
    try:
        found = (case.begun_elsewhere if begin else case.run)(trial)
        tensors = {name: value.cpu().numpy() for name, value in found.tensors.items()}
        return Answer(tensors, found.numbers)
    except BaseException as error:
        kind = "refused" if isinstance(error, MultiGPUError) else "crash"
        text = " ".join(str(error).split())
        if kind == "crash":
            text = f"{type(error).__name__}: {text}"
        return Answer(kind=kind, text=text, trace=traceback.format_exc())


# Comparing


@dataclass
class Row:
    case: Any
    dtype: str
    cells: dict[int, str]
    notes: list[str]
    well: bool


class Comparison:
    """All cases: each number of ranks goes through them at its own pace."""

    def __init__(self, cases: dict[str, Any], worlds: list[int], patience_s: float) -> None:
        self.cases = cases
        needs = {1} if any(case.against_one for case in cases.values()) else set()
        after = {following(world) for world in worlds}
        self.worlds = worlds
        every = {HAND, *worlds, *needs, *after}
        self.ranks = {world: Ranks(world, patience_s) for world in every}

    def run(self, jobs: list[tuple[str, str]], errors: bool) -> list[Row]:
        answers: dict[tuple[str, str, int], list[Answer]] = {}

        def all_of(world: int) -> None:
            for name, dtype in jobs:
                case = self.cases[name]
                if world == HAND and case.against_one:
                    continue
                with tempfile.TemporaryDirectory(prefix="mgt-exactness-run-") as folder:
                    if case.begun_elsewhere is not None and world != HAND:
                        begun = self.ranks[following(world)].run(name, dtype, Path(folder), True)
                        if any(a.kind for a in begun):
                            answers[name, dtype, world] = begun
                            continue
                    found = self.ranks[world].run(name, dtype, Path(folder))
                answers[name, dtype, world] = found
                ended = ", ".join(dict.fromkeys(a.kind or "done" for a in found))
                who = f"{world} ranks" if world else "by hand"
                print(f"{who}: {name}, {dtype}: {ended}", file=sys.stderr, flush=True)

        try:
            with ThreadPoolExecutor() as threads:
                wanted = {HAND, *self.worlds}
                if any(self.cases[name].against_one for name, _ in jobs):
                    wanted.add(1)
                list(threads.map(all_of, sorted(wanted, reverse=True)))
        finally:
            for ranks in self.ranks.values():
                ranks.end()
        return [self.row(name, dtype, answers, errors) for name, dtype in jobs]

    def row(self, name: str, dtype: str, answers: dict[Any, Any], errors: bool) -> Row:
        case = self.cases[name]
        reference = answers[name, dtype, 1 if case.against_one else HAND][0]
        cells, notes, wells = {}, [], []
        for world in self.worlds:
            found = answers[name, dtype, world]
            cell, note, well = judge(case, dtype, reference, found)
            cells[world] = cell
            wells.append(well)
            if note:
                notes.append(f"{world}: {note}")
            if errors:
                for rank, one in enumerate(found):
                    if one.kind:
                        print(f"--- {name}, {world} ranks, rank {rank}\n{one.trace or one.text}")
        if reference.kind:
            notes.append(f"plain loop: {reference.text}")
            if errors:
                print(f"--- {name}, plain loop\n{reference.trace or reference.text}")
        return Row(case, dtype, cells, notes, all(wells) and not reference.kind)


def following(world: int) -> int:
    """Another number of ranks, to begin a training that `world` ranks go on with."""
    return world % 4 + 1


def judge(case: Any, dtype: str, reference: Answer, found: list[Answer]) -> tuple[str, str, bool]:
    """What the table says, a note, and whether that is well."""
    refusal = case.refusal or (case.refused_on_ranks and len(found) > 1)
    ended = [a for a in found if a.kind in ("crash", "refused")] or [a for a in found if a.kind]
    if ended:
        worst = min(ended, key=lambda a: ("refused", "crash", "hang").index(a.kind))
        # Ranks that wait for one that failed end with errors that say nothing.
        said = [a for a in ended if "onnection" not in a.text] or ended
        return (
            worst.kind,
            f"{said[0].kind}: {said[0].text}",
            refusal and all(a.kind == "refused" for a in found),
        )
    if refusal:
        return "not refused", "", False
    if reference.kind:
        return "no reference", "", False
    largest, where = max(
        (difference(answer, reference, case.left_out) for answer in found), key=lambda pair: pair[0]
    )
    first = difference(found[0], reference, case.left_out)[0]
    if first <= LIMIT[dtype] < largest:
        where += ", not on rank 0"
    well = largest <= LIMIT[dtype]
    return f"{largest:.0e}", "" if well else f"{largest:.1e} in {where}", well


def difference(ours: Answer, reference: Answer, left_out: tuple[str, ...]) -> tuple[float, str]:
    import numpy as np

    assert ours.tensors is not None and reference.tensors is not None
    assert ours.numbers is not None and reference.numbers is not None
    if ours.tensors.keys() != reference.tensors.keys():
        return math.inf, f"names: {sorted(ours.tensors.keys() ^ reference.tensors.keys())[:4]}"
    if ours.numbers.keys() != reference.numbers.keys():
        return math.inf, f"{sorted(ours.numbers)} and not {sorted(reference.numbers)}"
    worst, where = 0.0, ""
    for name, b in [*reference.tensors.items(), *reference.numbers.items()]:
        if any(part in name for part in left_out):
            continue
        a = ours.tensors[name] if name in ours.tensors else ours.numbers[name]
        if np.shape(a) != np.shape(b):
            return math.inf, f"{name}: shape {np.shape(a)}, not {np.shape(b)}"
        wide = np.complex128 if np.iscomplexobj(b) else np.float64
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        norm = float(np.linalg.norm(b.ravel()))
        apart = float(np.linalg.norm((a - b).ravel())) / (norm or 1.0)
        if math.isnan(apart):
            return math.inf, f"{name} is NaN"
        if apart > worst:
            worst, where = apart, name
    return worst, where


# The table


def markdown(rows: list[Row], worlds: list[int], seconds: float) -> str:
    import torch

    good = sum(row.well for row in rows)
    names = {row.case.name for row in rows}
    refused = {r.case.name for r in rows if r.case.refusal or r.case.refused_on_ranks}
    lines = [
        "# The same result, case by case",
        "",
        f"{len(names)} cases, {len(refused)} of them to be refused, in {len(rows)} trainings per "
        f"number of ranks: {good} end as they should. {seconds:.0f} s on {machine()}, torch "
        f"{torch.__version__}, Python {platform.python_version()}.",
        "",
        "Largest `||a-b|| / ||b||` over all tensors of the model on all ranks and the losses of "
        "the epochs, against a plain PyTorch loop on one process (marked *: against one rank of "
        "the package). Limits: 1e-12 in float64, 1e-5 in float32. Made by `python "
        "benchmarks/exactness.py --out benchmarks/exactness.md`.",
    ]
    head = ["case", "", *(f"{w} rank{'s' * (w > 1)}" for w in worlds), ""]
    for group in dict.fromkeys(row.case.group for row in rows):
        lines += ["", f"## {group}", "", bar(head), bar(["---"] * len(head))]
        for row in rows:
            if row.case.group != group:
                continue
            name = row.case.name + (" *" if row.case.against_one else "")
            note = "" if row.well and row.case.name not in refused else shorten(row.notes)
            verdict = "" if row.well else "**FAIL** "
            lines.append(
                bar([name, row.dtype, *(row.cells[w] for w in worlds), (verdict + note).strip()])
            )
    return "\n".join(lines) + "\n"


def shorten(notes: list[str]) -> str:
    """Notes of several numbers of ranks, each text once."""
    texts: dict[str, list[str]] = {}
    for note in notes:
        world, _, text = note.partition(": ")
        texts.setdefault(text[:300], []).append(world)
    return "; ".join(f"{','.join(worlds)}: {text}" for text, worlds in texts.items())


def bar(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"


if __name__ == "__main__":
    # What every rank needs is imported once, in the process that they are forked from.
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    kinds = ("gpt2", "bert", "t5", "llama")
    models = [f"transformers.models.{kind}.modeling_{kind}" for kind in kinds]
    CONTEXT.set_forkserver_preload(
        ["torch", "torch._dynamo", "multi_gpu_training.manager", *models, *MODULES]
    )
    main()
