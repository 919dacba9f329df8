"""Which engine runs a job, and what every engine can rely on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from multi_gpu_training import ConfigError, MultiGPUConfig, launch_distributed_training
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import RankFailure
from multi_gpu_training.launch.engine import (
    ENGINES,
    Hosts,
    LaunchPlan,
    RankJob,
    RunOutcome,
    choose_engine,
    run_job,
)
from multi_gpu_training.launch.signals import AskedToEnd, LauncherSignals

TWO_NODES = Hosts(2, 0, "127.0.0.1")


def test_one_machine_several_machines_and_ranks_that_run_have_their_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MultiGPUConfig()
    assert choose_engine(Hosts(), config).__name__ == "LocalEngine"
    assert choose_engine(TWO_NODES, config).__name__ == "ElasticEngine"
    assert choose_engine(Hosts(), config).identity(config) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for hosts in (Hosts(), TWO_NODES):
        engine = choose_engine(hosts, config)
        assert engine.__name__ == "TorchrunEngine"
        found = engine.identity(config)
        assert found is not None and (found.rank, found.world_size) == (1, 2)
    # A command that is to be started is not this process, whatever rank this one is.
    assert choose_engine(Hosts()).__name__ == "LocalEngine"


def test_a_rank_started_by_hand_is_one_by_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MultiGPUConfig(world_size=2, rank=1)
    assert choose_engine(Hosts(), config).__name__ == "LocalEngine"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert choose_engine(Hosts(), config).__name__ == "TorchrunEngine"


class Recorded:
    """An engine as somebody may add it, somewhere else than here."""

    options = ()
    calls: list[str] = []
    script: list[RunOutcome | BaseException | None] = []

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        return False

    @classmethod
    def identity(cls, config: MultiGPUConfig) -> Identity | None:
        return None

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        signals.listen()
        self.calls.append(f"start {' '.join(job.command)}")

    def watch(self) -> RunOutcome | None:
        self.calls.append("watch")
        step = self.script.pop(0)
        if isinstance(step, BaseException):
            raise step
        return step

    def stop(self, number: int) -> None:
        self.calls.append(f"stop {number}")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    monkeypatch.setitem(ENGINES, "recorded", f"{__name__}:Recorded")
    found: type[Recorded] = choose_engine(Hosts(engine="recorded"))  # type: ignore[assignment]
    found.calls, found.script = [], []
    return found


def run(engine: type[Recorded], *script: RunOutcome | BaseException | None) -> RunOutcome:
    engine.script = list(script)
    return run_job(engine(LaunchPlan(2)), RankJob(("train.py",)))  # type: ignore[arg-type]


def test_one_line_adds_an_engine_that_is_started_watched_and_closed(
    recorded: type[Recorded],
) -> None:
    assert choose_engine(Hosts()).__name__ == "LocalEngine", (
        "it is not chosen where it does not fit"
    )
    assert run(recorded, None, None, RunOutcome()).exit_code == 0
    assert recorded.calls == ["start train.py", "watch", "watch", "watch", "close"]
    with pytest.raises(
        ConfigError, match=r"--engine 'moon': .* use one of torchrun, elastic, local"
    ):
        choose_engine(Hosts(engine="moon"))
    with pytest.raises(ConfigError, match=r"--ray-address does not belong to the engine 'local'"):
        choose_engine(Hosts(engine_options={"ray_address": "auto"}))


def test_a_signal_to_the_launcher_or_to_its_ranks_stops_the_engine(
    recorded: type[Recorded],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    outcome = run(recorded, None, AskedToEnd(signal.SIGUSR1))
    assert outcome.exit_code == 143
    assert recorded.calls[-2:] == ["stop 15", "close"]

    class Signalled(recorded):  # type: ignore[misc, valid-type]
        number = signal.SIGINT

        def watch(self) -> None:
            os.kill(os.getpid(), self.number)

    assert run(Signalled).exit_code == 130
    assert recorded.calls[-2:] == ["stop 2", "close"]
    for Signalled.number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        assert run(Signalled).exit_code == 143
        assert recorded.calls[-2:] == ["stop 15", "close"], "all of them ask the ranks to save"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_hang_up_that_nohup_ignores_stays_ignored(
    recorded: type[Recorded],
) -> None:
    class HungUp(recorded):  # type: ignore[misc, valid-type]
        def watch(self) -> RunOutcome | None:
            os.kill(os.getpid(), signal.SIGHUP)
            return super().watch()  # type: ignore[no-any-return]

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(HungUp, None, RunOutcome()).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_engine_is_closed_however_it_fails(recorded: type[Recorded]) -> None:
    failure = RankFailure("rank 1 died")
    failure.exit_code = 7
    assert run(recorded, failure).exit_code == 7
    with pytest.raises(OSError, match="no such cluster"):
        run(recorded, OSError("no such cluster"))
    assert recorded.calls.count("close") == 2


def meet(name: str) -> tuple[str, str, list[str]]:
    port = int(os.environ["MASTER_PORT"])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    on = [r[1].split(":")[0] for r in rows if r[1].endswith(f":{port:04X}") and r[3] == "0A"]
    return name, os.environ["RANK"] + "/" + os.environ["WORLD_SIZE"], on


def test_ranks_of_one_machine_meet_on_loopback_alone() -> None:
    assert launch_distributed_training(meet, 2, ("it",)) == ("it", "0/2", ["0100007F"])


def test_a_function_runs_in_place_where_the_process_is_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch_distributed_training(os.getpid, 2) == os.getpid()
    with pytest.raises(ConfigError, match="world_size=3 was asked for, but the launcher started 2"):
        launch_distributed_training(os.getpid, 3)
