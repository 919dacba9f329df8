"""Who am I: the rank that a launcher gave this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_output import brief

FULL_WORLD = "MGT_FULL_WORLD_SIZE"
# A job that its scheduler starts again and again: one name for all its launches, and their count.
RUN_KEY, REQUEUES = "MGT_RUN_KEY", "MGT_REQUEUES"
MOST = 2**31 - 1
_RESTARTS_PER_REQUEUE = 1000  # attempts of a later launch count higher than any of an earlier one


@dataclass(frozen=True)
class Identity:
    """A rank's number, and those of its machine and launch.

    `attempt` counts restarts, `run_id` names the launch. `full_world_size` is how many ranks the
    run has when all its nodes are there; 0: the number never changes.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False
    attempt: int = 0
    run_id: str = ""
    full_world_size: int = 0

    @property
    def on_several_hosts(self) -> bool:
        return self.local_world_size < self.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def host(self) -> str:
        return socket.gethostname()


ALONE = Identity()


def from_environment(env: Mapping[str, str] | None = None) -> Identity | None:
    """The identity a launcher (ours, torchrun, srun) put into the environment, or None."""
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size, rank = _integer(env, "WORLD_SIZE", least=1), _integer(env, "RANK")
        if rank >= world_size:  # it would wait for the others until time is up
            raise ConfigError(
                f"the environment has RANK={rank} and WORLD_SIZE={world_size}: ranks count from 0 "
                "to WORLD_SIZE - 1; unset them, or start with `mgt run` or torchrun",
                code="MGT202",
            )
        _check_local(env, world_size)
        return Identity(
            rank=rank,
            local_rank=_integer(env, "LOCAL_RANK", _integer(env, "RANK")),
            world_size=world_size,
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", world_size, least=1),
            launched=True,
            attempt=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
            + _RESTARTS_PER_REQUEUE * _integer(env, REQUEUES, 0),
            run_id=env.get(RUN_KEY) or _launch_of_torchrun(env),
            full_world_size=_integer(env, FULL_WORLD, 0),
        )
    if _integer(env, "SLURM_NTASKS", 1) > 1 and "SLURM_PROCID" in env and "MASTER_ADDR" in env:
        return Identity(
            rank=_integer(env, "SLURM_PROCID"),
            # With GPUs bound to tasks each rank sees its own GPU alone, as number 0.
            local_rank=0 if "SLURM_GPUS_PER_TASK" in env else _integer(env, "SLURM_LOCALID", 0),
            world_size=_integer(env, "SLURM_NTASKS"),
            local_world_size=_integer(env, "SLURM_NTASKS_PER_NODE", 1),
            launched=True,
            attempt=_integer(env, "SLURM_RESTART_COUNT", 0),
            run_id=f"{slurm_key(env)}.{env.get('SLURM_STEP_ID', '')}",
        )
    return None


def _check_local(env: Mapping[str, str], world_size: int) -> None:
    """Refuse places on the machine that cannot be, and a meeting place without an address."""
    problem = None
    if "LOCAL_WORLD_SIZE" in env:
        local_world = _integer(env, "LOCAL_WORLD_SIZE", least=1)
        if local_world > world_size:
            problem = f"LOCAL_WORLD_SIZE={local_world}, more than WORLD_SIZE={world_size}"
        elif "LOCAL_RANK" in env and _integer(env, "LOCAL_RANK") >= local_world:
            problem = (
                f"LOCAL_RANK={env['LOCAL_RANK']} and LOCAL_WORLD_SIZE={local_world}: local ranks "
                "count from 0 to LOCAL_WORLD_SIZE - 1"
            )
    if world_size > 1 and env.get("MASTER_ADDR") == "":
        problem = "an empty MASTER_ADDR, where the ranks are to meet"
    if problem is not None:
        raise ConfigError(
            f"the environment has {problem}; correct it, or start with `mgt run` or torchrun, "
            "which set it",
            code="MGT202",
        )


def refuse_half_a_launch(world_size: int, env: Mapping[str, str] | None = None) -> None:
    """Refuse to begin a run of `world_size` ranks where the environment promises another one.

    Whoever sets WORLD_SIZE wants these processes to train together; without RANK each would train
    by itself.
    """
    env = os.environ if env is None else env
    if "WORLD_SIZE" in env and "RANK" not in env:
        promised = _integer(env, "WORLD_SIZE", least=1)
        problem = f"WORLD_SIZE={promised} but no RANK" if promised != world_size else None
    elif "RANK" in env and "WORLD_SIZE" not in env:
        problem = f"RANK={brief(env['RANK'])} but no WORLD_SIZE"
    else:
        problem = None
    if problem is not None:
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        raise ConfigError(
            f"the environment has {problem}: this would become a run of its own, with {ranks}; set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, start with `mgt run` or torchrun, or "
            "unset it",
            code="MGT202",
        )


def slurm_key(env: Mapping[str, str]) -> str:
    """What names this job in Slurm, also after it was requeued."""
    # A task of an array may have another job id then.
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env.get('SLURM_ARRAY_TASK_ID', '')}"
    return env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID", "")


def _launch_of_torchrun(env: Mapping[str, str]) -> str:
    """A name that all attempts of this launch share, and no other launch has.

    torchrun's own id is "none" unless the user gives one; then the process that started this rank
    identifies the launch.
    """
    name = env.get("TORCHELASTIC_RUN_ID", "")
    if name != "none":
        return name
    agent = os.getppid()
    try:
        begun = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        begun = ""
    return f"{socket.gethostname()}-{agent}-{begun}"


def _integer(env: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        found = int(str(text))
    except ValueError:
        found = None
    if found is None or not least <= found <= MOST:
        raise ConfigError(
            f"the environment has {name}={brief(text)}, which is not a whole number from {least} "
            f"to {MOST:,}; unset it, or start with `mgt run` or torchrun, which set it",
            code="MGT202",
        )
    return found
