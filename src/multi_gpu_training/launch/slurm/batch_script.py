"""The sbatch script of a run: what Slurm is asked for, and what it then runs."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.slurm.node_lists import expand
from multi_gpu_training.run_places import path_problem
from multi_gpu_training.safe_files import SMALL
from multi_gpu_training.safe_output import brief

JOBS = "slurm-jobs"  # the folder, where the job is submitted, of its scripts and logs
MAX_REQUEUES = 50
LEAD_S = 120  # from Slurm's warning to the time limit; it may come half a minute early
_SUPERVISOR = "multi_gpu_training.launch.slurm.job_supervisor"
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
# What the script sets itself, and the flag that changes it.
_OURS = {
    "nodes": "--nodes",
    "time": "--time",
    "partition": "--partition",
    "gpus-per-node": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-task",
    "ntasks-per-node": "--gpus-per-node and --gpus-per-task",
    "ntasks": "--nodes",
    "output": "nothing: the log is followed",
    "error": "nothing: the log is followed",
    "open-mode": "nothing: logs of requeued jobs are appended",
    "requeue": "nothing: it is always set",
    "no-requeue": "--max-requeues 0",
    "signal": "nothing: it is sent before the time limit",
    "parsable": "nothing",
    "test-only": "mgt check --engine slurm",
    "wait": "nothing: without --detach the job is followed",
    "wrap": "mgt run SCRIPT.py",
    "het-group": "--het",
}


@dataclass(frozen=True)
class Component:
    """Nodes of one kind. A job has one, a heterogeneous one several."""

    nodes: str  # 2, or 1-2
    gpus_per_node: str | None = None
    gpus_per_task: int | None = None
    partition: str | None = None
    options: tuple[str, ...] = ()  # further ones, as `key=value` or `key`

    @property
    def tasks_per_node(self) -> int:
        """Each task is a launcher with the ranks of its GPUs."""
        if self.gpus_per_task is None or self.gpus_per_node is None:
            return 1
        return gpu_count(self.gpus_per_node) // self.gpus_per_task

    def lines(self) -> list[str]:
        _, dash, most = self.nodes.partition("-")
        found = [f"--nodes={self.nodes}", f"--ntasks-per-node={self.tasks_per_node}"]
        if dash:
            # Slurm gives no more nodes than tasks, and else wants cores for all tasks on one node.
            found = [f"--nodes={self.nodes}", f"--ntasks={most}", "--overcommit"]
        if self.gpus_per_task is not None:
            found.append(f"--gpus-per-task={self.gpus_per_task}")
        elif self.gpus_per_node is not None:
            found.append(f"--gpus-per-node={self.gpus_per_node}")
        if self.partition is not None:
            found.append(f"--partition={self.partition}")
        pairs = (option.partition("=") for option in self.options)
        return [*found, *(f"--{key}{equals}{_quoted(value)}" for key, equals, value in pairs)]


@dataclass(frozen=True)
class BatchJob:
    """Everything that the script says. `command` is a script or `-m module`, with its words."""

    command: tuple[str, ...]
    components: tuple[Component, ...]
    folder: Path
    name: str = "mgt"
    limit: str | None = None
    setup: str = ""
    ranks: int | None = None  # of each task; None: as many as it has GPUs
    most_nodes: int = 0  # of a run whose nodes may come and go; 0: the number is fixed
    max_requeues: int = MAX_REQUEUES
    max_restarts: int | None = None
    recovery_timeout: float = 300.0
    python: str = field(default_factory=lambda: sys.executable)
    # Job ids may begin anew; with this the run keeps a name of its own.
    submission: str = field(default_factory=lambda: f"{int(time.time()):x}")

    @property
    def is_array(self) -> bool:
        return any(
            option.partition("=")[0] == "array"
            for part in self.components
            for option in part.options
        )

    def log(self, job: str) -> Path:
        """Where a job writes; each task of an array has a log of its own."""
        return self.folder / f"{job}{'_*' if self.is_array else ''}.log"

    def text(self) -> str:
        first, *further = self.components
        limit = seconds_of(self.limit) if self.limit is not None else None
        lead = LEAD_S if limit is None else max(30, min(LEAD_S, limit // 4))
        asked = [
            f"--job-name={self.name}",
            f"--output={_quoted(self._output)}",
            "--open-mode=append",
            "--requeue" if self.max_requeues else "--no-requeue",
            # To the batch script alone, which passes it on and has the job requeued.
            f"--signal=B:USR1@{lead}",
            *([f"--time={self.limit}"] if self.limit is not None else []),
            *first.lines(),
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in asked)]
        for component in further:
            lines += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in component.lines())]
        lines.append("")
        lines.append(f'python="{_inside_quotes(self.python)}"')
        if self.setup:
            # One that activates an environment means its Python; the shell of the user who
            # submitted the job, whose variables sbatch passes on, may have another one active.
            lines += [
                "mgt_venv=${VIRTUAL_ENV:-} mgt_conda=${CONDA_PREFIX:-}",
                *("# --setup-file", self.setup.rstrip("\n"), "# End of --setup-file"),
                'if [ "${VIRTUAL_ENV:-$mgt_venv}" != "$mgt_venv" ]; then',
                "  python=$VIRTUAL_ENV/bin/python",
                'elif [ "${CONDA_PREFIX:-$mgt_conda}" != "$mgt_conda" ]; then',
                "  python=$CONDA_PREFIX/bin/python",
                "fi",
            ]
        lines += [
            # With a container's command before it, MGT_PYTHON is a path in the container.
            '[ -n "${MGT_TASK_PREFIX:-}" ] || python=${MGT_PYTHON:-$python}',
            f'exec "$python" -m {_SUPERVISOR} \\',
            f"  {shlex.join(self._flags())} \\",
            f"  -- {shlex.join(self.command)}",
        ]
        return "\n".join(lines) + "\n"

    @property
    def _output(self) -> str:
        """The log in sbatch's pattern, in which the folder's own % stands for nothing."""
        name = "%A_%a.log" if self.is_array else "%j.log"
        return f"{str(self.folder).replace('%', '%%')}/{name}"

    def _flags(self) -> list[str]:
        flags = [f"--folder={self.folder}", f"--submission={self.submission}"]
        flags += [f"--max-requeues={self.max_requeues}"]
        flags += [f"--recovery-timeout={self.recovery_timeout:g}"]
        if self.ranks is not None:
            flags.append(f"--ranks={self.ranks}")
        if self.most_nodes:
            flags.append(f"--most-nodes={self.most_nodes}")
        if self.max_restarts is not None:
            flags.append(f"--max-restarts={self.max_restarts}")
        return flags


def parse_components(
    nodes: str, options: Mapping[str, Any], problems: list[str]
) -> tuple[Component, ...]:
    """The components that the flags ask for; what is wrong with them goes to `problems`."""
    passed = tuple(options.get("sbatch") or ())
    problems += _option_problems(passed)
    main = Component(
        nodes,
        options.get("gpus_per_node"),
        options.get("gpus_per_task"),
        options.get("partition"),
        passed,
    )
    components = [main, *(_het(text, problems) for text in options.get("het") or ())]
    for component in components:
        problems += _gpu_problems(component)
    return tuple(components)


def _het(text: str, problems: list[str]) -> Component:
    """`nodes=1,gpus-per-node=8,partition=big`: a further component of a heterogeneous job."""
    found: dict[str, str] = {}
    # A comma inside brackets belongs to a node list.
    for word in re.split(r",(?![^\[]*\])", text):
        key, _, value = word.strip().partition("=")
        key = key.replace("_", "-")
        if key in found:
            problems.append(f"--het {brief(text)}: {brief(key, 40)} is given twice; keep one")
        found[key] = value
    nodes = found.pop("nodes", "1")
    per_task = found.pop("gpus-per-task", None)
    if not nodes.isdecimal() or int(nodes) < 1:
        problems.append(f"--het {brief(text)}: nodes={brief(nodes, 40)}; use 1 or more")
    if per_task is not None and not per_task.isdecimal():
        problems.append(f"--het {brief(text)}: gpus-per-task is a whole number")
        per_task = None
    component = Component(
        nodes,
        found.pop("gpus-per-node", None),
        None if per_task is None else int(per_task),
        found.pop("partition", None),
        tuple(f"{key}={value}" if value else key for key, value in found.items()),
    )
    problems += _option_problems(component.options)
    return component


def _option_problems(options: Sequence[str]) -> list[str]:
    problems = []
    for option in options:
        key, _, value = option.partition("=")
        # A line of its own in the script must stay one line, and an option must stay one option.
        if not _OPTION.fullmatch(key) or not value.isprintable():
            problems.append(
                f"--sbatch {brief(option)}: write it as sbatch's own option without the dashes, "
                "such as account=NAME or exclusive"
            )
        elif key in _OURS:
            problems.append(f"--sbatch {brief(option)}: use {_OURS[key]} instead")
        elif key in ("nodelist", "exclude"):
            try:
                expand(value)
            except ConfigError as error:
                problems += [f"--sbatch {key}: {problem}" for problem in error.problems]
    return problems


def _gpu_problems(component: Component) -> list[str]:
    per_node, per_task = component.gpus_per_node, component.gpus_per_task
    if component.partition is not None and not re.fullmatch(r"[\w.,-]+", component.partition):
        return [f"--partition {brief(component.partition)}: give a name that `sinfo` lists"]
    if per_node is not None and not re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?[1-9]\d{0,3}", per_node):
        return [f"--gpus-per-node {brief(per_node)}: give a number, or TYPE:NUMBER such as a100:4"]
    if per_task is None:
        return []
    if "-" in component.nodes:
        return ["--gpus-per-task needs a fixed number of --nodes, not LEAST:MOST"]
    if per_node is None:
        return [f"--gpus-per-task {per_task} needs --gpus-per-node: how many a node has in all"]
    if per_task < 1 or gpu_count(per_node) % per_task:
        return [f"--gpus-per-task {per_task} does not divide --gpus-per-node {per_node}"]
    return []


def gpu_count(per_node: str) -> int:
    return int(per_node.rpartition(":")[2])


def seconds_of(text: str) -> int | None:
    """A time in Slurm's words, in seconds; None: no limit. ConfigError: it is not one."""
    if text.lower() in ("unlimited", "infinite"):
        return None
    found = _TIME.fullmatch(text)
    if found is None or len(text) > 20:
        raise ConfigError(
            f"--time {brief(text, 40)} is not a time of Slurm; write it as HOURS:MINUTES:SECONDS "
            "such as 4:00:00, as DAYS-HOURS such as 1-12, or as minutes"
        )
    days, *rest = (None if part is None else int(part) for part in found.groups())
    first, second, third = rest
    assert first is not None
    if days is not None:  # D-H, D-H:M, D-H:M:S
        seconds = (days * 24 + first) * 3600 + (second or 0) * 60 + (third or 0)
    elif third is not None:  # H:M:S
        seconds = first * 3600 + (second or 0) * 60 + third
    else:  # M, M:S
        seconds = first * 60 + (second or 0)
    if seconds < 60:
        raise ConfigError(f"--time {text}: a job needs a minute at least; 4:00:00 is four hours")
    return seconds


