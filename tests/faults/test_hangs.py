"""A rank that stands still is named, with the line it stands on, and the run goes on."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import Program
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.distributed import progress_slot
from multi_gpu_training.distributed.progress_slot import (
    BACKWARD,
    BETWEEN_STEPS,
    INPUT,
    OPTIMIZER,
    Phase,
    RankProgress,
)
from multi_gpu_training.distributed.stacks import Stack, read_stack, sample
from multi_gpu_training.distributed.stall import PeerWatch, ProgressWatch, Stall, diagnose, limit_s
from multi_gpu_training.errors import ConfigError


def at(step: int, phase: Phase, hang_s: float = 5.0, line: str = "") -> RankProgress:
    return RankProgress(step, True, phase=phase, hang_s=hang_s, line=line)


WAITS = Stack((("/x/torch/autograd/graph.py", 800, "_engine_run_backward"), ("/u.py", 3, "step")))
BUSY = Stack((("/home/me/loss.py", 7, "loss_fn"), ("/home/me/train.py", 30, "<module>")))


# How long is too long


def test_the_limit_follows_the_step_time_unless_it_is_given() -> None:
    assert limit_s(0, 0.01, Phase.FORWARD) == 120
    assert limit_s(0, 30.0, Phase.FORWARD) == 600
    assert limit_s(0, 1000.0, Phase.FORWARD) < 1800  # an exchange is given up then
    assert limit_s(5, 30.0, Phase.INPUT) == 5
    # A first step may compile; validations and checkpoints are long in healthy runs too.
    assert limit_s(5, None, Phase.FORWARD, settled=False) == 50
    assert limit_s(5, 0.1, Phase.VALIDATION) == limit_s(5, 0.1, Phase.CHECKPOINT) == 50
    # Nobody knows how long a data set takes to prepare.
    assert limit_s(0, None, Phase.SET_UP) == limit_s(0, 0.1, Phase.BETWEEN_STEPS) == math.inf


def test_progress_of_any_kind_is_no_hang() -> None:
    watch = ProgressWatch()
    for second in range(100):
        ranks = {0: at(10 + second // 4, Phase.FORWARD), 1: at(10 + second // 4, Phase.BACKWARD)}
        assert watch.look(ranks, float(second)) is None
    assert watch.step_s == pytest.approx(4.0)


def test_the_rank_behind_the_others_is_over_its_limit() -> None:
    watch = ProgressWatch()
    for step in range(10):
        watch.look({0: at(step, Phase.FORWARD), 1: at(step, Phase.FORWARD)}, step / 10)
    stuck = {0: at(9, Phase.BACKWARD), 1: at(9, Phase.FORWARD)}
    found = [watch.look(stuck, 1.0 + second / 2) for second in range(20)]
    assert found[9] is None
    (first, *_) = [stall for stall in found if stall is not None]
    assert first.rank == 1 and 5 < first.for_s < 6 and first.limit_s == 5


def test_a_stopped_process_is_not_given_the_time_of_a_long_phase() -> None:
    watch = ProgressWatch()
    ranks = {0: at(3, Phase.CHECKPOINT), 1: at(3, Phase.SET_UP)}
    found = [watch.look(ranks, float(second), stopped={1}) for second in range(8)]
    assert found[5] is None and found[6] is not None and found[6].rank == 1


def test_a_launcher_that_was_stopped_itself_blames_nobody() -> None:
    watch = ProgressWatch()
    for step in range(10):
        watch.look({0: at(step, Phase.FORWARD)}, step / 10)
    assert watch.look({0: at(9, Phase.FORWARD)}, 3600.0) is None


def test_without_a_limit_nothing_is_a_hang() -> None:
    watch = ProgressWatch()
    ranks = {0: RankProgress(3, True, phase=Phase.FORWARD, hang_s=None)}
    assert not any(watch.look(ranks, float(second)) for second in range(0, 10**6, 10**5))


# Who is to blame


@pytest.mark.parametrize(
    ("stacks", "states", "blamed"),
    [
        ({0: WAITS, 1: BUSY}, {}, 1),
        ({0: BUSY, 1: WAITS}, {}, 0),
        ({0: BUSY}, {1: "T"}, 1),
        ({1: BUSY}, {}, 0),
        ({0: WAITS, 1: WAITS}, {}, 1),
    ],
    ids=["the one that computes", "whichever", "the stopped one", "the silent one", "the last"],
)
def test_the_rank_that_does_not_wait_is_named(
    stacks: dict[int, Stack], states: dict[int, str], blamed: int
) -> None:
    ranks = {0: at(7, Phase.BACKWARD, line="/u.py:3 in step"), 1: at(7, Phase.FORWARD)}
    hang = diagnose(Stall(blamed, 6.0, 5.0), ranks, stacks, states)
    assert hang.rank == blamed and f"rank {blamed} holds the others up" in hang.report
    if blamed in stacks and stacks[blamed] is BUSY:
        assert "at /home/me/loss.py:7 in loss_fn" in hang.report
        assert "loss.py:7" in hang.kind and hang.step == 7


def test_ranks_that_all_wait_for_another_machine_are_not_to_blame() -> None:
    ranks = {2: at(7, Phase.BACKWARD), 3: at(7, Phase.BACKWARD)}
    hang = diagnose(Stall(2, 6.0, 5.0), ranks, {2: WAITS, 3: WAITS}, {}, all_here=False)
    assert not hang.ours and "on another machine" in hang.report


def test_a_stack_is_the_main_threads_from_its_innermost_line_on() -> None:
    ready = threading.Event()
    other = threading.Thread(target=ready.wait)
    other.start()
    with tempfile.TemporaryFile("w+") as file:
        file.write(f"main 0x{threading.main_thread().ident:016x}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stack = read_stack(file.read())
    ready.set()
    other.join()
    assert stack is not None and not stack.waits
    assert stack.frames[0][0] == __file__
    assert re.fullmatch(re.escape(__file__) + r":\d+ in test_a_stack_\w+", stack.line)
    assert read_stack("main 0x1\n") is None


# What a rank notes


def test_progress_comes_back_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_slot", "_shared"):
        monkeypatch.setattr(progress_slot, name, getattr(progress_slot, name))
    error_file = str(tmp_path / "error.json")
    assert progress_slot.of_rank(error_file) == RankProgress()
    progress_slot.keep(error_file)
    progress_slot.note_limits(3, 60.0)
    progress_slot.note_grace(30.0)
    progress_slot.note_hang_limit(0.0)
    progress_slot.note_step(7, begun=True)
    progress_slot.note_count(2)
    progress_slot.note_phase(Phase.OPTIMIZER)
    progress_slot.note_line("/a/" + "b" * 300 + ".py:3 in f")
    found = progress_slot.of_rank(error_file)
    assert found == progress_slot.here()
    assert (found.step, found.begun, found.phase, found.count) == (7, True, Phase.OPTIMIZER, 2)
    assert (found.max_restarts, found.restart_window_s, found.grace_s) == (3, 60.0, 30.0)
    assert found.hang_s == 0.0 and found.line.endswith("b.py:3 in f")
    progress_slot.note_line("/short.py:1 in g")
    assert progress_slot.here().line == "/short.py:1 in g"


def test_notes_of_a_whole_step_cost_about_a_microsecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_slot", "_shared"):
        monkeypatch.setattr(progress_slot, name, getattr(progress_slot, name))
    progress_slot.keep(str(tmp_path / "error.json"))

    def seconds() -> float:
        begun = time.perf_counter()
        for step in range(300):
            progress_slot.note_step(step, begun=True)
            for phase in (BACKWARD, OPTIMIZER, BETWEEN_STEPS, INPUT):
                progress_slot.note_phase(phase)
        return (time.perf_counter() - begun) / 300

    # 0.6 us on a quiet machine. Many short looks, some of which nobody disturbs.
    assert min(seconds() for _ in range(500)) < 3e-6


def test_the_line_of_a_thread_is_the_users_own() -> None:
    import json

    found: list[Stack] = []
    json.loads("{}", object_hook=lambda _: found.append(Stack(tuple(sample()))))
    assert "test_hangs.py" in found[0].line


@pytest.mark.parametrize(
    "library",
    [
        "/usr/lib/python3/dist-packages/torch/autograd/graph.py",
        "/home/me/.local/lib/python3.12/site-packages/torch/autograd/graph.py",
        "/opt/shared/lib/python3.11/site-packages/torch/autograd/graph.py",
    ],
)
def test_the_users_line_is_named_wherever_torch_is_installed(library: str) -> None:
    stack = Stack(((library, 800, "_engine_run_backward"), ("/home/me/train.py", 3, "step")))
    assert stack.line == "/home/me/train.py:3 in step"


def test_ranks_name_each_other_where_no_launcher_watches() -> None:
    """Rank 1 falls silent, as one does that was stopped; rank 0 reports it, rank 2 does not."""
    progress_slot.note_step(9, begun=True)
    progress_slot.note_hang_limit(5.0)
    try:
        watches = [PeerWatch(rank, 3, None) for rank in range(3)]
        for _ in range(5):  # the first steps may take longer
            progress_slot.note_step((progress_slot.here().step or 0) + 1, begun=True)
            messages = [watch.message() for watch in watches]
            assert [watch.look(messages, 0.0) for watch in watches] == [None] * 3
        for second in range(1, 8):
            messages = [watches[0].message(), messages[1], watches[2].message()]
            found = [watches[rank].look(messages, float(second)) for rank in (0, 2)]
    finally:
        progress_slot.note_hang_limit(math.nan)
    assert found[1] is None and found[0] is not None
    assert "rank 1 holds the others up" in found[0].report
    assert "it does not answer" in found[0].report


def test_ranks_name_rank_0_where_the_store_stops_with_it() -> None:
    """Nobody is heard any more. Rank 1 reports it, and rank 2 a while later; a rank whose steps go
    on says nothing: then it is the launcher that was stopped."""
    progress_slot.note_step(9, begun=True)
    progress_slot.note_hang_limit(5.0)
    try:
        watches = [PeerWatch(rank, 3, None) for rank in range(3)]
        for second in range(5):
            progress_slot.note_step((progress_slot.here().step or 0) + 1, begun=True)
            messages = [watch.message() for watch in watches]
            assert [watch.look(messages, float(second)) for watch in watches] == [None] * 3
        for second in range(5, 30):  # steps go on
            progress_slot.note_step((progress_slot.here().step or 0) + 1, begun=True)
            assert watches[1].look_alone(messages, float(second)) is None
        reports: dict[int, float] = {}
        for second in range(30, 45):
            for rank in (1, 2):
                found = watches[rank].look_alone(messages, float(second))
                if found is not None and rank not in reports:
                    reports[rank] = second
                    assert "rank 0 holds the others up" in found.report
                    assert "it does not answer" in found.report
    finally:
        progress_slot.note_hang_limit(math.nan)
    assert 34 <= reports[1] <= 36 and reports[1] < reports[2] <= 40


THREADS = """
import time
from torch.distributed import TCPStore
from multi_gpu_training.distributed import stall
from multi_gpu_training.distributed.signal_thread import SignalThread

