"""All checks in order, on one machine or on every machine of a job."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multi_gpu_training.distributed.cluster_token import network_key
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning.check import machine, software
from multi_gpu_training.planning.check.check_report import CheckReport, Finding, Level
from multi_gpu_training.planning.check.devices import used_gpus
from multi_gpu_training.planning.check.network_check import network_gbps
from multi_gpu_training.planning.check.nvml import Gpu, Nvml, Port
from multi_gpu_training.planning.check.rank_trial import (
    GROUP,
    MEETING,
    dismiss,
    find_failure,
    judge,
    try_out,
)
from multi_gpu_training.planning.check.registry import CheckOptions, Context, all_checks
from multi_gpu_training.planning.check.topology import NETWORK, Team, find_topology, free_port
from multi_gpu_training.planning.check.watched_process import Watched

if TYPE_CHECKING:
    from multi_gpu_training.planning.check.training_fit import TrainingFit

# A launcher ends all ranks when one fails: rank 0 must have printed by then.
LINGER_S = 5.0
# A case of a training starts several processes and takes dozens of steps.
LONGER_TO_TRAIN = 5
RANK_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "SLURM_PROCID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
}


class Checkup:
    """The checks of this process; under a launcher one of many, of which rank 0 prints.

    After `run`, `report` holds the findings and `speaks` says whether this process should show
    them. `finish` lets the others know the outcome and ends every process.
    """

    def __init__(self, options: CheckOptions, report: CheckReport, env: Mapping[str, str]) -> None:
        self.options = options
        self.report = report
        self.env = env
        self.members: list[Watched] = []
        self.team: Team | None = None
        self.topology, problems = find_topology(options.hosts, options.num_gpus, env)
        self.context = Context(options, env, self.topology, Nvml(), problems=problems)

    @property
    def main(self) -> bool:
        return self.topology.main

    @property
    def speaks(self) -> bool:
        """Rank 0 prints for all; another machine only where rank 0 did not hear it."""
        heard = bool(self.members) and bool(self.members[0].told("all_came"))
        return self.main or (self.topology.looks and not heard)

    def run(self) -> None:
        context = self.context
        if self.topology.looks:
            here = machine.look(self.env)
            if here.memory_free_bytes < machine.TOO_LITTLE:
                # Whatever comes next would be killed, this process first.
                self.report.add([machine.free_memory(here, 1, 0)])
                return
        found = software.look(context.nvml, self.env)
        if self.options.device != "cpu":
            context.gpu_count = found.visible
        if self.topology.looks:  # one process of each machine does
            self.report.add(software.judge(found, self.options.device))
            for one in all_checks():
                self.report.add(one(context))
        self.report.add(self._together(found))

    def fit(self, command: Sequence[str], say: Callable[[str], None]) -> TrainingFit | None:
        """Measure `command` (a script, or `-m module` with its words) on this machine; `say` hears
        of each case when it is done."""
        from multi_gpu_training.measure.script_runner import ScriptRunner
        from multi_gpu_training.planning.check import training_fit

        if self.topology.together and self.report.exit_code:
            remedy = "fix the lines above, or run it on one machine alone"
            self.report.add([training_fit.GROUP.fail("training", "it was not tried", remedy)])
            return None
        self._let_go()  # what is measured next needs the GPUs to itself
        for name in RANK_VARIABLES:
            os.environ.pop(name, None)  # the ranks that start now have their own
        gpus = used_gpus(self.context)
        here = machine.look(self.env)
        count = min(self.context.ranks_here, len(gpus)) if gpus else self.context.ranks_here
        # CPU ranks share the machine's memory; a GPU is one rank's.
        share = min((gpu.free_bytes for gpu in gpus), default=here.memory_free_bytes // count)
        with tempfile.TemporaryDirectory(prefix="mgt-check-") as folder:
            runner = ScriptRunner(
                command,
                Path(folder),
                training_fit.GPU_STEPS if gpus else training_fit.CPU_STEPS,
                None if gpus else training_fit.CPU_WARMUP,
                "auto" if gpus else "cpu",
                LONGER_TO_TRAIN * self.options.timeout_s,
                ranks_at_hand=count,
                say=say,
            )
            found = training_fit.Fitting(runner, count, gpus, share, self._add).measure()
        if found is not None:
            free = [f.facts.get("free_bytes") for f in self.report.findings if f.topic == "disk"]
            self.report.add(training_fit.judge(found, free[0] if free else None))
        return found

    def _add(self, finding: Finding) -> None:
        self.report.add([finding])

    def workers(self, ranks: int) -> int:
        """Loader workers that the cores here allow each rank."""
        return machine.workers_for(machine.look(self.env).usable_cores, ranks)

    def finish(self) -> int:
        """The exit code: rank 0's for all that hear it. Call it when all is printed."""
        code = self.report.exit_code
        self._let_go()
        told = self.members[0].last("verdict") if self.members else None
        # Nobody heard this process: leave rank 0 the time to say what it knows.
        if told is None and code and not self.speaks:
            time.sleep(LINGER_S)
        return max(told or 0, code)

    def _let_go(self) -> None:
        """Hand the verdict out or wait for it, and end the ranks."""
        verdict = self.report.exit_code if self.main else None
        dismiss(self.members, verdict, min(10.0, self.options.timeout_s))

    def abort(self) -> None:
        for member in self.members:
            member.kill()

    @property
    def hardware(self) -> str:
        """What the ranks ran on, for the head of a curve."""
        if not self.context.gpus:
            return "CPU"
        names = " + ".join(sorted({gpu.name for gpu in used_gpus(self.context)}))
        if self.team is not None and self.team.backend == "gloo":
            return f"{names} shared, through host memory"
        return f"{names}, {self._port(self.context.gpus[0]).describe()}"

    def _together(self, found: software.Software) -> Iterator[Finding]:
        """Real ranks: those of this process, with those of the others."""
        blocked = [f for f in self.report.findings if f.level is Level.FAIL and _blocks(f)]
        together = self.topology.together
        if together and blocked:
            yield MEETING.fail("the ranks were not started", f"first fix: {blocked[0].topic}")
            return
        team = self.topology.team(self.context.gpu_count, self.options.timeout_s)
        if not self.topology.one_machine:
            try:
                team = replace(team, key=network_key("`mgt check` on several machines").hex())
            except ConfigError as error:
                yield MEETING.fail("the ranks were not started", error.problems[0])
                return
        self.team = team
        self.members = try_out(team, self._facts(found))
        if self.main:
            yield from self._others(self.members[0], found)
        link = self._link_gbps(team)
        for finding in judge(team, self.members, link):
            self.report.curve = finding.facts.get("curve", self.report.curve)
            yield finding
        if len(self.context.gpus) == 1 and not together:
            text = "two ranks shared it over gloo: right, and no measure of speed"
            yield GROUP.passed("one GPU", text)
            yield self._nccl_alone(team)

    def _nccl_alone(self, shared: Team) -> Finding:
        """NCCL takes no two ranks on one GPU; one rank shows at least that it works."""
        port, names = free_port(), ["cuda:0"]
        team = replace(shared, here=1, ranks=1, port=port, devices=names, backend="nccl")
        members = try_out(team, {})
        try:
            problem = find_failure(team, members)
        finally:
            dismiss(members)
        return problem or GROUP.passed("NCCL", "it starts and sums on this GPU")

    def _facts(self, found: software.Software) -> dict[str, object]:
        """What rank 0 is told about this machine."""
        if not self.topology.looks:
            return {}
        return {
            "findings": [replace(one, facts={}).plain() for one in self.report.findings],
            "torch": found.torch,
            "nccl": found.nccl,
            "gpus": [gpu.name for gpu in self.context.gpus],
        }

    def _others(self, first: Watched, mine: software.Software) -> Iterator[Finding]:
        """What other machines found: their trouble, and a line for what is in order."""
        for hello in first.told("hello"):
            facts = hello["facts"]
            if hello["hello"] == 0 or not facts:
                continue
            host = hello["host"]
            if host == socket.gethostname():
                host += f" (rank {hello['hello']})"
            found = [Finding.from_plain(raw) for raw in facts["findings"]]
            bad = [one for one in found if one.level is not Level.PASS]
            self.report.add(bad, host)
            yield from _versions(host, facts, mine)
            there = ", ".join(facts["gpus"]) or "no GPU"
            yield GROUP.passed(host, f"{len(found) - len(bad)} lines pass there; {there}")

    def _port(self, gpu: Gpu) -> Port:
        return self.context.ports.get(gpu.index, Port())

    def _link_gbps(self, team: Team) -> float | None:
        """What the slowest link of a ring should give; None where nobody knows."""
        if team.backend != "nccl" or team.ranks == 1 or not self.context.gpus:
            return None
        ports = [self._port(gpu) for gpu in used_gpus(self.context)]
        speeds = [port.nvlink_gbps for port in ports]
        if None in speeds:
            speeds = [port.pcie_gbps for port in ports]
        if team.nodes > 1:
            speeds.append(network_gbps(Path("/sys/class")))
        known = [speed for speed in speeds if speed is not None]
        return min(known) if known and len(known) == len(speeds) else None


def _blocks(finding: Finding) -> bool:
    """Whether ranks on several machines cannot even meet."""
    needed = ("MASTER_ADDR", "MASTER_PORT", "port", "launcher")
    return finding.group == NETWORK.name and finding.topic.split()[0] in needed


def _versions(host: str, facts: Mapping[str, Any], mine: software.Software) -> Iterator[Finding]:
    for name in ("torch", "nccl"):
        if facts[name] != getattr(mine, name):
            yield GROUP.fail(
                host,
                f"it has {name} {facts[name]}, this machine {getattr(mine, name)}",
                f"install the same {name} on every machine",
            )
