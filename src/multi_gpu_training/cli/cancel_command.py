"""`mgt cancel`: end Slurm jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.slurm.slurm_commands import (
    SlurmRefused,
    cancel,
    job_statuses,
    require_slurm,
)
from multi_gpu_training.safe_output import brief


def cancel_jobs(jobs: Sequence[str]) -> int:
    wrong = [job for job in jobs if not re.fullmatch(r"\d+(_\d+)?", job)]
    if wrong:
        raise ConfigError(f"{brief(wrong[0])} is not the number of a job; `mgt jobs` lists them")
    require_slurm("mgt cancel")
    stand = {job: job_statuses(job) for job in jobs}
    over = {job: tasks for job, tasks in stand.items() if all(task.ended for task in tasks)}
    if over:
        job, tasks = next(iter(over.items()))
        how = f"has ended as {tasks[0].state}" if tasks else "is not known to Slurm"
        raise ConfigError(f"job {job} {how}; `mgt jobs` lists those that run. None was cancelled")
    try:
        cancel(jobs)
    except SlurmRefused as error:
        raise ConfigError(f"{error}; you can cancel your own jobs only") from None
    print(f"asked {', '.join(jobs)} to save and end; `mgt train ... --resume auto` continues it")
    return 0
