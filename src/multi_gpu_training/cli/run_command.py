"""`mgt run`: any script, once per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError

MOST_SCRIPT = 10_000_000  # bytes


def run_script(
    command: Sequence[str],
    num_gpus: int,
    share_gpu: bool,
    again: Mapping[str, Any],
    hosts: Mapping[str, Any],
) -> int:
    """Run a script on every rank; returns the exit code of the run."""
    from multi_gpu_training.distributed.identity import refuse_half_a_launch
    from multi_gpu_training.launch.engine import FINDS_NODES, Hosts, LaunchPlan
    from multi_gpu_training.launch.launcher import ranks_for, ranks_per_node, supervise

    script, *arguments = command
    check_script(script)
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    found = Hosts.from_environment(**hosts)
    if found.engine in FINDS_NODES:  # whose nodes have other GPUs than this machine
        here = ranks_per_node(num_gpus)
    else:
        here = ranks_for(num_gpus, share_gpu)
        refuse_half_a_launch(here * found.nodes)
    plan = LaunchPlan(here, found, **again)
    return supervise([script, *arguments], plan)


def check_script(script: str, command: str = "mgt run") -> None:
    """Refuse what no rank could run, before any is started."""
    path = Path(script)
    if not path.is_file():
        if (path / "config.yaml").is_file():
            problem = f"this is a run folder; continue it with `mgt resume {script}`"
        elif path.is_dir():
            problem = "this is a folder; give the path of a Python script"
        else:
            problem = "no such file; give the path of a Python script"
        raise ConfigError(f"{command} {script}: {problem}", code="MGT104")
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{command} {script}: this is a config file, not a Python script; `mgt train {script}` "
            "trains it",
            code="MGT104",
        )
    try:
        if path.stat().st_size > MOST_SCRIPT:
            raise ValueError(f"it has more than {MOST_SCRIPT:,} bytes")
        compile(decode_source(path.read_bytes()), script, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        problem = f"{where}{error.msg}"
    except (ValueError, RecursionError, MemoryError, OSError) as error:
        problem = str(error) or type(error).__name__
    else:
        return
    raise ConfigError(f"{command} {script}: this is not a Python script ({problem})", code="MGT104")
