"""One short training of a script under `mgt verify`, and what its ranks wrote down."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.measure.batch_rows import same_rows
from multi_gpu_training.measure.case import Case, Failure
from multi_gpu_training.planning.verify.rank_server import RankServers, ServedRunner

TIMEOUT_S = 1800.0  # of one training; a script may take minutes to read its data
CANNOT_START = "This run cannot start:"  # how errors begin that are found before training
IDLE_S = 20.0  # after which ranks that do nothing wait for each other; at least


@dataclass
class RankRecord:
    """What one rank wrote of one manager's training."""

    header: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] | None = None
    rows: Path | None = None

    def kept_rows(self, micro: dict[str, Any]) -> dict[str, list[Any]] | None:
        """The samples of a micro-batch; None where they were too large to keep."""
        places = micro["kept"] if isinstance(micro["kept"], list) else [micro["kept"]]
        if None in places or self.rows is None or not self.rows.exists():
            return None
        loaded = torch.load(self.rows, weights_only=True)
        parts: list[dict[str, list[Any]]] = [loaded[place] for place in places]
        return {path: [row for part in parts for row in part.get(path, ())] for path in parts[0]}


@dataclass
class RecordedRun:
    """managers: per manager of the script, the records of all ranks, in rank order."""

    ranks: int
    managers: list[list[RankRecord]]
    error: str = ""
    failure: Failure | None = None
    probe: dict[str, Any] | None = None
    double: bool = True
    asked: int | None = None  # steps, which also say how much of the data was taken
    settings: Mapping[str, Any] = field(default_factory=dict)  # the script's own; of its manager

    @property
    def first(self) -> RankRecord:
        return self.managers[0][0]

    @property
    def steps(self) -> int:
        """Steps that every rank has finished, of the manager that trained most."""
        counts = [min(len(rank.steps) for rank in manager) for manager in self.managers if manager]
        return max(counts, default=0)


@dataclass(frozen=True)
class Conditions:
    """How the trainings of one comparison are run; the same forevery number of ranks."""

    double: bool = True
    as_is: bool = False
    sample_noise: bool = False
    sync_bn: bool | None = None

    def describe(self) -> str:
        words = ["float64" if self.double else "float32"]
        words += ["own batch size, workers and data"] if self.as_is else []
        words += ["noise tied to samples"] if self.sample_noise else []
        words += ["sync_bn=true"] if self.sync_bn else []
        return ", ".join(words)


class VerifyRunner:
    """Trains `command` for a few steps on any number of ranks, and reads what was recorded."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        steps: int,
        device: str,
        ranks: Sequence[int],
        say: Callable[[str], None],
        servers: RankServers | None = None,
    ) -> None:
        self.command = command
        self.folder = folder
        self.steps = steps
        self.device = device
        self.most = max(ranks)
        self.say = say
        self.servers = servers
        self.count = 0
        self.batches: dict[str, dict[str, int | None]] = {}  # of managers, on one rank
        self.alone_s = 0.0  # how long one rank took: several may take a few times that

    def __call__(
        self,
        ranks: int,
        conditions: Conditions,
        probe: dict[str, Any] | None = None,
        steps: int | None = None,
    ) -> RecordedRun:
        self.count += 1
        steps = steps or self.steps
        several = f"{ranks} rank{'s' if ranks > 1 else ''}"
        looking = ", looking closer" if probe else ""
        self.say(f"training {steps} steps on {several} ({conditions.describe()}{looking})")
        runner = ServedRunner(
            self.command,
            self.folder / f"{self.count:03d}",
            steps,
            device=self.device,
            timeout_s=TIMEOUT_S,
            ranks_at_hand=self.most,
            timeout_flag="",
        )
        runner.servers = self.servers
        runner.measured = 1  # a request that is wrong here may be right under other conditions
        settings: dict[str, Any] = {}
        if conditions.sync_bn is not None:
            settings["sync_bn"] = conditions.sync_bn
        if ranks > 1:
            # Ranks that wait for one that has left must not wait for long.
            settings["hang_timeout_s"] = max(IDLE_S, 4 * self.alone_s)
        more = {
            "double": conditions.double,
            "as_is": conditions.as_is,
            "sample_noise": conditions.sample_noise,
            "probe": probe,
            "least_batch": self.most,
            "batches": self.batches if ranks > 1 else {},
        }
        mode = TrainingMode.SINGLE if ranks == 1 else TrainingMode.DISTRIBUTED_DATA_PARALLEL
        begun = time.monotonic()
        found = runner(Case(several, mode, ranks, settings, kind="recorder", more=more))
        if ranks == 1:
            self.alone_s = time.monotonic() - begun
        file = runner.out / "probe.json"
        managers = read_records(runner.out, ranks)
        if ranks == 1:
            headers = [record.header for (record,) in managers]
            self.batches = {h["number"]: {k: h[k] for k in ("own_batch", "total")} for h in headers}
        return RecordedRun(
            ranks,
            managers,
            "" if found.ok else _error(found.error, runner.out / "output.txt"),
            found.failure,
            json.loads(file.read_text()) if file.exists() else None,
            conditions.double,
            steps,
            found.asked,
        )


def _error(said: str, log: Path) -> str:
    """The error in a line, and where in the user's own code it arose: "... (train.py:12)"."""
    text = log.read_text(errors="replace") if log.exists() else ""
    _, traceback, last = text.rpartition("Traceback")
    if said.startswith(CANNOT_START):
        what, begins, rest = said.partition("\n(MGT")
        return what + begins + rest.partition("\n")[0]  # without what other ranks have printed
    if not traceback:
        # An error of ours has several lines, of which the last says what to do.
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " ".join(line for line in lines[-4:] if line[0] != "(") or said
    frames = re.findall(r'File "([^"]+)", line (\d+)', last)
    own = [
        f"{Path(file).name}:{line}"
        for file, line in frames
        if "site-packages" not in file and "multi_gpu_training" not in file and file[0] != "<"
    ]
    return f"{said} ({own[-1]})" if own else said


