"""What `srun` starts on every node of a job: the launcher of the ranks there.

    python -m multi_gpu_training.launch.slurm.node_task FLAGS -- SCRIPT ARGS

Who it is comes from Slurm, where the others are from the job's supervisor (job_supervisor.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from multi_gpu_training.distributed.identity import FULL_WORLD
from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.launch.elastic.elastic_engine import ElasticEngine
from multi_gpu_training.launch.engine import Hosts, LaunchPlan, RankJob, run_job
from multi_gpu_training.launch.local import LocalEngine, Meeting
from multi_gpu_training.launch.slurm.fence import Fence

MASTER = "MGT_SLURM_MASTER"  # ADDRESS:PORT of the first node's launcher


class NodeEngine(ElasticEngine):
    """The launchers of a job's nodes together. Slurm, not they, replaces a lost node."""

    def _meet(self) -> Meeting:
        meeting = super()._meet()
        # Nodes of a heterogeneous job differ in ranks: only a run of 1:2 has a fuller world.
        full = os.environ.get(FULL_WORLD, "0")
        return replace(meeting, variables={**meeting.variables, FULL_WORLD: full})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--most-nodes", type=int, default=0)
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--recovery-timeout", type=float, default=300.0)
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("command", nargs="*")
    flags = parser.parse_args()
    if flags.probe:
        probe()
        return
    env = os.environ
    Fence(flags.folder, int(env.get("SLURM_RESTART_COUNT", 0))).watch()
    ranks = flags.ranks or visible_gpus(env)
    if not ranks:
        print(
            "the job named no number of ranks, and Slurm gave this task no GPU "
            f"(CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')!r}); submit it with "
            "--gpus-per-node N, or with --num-gpus N for CPU ranks",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(2)
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    if flags.most_nodes:  # with one task each
        env[FULL_WORLD] = str(flags.most_nodes * ranks)
    address, _, port = env[MASTER].rpartition(":")
    hosts = Hosts(tasks, int(env["SLURM_PROCID"]), address, int(port) if tasks > 1 else None)
    plan = LaunchPlan(ranks, hosts, flags.max_restarts, flags.recovery_timeout)
    sys.exit(launch(plan, flags.command))


def launch(plan: LaunchPlan, command: Sequence[str]) -> int:
    engine = NodeEngine if plan.hosts.nodes > 1 else LocalEngine
    try:
        outcome = run_job(engine(plan), RankJob(tuple(command)))
    except MultiGPUError as error:
        print(error.shown(), file=sys.stderr, flush=True)
        return error.exit_code
    if outcome.error is not None:
        print(outcome.error.shown(), file=sys.stderr, flush=True)
    return outcome.exit_code


def visible_gpus(env: Mapping[str, str]) -> int:
    """How many GPUs Slurm gave this task."""
    listed = env.get("CUDA_VISIBLE_DEVICES") or env.get("ROCR_VISIBLE_DEVICES") or ""
    if listed == "NoDevFiles":  # Slurm's word for none
        return 0
    if listed:
        return len(listed.split(","))
    return int(env.get("SLURM_GPUS_ON_NODE") or 0)


def probe() -> None:
    """Compute on every GPU of this node. Ends with an error where one is broken."""
    import torch

    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        ones = torch.ones(1024, device=f"cuda:{number}")
        assert float(ones.sum()) == 1024.0


if __name__ == "__main__":
    main()
