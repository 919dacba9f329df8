"""The Engine protocol: start the ranks of a run somewhere, watch them, stop them.

An engine assumes no parent process, loopback interface or shared disk in common with its ranks.
To add one, write its module and add its line to ENGINES.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import ConfigError, RankFailure
from multi_gpu_training.launch.restart_policy import Limits
from multi_gpu_training.launch.signals import AskedToEnd, LauncherSignals
from multi_gpu_training.safe_output import brief

# The first one that fits is chosen.
ENGINES = {
    "torchrun": "multi_gpu_training.launch.torchrun:TorchrunEngine",
    "elastic": "multi_gpu_training.launch.elastic.elastic_engine:ElasticEngine",
    "local": "multi_gpu_training.launch.local:LocalEngine",
    "slurm": "multi_gpu_training.launch.slurm.slurm_engine:SlurmEngine",
    "ray": "multi_gpu_training.launch.ray_cluster.ray_engine:RayEngine",
    "kubernetes": "multi_gpu_training.launch.kubernetes.kubernetes_engine:KubernetesEngine",
}
FINDS_NODES = ("ray", "slurm", "kubernetes")  # a scheduler says where node 0 is
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Hosts:
    """Which machines take part, and where the ranks meet. By default this one, on a free port.

    `nodes` is the most there may be, `at_least` how many are enough to train; None: all of them.
    `ranks_here` is how many ranks this machine has, where the config does not say it. `engine`
    names the one that starts them; None: the first that fits. `engine_options` are its own.
    """

    nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    at_least: int | None = None
    ranks_here: int | None = None
    engine: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def least(self) -> int:
        return self.nodes if self.at_least is None else self.at_least

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks may change during the run."""
        return self.least < self.nodes

    @classmethod
    def from_environment(cls, **flags: Any) -> Hosts:
        """Read MASTER_ADDR and MASTER_PORT; flags win. nodes may be "1:2"."""
        if isinstance(flags.get("nodes"), str):
            flags = {**flags, **_node_range(flags["nodes"])}
        port = os.environ.get("MASTER_PORT")
        if port and not (port.isdecimal() and 1 <= int(port) <= 65535):
            raise ConfigError(
                f"the environment has MASTER_PORT={port!r}, which is not a valid port; unset it "
                "for a free one, or set it to a number from 1 to 65535",
                code="MGT501",
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
                f"--master-port {self.master_port} is not a valid port; use 1 to 65535, or drop it "
                "for a free one"
            )
        if self.nodes < 1 or not 1 <= self.least <= self.nodes:
            asked = self.nodes if self.at_least is None else f"{self.at_least}:{self.nodes}"
            problems.append(f"--nnodes {asked}: use 1 or more, or LEAST:MOST such as 1:2")
        elif not 0 <= self.node_rank < self.nodes:
            problems.append(
                f"--node-rank {self.node_rank} is outside --nnodes {self.nodes}; "
                f"nodes count from 0 to {self.nodes - 1}"
            )
        if self.nodes > 1 and self.master_addr is None and self.engine not in FINDS_NODES:
            problems.append(
                f"--nnodes {self.nodes} needs --master-addr: the address of node 0, on every node"
            )
        if problems:
            raise ConfigError(problems)


def _node_range(text: str) -> dict[str, int]:
    """`2`, or `1:2` for a run that continues with one node and may have two."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else not most)):
        raise ConfigError(f"--nnodes {text}: give a number, or LEAST:MOST such as 1:2")
    return {"nodes": int(most), "at_least": int(least)} if colon else {"nodes": int(least)}


@dataclass(frozen=True)
class LaunchPlan:
    """How many ranks, where, and how often they are restarted.

    max_restarts None: as often as the ranks' own config allows, which they report once they run.
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


@dataclass(frozen=True)
class RankJob:
    """What every rank runs: a script or `-m module` with its arguments, or a function."""

    command: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: well, with an error, or because signal `signal` asked it to.

    `results` has what the function returned on those ranks that the engine can reach.
    """

    error: RankFailure | None = None
    signal: int = 0
    results: Mapping[int, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        if self.error is not None:
            return self.error.exit_code
        return 128 + self.signal if self.signal else 0


class Engine(Protocol):
    """One way to run ranks. An object serves one run; `run_job` calls its methods in order.

    `options` names what it takes from `Hosts.engine_options`: flags of `mgt train` and `mgt run`.
    """

    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, plan: LaunchPlan) -> None: ...

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        """Whether to use this engine where the user named none.

        config None: the ranks run another program, so this process cannot be one of them.
        """
        ...

    @classmethod
    def identity(cls, config: MultiGPUConfig) -> Identity | None:
        """Who this process is among the ranks of the run; None if it must start them."""
        ...

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        """Start the ranks. An engine that starts other processes calls `signals.listen` first,
        and `signals.check` or `pause` where it waits for long."""
        ...

    def watch(self) -> RunOutcome | None:
        """Look at the ranks once; None while they run. Restarts them where its policy says so.

        Raises AskedToEnd where the ranks, rather than the launcher, were asked to end.
        """
        ...

    def stop(self, number: int) -> None:
        """Pass the signal on to the ranks, let them save, and end those that do not listen."""
        ...

    def close(self) -> None:
        """Release what `start` took, also after a failure. No rank survives it."""
        ...


def choose_engine(hosts: Hosts, config: MultiGPUConfig | None = None) -> type[Engine]:
    """The engine for a run on `hosts`: the one that they name, or the first that fits."""
    name = hosts.engine
    if name is not None and name not in ENGINES:
        raise ConfigError(
            f"--engine {brief(name)}: no engine has that name; use one of {', '.join(ENGINES)}"
        )
    for known in [name] if name is not None else ENGINES:
        module, _, attribute = ENGINES[known].partition(":")
        engine: type[Engine] = getattr(importlib.import_module(module), attribute)
        if name is not None or engine.fits(hosts, config):
            if name is not None or known != "torchrun":  # a rank's are those of its launcher
                _refuse_options_of_others(known, engine, hosts.engine_options)
            return engine
    raise ConfigError(f"no engine can start ranks on {hosts.nodes} nodes")


def _refuse_options_of_others(name: str, engine: type[Engine], given: Mapping[str, Any]) -> None:
    foreign = [key for key, value in given.items() if value and key not in engine.options]
    if foreign:
        flag = "--" + foreign[0].replace("_", "-")
        raise ConfigError(
            f"{flag} does not belong to the engine {name!r}; drop it, or name its own "
            "engine with --engine"
        )


def run_job(engine: Engine, job: RankJob) -> RunOutcome:
    """Run `job` on every rank of `engine` to its end."""
    with LauncherSignals() as signals:
        try:
            engine.start(job, signals)
            while True:
                signals.check()
                outcome = engine.watch()
                if outcome is not None:
                    return outcome
                time.sleep(LOOK_EVERY_S)
        except AskedToEnd as asked:
            engine.stop(asked.number)
            return RunOutcome(signal=asked.number)
        except RankFailure as failure:
            return RunOutcome(error=failure)
        finally:
            engine.close()
