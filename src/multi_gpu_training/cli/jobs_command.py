"""`mgt jobs`: the Slurm jobs of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.slurm.batch_script import JOBS, exit_code_file
from multi_gpu_training.launch.slurm.slurm_commands import job_status, require_slurm
from multi_gpu_training.safe_output import printable


def show_jobs(folder: str, as_json: bool) -> int:
    jobs = Path(folder) / JOBS
    scripts = sorted(jobs.glob("*.sh"), key=lambda path: path.stat().st_mtime)
    if not scripts:
        raise ConfigError(
            f"no job was submitted from {Path(folder).absolute()}; give the folder in which `mgt "
            "train --engine slurm` was typed"
        )
    require_slurm("mgt jobs")
    found = [_row(script.stem, jobs) for script in scripts]
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    table = Table("job", "name", "state", "requeued", "nodes", "log")
    for row in found:
        table.add_row(*(printable(str(value)) for value in row.values()))
    Console().print(table)
    return 0


def _row(job: str, folder: Path) -> dict[str, Any]:
    log = folder / f"{job}.log"
    shown = str(log) if log.exists() else ""
    try:
        status = job_status(job)
    except LaunchError as error:
        return _fields(job, "", f"unknown ({error})", "", "", shown)
    if status is None:  # Slurm forgets a job minutes after its end
        try:
            code = int(exit_code_file(folder, job).read_text())
        except (OSError, ValueError):
            return _fields(job, "", "ended", "", "", shown)
        return _fields(job, "", f"ended with {code}", "", "", shown)
    state = status.state.lower()
    if status.state == "PENDING":
        state += f" ({status.reason})"
    elif status.ended and status.exit_code:
        state += f" with {status.exit_code}"
    return _fields(job, status.name, state, status.restarts, status.nodes, shown)


def _fields(*values: Any) -> dict[str, Any]:
    return dict(zip(("job", "name", "state", "requeued", "nodes", "log"), values, strict=True))