def read_records(folder: Path, ranks: int) -> list[list[RankRecord]]:
    """Per manager, the records of its ranks; a manager that not every rank has is left out."""
    managers: list[list[RankRecord]] = []
    for number in range(len(list(folder.glob("steps-0-*.jsonl")))):
        found = []
        for rank in range(ranks):
            file = folder / f"steps-{rank}-{number}.jsonl"
            if file.exists():
                found.append(_read(file, folder / f"rows-{rank}-{number}.pt"))
        if len(found) == ranks:
            managers.append(found)
    return managers


def _read(file: Path, rows: Path) -> RankRecord:
    record = RankRecord({}, rows=rows)
    for text in file.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the rank was ended while it wrote
            break
        if line["kind"] == "header":
            record.header = line
        elif line["kind"] == "step":
            record.steps.append(line)
        elif line["kind"] == "validation":
            record.validations.append(line)
        else:
            record.last = line
    return record


# The samples of a step


@dataclass
class RowMatch:
    """Which samples of one rank's micro-batch each of several ranks got.

    parts: per rank, their places in the micro-batch of one rank.
    missing, extra: samples that nobody got, and those that one rank does not have, as
        (rank, place in its micro-batch).
    """

    parts: list[list[int]]
    missing: list[int]
    extra: list[tuple[int, int]]

    @property
    def same(self) -> bool:
        return not self.missing and not self.extra


def merged(micros: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The micro-batches of a rank's step as one."""
    if not micros:
        return None
    return {
        **micros[0],
        "count": sum(micro["count"] for micro in micros),
        "hashes": [text for micro in micros for text in micro["hashes"]],
        "indices": [index for micro in micros for index in micro["indices"]],
        "kept": [micro["kept"] for micro in micros],
    }


def match_rows(
    one: RankRecord,
    many: Sequence[RankRecord],
    alone: dict[str, Any] | None,
    micros: Sequence[dict[str, Any] | None],
) -> RowMatch:
    """Find the samples of each rank's micro-batch in that of one rank, by content."""
    hashes = alone["hashes"] if alone is not None else []
    free: dict[str, list[int]] = {}
    for place, text in enumerate(hashes):
        free.setdefault(text, []).append(place)
    parts: list[list[int]] = []
    unknown: list[tuple[int, int]] = []
    for rank, micro in enumerate(micros):
        parts.append([])
        for place, text in enumerate(micro["hashes"] if micro is not None else []):
            if free.get(text):
                parts[-1].append(free[text].pop(0))
            else:
                unknown.append((rank, place))
    left = sorted(place for places in free.values() for place in places)
    if unknown and left and alone is not None:
        unknown, left = _match_closely(one, many, alone, micros, unknown, left, parts)
    return RowMatch(parts, left, unknown)


def _match_closely(
    one: RankRecord,
    many: Sequence[RankRecord],
    alone: dict[str, Any],
    micros: Sequence[dict[str, Any] | None],
    unknown: list[tuple[int, int]],
    left: list[int],
    parts: list[list[int]],
) -> tuple[list[tuple[int, int]], list[int]]:
    """The same for samples that were padded further, or that differ by rounding."""
    mine = one.kept_rows(alone)
    still: list[tuple[int, int]] = []
    theirs = {
        rank: many[rank].kept_rows(micro)
        for rank, micro in enumerate(micros)
        if micro is not None and any(rank == found for found, _ in unknown)
    }
    for rank, place in unknown:
        rows = theirs.get(rank)
        found = None
        if mine is not None and rows is not None and mine.keys() == rows.keys():
            for candidate in left:
                if all(same_rows(mine[path][candidate], rows[path][place]) for path in mine):
                    found = candidate
                    break
        if found is None:
            still.append((rank, place))
        else:
            parts[rank].append(found)
            left.remove(found)
    return still, left


def seen_by(record: RankRecord) -> Counter[str]:
    """How often a rank trained on each sample, by content."""
    return Counter(
        text for step in record.steps for micro in step["micros"] for text in micro["hashes"]
    )
