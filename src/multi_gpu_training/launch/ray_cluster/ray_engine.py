"""The engine for a Ray cluster: one actor per rank, in a placement group with a bundle per node.

This process, Ray's driver, watches and restarts the ranks as the engine for one machine does.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.cleanup import Scratch
from multi_gpu_training.distributed.cluster_token import TOKEN, TOKEN_FILE, cluster_token
from multi_gpu_training.distributed.identity import FULL_WORLD, Identity, from_environment
from multi_gpu_training.distributed.store_relay import HostedStore
from multi_gpu_training.errors import ConfigError, LaunchError, RankFailure
from multi_gpu_training.launch.engine import Hosts, LaunchPlan, RankJob, RunOutcome
from multi_gpu_training.launch.local import LocalEngine, Meeting, rank_variables
from multi_gpu_training.launch.ray_cluster.actor_ranks import ActorRanks
from multi_gpu_training.launch.ray_cluster.rank_actor import LEASE_S, RankActor, Site
from multi_gpu_training.launch.ray_cluster.ray_connection import RayOptions, connect
from multi_gpu_training.launch.restart_policy import Fault, NodeLosses, RestartVerdict
from multi_gpu_training.launch.signals import LauncherSignals
from multi_gpu_training.portability import LOOPBACK_INTERFACE

# How long a run of LEAST:MOST nodes waits for the most: when it starts, after one was lost, and
# after Ray had room for another, which it has again when the ranks are gone.
AT_START_S, AFTER_LOSS_S, WHEN_GROWING_S = 10.0, 2.0, 60.0
_ROOM_EVERY_S = 5.0
_ACTOR_S = 120.0  # a node may have to unpack the code first
_FORWARDED = ("MGT_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUBLAS_")
_NOT_FORWARDED = (TOKEN, TOKEN_FILE)


class RayEngine(LocalEngine):
    """Places `ranks_here` ranks on each of `nodes` Ray nodes; 0: one per GPU or core of a node.

    A run of 1:2 nodes goes on with one when the other is lost, and with both when Ray has room
    again. A run with a fixed number waits for a node in its place, up to recovery_timeout.
    """

    options = ("ray_address", "ray_options")

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(plan)
        self._asked = RayOptions.read(plan.hosts.engine_options)
        self._token = cluster_token() or secrets.token_hex(32).encode()
        self._connected = False
        self._group: Any = None
        self._nodes = 0
        self._patience_s = AT_START_S
        self._spare: Any = None  # a bundle that waits for room for another node
        self._next_look = 0.0
        self._losses = NodeLosses()

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        return False  # only where it is named

    @classmethod
    def identity(cls, config: MultiGPUConfig) -> Identity | None:
        return from_environment()

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        if job.function is not None and job.function.__module__ == "__main__":
            raise ConfigError(
                f"--engine ray: other nodes cannot import {job.function.__qualname__} from the "
                "script that was started; move it into a module beside it"
            )
        self._connected = connect(self._asked)
        self._count_ranks()
        self._bundle = self._needs_of_a_node()
        signals.listen()  # after Ray, which takes SIGTERM for itself
        self._job, self._signals = job, signals
        self._scratch = Scratch()
        if "/runtime_resources/working_dir_files/" in str(Path.cwd()):
            say(
                "the current folder is Ray's copy, which Ray deletes: give save_dir as an absolute "
                "path that lasts, or as a URL"
            )
        self._start_attempt()

    def watch(self) -> RunOutcome | None:
        outcome = super().watch()
        if outcome is None and self._nodes < self.plan.hosts.nodes:
            self._grow()
        return outcome

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._group is not None:
                self._release()
            if self._connected:
                import ray

                ray.shutdown()

    # One attempt

    def _meet(self) -> Meeting:
        import ray

        self._attempt += 1
        self._close_store()
        # Ray's nodes reach this process, or it could not be a driver.
        address = ray.util.get_node_ip_address()
        self._store = HostedStore(address, 0, self.plan.recovery_timeout, self._token)
        # As for ranks on this machine: this process watches every one of them.
        return Meeting(address, self._store.port, self._run_id, self._attempt)

    def _start_ranks(self, meeting: Meeting, folder: Path) -> ActorRanks:
        deadline = time.monotonic() + self.plan.recovery_timeout
        while True:
            self._reserve(deadline)
            try:
                actors, sites = self._place()
                self._check(sites)
                self._start_actors(meeting, actors, sites)
                return ActorRanks(actors, sites, folder)
            except _NodeGone as error:
                # Ray takes seconds to notice that a node it has chosen is dead.
                self._release()
                if time.monotonic() > deadline:
                    raise LaunchError(f"--engine ray: {error}", code="MGT505") from None
                self._signals.pause(LEASE_S)  # ranks that nobody hears of have ended then
                meeting = self._meet()

    def _reserve(self, deadline: float) -> None:
        """Wait for room, for as many nodes as the run may have, else for as many as it needs."""
        hosts = self.plan.hosts
        for nodes in range(hosts.nodes, hosts.least - 1, -1):
            until = deadline if nodes == hosts.least else time.monotonic() + self._patience_s
            self._group = self._placement_group(nodes)
            if self._wait_for_room(self._group, min(until, deadline)):
                self._nodes, self._patience_s = nodes, AFTER_LOSS_S
                return
            self._release()
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        raise LaunchError(
            f"--engine ray: there is no room for {hosts.least} x {self._bundle} within "
            f"recovery_timeout={self.plan.recovery_timeout:g} s; the cluster has "
            f"{_amounts(total)}, of which {_amounts(free)} is free. Add nodes with `ray start "
            "--address=...`, or ask for less with --num-gpus, --nnodes or --ray-options",
            code="MGT505",
        )

    def _count_ranks(self) -> None:
        """Where nobody said how many ranks a node has: what the nodes have counts, not this one."""
        import ray

        if self.plan.ranks_here:
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        each = self._needs_of_a_rank()
        if not each:
            raise ConfigError(
                "--engine ray: a rank needs neither CPUs nor GPUs (cpus_per_rank=0), so how many "
                "fit on a node cannot be known; give --num-gpus N"
            )
        ranks = ranks_that_fit(nodes, self.plan.hosts.nodes, each)
        if not ranks:
            raise LaunchError(
                f"--engine ray: no node has room for one rank, which needs {_amounts(each)}; the "
                f"nodes have {'; '.join(map(_amounts, nodes))}. Add nodes with `ray start "
                "--address=...`, or ask for less with --ray-options",
                code="MGT505",
            )
        self.plan = replace(self.plan, ranks_here=ranks)
        per = "GPU" if each.get("GPU") else f"{each['CPU']:g} CPUs" if each["CPU"] != 1 else "CPU"
        say(f"{ranks} ranks on each Ray node, one per {per}; --num-gpus N gives another number")

    def _needs_of_a_rank(self) -> dict[str, float]:
        import ray

        gpus = self._asked.gpus_per_rank
        if gpus is None:
            gpus = int(ray.cluster_resources().get("GPU", 0) >= 1)
        each: dict[str, float] = {"CPU": self._asked.cpus_per_rank, "GPU": gpus}
        return {name: n for name, n in each.items() if n}

    def _needs_of_a_node(self) -> dict[str, float]:
        return {name: n * self.plan.ranks_here for name, n in self._needs_of_a_rank().items()}

    def _placement_group(self, nodes: int) -> Any:
        from ray.util import placement_group

        strategy = "STRICT_PACK" if self.plan.hosts.nodes == 1 else "SPREAD"
        return placement_group([self._bundle] * nodes, strategy=strategy)

    def _wait_for_room(self, group: Any, deadline: float) -> bool:
        began, told = time.monotonic(), False
        while not group.wait(0.5):
            self._signals.check()
            now = time.monotonic()
            if now > deadline:
                return False
            if not told and now - began > _ROOM_EVERY_S:
                told = True
                say(f"waiting for Ray nodes with room for {group.bundle_count} x {self._bundle}")
        return True

    def _place(self) -> tuple[list[Any], list[Site]]:
        """An actor per rank, and where each is; in the order of ranks."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each = {name: n / self.plan.ranks_here for name, n in self._bundle.items()}
        kind = ray.remote(RankActor)
        actors = [
            kind.options(
                num_cpus=each.get("CPU", 0),
                num_gpus=each.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            ).remote()
            for bundle in range(self._nodes)
            for _ in range(self.plan.ranks_here)
        ]
        with _ticket() as ticket:
            sites = self._call([actor.where.remote(ticket) for actor in actors])
        # Rank 0, which writes the run folder, is here if any rank is; ranks of a node are adjacent.
        here = ray.get_runtime_context().get_node_id()
        order = sorted(
            range(len(actors)),
            key=lambda i: (sites[i].node != here, not sites[i].shared, sites[i].node, i),
        )
        return [actors[i] for i in order], [sites[i] for i in order]

    def _call(self, calls: list[Any]) -> list[Any]:
        """The answers of actors that are being set up. _NodeGone: one cannot be."""
        import ray

        deadline = time.monotonic() + _ACTOR_S
        left = calls
        while left:
            self._signals.check()
            _, left = ray.wait(left, num_returns=len(left), timeout=0.5)
            if left and time.monotonic() > deadline:
                raise _NodeGone(f"{len(left)} of {len(calls)} actors did not start")
        try:
            found: list[Any] = ray.get(calls)
        except ray.exceptions.RuntimeEnvSetupError as error:
            raise LaunchError(
                f"--engine ray: a node cannot unpack the code: {error}", code="MGT505"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise LaunchError(
                f"--engine ray: a node cannot start its rank: {error.cause}",
                code="MGT505",
            ) from None
        except ray.exceptions.RayActorError as error:
            if "creation task" in str(error):  # an exception, which would come again
                last = str(error).strip().splitlines()[-1]
                raise LaunchError(
                    f"--engine ray: a node cannot start an actor: {last}", code="MGT505"
                ) from None
            raise _NodeGone(f"an actor ended before its rank was started: {error}") from None
        return found

    def _check(self, sites: Sequence[Site]) -> None:
        versions = {version for site in sites for version in site.versions}
        differ = len(versions) > len(sites[0].versions)
        if differ or "torch is not installed" in versions:
            shown = "; ".join(sorted({f"{s.host}: {', '.join(s.versions)}" for s in sites}))
            raise ConfigError(
                f"--engine ray: the nodes need the same Python and torch, and have: {shown}"
            )

    def _start_actors(self, meeting: Meeting, actors: list[Any], sites: list[Site]) -> None:
        nodes = list(dict.fromkeys(site.node for site in sites))
        store = meeting.address, meeting.port
        calls = []
        for node in nodes:
            ranks = [rank for rank, site in enumerate(sites) if site.node == node]
            own = replace(
                meeting,
                first_rank=ranks[0],
                world=len(sites),
                node=nodes.index(node),
                nodes=len(nodes),
            )
            # As on one machine every rank sees all GPUs of its node, and takes its own.
            gpus = ",".join(gpu for rank in ranks for gpu in sites[rank].gpus)
            for local, rank in enumerate(ranks):
                variables = {
                    "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
                    **(sites[rank].interfaces if len(nodes) > 1 else {}),
                    **_forwarded(),
                    **rank_variables(own, local, len(ranks)),
                    FULL_WORLD: str(self.plan.hosts.nodes * self.plan.ranks_here),
                    "TORCHELASTIC_MAX_RESTARTS": str(self.plan.max_restarts or 0),
                }
                if gpus:
                    variables["CUDA_VISIBLE_DEVICES"] = gpus
                job = self._job if sites[rank].shared else _shipped_job(self._job, sites[rank])
                calls.append(
                    actors[rank].start.remote(
                        rank, job, variables, str(Path.cwd()), store, self._token
                    )
                )
        self._call(calls)

    def _release(self) -> None:
        from ray.util import remove_placement_group

        for group in (self._group, self._spare):
            if group is not None:
                with suppress(Exception):  # Ray is being left, or has removed it already
                    remove_placement_group(group)
        self._group = self._spare = None

    # After a loss, and after room is found

    def _start_attempt(self) -> None:
        if self._group is not None:
            self._release()
        super()._start_attempt()

    def _decide(self, fault: Fault, error: RankFailure) -> RestartVerdict:
        ranks = self._running
        assert isinstance(ranks, ActorRanks)
        limits = self._policy.limits
        node = ranks.lost and all(ranks.lost.values())
        if node and limits is not None and limits.restarts and self._losses.excused(fault.step):
            return RestartVerdict(
                True,
                "restarting every rank from the newest checkpoint, on the nodes that are left",
            )
        return super()._decide(fault, error)

    def _grow(self) -> None:
        """Restart on more nodes once Ray has room for another one."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        ranks = self._running
        if not any(found.begun for found in ranks.progress.values()):
            return
        if self._spare is None:
            self._spare = self._placement_group(1)
        elif self._spare.wait(0):
            say("Ray has room for another node: the ranks save and start again with it")
            ranks.ask(signal.SIGTERM, lambda: self._signals.interrupts)
            self._patience_s = WHEN_GROWING_S
            self._start_attempt()


def ranks_that_fit(
    nodes: Sequence[Mapping[str, float]], wanted: int, rank: Mapping[str, float]
) -> int:
    """The most ranks that each of `wanted` nodes, or of the fewer that are there, has room for.

    `nodes` are the resources of each, `rank` is what one rank needs.
    """
    # Ray counts 0.1 + 0.2 CPUs, too.
    room = [min(int(node.get(name, 0) / n + 1e-9) for name, n in rank.items()) for node in nodes]
    usable = sorted((ranks for ranks in room if ranks), reverse=True)
    return usable[min(wanted, len(usable)) - 1] if usable else 0


class _NodeGone(Exception):
    """An actor could not be set up on the node that Ray chose."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _ticket() -> Iterator[str]:
    """A new file in the current folder: who sees it shares the folder with this process."""
    path = Path.cwd() / f".mgt-ray-{uuid.uuid4().hex}"
    try:
        path.touch()
    except OSError:
        yield ""
        return
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def _forwarded() -> dict[str, str]:
    """Of this process's environment what concerns the training, without secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and name not in _NOT_FORWARDED
    }


def _shipped_job(job: RankJob, site: Site) -> RankJob:
    """The job of a rank that does not see this process's folder: scripts and configs are in Ray's
    copy of it."""

    def found(word: str) -> str:
        path = Path(word)
        is_code = path.suffix in (".py", ".yaml", ".yml") and path.is_file()
        if not is_code or not path.resolve().is_relative_to(Path.cwd()):
            return word
        return str(Path(site.shipped) / path.resolve().relative_to(Path.cwd()))

    return replace(job, command=tuple(map(found, job.command)))


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
