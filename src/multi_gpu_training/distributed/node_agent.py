"""The agent of one node among several: what its ranks do is agreed with the other nodes."""

from __future__ import annotations

import os
import signal
import uuid
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler

from multi_gpu_training.distributed import network
from multi_gpu_training.distributed.agent import _ENDLESS, RankAgent, make_spec
from multi_gpu_training.distributed.identity import FULL_WORLD
from multi_gpu_training.distributed.launch import LaunchPlan
from multi_gpu_training.distributed.nodes import Nodes, say
from multi_gpu_training.distributed.rank_store import OneNode
from multi_gpu_training.distributed.restarts import Fault, Limits, Verdict


class NodeAgent(RankAgent):
    """Restarts when the set of nodes changes, and ends when all nodes have ended."""

    def __init__(self, spec: WorkerSpec, logs: Any, limits: Limits | None, nodes: Nodes) -> None:
        super().__init__(spec, logs, limits)
        self.nodes = nodes
        self._success: RunResult | None = None

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        first, world = self.nodes.first_rank, self.nodes.world
        return [
            Worker(
                local_rank=local,
                global_rank=first + local,
                role_rank=first + local,
                world_size=world,
                role_world_size=world,
            )
            for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._success, self._verdict = None, Verdict(False, "")
        # Ranks of all nodes count attempts alike, also on a node that has come later.
        self._remaining_restarts = _ENDLESS - self.nodes.attempt
        os.environ[FULL_WORLD] = str(self.nodes.round.full_world)
        return super()._start_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.nodes.round.joining and not self._verdict.restart:
            # Nothing is wrong: as when the run is asked to end, ranks may save first.
            self._shutdown(signal.SIGTERM)
            self._pcontext = None
        super()._restart_workers(worker_group)

    def run(self, role: str = "rank") -> RunResult:
        try:
            result: RunResult = super().run(role)
            return result
        except SignalException as asked:
            # A node that is asked to leave a run of 1:2 leaves the others alone.
            if not self.nodes.elastic:
                number = int(asked.sigval)
                self.nodes.end(128 + number, f"ended by signal {number}")
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        try:
            result = self._success or super()._monitor_workers(worker_group)
        except SignalException:
            if self._signals.came or self.nodes.change() is None:
                raise
            # Ranks end together when one is asked to; this node itself was not.
            return RunResult(state=WorkerState.HEALTHY)
        if result.state is not WorkerState.SUCCEEDED:
            return result
        if self._success is None:
            self._success = result
            self.nodes.phase("done")
        # Until every node has ended one may fail, and need this one for another round.
        return result if self.nodes.round.finished else RunResult(state=WorkerState.HEALTHY)

    def _decide(self, fault: Fault) -> Verdict:
        cause = self.nodes.fault_elsewhere() if fault.contact else None
        if cause is not None:
            return Verdict(True, f"{cause}: that is why the ranks here lost the others")
        verdict = self.nodes.judge(fault, self._policy.limits)
        if not verdict.restart:
            assert self._error is not None
            reason = f"{verdict.reason}\n" if verdict.reason else ""
            self.nodes.end(self._error.exit_code, f"{reason}{self._error}")
        return verdict

    def _exit_barrier(self) -> None:
        pass  # `_monitor_workers` has seen all nodes end


def make_agent(
    plan: LaunchPlan, entrypoint: Any, args: tuple[Any, ...], logs: str
) -> tuple[RankAgent, RendezvousHandler]:
    """The agent for this machine's ranks, and where they meet: a free port on loopback, or the
    address that was asked for."""
    hosts, specs = plan.hosts, DefaultLogsSpecs(log_dir=logs)
    patience = plan.recovery_timeout
    if hosts.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        alone = OneNode(uuid.uuid4().hex, hosts.master_port, patience)
        return RankAgent(make_spec(plan, entrypoint, args, alone), specs, plan.limits), alone
    assert hosts.master_addr is not None
    master = network.resolved(hosts.master_addr)
    address = master if hosts.node_rank == 0 else network.address_towards(master, patience)
    network.use_interface(address)
    nodes = Nodes(
        hosts.least,
        hosts.nodes,
        hosts.node_rank,
        plan.ranks_here,
        (master, hosts.master_port or 29500),
        address,
        patience,
    )
    if address != "127.0.0.1":
        say(
            f"node {hosts.node_rank} listens on {address}:{nodes.me.port} for the other launchers"
            ", the leader on a free port for the ranks, the ranks among themselves on "
            f"{os.environ.get('GLOO_SOCKET_IFNAME') or 'every interface'}: whoever reaches these "
            "ports can join or end the run, none of them executes what it receives; keep them "
            "inside your own network"
        )
    return NodeAgent(make_spec(plan, entrypoint, args, nodes), specs, plan.limits, nodes), nodes
