"""`kill -9` at random instants, hundreds of times: does every run end as if nothing had happened?

    python benchmarks/kills.py --trials 200 --lanes 6 --out kills.json
    python benchmarks/kills.py --trials 300 --while-saving --mode single
    python benchmarks/kills.py --quick

The training of subject.py (two ranks, two loader workers each, about 50 MB of state, a checkpoint
every five steps, default settings for restarts) is killed again and again until it is done: the
whole process tree, one rank, or the launcher alone, at a random instant while it starts, resumes,
trains or saves. A killed rank is made good by the supervision; after the others a user adds
`--resume auto`. Looked at are the exit code, every bit of the final weights, optimizer state and
history, the steps that were done again (from the events and the manifests), and the processes,
temporary files and shared memory that were left.

`--mode single` trains in one process instead, `--mode fsdp` splits the state over the ranks, and
`--while-saving` lets every kill fall while a checkpoint is being written.

`--lanes` trainings run side by side. `--out` is written after each of them and read at the start:
the same command goes on with what is missing. Beside it lies the table, as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from subject import EVERY, Reference, Subject, ended_at_last, shared_memory, undisturbed

PATIENCE_S = 180.0
KINDS = {"tree": 9, "rank": 9, "launcher": 2}  # and how often
MODES = {
    "ddp": {},
    "single": {"training_mode": "single", "world_size": 1, "batch_size": 8},
    "fsdp": {"training_mode": "fsdp"},
}
RESTARTS = 3  # of one launch, the default of max_restarts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=1, help="trainings side by side")
    parser.add_argument("--steps", type=int, default=100, help="of a training; a multiple of 50")
    parser.add_argument(
        "--width", type=int, default=1900, help="of the MLP: 1900 is 45 MB of state"
    )
    parser.add_argument("--reach-s", type=float, default=2.0, help="kills fall within it")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no trial after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="ddp")
    parser.add_argument("--while-saving", action="store_true", help="kill only then")
    parser.add_argument("--quick", action="store_true", help="four trials with a small model")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.trials, given.width, given.steps = 4, 64, 50
    campaign = Campaign(given)
    campaign.run()
    print(campaign.table())
    if not campaign.well:
        sys.exit(1)


class Campaign:
    """All trials, those of an earlier call too, and what became of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.began = time.monotonic()
        self.lock = threading.Lock()
        self.runs: list[dict[str, Any]] = self._earlier()
        self.begun = sum(len(run["kills"]) for run in self.runs)
        self.number = len(self.runs)
        self.reference = Reference("", 0, 0.0, {})

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            given = self.given
            self.folder = Path(folder)
            sizes = (given.steps, given.width, PATIENCE_S)
            self.reference = undisturbed(self.folder / "u", *sizes, **MODES[given.mode])
            lanes = [threading.Thread(target=self._lane) for _ in range(given.lanes)]
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
            self._write()

    def _lane(self) -> None:
        while (number := self._next_run()) is not None:
            chance = random.Random(1000 * self.given.seed + number)
            sizes = (self.given.steps, self.given.width)
            subject = Subject(self.folder / str(number), *sizes, **MODES[self.given.mode])
            with ended_at_last(subject):
                found = Ordeal(subject, chance, self).run()
            subject.remove()
            found["shared_memory"] = [
                name for pid in subject.pids for name in shared_memory() if f"_{pid}_" in name
            ]
            with self.lock:
                self.runs.append(found)
                self._write()
            print(json.dumps(summary(number, found)), flush=True)

    def _next_run(self) -> int | None:
        with self.lock:
            if not self._more():
                return None
            self.number += 1
            return self.number

    def take(self) -> bool:
        """Whether one more trial is to be made; then it is counted."""
        with self.lock:
            more = self._more()
            self.begun += more
            return more

    def _more(self) -> bool:
        in_time = time.monotonic() - self.began < self.given.limit_s
        return in_time and self.begun < self.given.trials

    # What came out

    @property
    def kills(self) -> list[dict[str, Any]]:
        return [kill for run in self.runs for kill in run["kills"]]

    @property
    def well(self) -> bool:
        return all(run["well"] for run in self.runs) and len(self.kills) >= self.given.trials

    def table(self) -> str:
        runs, kills = self.runs, self.kills
        again = [kill["again_s"] for kill in kills if kill["again_s"] is not None]
        repeated = [kill["repeated"] for kill in kills]
        good = [kill for run in runs for kill in run["kills"] if run["well"]]
        lines = [
            f"{self.machine()}",
            "",
            f"{'One process' if self.given.mode == 'single' else 'Two ranks'}, two workers each, "
            f"{self.reference.state_bytes / 1e6:.0f} MB of state, "
            f"{self.given.steps} steps, a checkpoint every {EVERY}; {len(kills)} kills in "
            f"{len(runs)} trainings, {self.given.lanes} side by side.",
            "",
            "| `kill -9` of | kills | while starting or resuming | run went on to the undisturbed "
            "result | by itself | with `--resume auto` |",
            "|---|---|---|---|---|---|",
        ]
        for kind in KINDS:
            some = [kill for kill in kills if kill["kind"] == kind]
            early = sum(kill["early"] for kill in some)
            fine = sum(kill["kind"] == kind for kill in good)
            alone = sum(kill["by"] == "supervision" for kill in some)
            lines.append(
                f"| {kind} | {len(some)} | {early} | {fine} | {alone} | {len(some) - alone} |"
            )
        too_far = sum(kill["resumed_from"] < kill["completed"] for kill in kills)
        facts = {
            "kills while a checkpoint was being written": sum(kill["saving"] for kill in kills),
            "trainings with every bit of the undisturbed one": f"{sum(r['same'] for r in runs)} "
            f"of {len(runs)}",
            "kills that cost more than the steps since the last completed checkpoint": too_far,
            "steps repeated: median, most": f"{_median(repeated)}, {max(repeated, default=0)}",
            "kill to training again: median, slowest": f"{_median(again):.1f} s, "
            f"{max(again, default=0):.1f} s",
            "launches that gave up": sum(run["gave_up"] for run in runs),
            "processes left": sum(run["processes"] for run in runs),
            "temporary files left": sum(len(run["litter"]) for run in runs),
            "shared memory left": sum(len(run["shared_memory"]) for run in runs),
        }
        lines += ["", "| | |", "|---|---|"]
        return "\n".join(lines + [f"| {name} | {value} |" for name, value in facts.items()])

    def machine(self) -> str:
        command = "python benchmarks/kills.py " + " ".join(sys.argv[1:])
        return (
            f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, Python "
            f"{platform.python_version()}: `{command}`"
        )

    def _write(self) -> None:
        if self.given.out is None:
            return
        document = {"machine": self.machine(), "settings": self._settings(), "runs": self.runs}
        draft = self.given.out.with_suffix(".new")
        draft.write_text(json.dumps(document, indent=1))
        draft.replace(self.given.out)
        self.given.out.with_suffix(".md").write_text(self.table() + "\n")

    def _earlier(self) -> list[dict[str, Any]]:
        if self.given.out is None or not self.given.out.exists():
            return []
        document = json.loads(self.given.out.read_text())
        if document["settings"] != self._settings():
            sys.exit(f"{self.given.out} has {document['settings']}; choose another --out")
        found: list[dict[str, Any]] = document["runs"]
        return found

    def _settings(self) -> dict[str, Any]:
        chosen = ("steps", "width", "mode", "while_saving")
        return {name: getattr(self.given, name) for name in chosen}


