"""The engine for ranks that somebody else started: torchrun, srun, or a person, one by one.

This process is one of the ranks already. Its identity comes from the environment, and whoever
started it also watches and restarts it.
"""

from __future__ import annotations

from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import Identity, from_environment
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.engine import Engine, Hosts, LaunchPlan, RankJob, RunOutcome
from multi_gpu_training.launch.signals import LauncherSignals


class TorchrunEngine(Engine):
    """Runs the job in this process, as the rank that it is."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._results: dict[int, Any] = {}

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        return config is not None and cls.identity(config) is not None

    @classmethod
    def identity(cls, config: MultiGPUConfig) -> Identity | None:
        from multi_gpu_training.distributed.placement import claimed_identity

        return claimed_identity(config)

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        if job.function is None:
            raise ConfigError(
                "--engine torchrun: no launcher has started this process as a rank; use "
                "`torchrun --nproc-per-node N -m multi_gpu_training ...`, or drop --engine",
                code="MGT202",
            )
        found = from_environment() or Identity()
        self._results[found.rank] = job.function(*job.args)

    def watch(self) -> RunOutcome | None:
        return RunOutcome(results=self._results)

    def stop(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass
