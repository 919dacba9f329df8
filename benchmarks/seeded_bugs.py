"""Seed bugs into small training scripts, and see whether `mgt verify` finds and names them.

    python benchmarks/seeded_bugs.py --out benchmarks/seeded_bugs.md
    python benchmarks/seeded_bugs.py --only batchnorm_cnn --show

The ranks of every training are forked from this process, which has torch loaded: a script takes a
second or two instead of twenty. `--launch` starts them as the command does.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it
from seeded_scripts import BUGS, CORRECT, HEADER

import multi_gpu_training.manager  # noqa: F401
from multi_gpu_training.distributed.cleanup import end_workers
from multi_gpu_training.launch import rank_main
from multi_gpu_training.measure.request import VARIABLE
from multi_gpu_training.measure.script_runner import TIMED_OUT, ScriptRunner
from multi_gpu_training.planning.verify import VerifyReport, verify


def start_forked(runner: ScriptRunner, request: Any, log: Path) -> int:
    """Stands in for `ScriptRunner.start`: the ranks are forks of this process."""
    path = request.save()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        fork_rank(runner.command, path, log, rank, request.ranks, port)
        for rank in range(request.ranks)
    ]
    codes: dict[int, int] = {}
    ended_at = None
    deadline = time.monotonic() + 240
    while len(codes) < len(children):
        for rank, pid in enumerate(children):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    ended_at = ended_at or time.monotonic()
        now = time.monotonic()
        failed = any(codes.values())
        if now > deadline or (ended_at and now > ended_at + (3 if failed else 20)):
            for rank, pid in enumerate(children):
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            if not failed:
                log.write_text(log.read_text() + "\nhang: a rank waits for one that has left\n")
                return TIMED_OUT
            break
        time.sleep(0.01)
    return next((code for code in codes.values() if code), 0)


def fork_rank(command: Any, request: str, log: Path, rank: int, ranks: int, port: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ |= {VARIABLE: request, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in values.items()}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        torch.set_num_threads(1)
        rank_main.as_rank(lambda: rank_main.run_command(list(command)))
        code: Any = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    end_workers(all_children=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)  # exit functions are this process's parent's


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


def run_one(name: str, folder: Path, ranks: list[int], show: bool) -> tuple[str, str, float]:
    script = folder / f"{name}.py"
    script.write_text(HEADER + (CORRECT[name] if name in CORRECT else BUGS[name][1]))
    begun = time.monotonic()
    report: VerifyReport | None = None
    said = ""
    try:
        report = verify([str(script)], ranks, 8, "cpu", lambda text: None)
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
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--show", action="store_true", help="what verify says of each script")
    parser.add_argument("--launch", action="store_true", help="start ranks as the command does")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not args.launch:
        ScriptRunner.start = start_forked  # type: ignore[method-assign]
        torch.set_num_threads(1)
    ranks = [int(part) for part in args.ranks.split(",")]
    names = [
        name
        for name in [*BUGS, *CORRECT]
        if not args.only or any(part in name for part in args.only)
    ]
    rows = []
    with tempfile.TemporaryDirectory(prefix="mgt-seeded-") as folder:
        for name in names:
            verdict, said, seconds = run_one(name, Path(folder), ranks, args.show)
            rows.append((name, verdict, said, seconds))
            if not args.show:
                print(f"{name:40} {verdict:24} {seconds:5.1f} s", flush=True)
    text = tables(rows, args.ranks)
    print(text)
    if args.out:
        args.out.write_text(text)


def tables(rows: list[tuple[str, str, str, float]], ranks: str) -> str:
    lines = [
        "# Seeded bugs",
        "",
        f"`mgt verify --ranks {ranks}` of every script in `seeded_scripts.py`, by "
        f"`benchmarks/seeded_bugs.py`. {platform.machine()}, {os.cpu_count()} cores, CPU ranks "
        f"over gloo, torch {torch.__version__}, Python {platform.python_version()}.",
        "",
    ]
    for title, kinds, mine in (
        (
            "with a bug",
            ("named", "failed without cause", "wrong cause", "passed", "crashed"),
            [row for row in rows if row[0] in BUGS],
        ),
        (
            "correct",
            ("ok", "not comparable", "false alarm", "crashed"),
            [row for row in rows if row[0] in CORRECT],
        ),
    ):
        counts = [str(sum(row[1] == kind for row in mine)) for kind in kinds]
        lines += [f"| {title} | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
        lines += [f"| {len(mine)} | {' | '.join(counts)} |", ""]
    lines += ["| script with a bug | verdict | what `mgt verify` says |", "|---|---|---|"]
    for name, verdict, said, _ in rows:
        if name in BUGS:
            cause = next((part for part in said.split(" / ") if part.startswith("cause: ")), said)
            lines.append(f"| {name} | {verdict} | {cause.removeprefix('cause: ')[:160]} |")
    wrong = [row for row in rows if row[0] in CORRECT and row[1] != "ok"]
    lines += ["", "| correct script | verdict | why |", "|---|---|---|"] if wrong else []
    lines += [f"| {name} | {verdict} | {said[:200]} |" for name, verdict, said, _ in wrong]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
