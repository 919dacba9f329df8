"""Random faults of every kind, for as long as you like: does every run end as if undisturbed?

    python benchmarks/soak.py --minutes 30 --lanes 4 --set hang_timeout_s=10 --out soak.json
    python benchmarks/soak.py --minutes 3 --kinds kill-rank,kill-tree,flip,exception

The training of subject.py, with a small model, meets one fault after the other until it is done;
then the next training begins. Faults come from outside the process, at instants it does not know,
and from inside, at a step and phase drawn by chance (multi_gpu_training.faults.injection).
Where the launcher has ended, `--resume auto` is added, as a user would. At the end of each training
every bit of weights, optimizer state and history must be that of an undisturbed one (after an
`oom`, which cuts micro-batches, the weights to 1e-5), and no process, temporary file or shared
memory may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import platform
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from failing_calls import ALL, NEW, WRITES, FailingCalls
from subject import EVERY, Reference, Subject, ended_at_last, shared_memory, undisturbed

PATIENCE_S = 300.0
STEPS, WIDTH = 100, 128
PHASES = ("input", "forward", "backward", "optimizer", "step_end", "saving")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--lanes", type=int, default=1, help="trainings side by side")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults to draw from")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the trainings"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    unknown = set(given.kinds.split(",")) - set(KINDS)
    if unknown:
        sys.exit(f"--kinds {','.join(sorted(unknown))}: use some of {', '.join(KINDS)}")
    soak = Soak(given)
    soak.run()
    print(soak.table())
    if not soak.well:
        sys.exit(1)


# From outside: each does something to a training that runs.


def kill_rank(subject: Subject, chance: random.Random) -> None:
    _one_rank(subject, chance, signal.SIGKILL)


def stop_rank(subject: Subject, chance: random.Random) -> None:
    _one_rank(subject, chance, signal.SIGSTOP)


def _one_rank(subject: Subject, chance: random.Random, number: signal.Signals) -> None:
    ranks = subject.ranks()
    if ranks:
        ranks[chance.choice(sorted(ranks))].send_signal(number)


def kill_worker(subject: Subject, chance: random.Random) -> None:
    direct = {process.pid for process in subject.ranks().values()}
    workers = [p for p in subject.tree()[1:] if p.pid not in direct]
    if workers:
        chance.choice(workers).kill()


def kill_launcher(subject: Subject, chance: random.Random) -> None:
    subject.launcher.kill()
    subject.launcher.wait()


def kill_tree(subject: Subject, chance: random.Random) -> None:
    subject.kill_tree()


def terminate(subject: Subject, chance: random.Random) -> None:
    subject.launcher.terminate()


def interrupt(subject: Subject, chance: random.Random) -> None:
    os.killpg(subject.launcher.pid, signal.SIGINT)


def no_space(subject: Subject, chance: random.Random) -> None:
    """Rank 0 can write no file longer than a few bytes for a while, as with a quota."""
    rank = subject.ranks().get(0)
    if rank is None:
        return
    before = rank.rlimit(resource.RLIMIT_FSIZE)
    rank.rlimit(resource.RLIMIT_FSIZE, (chance.randrange(1, 50_000), before[1]))
    time.sleep(chance.uniform(0.2, 2.0))
    rank.rlimit(resource.RLIMIT_FSIZE, before)


def flip(subject: Subject, chance: random.Random) -> None:
    """Kill all, and change a byte in the newest checkpoint, or cut a file of it short. An older
    intact one is there: one is always kept."""
    subject.kill_tree()
    found = sorted(subject.checkpoints.glob("step-*/manifest.json"))
    if len(found) < 2:
        return
    file = chance.choice(sorted(found[-1].parent.iterdir()))
    raw = bytearray(file.read_bytes())
    if not raw:
        return
    place = chance.randrange(len(raw))
    if chance.random() < 0.3:
        raw = raw[:place]
    else:
        raw[place] ^= 1 << chance.randrange(8)
    file.write_bytes(raw)


def freeze(subject: Subject, chance: random.Random) -> None:
    """All of it stands still and goes on, as in a suspended virtual machine."""
    frozen = subject.tree()
    for number, pause in ((signal.SIGSTOP, chance.uniform(0.5, 5.0)), (signal.SIGCONT, 0.0)):
        for process in frozen:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        time.sleep(pause)


Strike = Callable[[Subject, random.Random], None]


def _disk(number: int, calls: int, every: tuple[int, ...] = (1,)) -> Strike:
    """Calls into its folder fail for a moment: all, those that write, or those that make files."""

    def strike(subject: Subject, chance: random.Random) -> None:
        calls_of(subject).fail(number, chance.choice(every), calls)
        time.sleep(chance.uniform(0.2, 3.0))
        calls_of(subject).work()

    return strike


def clock(subject: Subject, chance: random.Random) -> None:
    """From now on the clocks of its processes are off, each by another amount."""
    calls_of(subject).jump(chance.choice((-86_400, -3600, -5, 0, 5, 3600, 86_400, 10**8)))


def calls_of(subject: Subject) -> FailingCalls:
    return FailingCalls.at(subject.folder)


OUTSIDE: dict[str, Strike] = {
    "kill-rank": kill_rank,
    "kill-worker": kill_worker,
    "kill-launcher": kill_launcher,
    "kill-tree": kill_tree,
    "stop-rank": stop_rank,
    "terminate": terminate,
    "interrupt": interrupt,
    "no-space": no_space,
    "flip": flip,
    "freeze": freeze,
    "io-error": _disk(errno.EIO, ALL, (1, 2, 3, 7)),
    "stale": _disk(errno.ESTALE, ALL, (1, 2, 3, 7)),
    "read-only": _disk(errno.EROFS, WRITES),
    "no-inodes": _disk(errno.ENOSPC, NEW),
    "clock": clock,
}
# From inside: what `fail_at` does.
INSIDE = {
    "exception": "exception",
    "exit": "exit",
    "crash": "sigkill",
    "nan": "nan",
    "oom": "oom",
    "disk-full": "disk_full",
    "hang": "sleep",
    "pause": "slow",
}
KINDS = (*OUTSIDE, *INSIDE)


def inside_fault(kind: str, chance: random.Random, after: int) -> dict[str, Any]:
    """Arguments of fail_at, soon after step `after`."""
    does = INSIDE[kind]
    phase = {"disk_full": "saving", "oom": "backward"}.get(does) or chance.choice(PHASES)
    if does == "nan" and phase == "saving":
        phase = "backward"
    rank = 0 if phase == "saving" else chance.randrange(2)
    fault = {"rank": rank, "step": after + chance.randrange(1, 16), "phase": phase, "kind": does}
    return {**fault, "seconds": 0.2, "times": 3} if does == "slow" else fault


class Ordeal:
    """One training with all that happens to it."""

    def __init__(
        self, subject: Subject, chance: random.Random, kinds: list[str], start_s: float
    ) -> None:
        self.subject = subject
        self.chance = chance
        self.outside = [kind for kind in kinds if kind in OUTSIDE]
        self.inside = [kind for kind in kinds if kind in INSIDE]
        self.start_s = start_s
        self.faults: list[str] = []
        self.codes: list[int] = []
        self.processes = 0

    def run(self, deadline: float) -> None:
        """Until the training is done; after `deadline` nothing more is done to it."""
        subject = self.subject
        self._start(resume=False, more=True)
        while subject.ended != 0:
            more = time.monotonic() < deadline
            if more and self.outside:
                self._strike()
            elif not subject.wait(lambda: subject.ended is not None, PATIENCE_S):
                return  # it hangs
            ended = subject.ended
            if ended is not None and ended != 0:
                self.codes.append(ended)
                self.processes += len(subject.left(within_s=10))
                if len(self.codes) > 100:
                    return
                self._start(resume=True, more=more)

    def _start(self, resume: bool, more: bool) -> None:
        """Each launch brings new faults of its own."""
        subject = self.subject
        subject.faults = []
        if more and self.inside and self.chance.random() < 0.6:
            after = subject.newest()
            for kind in self.chance.sample(self.inside, min(2, len(self.inside))):
                subject.faults.append(inside_fault(kind, self.chance, after))
                self.faults.append(kind)
        subject.start(resume)

    def _strike(self) -> None:
        """Let it train for a moment, and do something to it; sometimes while it starts."""
        subject, chance = self.subject, self.chance
        recorded = subject.steps_recorded()
        if chance.random() < 0.15:
            delay = chance.uniform(0, self.start_s)
        else:
            moving = subject.wait(lambda: subject.steps_recorded() != recorded, PATIENCE_S, 0.1)
            if not moving:
                return
            delay = chance.uniform(0, 2.0)
        due = time.time() + delay
        subject.wait(lambda: time.time() >= due, delay + 1)
        if subject.ended is not None or subject.newest() >= subject.steps:
            subject.wait(lambda: subject.ended is not None, PATIENCE_S)
            return
        kind = chance.choice(self.outside)
        self.faults.append(kind)
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            OUTSIDE[kind](subject, chance)
        if kind in ("terminate", "interrupt"):
            subject.wait(lambda: subject.ended is not None, PATIENCE_S)


class Soak:
    """Trainings side by side until the time is over, and what became of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.kinds = given.kinds.split(",")
        self.rows: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.number = 0
        pairs = (item.partition("=") for item in given.set)
        self.settings = {key: yaml.safe_load(value) for key, _, value in pairs}

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            self.folder = Path(folder)
            self.references = {
                noise: undisturbed(self.folder / f"u{noise}", STEPS, WIDTH, PATIENCE_S, noise)
                for noise in ((0.2, 0.0) if "oom" in self.kinds else (0.2,))
            }
            self.deadline = time.monotonic() + 60 * self.given.minutes
            lanes = [threading.Thread(target=self._lane) for _ in range(self.given.lanes)]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()

    def _lane(self) -> None:
        while time.monotonic() < self.deadline:
            with self.lock:
                self.number += 1
                number = self.number
            row = self._training(number)
            with self.lock:
                self.rows.append(row)
                self._write()
            print(json.dumps(row), flush=True)

    def _training(self, number: int) -> dict[str, Any]:
        # Smaller micro-batches draw other dropout: those that run out of memory train without.
        with_oom = "oom" in self.kinds and number % 4 == 0
        noise = 0.0 if with_oom else 0.2
        kinds = [kind for kind in self.kinds if kind != "oom" or with_oom]
        reference = self.references[noise]
        chance = random.Random(1000 * self.given.seed + number)
        folder = self.folder / str(number)
        # The calls that fail are told by their paths, which must be whole.
        settings = {"keep_last": 4, "save_dir": str(folder / "runs"), **self.settings}
        subject = Subject(folder, STEPS, WIDTH, noise, **settings)
        subject.variables = FailingCalls.at(folder).environment
        with ended_at_last(subject):
            ordeal = Ordeal(subject, chance, kinds, reference.start_s)
            ordeal.run(self.deadline)
            calls_of(subject).work()
            code = subject.ended
            processes = ordeal.processes + len(subject.left(within_s=5))
            apart = difference(subject, reference) if code == 0 else float("inf")
            same = code == 0 and subject.result() == reference.result
            litter = subject.litter()
            said = (subject.folder / "out.txt").read_text()[-8000:]
        memory = [name for pid in subject.pids for name in shared_memory() if f"_{pid}_" in name]
        subject.remove()
        right = same or (with_oom and apart <= 1e-5)
        row = {
            "training": number,
            "faults": ordeal.faults,
            "exit_codes": [*ordeal.codes, code],
            "same_bits": same,
            "difference": apart,
            "processes": processes,
            "litter": litter,
            "shared_memory": memory,
            "well": right and not processes and not litter and not memory,
        }
        return row if row["well"] else {**row, "said": said}

    @property
    def well(self) -> bool:
        return bool(self.rows) and all(row["well"] for row in self.rows)

    def table(self) -> str:
        rows = self.rows
        count = Counter(kind for row in rows for kind in row["faults"])
        lines = [
            f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, Python "
            f"{platform.python_version()}: `python benchmarks/soak.py {' '.join(sys.argv[1:])}`",
            "",
            f"{len(rows)} trainings of {STEPS} steps on two ranks, a checkpoint every {EVERY}; "
            f"{sum(count.values())} faults. As if undisturbed: {sum(r['well'] for r in rows)} of "
            f"{len(rows)}, bit for bit {sum(r['same_bits'] for r in rows)}. Left over: "
            f"{sum(r['processes'] for r in rows)} processes, "
            f"{sum(len(r['litter']) for r in rows)} temporary files, "
            f"{sum(len(r['shared_memory']) for r in rows)} pieces of shared memory.",
            "",
            "| fault | times |",
            "|---|---|",
        ]
        return "\n".join(lines + [f"| {kind} | {count[kind]} |" for kind in self.kinds])

    def _write(self) -> None:
        if self.given.out is not None:
            self.given.out.write_text(json.dumps({"trainings": self.rows}, indent=1))
            self.given.out.with_suffix(".md").write_text(self.table() + "\n")


def difference(subject: Subject, reference: Reference) -> float:
    """The largest ||a-b|| / ||a|| of a tensor of the final weights."""
    ours = subject.weights()
    return max(
        float((ours[name] - value).norm() / value.norm())
        for name, value in reference.weights.items()
    )


if __name__ == "__main__":
    main()
