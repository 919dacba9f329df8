"""`mgt report`: what a run did, why it is slow, and how runs compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.report import write_page
from multi_gpu_training.monitoring.report.figures import figures
from multi_gpu_training.monitoring.report.run_record import RunRecord, read_runs
from multi_gpu_training.monitoring.report.terminal import show
from multi_gpu_training.monitoring.report.verdict import judge
from multi_gpu_training.run_places import is_url


def report(folders: list[str], out: str | None, as_json: bool, html: bool) -> int:
    """Show the runs, and write the page unless told not to."""
    if out is not None and not html:
        raise ConfigError("--out names the HTML file, which --no-html leaves out; drop one of them")
    runs = _found(folders) if any(map(is_url, folders)) else read_runs(folders)
    if as_json:
        print(json.dumps([summary(run) for run in runs], indent=1))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 160  # into a file or a pipe nothing need be cut
        show(runs, console)
    if html:
        path = write_page(runs, out)
        if not as_json:
            print(f"report: {Path(path)}")
    return 0


def _found(names: list[str]) -> list[RunRecord]:
    """The runs, of which some are at a URL."""
    # These import torch, which takes 150 MB and a second: a folder is read without.
    from multi_gpu_training.storage.remote_resume import parse_address
    from multi_gpu_training.storage.remote_view import fetch_record, is_running

    runs = read_runs([fetch_record(name) if is_url(name) else name for name in names])
    for name, run in zip(names, runs, strict=True):
        if is_url(name) and is_running(parse_address(name).url):
            run.state = "running"
    return runs


def summary(run: RunRecord) -> dict[str, Any]:
    """The verdict and the figures, for programs."""
    verdict, found = judge(run), figures(run)
    causes = [
        {
            "kind": cause.kind,
            "ranks": list(cause.ranks),
            "seconds": cause.seconds,
            "gain": cause.gain,
        }
        for cause in verdict.causes
    ]
    return {
        "run": str(run.path),
        "state": run.state,
        "steps": run.last_step,
        "world_size": run.world_size,
        "verdict": verdict.kind,
        "headline": verdict.headline,
        "causes": causes,
        "notes": verdict.notes,
        **vars(found),
    }
