"""`mgt run`: any script, once per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError


def run_script(
    command: Sequence[str],
    num_gpus: int,
    share_gpu: bool,
    again: Mapping[str, Any],
    hosts: Mapping[str, Any],
) -> int:
    """Run a script on every rank; returns the exit code of the run."""
    from multi_gpu_training.launch.engine import FINDS_NODES, Hosts, LaunchPlan
    from multi_gpu_training.launch.launcher import ranks_for, ranks_per_node, supervise

    script, *arguments = command
    if not Path(script).is_file():
        raise ConfigError(
            f"mgt run {script}: no such file; give the path of a Python script", code="MGT104"
        )
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    found = Hosts.from_environment(**hosts)
    if found.engine in FINDS_NODES:  # whose nodes have other GPUs than this machine
        here = ranks_per_node(num_gpus)
    else:
        here = ranks_for(num_gpus, share_gpu)
    plan = LaunchPlan(here, found, **again)
    return supervise([script, *arguments], plan)
