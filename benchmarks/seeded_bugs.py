"""Seed bugs into small training scripts, and see whether `mgt verify` finds and names them.

    python benchmarks/seeded_bugs.py --set 4 --out verdicts.json
    python benchmarks/seeded_bugs.py --only batchnorm_cnn --show

`--out` writes what `verify` said of every script, and adds to what is there: a run that was
stopped goes on with the scripts that are left.

The servers that fork the ranks (`planning/verify/rank_server.py`) are kept from script to script:
otherwise this is what the command does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tempfile
import time
from pathlib import Path

import seeded_scripts
import seeded_scripts_blind
import seeded_scripts_complete
import seeded_scripts_habits
import seeded_scripts_later
import seeded_scripts_more
import seeded_scripts_tasks
import torch

from multi_gpu_training.planning.verify import VerifyReport, verify
from multi_gpu_training.planning.verify.rank_server import RankServers

SETS = (
    seeded_scripts,
    seeded_scripts_more,
    seeded_scripts_later,
    seeded_scripts_blind,
    seeded_scripts_complete,
    seeded_scripts_tasks,
    seeded_scripts_habits,
)
BUGS = {name: bug for part in SETS for name, bug in part.BUGS.items()}
CORRECT = {name: script for part in SETS for name, script in part.CORRECT.items()}


def judge(name: str, report: VerifyReport | None) -> str:
    """named, failed without cause, wrong cause, passed or crashed; for correct scripts ok, false
    alarm, not comparable or crashed."""
    if report is None:
        return "crashed"
    if name in CORRECT:
        if report.passed:
            return "ok"
        return "false alarm" if report.problems else "not comparable"
    if report.passed:
        return "passed"
    causes = [line for line in [*report.problems, *report.notes] if line.startswith("cause: ")]
    if any(re.search(BUGS[name][0], line) for line in causes):
        return "named"
    found = [line for line in causes if not line.startswith("cause: not found")]
    return "wrong cause" if found else "failed without cause"


def run_one(
    name: str, folder: Path, ranks: list[int], servers: RankServers, show: bool
) -> tuple[str, str, float]:
    script = folder / f"{name}.py"
    header = next(part.HEADER for part in SETS if name in part.BUGS or name in part.CORRECT)
    script.write_text(header + (CORRECT[name] if name in CORRECT else BUGS[name][1]))
    for beside, text in seeded_scripts_more.FILES.get(name, {}).items():
        (folder / beside).write_text(text)
    begun = time.monotonic()
    report: VerifyReport | None = None
    said = ""
    try:
        report = verify([str(script)], ranks, 8, "cpu", lambda text: None, servers)
        lines = [*report.notes, *report.problems]
        said = " / ".join(lines)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    verdict = judge(name, report)
    if show:
        print(f"--- {name}: {verdict}\n    " + said.replace(" / ", "\n    "), flush=True)
    return verdict, said, time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of them")
    parser.add_argument("--set", type=int, choices=range(len(SETS)), help="the scripts of one file")
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--show", action="store_true", help="what verify says of each script")
    parser.add_argument("--out", type=Path, help="a JSON file of verdicts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = [int(part) for part in args.ranks.split(",")]
    names = [
        name
        for name in [*BUGS, *CORRECT]
        if (not args.only or any(part in name for part in args.only))
        and (args.set is None or name in SETS[args.set].BUGS | SETS[args.set].CORRECT)
    ]
    rows: dict[str, dict[str, str | float]] = {}
    if args.out and args.out.exists():
        rows = json.loads(args.out.read_text())
    with (
        tempfile.TemporaryDirectory(prefix="mgt-seeded-") as folder,
        RankServers(max(ranks)) as servers,
    ):
        for name in names:
            if name in rows:
                continue
            verdict, said, seconds = run_one(name, Path(folder), ranks, servers, args.show)
            rows[name] = {"verdict": verdict, "says": said, "seconds": round(seconds, 1)}
            print(f"{name:44} {verdict:24} {seconds:5.1f} s", flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table({name: row for name, row in rows.items() if name in names}, args.ranks))


def table(rows: dict[str, dict[str, str | float]], ranks: str) -> str:
    lines = [
        f"`mgt verify --ranks {ranks}`: {platform.machine()}, {os.cpu_count()} cores, CPU ranks "
        f"over gloo, torch {torch.__version__}, Python {platform.python_version()}.",
        "",
    ]
    for title, kinds, among in (
        (
            "with a bug",
            ("named", "wrong cause", "failed without cause", "passed", "crashed"),
            BUGS,
        ),
        ("correct", ("ok", "not comparable", "false alarm", "crashed"), CORRECT),
    ):
        mine = [row["verdict"] for name, row in rows.items() if name in among]
        counts = [str(mine.count(kind)) for kind in kinds]
        lines += [f"| {title} | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
        lines += [f"| {len(mine)} | {' | '.join(counts)} |", ""]
    wrong = {name: row for name, row in rows.items() if row["verdict"] not in ("named", "ok")}
    lines += ["| script | verdict | what `mgt verify` says |", "|---|---|---|"] if wrong else []
    lines += [f"| {name} | {r['verdict']} | {r['says']!s:.200} |" for name, r in wrong.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
