"""`mgt jobs`: the Slurm jobs of a folder."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.slurm.batch_script import JOBS, exit_code_file
from multi_gpu_training.launch.slurm.slurm_commands import job_statuses, require_slurm
from multi_gpu_training.safe_output import printable


def show_jobs(folder: str, as_json: bool) -> int:
    jobs = Path(folder) / JOBS
    scripts = sorted(jobs.glob("*.sh"), key=lambda path: path.stat().st_mtime)
    if not scripts:
        raise ConfigError(
            f"no job was submitted from {Path(folder).absolute()}; give the folder where you "
            "ran `mgt train --engine slurm`"
        )
    require_slurm("mgt jobs")
    found = [row for script in scripts for row in _rows(script.stem, jobs)]
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    table = Table("job", "name", "state", "requeued", "nodes", "log")
    for row in found:
        table.add_row(*(printable(str(value)) for value in row.values()))
    Console().print(table)
    return 0


def _rows(job: str, folder: Path) -> list[dict[str, Any]]:
    """What is known of a job, or of each task of an array."""
    try:
        found = job_statuses(job)
    except LaunchError as error:
        return [_fields(job, "", f"unknown ({error})", "", "", _log(job, folder))]
    rows = {}
    for status in found:
        name = f"{job}_{status.task}" if status.task else job
        state = status.state.lower()
        if status.state == "PENDING":
            state += f" ({status.reason})"
        elif status.ended and status.exit_code:
            state += f" with {status.exit_code}"
        rows[name] = _fields(
            name, status.name, state, status.restarts, status.nodes, _log(name, folder)
        )
    # Slurm forgets a job minutes after its end.
    for place in (folder / job, *folder.glob(f"{job}_*/")):
        if place.name not in rows:
            with suppress(OSError, ValueError):
                state = f"ended with {int(exit_code_file(folder, place.name).read_text())}"
                log = _log(place.name, folder)
                rows[place.name] = _fields(place.name, "", state, "", "", log)
    if not rows:
        return [_fields(job, "", "ended", "", "", _log(job, folder))]
    return [rows[name] for name in sorted(rows, key=_number)]


def _number(name: str) -> tuple[int, ...]:
    """The job and the first task that it stands for."""
    return tuple(map(int, re.findall(r"\d+", name)[:2]))


def _log(name: str, folder: Path) -> str:
    log = folder / f"{name}.log"
    return str(log) if log.exists() else ""


def _fields(*values: Any) -> dict[str, Any]:
    return dict(zip(("job", "name", "state", "requeued", "nodes", "log"), values, strict=True))
