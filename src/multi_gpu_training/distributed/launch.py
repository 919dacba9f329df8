"""Start the ranks of a run on this machine, watch them, and end them all when one ends badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from multi_gpu_training.config import MultiGPUConfig, TrainingMode
from multi_gpu_training.distributed.identity import from_environment
from multi_gpu_training.distributed.rank_main import install_error_hook
from multi_gpu_training.distributed.restarts import Limits
from multi_gpu_training.distributed.scratch import Scratch
from multi_gpu_training.errors import ConfigError, LaunchError, RankFailure

# Ranks get this long to end by themselves before they are killed; Ctrl-C must end within 5 s.
GRACE_S = 3


@dataclass(frozen=True)
class Hosts:
    """Which machines take part, and where the ranks meet. By default this one, on a free port.

    `nodes` is the most there may be, `at_least` how many are enough to train; None: all of them.
    `ranks_here` is how many ranks this one has, where the config does not say it.
    """

    nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    at_least: int | None = None
    ranks_here: int | None = None

    @property
    def least(self) -> int:
        return self.nodes if self.at_least is None else self.at_least

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks may change while the run goes on."""
        return self.least < self.nodes

    @classmethod
    def from_environment(cls, **flags: Any) -> Hosts:
        """MASTER_ADDR and MASTER_PORT are honoured; flags win. nodes may be "1:2"."""
        if isinstance(flags.get("nodes"), str):
            flags = {**flags, **_node_range(flags["nodes"])}
        port = os.environ.get("MASTER_PORT")
        if port and not (port.isdecimal() and 1 <= int(port) <= 65535):
            raise ConfigError(
                f"the environment has MASTER_PORT={port!r}, which is no port; unset it for a free "
                "one, or set it to a number from 1 to 65535"
            )
        found = {
            "master_addr": os.environ.get("MASTER_ADDR"),
            "master_port": int(port) if port else None,
        }
        return cls(**{**found, **{k: v for k, v in flags.items() if v is not None}})

    def __post_init__(self) -> None:
        problems = []
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            problems.append(
                f"--master-port {self.master_port} is no port; use 1 to 65535, or none for a "
                "free one"
            )
        if self.nodes < 1 or not 1 <= self.least <= self.nodes:
            asked = self.nodes if self.at_least is None else f"{self.at_least}:{self.nodes}"
            problems.append(f"--nnodes {asked}: use 1 or more, or LEAST:MOST such as 1:2")
        elif not 0 <= self.node_rank < self.nodes:
            problems.append(
                f"--node-rank {self.node_rank} is outside --nnodes {self.nodes}; "
                f"nodes count from 0 to {self.nodes - 1}"
            )
        if self.nodes > 1 and self.master_addr is None:
            problems.append(
                f"--nnodes {self.nodes} needs --master-addr: the address of node 0, on every node"
            )
        if problems:
            raise ConfigError(problems)