stall.SAMPLE_EVERY_S = stall.SOON_S = 0.0
store = TCPStore("127.0.0.1", 0, is_master=True)
watches = [stall.PeerWatch(rank, 4, store.clone()) for rank in range(4)]
mine = store.clone()
watches.append(SignalThread(print, lambda: mine.check(["asked"]), print, 0.0))
for watch in watches:
    watch.start()
time.sleep(0.2)
for watch in watches:
    watch.close()
"""


def test_threads_that_ask_the_store_do_not_abort_the_exit(tmp_path: Path) -> None:
    """Python 3.11 ends a thread that comes back from C++ after the interpreter, and all with it."""
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    with Program(script, cwd=tmp_path) as program:
        assert program.end_of_run() == 0, program


def test_hang_timeout_s_is_below_the_time_for_an_exchange() -> None:
    assert MultiGPUConfig(hang_timeout_s=600).exchange_timeout.total_seconds() > 10 * 600
    with pytest.raises(ConfigError, match="hang_timeout_s=60"):
        MultiGPUConfig(timeout=30, hang_timeout_s=60).check()


# Real ranks


class Steps(Callback):
    def __init__(self, pause: float) -> None:
        self.pause = pause

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        time.sleep(self.pause)
        rank, attempt = manager.placement.dp_rank, manager.placement.identity.attempt
        if self.pause:
            Path(f"at-{attempt}-{rank}-{step}").touch()


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    if Path(f"sleep-{os.environ.get('RANK')}").exists():
        Path(f"sleep-{os.environ['RANK']}").unlink()
        time.sleep(3600)
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def train(folder: Path, name: str, pause: float = 0.0, **settings: object) -> list[object]:
    config = MultiGPUConfig(
        device="cpu",
        save_dir=str(folder / "runs"),
        run_name=name,
        batch_size=4,
        epochs=6,
        checkpoint_frequency=5,
        tensorboard=False,
        progress="off",
        **settings,
    )
    manager = MultiGPUTrainingManager(config)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    manager.fit(model, data, loss_fn=loss_fn, callbacks=[Steps(pause)])
    return [p.detach().view(torch.int32).tolist() for p in model.parameters()]


SCRIPT = """
import json, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from faults.test_hangs import train
weights = train(Path({folder!r}), "it", 0.05, world_size=2, hang_timeout_s=4, max_restarts=9)
Path("weights.json").write_text(json.dumps(weights))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sleeping_and_a_stopped_rank_are_named_and_the_run_recovers(tmp_path: Path) -> None:
    import json

    tests = str(Path(__file__).parent.parent)
    (tmp_path / "train.py").write_text(SCRIPT.format(tests=tests, folder=str(tmp_path)))
    with Program("train.py", cwd=tmp_path) as program:

        def reached(attempt: int) -> bool:
            return any(tmp_path.glob(f"at-{attempt}-0-*")) and any(
                int(path.name.rpartition("-")[2]) > 5 for path in tmp_path.glob(f"at-{attempt}-1-*")
            )

        program.when(lambda: reached(0))
        (tmp_path / "sleep-1").touch()
        program.when(lambda: "hang:" in program.err, 60)
        said = program.err
        assert re.search(r"no progress for \d+\.\d s \(limit 4.0 s\); rank 1 holds", said), said
        assert re.search(r"rank 1: step \d+, forward, at \S+test_hangs.py:\d+ in loss_fn", said)
        assert re.search(r"rank 0: step \d+, backward, waits for the others", said), said
        program.when(lambda: reached(1))
        ranks = {p.environ().get("RANK"): p for p in psutil.Process(program.pid).children()}
        time.sleep(1.0)  # a line is noted every second
        os.kill(ranks["0"].pid, signal.SIGSTOP)
        program.when(lambda: program.err.count("hang:") >= 2, 60)
        said = program.err.rpartition("hang:")[2]
        assert "rank 0 holds the others up" in said
        assert re.search(r"rank 0: step \d+, [a-z ]+, at \S+.py:\d+ in \S+; .*SIGSTOP", said), said
        assert re.search(r"rank 1: step \d+, .*, at \S+test_hangs.py:\d+ in train", said), said
        assert program.end_of_run(120) == 0, program
        assert "from the newest checkpoint (2 of 9" in program.err
        assert program.nothing_left(within_s=5), program.alive()
    undisturbed = run_ranks(2, train, tmp_path, "whole")[0]
    assert json.loads((tmp_path / "weights.json").read_text()) == undisturbed