class Ordeal:
    """One training that is killed until it is done, or until there are trials enough."""

    def __init__(self, subject: Subject, chance: random.Random, campaign: Campaign) -> None:
        self.subject = subject
        self.chance = chance
        self.campaign = campaign
        self.kills: list[dict[str, Any]] = []
        self.processes = 0  # that lived on after a kill
        self.gave_up = 0  # launches that ended by themselves
        self._restarts = 0  # of this launch

    def run(self) -> dict[str, Any]:
        self._start(resume=False)
        while self.subject.ended != 0 and self.gave_up < 4:
            early = self.chance.random() < 0.2 and not self.campaign.given.while_saving
            if self._wait_for_the_instant(early) and self.campaign.take():
                self._kill(early)
                continue
            if not self.subject.wait(lambda: self.subject.ended is not None, PATIENCE_S):
                break  # it hangs
            if self.subject.ended:  # too many restarts: what a user does then
                self.gave_up += 1
                self._start(resume=True)
        return self._outcome()

    def _start(self, resume: bool) -> None:
        self._restarts = 0
        self._began = time.time()
        self.subject.start(resume)

    def _wait_for_the_instant(self, early: bool) -> bool:
        """Let it run until the next kill is due; False if it comes to its end before."""
        subject = self.subject
        delay = self.chance.uniform(0, self.campaign.given.reach_s)
        if early:  # while it starts, and resumes
            delay = self.chance.uniform(0, self.campaign.reference.start_s)
        elif not subject.wait(lambda: subject.steps_since(self._began) > 0, PATIENCE_S):
            return False
        if self.campaign.given.while_saving:
            let = subject.newest() + EVERY * self.chance.randrange(4)  # saves that are let through
            subject.wait(lambda: subject.newest() >= let, PATIENCE_S)
            if not subject.wait(lambda: subject.saving(), PATIENCE_S, 0.001):
                return False
            delay = self.chance.uniform(0, 0.05)  # of a save of about that length
        due = time.time() + delay
        subject.wait(lambda: time.time() >= due, delay + 1, 0.001)
        return subject.ended is None and subject.newest() < subject.steps

    def _kill(self, early: bool) -> None:
        subject, chance = self.subject, self.chance
        kinds = [kind for kind in KINDS if kind != "rank" or self._restarts < RESTARTS]
        kind = chance.choices(kinds, [KINDS[k] for k in kinds])[0]
        victims = subject.ranks() if kind == "rank" else {}
        if kind == "rank" and len(victims) < 2:
            kind = "tree"
        kill = {"kind": kind, "early": early, "completed": subject.newest(), "time": time.time()}
        kill["saving"] = subject.saving()
        self.kills.append(kill)
        if kind == "rank":
            kill["rank"] = chance.randrange(2)
            victims[kill["rank"]].kill()
            self._restarts += 1
            self._began = time.time()
            return
        if kind == "tree":
            subject.kill_tree()
        else:
            subject.launcher.kill()
            subject.launcher.wait()
        self.processes += len(subject.left(within_s=10))
        kill["gone_s"] = time.time() - kill["time"]
        kill["completed"] = subject.newest()
        self._start(resume=True)

    def _outcome(self) -> dict[str, Any]:
        subject = self.subject
        code = subject.ended
        self.processes += len(subject.left(within_s=5))
        same = code == 0 and subject.result() == self.campaign.reference.result
        repeats(subject, self.kills)
        litter = subject.litter()
        kept = all(kill["resumed_from"] >= kill["completed"] for kill in self.kills)
        found = {
            "kills": self.kills,
            "exit_code": code,
            "same": same,
            "processes": self.processes,
            "litter": litter,
            "gave_up": self.gave_up,
            "well": same and kept and not self.processes and not litter,
        }
        if not found["well"]:
            found["said"] = (subject.folder / "out.txt").read_text()[-6000:]
        return found


