"""The engine for several machines: each has a launcher, and together they restart and end."""

from __future__ import annotations

import shlex
import signal
import sys
from typing import ClassVar

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed import sockets
from multi_gpu_training.distributed.cluster_token import (
    INSECURE,
    PUBLIC_KEY,
    cluster_token,
    network_key,
)
from multi_gpu_training.distributed.identity import FULL_WORLD
from multi_gpu_training.distributed.round_lease import RoundLease
from multi_gpu_training.distributed.store_relay import StoreRelay, remote_upstream
from multi_gpu_training.errors import LaunchError, RankFailure
from multi_gpu_training.launch.elastic.quorum import Quorum
from multi_gpu_training.launch.elastic.rendezvous import NotMet, Rendezvous, say
from multi_gpu_training.launch.elastic.witness import find_witness
from multi_gpu_training.launch.engine import Hosts, LaunchPlan, RankJob, RunOutcome
from multi_gpu_training.launch.local import LocalEngine, Meeting
from multi_gpu_training.launch.restart_policy import Fault, RestartVerdict
from multi_gpu_training.launch.signals import AskedToEnd, LauncherSignals
from multi_gpu_training.redaction import redact_command

DEFAULT_PORT = 29500


class ElasticEngine(LocalEngine):
    """Restarts the ranks here when the set of nodes changes, and ends when all nodes have ended."""

    options: ClassVar[tuple[str, ...]] = ("witness", "allow_minority")

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(plan)
        self._nodes: Rendezvous | None = None
        self._relay: StoreRelay | None = None
        self._lease: RoundLease | None = None
        self._key = PUBLIC_KEY
        self._success: RunOutcome | None = None  # of the ranks here, while others still train

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        return hosts.nodes > 1

    @property
    def nodes(self) -> Rendezvous:
        assert self._nodes is not None, "start() comes first"
        return self._nodes

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        signals.listen()
        hosts, patience_s = self.plan.hosts, self.plan.recovery_timeout
        assert hosts.master_addr is not None
        master = sockets.resolved(hosts.master_addr)
        address = master
        if hosts.node_rank > 0:
            address = sockets.address_towards(master, patience_s, signals.pause)
        self._interfaces = sockets.interface_variables(address)
        if sockets.is_loopback(address):
            self._key = cluster_token() or PUBLIC_KEY  # only this user is admitted there
            self._interfaces[INSECURE] = "1"
        else:
            self._key = network_key(f"--nnodes {hosts.nodes} with --master-addr {master}")
        port = hosts.master_port or DEFAULT_PORT
        asked = hosts.engine_options.get("witness")
        witness = None if asked is None else find_witness(asked, f"{master}:{port}", self._key)
        quorum = Quorum(hosts.nodes, asked, bool(hosts.engine_options.get("allow_minority")))
        if quorum.allow_minority:
            say(
                "warning: --allow-minority: nodes that lose the others continue alone. If those "
                "are cut off rather than dead, they train the same run, too: two results, and on "
                "a shared disk checkpoints that overwrite each other"
            )
        self._nodes = Rendezvous(
            hosts.least,
            hosts.nodes,
            hosts.node_rank,
            self.plan.ranks_here,
            (master, port),
            address,
            patience_s,
            self._key,
            witness,
            quorum,
        )
        if not sockets.is_loopback(address):
            ranks_on = self._interfaces.get("GLOO_SOCKET_IFNAME", "every interface")
            trust = "machines with the same cluster token are admitted"
            if self._key == PUBLIC_KEY:
                trust = "without a token: anyone who reaches these ports can join or end the run"
            say(
                f"node {hosts.node_rank} listens on {address}:{self.nodes.me.port} for the other "
                f"launchers, the leader on a free port for the ranks' store ({trust}); the ranks "
                f"exchange tensors on {ranks_on}, unencrypted"
            )
        super().start(job, signals)

    def watch(self) -> RunOutcome | None:
        if self._success is None:
            outcome = super().watch()
            if outcome is not None:
                return outcome
        elif self.nodes.round.finished:
            return self._success
        # Until every node has ended one may fail, and need this one for another round.
        if self.nodes.why_again() is not None:
            self._begin_again()
        return None

    def stop(self, number: int) -> None:
        super().stop(number)
        # A node that is asked to leave a run of 1:2 leaves the others alone.
        if self._nodes is not None and not self.nodes.elastic:
            self.nodes.end(128 + number, f"ended by signal {number}")

    def close(self) -> None:
        super().close()
        if self._nodes is not None:
            self.nodes.shutdown()
        if self._relay is not None:
            self._relay.close()

    def _meet(self) -> Meeting:
        self._success = None
        hosts = self.plan.hosts
        try:
            number, nodes = self.nodes.next_round(self._signals.check)
        except NotMet as error:
            if self.nodes.me.round:
                raise LaunchError(self._cannot_continue(error), code="MGT504") from None
            raise LaunchError(
                f"node {hosts.node_rank} of {hosts.nodes} did not meet the others at "
                f"{hosts.master_addr}:{hosts.master_port or DEFAULT_PORT} within "
                f"recovery_timeout={self.plan.recovery_timeout:g} s ({error}); check that every "
                "node is started with the same --master-addr and --master-port and can reach it",
                code="MGT502",
            ) from None
        view = self.nodes.round
        if self._relay is not None:
            self._relay.close()
        if self._lease is None:
            assert self._scratch is not None
            self._lease = RoundLease(self._scratch.path)
            self.nodes.set_lease(self._lease)
        # The ranks here speak to this launcher, and it proves to the leader's who they are.
        upstream = remote_upstream(view.leader.address, view.store_port, self._key)
        self._relay = StoreRelay(sockets.listening_socket(sockets.LOOPBACK, 0), upstream)
        return Meeting(
            sockets.LOOPBACK,
            self._relay.port,
            view.run,
            # Ranks on all nodes count attempts alike, also on a node that joined later.
            self.nodes.attempt,
            self.nodes.first_rank,
            self.nodes.world,
            number,
            nodes,
            {**self._interfaces, FULL_WORLD: str(view.full_world)},
        )

    def _cannot_continue(self, why: NotMet) -> str:
        """How the run ends here, and how it is taken up again."""
        command = "the same command"
        if sys.argv[1:2] == ["train"]:
            words = redact_command(["mgt", *sys.argv[1:]])
            resume = [] if "--resume" in words else ["--resume", "auto"]
            command = f"\n  {shlex.join([*words, *resume])}\n"
        return (
            f"node {self.plan.hosts.node_rank} stops at its newest checkpoint: {why}. Waited "
            f"recovery_timeout={self.plan.recovery_timeout:g} s for the others; whether they train "
            f"on cannot be known from here. To continue, start {command} again on every node, with "
            "--resume auto (resume: auto in the config of a script). If the others are gone for "
            "good, use --nnodes with the nodes that are left, one of them as --node-rank 0. With "
            "--witness such a run continues by itself"
        )

    def _begin_again(self) -> None:
        """Start the next round: nodes were lost, or wait to join."""
        if self.nodes.round.joining and self._success is None:
            # Nothing is wrong: ranks may save first, as when the run is asked to end.
            self._running.ask(signal.SIGTERM, lambda: self._signals.interrupts)
        self._running.end(signal.SIGTERM)
        self._start_attempt()

    def _after_success(self) -> RunOutcome | None:
        self._success = super()._after_success()
        self.nodes.phase("done")
        return None

    def _ranks_were_asked(self, number: int) -> RunOutcome | None:
        # Ranks end together when one of them is asked to; this node itself may not have been.
        self._signals.check()
        if self.nodes.change() is None:
            raise AskedToEnd(number)
        self._begin_again()
        return None

    def _decide(self, fault: Fault, error: RankFailure) -> RestartVerdict:
        cause = self.nodes.fault_elsewhere() if fault.contact else None
        if cause is not None:
            return RestartVerdict(True, f"{cause}: that is why the ranks here lost the others")
        verdict = self.nodes.judge(fault, self._policy.limits)
        if not verdict.restart:
            reason = f"{verdict.reason}\n" if verdict.reason else ""
            self.nodes.end(error.exit_code, error.shown(f"{reason}{error}"))
        return verdict
