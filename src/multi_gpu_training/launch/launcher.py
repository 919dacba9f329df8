"""Start a script or a function once per rank, with the engine that fits.

`mgt run`, `mgt train`, a plain `python train.py` and `launch_distributed_training` all come here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import from_environment, refuse_half_a_launch
from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.engine import (
    Hosts,
    LaunchPlan,
    RankJob,
    choose_engine,
    run_job,
)
from multi_gpu_training.safe_output import brief

# A slip of the finger must not bring the machine down.
MOST_RANKS, MOST_RANKS_PER_CORE = 256, 8


def available_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ranks_for(
    num_gpus: int,
    share_gpu: bool = False,
    device_ids: list[int] | None = None,
    device: str = "auto",
) -> int:
    """How many ranks `--num-gpus` means; -1 is every GPU. Without GPUs, N means N CPU ranks."""
    gpus = 0 if device == "cpu" else available_gpus()
    if gpus and device_ids is not None:
        gpus = len(device_ids)
    if num_gpus == -1:
        return max(1, gpus)
    if num_gpus < 1:
        raise ConfigError(f"--num-gpus {num_gpus}: use -1 for all, or a positive number")
    if not gpus or share_gpu:
        problem = too_many_ranks(num_gpus)
        if problem is not None:
            raise ConfigError(f"--num-gpus {brief(num_gpus, 40)}: {problem}")
    if gpus and num_gpus > gpus and not share_gpu:
        raise ConfigError(
            f"--num-gpus {num_gpus}: this machine has only {gpus} GPU{'s' * (gpus > 1)}; use at "
            f"most {gpus}, or --share-gpu to test several ranks on one GPU",
            code="MGT201",
        )
    return num_gpus


def ranks_per_node(num_gpus: int | None) -> int:
    """How many ranks `--num-gpus` asks for on each node of a cluster, whose GPUs nobody knows yet.

    0: as many as the nodes have GPUs, which the engine finds out.
    """
    if num_gpus is None or num_gpus == -1:
        return 0
    if num_gpus < 1:
        raise ConfigError(f"--num-gpus {num_gpus}: use -1 for all, or a positive number")
    return num_gpus


def too_many_ranks(ranks: int) -> str | None:
    """Why so many processes cannot be started on this machine; None if they can."""
    most = max(MOST_RANKS, MOST_RANKS_PER_CORE * (os.cpu_count() or 1))
    if ranks <= most:
        return None
    return f"each is a separate process, and this machine starts at most {most}"


def start_ranks_if_needed(config: MultiGPUConfig, hosts: Hosts | None = None) -> None:
    """Turn a plain `python train.py` into the supervisor of its own ranks.

    Returns at once in a rank, or where one rank is enough. Otherwise runs this very command once
    per rank, waits, and exits with the run's code.
    """
    hosts = hosts or Hosts.from_environment()
    if not config.training_mode.has_ranks:
        choose_engine(hosts, config)  # refuses options that would do nothing
        if from_environment() is None:
            refuse_half_a_launch(1)
        return
    if choose_engine(hosts, config).identity(config) is not None:  # this process is a rank
        return
    if config.rank:  # 0 is what many a script says that starts its ranks here
        raise ConfigError(
            f"rank={config.rank} says that you start each rank by hand, and the environment has no "
            "MASTER_ADDR, where they meet; set it, or drop rank and have the ranks started here",
            code="MGT202",
        )
    here, world = _ranks_here(config, hosts)
    refuse_half_a_launch(world)
    if world == 1:
        return
    command = own_command()
    if command is None:
        if config.world_size is None:
            return
        raise LaunchError(
            f"world_size={world} cannot be started from a notebook or an interactive session; put "
            "the training into a function and call notebook_launch(function, num_ranks="
            f"{world}), or into a file and use `mgt run FILE`"
        )
    plan = LaunchPlan(
        here, hosts, config.allowed_restarts, config.recovery_timeout, config.restart_window_s
    )
    sys.exit(supervise(command, plan))


def _ranks_here(config: MultiGPUConfig, hosts: Hosts) -> tuple[int, int]:
    """How many ranks to start on this machine, and how many there are in the whole run."""
    gpus = 0 if config.device == "cpu" else available_gpus()
    if gpus and config.device_ids is not None:
        gpus = len(config.device_ids)
    world = config.world_size or (hosts.ranks_here or max(1, gpus)) * hosts.nodes
    if hosts.elastic and config.world_size:
        raise ConfigError(
            f"world_size={world} and --nnodes {hosts.least}:{hosts.nodes} contradict each other: "
            "the number of ranks changes with the nodes; drop world_size, or give --nnodes N"
        )
    here = world // hosts.nodes
    if world % hosts.nodes:
        raise ConfigError(
            f"world_size={world} does not divide over {hosts.nodes} nodes", code="MGT202"
        )
    problem = too_many_ranks(here) if not gpus or config.share_gpu else None
    if problem is not None:
        raise ConfigError(f"world_size={world}: {problem}")
    if gpus and here > gpus and not config.share_gpu:
        raise ConfigError(
            f"world_size={world} needs {here} GPUs on this machine, which has {gpus}; start "
            f"{gpus} ranks, or set share_gpu=true to test several ranks on one GPU",
            code="MGT201",
        )
    return here, world


def own_command() -> list[str] | None:
    """The script or module that this process runs, with its arguments; None when interactive."""
    main = sys.modules["__main__"]
    # As they were given: the script may have changed sys.argv since.
    arguments = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] if len(sys.argv) > 1 else []
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *arguments]
    read_in = sys.argv[0] in ("", "-")  # python < FILE, which can be read once only
    if not getattr(main, "__file__", None) or hasattr(sys, "ps1") or read_in:
        return None
    return [sys.argv[0], *arguments]


def supervise(command: Sequence[str], plan: LaunchPlan) -> int:
    """Run `command` once per rank and return the exit code of the run."""
    engine = choose_engine(plan.hosts)(plan)
    outcome = run_job(engine, RankJob(tuple(command)))
    if outcome.error is not None:
        print(outcome.error.shown(), file=sys.stderr, flush=True)
    elif outcome.signal == signal.SIGINT:
        print("interrupted: every rank has ended", file=sys.stderr)
    elif outcome.signal:
        print(f"ended by signal {outcome.signal}: every rank has ended", file=sys.stderr)
    return outcome.exit_code


def launch_distributed_training(
    function: Callable[..., Any], num_gpus: int = -1, args: Sequence[Any] = (), **options: Any
) -> Any:
    """Run `function(*args)` on `num_gpus` ranks (-1: every GPU) and return rank 0's result.

    `function` must be importable: defined in a module, not in a notebook cell. `options` are
    those of LaunchPlan. In a process that is already a rank, for example under torchrun, the
    function runs there and its own result is returned.
    """
    if not callable(function):
        raise ConfigError(f"{brief(function)} cannot be called; give a function that trains")
    ranks = ranks_for(num_gpus, share_gpu=bool(options.pop("share_gpu", False)))
    main = sys.modules.get(function.__module__)
    if function.__module__ == "__main__" and not getattr(main, "__file__", None):
        raise LaunchError(
            f"{function.__qualname__} lives in an interactive session, where other processes "
            "cannot find it; use notebook_launch, or move it into a module and import it"
        )
    plan = LaunchPlan(ranks, Hosts.from_environment(), **options)
    engine = choose_engine(plan.hosts, MultiGPUConfig(world_size=None if num_gpus == -1 else ranks))
    outcome = run_job(engine(plan), RankJob(function=function, args=tuple(args)))
    if outcome.error is not None:
        raise outcome.error
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal:
        sys.exit(outcome.exit_code)
    return outcome.results[min(outcome.results)] if outcome.results else None