def read_setup(path: str | None) -> str:
    """The lines for modules, environments or containers that come before the run."""
    if path is None:
        return ""
    problem = path_problem(path)
    try:
        if problem is not None:
            raise ValueError(problem)
        if Path(path).exists() and not Path(path).is_file():  # a FIFO would be waited for
            raise ValueError("it is not a regular file")
        if Path(path).stat().st_size > SMALL:
            raise ValueError(f"it has more than {SMALL:,} bytes")
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"--setup-file {brief(path)} cannot be read: {said}; give a file with shell lines "
            "such as `module load cuda`"
        ) from None
    if any(line.startswith("#SBATCH") for line in text.splitlines()):
        raise ConfigError(
            f"--setup-file {brief(path)} has #SBATCH lines, which Slurm would not read there; "
            "give them as --sbatch KEY=VALUE"
        )
    return text


def exit_code_file(folder: Path, key: str) -> Path:
    """Where a job leaves its exit code, for the time when Slurm has forgotten it."""
    return folder / key / "exit_code"


def _quoted(text: str) -> str:
    """A word of an #SBATCH line, which Slurm reads like a shell, but also \\ inside quotes."""
    if re.fullmatch(r"[\w@%+=:,./\[\]-]*", text, re.ASCII):
        return text
    return shlex.quote(text.replace("\\", "\\\\"))


def _inside_quotes(text: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", text)