def _node_range(text: str) -> dict[str, int]:
    """`2`, or `1:2` for a run that goes on with one node and may have two."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else not most)):
        raise ConfigError(f"--nnodes {text}: give a number, or LEAST:MOST such as 1:2")
    return {"nodes": int(most), "at_least": int(least)} if colon else {"nodes": int(least)}


@dataclass(frozen=True)
class LaunchPlan:
    """How many ranks, where, and how often they are started again.

    max_restarts None: as often as the config allows that the ranks come with, and never before
    they have shown one.
    """

    ranks_here: int
    hosts: Hosts = Hosts()
    max_restarts: int | None = None
    recovery_timeout: float = 300.0
    restart_window_s: float = 3600.0

    @property
    def limits(self) -> Limits | None:
        if self.max_restarts is not None:
            return Limits(self.max_restarts, self.restart_window_s)
        return None


def available_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ranks_for(
    num_gpus: int,
    share_gpu: bool = False,
    device_ids: list[int] | None = None,
    device: str = "auto",
) -> int:
    """Ranks for `--num-gpus`: -1 is every GPU; without GPUs, or on device=cpu, N means N CPU
    ranks."""
    gpus = 0 if device == "cpu" else available_gpus()
    if gpus and device_ids is not None:
        gpus = len(device_ids)
    if num_gpus == -1:
        return max(1, gpus)
    if num_gpus < 1:
        raise ConfigError(f"--num-gpus {num_gpus}: use -1 for all, or a number from 1 on")
    if gpus and num_gpus > gpus and not share_gpu:
        raise ConfigError(
            f"--num-gpus {num_gpus} asked for, but {gpus} GPUs are there; use at most {gpus}, or "
            "--share-gpu to test several ranks on one GPU"
        )
    return num_gpus


def start_ranks_if_needed(config: MultiGPUConfig, hosts: Hosts | None = None) -> None:
    """Turn a plain `python train.py` into the supervisor of its own ranks.

    Returns at once in a rank, or where one rank is enough. Else runs this very command once a
    rank, waits, and exits with the run's code.
    """
    if config.training_mode is not TrainingMode.DISTRIBUTED_DATA_PARALLEL:
        return
    if from_environment() is not None:
        return
    if config.rank is not None and "MASTER_ADDR" in os.environ:
        return  # started by hand, one process a rank: join
    hosts = hosts or Hosts.from_environment()
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
        raise ConfigError(f"world_size={world} does not divide over {hosts.nodes} nodes")
    if gpus and here > gpus and not config.share_gpu:
        raise ConfigError(
            f"world_size={world} needs {here} GPUs on this machine and {gpus} are there; start "
            f"{gpus}, or set share_gpu=true to test several ranks on one GPU"
        )
    if world == 1:
        return
    command = own_command()
    if command is None:
        if config.world_size is None:
            return
        raise LaunchError(
            f"world_size={world} cannot be started from a notebook or an interactive session; put "
            "the training into a file and use `mgt run FILE`, or call "
            "launch_distributed_training(function, num_gpus=N) with a function of a module"
        )
    limits = Limits.of(config)
    plan = LaunchPlan(
        here, hosts, limits.restarts, config.recovery_timeout, config.restart_window_s
    )
    sys.exit(supervise(command, plan))


def own_command() -> list[str] | None:
    """The script or module that this process runs, with its arguments; None when interactive."""
    main = sys.modules["__main__"]
    arguments = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) + 1 :] if len(sys.argv) > 1 else []
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *arguments]
    read_in = sys.argv[0] in ("", "-")  # python < FILE, which can be read once only
    if not getattr(main, "__file__", None) or hasattr(sys, "ps1") or read_in:
        return None
    return [sys.argv[0], *arguments]


def supervise(command: Sequence[str], plan: LaunchPlan) -> int:
    """Run `command` once a rank and return the exit code of the run."""
    arguments = [*subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    arguments += ["-m", "multi_gpu_training.distributed.rank_main"]
    arguments += [f"--launcher={os.getpid()}", *command]
    try:
        _run_agent(plan, sys.executable, tuple(arguments))
    except RankFailure as failure:
        print(failure, file=sys.stderr, flush=True)
        return failure.exit_code
    except KeyboardInterrupt:
        print("interrupted: every rank has ended", file=sys.stderr)
        return 130
    except _Signalled as signalled:
        print(f"ended by signal {signalled.number}: every rank has ended", file=sys.stderr)
        return 128 + signalled.number
    return 0


def launch_distributed_training(
    function: Callable[..., Any], num_gpus: int = -1, args: Sequence[Any] = (), **options: Any
) -> Any:
    """Run `function(*args)` on `num_gpus` ranks (-1: every GPU) and return rank 0's result.

    `function` must be importable: defined in a module, not in a notebook cell. `options` are
    those of LaunchPlan.
    """
    ranks = ranks_for(num_gpus, share_gpu=bool(options.pop("share_gpu", False)))
    main = sys.modules.get(function.__module__)
    if function.__module__ == "__main__" and not getattr(main, "__file__", None):
        raise LaunchError(
            f"{function.__qualname__} lives in an interactive session, where other processes "
            "cannot find it; move it into a module and import it"
        )
    plan = LaunchPlan(ranks, Hosts.from_environment(), **options)
    install_error_hook()
    try:
        return _run_agent(plan, _call, (function, tuple(args), os.getpid())).get(0)
    except _Signalled as signalled:
        sys.exit(128 + signalled.number)


def _call(function: Callable[..., Any], args: tuple[Any, ...], launcher: int) -> Any:
    from multi_gpu_training.distributed.rank_main import as_rank

    os.setsid()  # signals are the launcher's to pass on, to this rank and all that it starts
    return as_rank(lambda: function(*args), launcher)


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def _run_agent(plan: LaunchPlan, entrypoint: Any, args: tuple[Any, ...]) -> dict[int, Any]:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from multi_gpu_training.distributed.node_agent import make_agent
    from multi_gpu_training.distributed.preemption import handlers_kept

    _set_thread_default(plan.ranks_here)
    with handlers_kept(), Scratch() as logs:
        agent, meeting = make_agent(plan, entrypoint, args, str(logs))
        try:
            result = agent.run()
        except (dist.DistError, RendezvousError, TimeoutError) as error:
            hosts = plan.hosts
            raise LaunchError(
                f"node {hosts.node_rank} of {hosts.nodes} did not meet the others at "
                f"{hosts.master_addr or '127.0.0.1'}:{hosts.master_port or 'a free port'} within "
                f"recovery_timeout={plan.recovery_timeout:g} s ({type(error).__name__}: {error}); "
                "check that every node is started with the same --master-addr and --master-port "
                "and can reach it"
            ) from None
        except SignalException as caught:
            if caught.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise _Signalled(int(caught.sigval)) from None
        finally:
            meeting.shutdown()
        if result.is_failed():
            raise agent.error(result)
        return dict(result.return_values)


def _set_thread_default(ranks: int) -> None:
    """Share the cores among the ranks, unless the user has set OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