def repeats(subject: Subject, kills: list[dict[str, Any]]) -> None:
    """After the run: from where each kill was recovered, how many steps were done again, and
    when training went on."""
    starts = []  # (time, step gone on from, step that had been reached before, by supervision)
    reached = 0
    for event in subject.events():
        if event["event"] == "log" and event["message"].startswith("resumed from"):
            starts.append((event["time"], event["step"], reached, event["attempt"] > 0))
        elif event["event"] == "step":
            if event["step"] == 1:
                starts.append((event["time"], 0, reached, event["attempt"] > 0))
            reached = event["step"]
    steps = [event["time"] for event in subject.events() if event["event"] == "step"]
    for kill in kills:
        begun = [start for start in starts if start[0] > kill["time"]]
        _, kill["resumed_from"], before, alone = begun[0] if begun else (0.0, -1, reached, False)
        kill["repeated"] = max(0, before - kill["resumed_from"])
        trained = [when for when in steps if begun and when >= begun[0][0]]
        later = [other["time"] for other in kills if other["time"] > kill["time"]]
        at_once = trained and not (later and later[0] < trained[0])
        kill["again_s"] = trained[0] - kill["time"] if at_once else None
        kill["by"] = "supervision" if alone and kill["kind"] == "rank" else "resume"


def summary(number: int, found: dict[str, Any]) -> dict[str, Any]:
    kinds = [f"{kill['kind']}@{kill['completed']}" for kill in found["kills"]]
    return {"run": number, **{k: found[k] for k in ("well", "exit_code", "litter")}, "kills": kinds}


def _median(values: list[Any]) -> Any:
    return statistics.median(values) if values else 0


if __name__ == "__main__":
    main()
