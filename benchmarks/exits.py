"""Runs that end in every way there is: is the exit code right each time, and is nothing left?

    python benchmarks/exits.py --trials 50 --lanes 6 --out exits.json
    python benchmarks/exits.py --trials 40 --only "by itself" "by itself, under torchrun"
    python benchmarks/exits.py --quick

Each run of a small model on two ranks ends by itself, by an error of a rank, by a rank that exits,
by settings that contradict each other, or by SIGTERM, Ctrl-C or `kill -9` to its launcher at a
random instant of training. The runs of a lane use one and the same port, one directly after the
other. Looked at are the exit code, processes that live on, and temporary files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from subject import Subject, ended_at_last

PATIENCE_S = 180.0
STEPS, WIDTH = 50, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=ENDS, default=list(ENDS), metavar="END")
    parser.add_argument("--quick", action="store_true", help="one run of each kind")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    trials = len(given.only) if given.quick else given.trials
    names = list(itertools.islice(itertools.cycle(given.only), trials))
    work = list(enumerate(names))
    rows: list[dict[str, Any]] = []

    def lane(folder: Path) -> None:
        port = free_port()
        while work:
            number, name = work.pop(0)
            chance = random.Random(1000 * given.seed + number)
            rows.append(trial(folder / str(number), name, chance, port))
            print(json.dumps(rows[-1]), flush=True)

    with tempfile.TemporaryDirectory(prefix="exits-") as folder:
        threads = [threading.Thread(target=lane, args=(Path(folder),)) for _ in range(given.lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(table(rows))
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": machine(), "trials": rows}, indent=1))
        given.out.with_suffix(".md").write_text(f"{machine()}\n\n{table(rows)}\n")
    if not all(row["well"] for row in rows):
        sys.exit(1)


def signalled(number: signal.Signals, to_all: bool = False) -> Any:
    """Ends by a signal to the launcher, or to all in the foreground, as Ctrl-C does."""

    def end(subject: Subject, chance: random.Random) -> None:
        subject.wait(lambda: subject.steps_since(0) > 1, PATIENCE_S)
        time.sleep(chance.uniform(0, 0.5))
        if to_all:
            os.killpg(subject.launcher.pid, number)
        else:
            subject.launcher.send_signal(number)

    return end


def by_itself(subject: Subject, chance: random.Random) -> None:
    pass


def fault(kind: str) -> dict[str, Any]:
    return {"faults": [{"rank": 1, "step": 9, "phase": "backward", "kind": kind}]}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# How it ends: settings, what is done to it, the exit code that is right.
ENDS: dict[str, tuple[dict[str, Any], Any, int]] = {
    "by itself": ({}, by_itself, 0),
    "by itself, under torchrun": ({"launch": TORCHRUN}, by_itself, 0),
    "an error of rank 1": (fault("exception"), by_itself, 1),
    "rank 1 exits with 17": (fault("exit"), by_itself, 17),
    "rank 1 is killed": (fault("sigkill"), by_itself, 1),
    "settings that contradict each other": ({"training_mode": "dp"}, by_itself, 2),
    "SIGTERM to the launcher": ({}, signalled(signal.SIGTERM), 143),
    "Ctrl-C": ({}, signalled(signal.SIGINT, to_all=True), 130),
    "kill -9 of the launcher": ({}, signalled(signal.SIGKILL), 137),
}


def trial(folder: Path, name: str, chance: random.Random, port: int) -> dict[str, Any]:
    settings, end, expected = ENDS[name]
    rest = dict(settings)
    faults, launch = rest.pop("faults", []), rest.pop("launch", [])
    # Signals are to meet it in training, however fast the machine is.
    steps = STEPS if end is by_itself else 100 * STEPS
    subject = Subject(folder, steps, WIDTH, max_restarts=0, **rest)
    subject.faults, subject.port, subject.launch = faults, port, launch
    with ended_at_last(subject):
        subject.start()
        end(subject, chance)
        asked = time.monotonic()
        ended = subject.wait(lambda: subject.ended is not None, PATIENCE_S)
        took = time.monotonic() - asked
        code = subject.ended if ended else None
        left = [process.pid for process in subject.left(within_s=3)]
        litter = subject.litter() if expected != 137 else []  # the next launcher sweeps it
        litter = [name for name in litter if not name.startswith("torchelastic_")]  # torchrun's
        said = (folder / "out.txt").read_text()[-3000:]
    row = {"end": name, "expected": expected, "code": code, "left": left, "litter": litter}
    row |= {"took_s": round(took, 2), "well": code == expected and not left and not litter}
    subject.remove()
    return row if row["well"] else {**row, "said": said}


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}: `python benchmarks/exits.py {' '.join(sys.argv[1:])}`"
    )


def table(rows: list[dict[str, Any]]) -> str:
    count = Counter(row["end"] for row in rows)
    lines = [
        f"{sum(row['well'] for row in rows)} of {len(rows)} right: the exit code, no process and "
        "no temporary file left, the port free for the next",
        "",
        "| the run ends by | exit code | right |",
        "|---|---|---|",
    ]
    for name in count:
        expected = ENDS[name][2]
        right = sum(row["well"] for row in rows if row["end"] == name)
        lines.append(f"| {name} | {expected} | {right} of {count[name]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
