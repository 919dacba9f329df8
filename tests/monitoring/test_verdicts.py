"""The report says why a run is slow and where: from recorded events, without processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from recorded import Folder, healthy

from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.monitoring.report.sentences import duration
from multi_gpu_training.monitoring.report.verdict import Verdict, judge


def judged(folder: Folder) -> Verdict:
    return judge(read_run(folder.path))


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def make(ranks: int = 3, facts: dict[str, Any] | None = None, **config: Any) -> Folder:
        made = Folder(tmp_path / "custom" / "run", ranks, **config)
        made.start(**(facts or {}))
        return made

    return make


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_a_run_that_is_well_has_no_cause(folder: Any, ranks: int, noise: float) -> None:
    run = folder(ranks)
    run.time_steps([healthy() for _ in range(ranks)], noise=noise)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes) == ("none", [])
    assert verdict.headline.startswith("nothing stands out: of a 2")


def test_the_rank_whose_loader_is_slow_is_named_with_those_that_wait(folder: Any) -> None:
    run = folder(4)
    run.time_steps([healthy(input=48.0 if rank == 1 else 0.0) for rank in range(4)], noise=0.1)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("data", (1,))
    assert verdict.headline.startswith("rank 1 waits ")
    assert "; ranks 0, 2, 3 wait for rank 1; fix its loader and gain " in verdict.headline
    # 20.8 + 2 ms are left of 70.8 + 2 ms, less noise.
    assert verdict.causes[0].gain == pytest.approx(2.2, rel=0.15)
    assert [cause.kind for cause in verdict.causes] == ["data"]  # waiting is no cause of its own


def test_a_fix_gains_no_more_than_the_next_slowest_allows(folder: Any) -> None:
    run = folder(3)
    run.time_steps([healthy(), healthy(input=20.0), healthy(input=40.0, forward=-2.0)])
    [cause] = judged(run).causes
    assert cause.ranks == (2, 1) or cause.ranks == (1, 2)
    run_of_one = Folder(run.path.parent / "other", 2)
    run_of_one.start()
    run_of_one.time_steps([healthy(input=40.0), healthy(forward=30.0)])
    causes = judged(run_of_one).causes
    # Rank 0 takes 60.8 ms and rank 1 50.8, of which 0.5 are its own loader's.
    assert causes[0].kind == "data" and causes[0].saved_s == pytest.approx(0.0105, rel=0.02)


def test_all_ranks_that_wait_for_data_are_told_to_get_workers(folder: Any) -> None:
    run = folder(2, num_workers=1)
    run.time_steps([healthy(input=15.0), healthy(input=14.0)])
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("data", ())
    assert verdict.headline.startswith("every rank waits 15.5 ms per step for data; more loader")


def test_batches_that_come_late_now_and_then_count_too(folder: Any) -> None:
    run = folder(2)
    run.time_steps([healthy(), healthy()])
    # Between the timed steps lie others: every fourth waited 40 ms.
    text = (run.path / "events" / "rank-1.jsonl").read_text()
    interval = '"interval_steps": 4, "interval_s": 0.16, "interval_input_s": 0.040'
    lines = [line.partition('"interval_steps"') for line in text.splitlines()]
    text = "\n".join(
        a + (f'{interval}, "interval_checkpoint_s": 0.0}}' if b else "") for a, b, _ in lines
    )
    (run.path / "events" / "rank-1.jsonl").write_text(text + "\n")
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("data", (1,))
    assert "waits 10.0 ms per step" in verdict.headline


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rank_that_computes_longer_is_named(folder: Any, ranks: int) -> None:
    run = folder(ranks)
    run.time_steps(
        [healthy(forward=9.0, backward=6.0) if r == ranks - 1 else healthy() for r in range(ranks)],
        noise=0.2,
    )
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("compute", (ranks - 1,))
    assert f"rank {ranks - 1} computes 1" in verdict.headline


def test_other_work_on_a_core_is_not_taken_for_a_slow_rank(folder: Any) -> None:
    run = folder(2)
    run.time_steps([healthy(), healthy(forward=8.0, queued=8.0)], noise=0.1)
    assert judged(run).kind == "none"
    hogged = Folder(run.path.parent / "hogged", 2)  # so much of it cannot be chance
    hogged.start()
    hogged.time_steps([healthy(), healthy(forward=60.0, queued=60.0)], noise=0.1)
    verdict = judged(hogged)
    assert (verdict.kind, verdict.causes[0].ranks) == ("compute", (1,))


def test_a_slow_network_is_slow_for_everyone(folder: Any) -> None:
    run = folder(3)
    run.time_steps([healthy() for _ in range(3)], transfer=0.05, noise=0.1)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("network", ())
    assert verdict.headline.startswith("the network is slow: exchanging 1.0 MB of gradients takes ")
    assert "MB/s" in verdict.headline


def test_with_sync_bn_the_exchange_is_not_of_gradients_alone(folder: Any) -> None:
    run = folder(3, sync_bn=True)
    run.time_steps([healthy() for _ in range(3)], transfer=0.05, noise=0.1)
    said = judged(run).headline
    assert "1.0 MB of gradients and BatchNorm's statistics (sync_bn) takes " in said
    assert "sync_bn=false" in said and "gradient_accumulation_steps" not in said
    assert "MB/s" not in said


def test_an_exchange_that_is_late_now_and_then_is_no_slow_network(folder: Any) -> None:
    run = folder(2)
    for step in range(1, 41):
        run.time_steps(
            [healthy(), healthy()], transfer=0.03 if step % 2 else 0.002, steps=1, first=step
        )
    assert judged(run).kind == "none"


def test_tiny_batches_are_named(folder: Any) -> None:
    run = folder(2, {"per_rank_batch": 2, "global_batch": 4})
    small = {"input": 0.1, "forward": 0.4, "backward": 0.6, "optimizer": 0.3, "other": 0.2}
    run.time_steps([small, small], transfer=0.001)
    for rank in range(2):
        run.add(rank, "work", step=5, operations=80, flops=500_000)
    verdict = judged(run)
    assert verdict.kind == "batch"
    assert verdict.headline.startswith("batches are tiny: 2 samples a rank")


def test_a_small_batch_of_a_large_model_is_not_tiny(folder: Any) -> None:
    run = folder(2, {"per_rank_batch": 2, "global_batch": 4})
    run.time_steps([healthy(), healthy()])
    for rank in range(2):
        run.add(rank, "work", step=5, operations=80, flops=250_000_000)  # of 4e8 in 20 ms
    assert judged(run).kind == "none"


def test_checkpoints_that_come_too_often_are_named(folder: Any) -> None:
    run = folder(2, checkpoint_frequency=5)
    run.time_steps([healthy(), healthy()], checkpoint_s=0.010)
    for step in range(5, 41, 5):
        run.add(0, "checkpoint", step * 0.03, step=step, stall_s=0.05, waited_s=0.0, write_s=0.1)
    verdict = judged(run)
    assert verdict.kind == "checkpoint"
    assert "pauses for them 30% of the time, 50 ms each time, every 5 steps" in verdict.headline
    assert "checkpoint_frequency=200 would gain 44%" in verdict.headline


def test_checkpoints_at_the_ends_of_epochs_are_not_put_down_to_their_frequency(folder: Any) -> None:
    run = folder(2, checkpoint_frequency=1000)
    run.time_steps([healthy(), healthy()], checkpoint_s=0.010)
    for epoch, step in enumerate((10, 20)):
        run.add(0, "epoch", step * 0.03, epoch=epoch, step=step, train={}, val=None)
        run.add(0, "checkpoint", step * 0.03, step=step, stall_s=0.05, waited_s=0.0, write_s=0.1)
    assert judged(run).kind == "none"  # two of them are no habit
    for epoch, step in enumerate((30, 40), start=2):
        run.add(0, "epoch", step * 0.03, epoch=epoch, step=step, train={}, val=None)
        run.add(0, "checkpoint", step * 0.03, step=step, stall_s=0.05, waited_s=0.0, write_s=0.1)
    verdict = judged(run)
    assert verdict.kind == "checkpoint" and "checkpoint_frequency" not in verdict.headline
    assert verdict.headline.startswith("epochs are short for the checkpoints at their ends: ")


def test_checkpoints_of_iterations_that_the_frequency_asks_for_are_put_down_to_it(
    folder: Any,
) -> None:
    """PPO saves at the ends of iterations only, and of those that reach checkpoint_frequency."""
    run = folder(2, checkpoint_frequency=5)
    run.time_steps([healthy(), healthy()], checkpoint_s=0.010)
    for epoch, step in enumerate(range(10, 41, 10)):
        run.add(0, "epoch", step * 0.03, epoch=epoch, step=step, train={}, val=None)
        run.add(0, "checkpoint", step * 0.03, step=step, stall_s=0.05, waited_s=0.0, write_s=0.1)
    assert "checkpoint_frequency" in judged(run).headline


@pytest.mark.parametrize(
    ("facts", "ranks", "place"),
    [
        ({"device_uuid": ("GPU-a", "GPU-b", "GPU-a"), "device": "cuda:0"}, (0, 2), "GPU GPU-a"),
        ({"cores": ([0], [0], [1]), "machine_cores": 4}, (0, 1), "core 0"),
        ({"cores": [0, 1], "machine_cores": 8}, (0, 1, 2), "cores 0, 1"),
    ],
)
def test_ranks_on_one_device_are_named(
    folder: Any, facts: dict[str, Any], ranks: tuple[int, ...], place: str
) -> None:
    run = folder(3, facts)
    queued = 0.0 if "device_uuid" in facts else 13.0  # GPUs have no such count
    slow = healthy(forward=5.0, backward=8.0, queued=queued)
    run.time_steps([slow if rank in ranks else healthy() for rank in range(3)], noise=0.1)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("shared", ranks)
    assert place in verdict.headline and "its own" in verdict.headline


def test_ranks_that_may_use_every_core_share_none(folder: Any) -> None:
    run = folder(3, {"cores": [0, 1], "machine_cores": 2})
    run.time_steps([healthy() for _ in range(3)])
    verdict = judged(run)
    assert verdict.kind == "none"
    assert "3 ranks share 2 cores: steps take turns on them" in verdict.notes


def test_a_slow_loader_is_worse_than_a_shared_gpu(folder: Any) -> None:
    run = folder(2, {"device_uuid": "GPU-a", "device": "cuda:0"})
    run.time_steps([healthy(), healthy(input=60.0)])
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("data", (1,))
    assert any("share GPU GPU-a" in line for line in verdict.more)


def test_a_rank_that_computes_far_longer_is_not_explained_by_a_shared_gpu(folder: Any) -> None:
    run = folder(2, {"device_uuid": "GPU-a", "device": "cuda:0"})
    run.time_steps([healthy(), healthy(forward=40.0)], noise=0.1)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("compute", (1,))
    assert any("share GPU GPU-a" in line for line in verdict.more)


def test_a_hook_on_one_rank_is_found(folder: Any) -> None:
    run = folder(2)
    run.time_steps([healthy(other=25.0), healthy()])
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("hooks", (0,))


def test_what_comes_every_few_steps_counts_by_its_mean(folder: Any) -> None:
    run = folder(2)
    for step in range(1, 41):
        other = 160.0 if step % 8 == 0 else 0.5
        run.time_steps([healthy(other=other)] * 2, steps=1, first=step)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("hooks", ())
    assert verdict.causes[0].seconds == pytest.approx(0.0205, rel=0.2)


def test_the_end_of_a_run_is_no_pause_between_epochs(folder: Any) -> None:
    run = folder(2)
    run.time_steps([healthy(), healthy()])
    run.add(0, "epoch", 1.0, epoch=0, step=40, train={"loss": 1.0}, val=None)
    run.end(40, at=9.0)  # after an export, say
    assert judged(run).kind == "none"


def in_some_steps(run: Folder, every: int, delayed: set[int], phase: str, delay: float) -> None:
    """60 timed steps in which these ranks take `delay` ms longer in one of `every`."""
    for step in range(1, 61):
        late = delayed if step % every == 0 else set()
        own = [healthy(**{phase: delay * (r in late)}) for r in range(run.ranks)]
        run.time_steps(own, steps=1, first=step, noise=0.2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("phase", "kind", "words"),
    [
        (
            "forward",
            "compute",
            r"rank 1 computes 2\d\d ms longer than usual in one step in 9, 2",
        ),
        (
            "other",
            "hooks",
            r"rank 1 spends 2\d ms per step between steps \(2\d\d ms in one step in 9\)",
        ),
    ],
)
def test_a_rank_that_is_slow_only_in_some_steps_is_named(
    folder: Any, ranks: int, phase: str, kind: str, words: str
) -> None:
    run = folder(ranks)
    in_some_steps(run, 10, {1}, phase, 190.0)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == (kind, (1,))
    assert re.match(words, verdict.headline)
    waiting = "rank 0 waits" if ranks == 2 else "ranks 0, 2 wait"
    assert f"; {waiting} for rank 1;" in verdict.headline
    assert not any("none of them is slow" in note for note in verdict.notes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_in_which_every_rank_computes_far_longer_are_named(folder: Any, ranks: int) -> None:
    run = folder(ranks)
    in_some_steps(run, 10, set(range(ranks)), "forward", 200.0)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("compute", ())
    who = "every rank computes" if ranks == 2 else "training computes"
    assert verdict.headline.startswith(who) and "in one step in 9" in verdict.headline


def test_a_step_or_two_that_took_long_are_chance(folder: Any) -> None:
    run = folder(2)
    in_some_steps(run, 25, {1}, "forward", 60.0)  # two of sixty
    assert judged(run).kind == "none"


def test_a_delay_that_has_no_place_is_told_all_the_same(folder: Any) -> None:
    run = folder(2)
    for step in range(1, 61):
        late = 0.4 if step % 6 == 0 else 0.002
        run.time_steps([healthy(), healthy()], transfer=late, steps=1, first=step)
    verdict = judged(run)
    assert verdict.kind == "none"
    assert verdict.headline.startswith("some steps take far longer than most (on average 3.9 ")


@pytest.mark.parametrize("empty", [False, True])
def test_what_ranks_without_events_did_is_not_guessed(folder: Any, empty: bool) -> None:
    run = folder(2)
    run.time_steps([healthy(), healthy(forward=40.0)])
    path = run.path / "events" / "rank-1.jsonl"
    path.write_text("") if empty else path.unlink()
    verdict = judged(run)
    assert verdict.kind == "unseen"
    assert verdict.headline.startswith("rank 0 waits 42 ms per step for rank 1 (no events) or for ")
    assert verdict.notes == ["no events of rank 1: its file is missing or empty"]


def test_a_slow_loader_of_the_only_rank_with_events_is_not_everyones(folder: Any) -> None:
    run = folder(2)
    run.time_steps([healthy(), healthy(input=40.0)])
    (run.path / "events" / "rank-0.jsonl").write_text("")
    verdict = judged(run)
    assert verdict.kind == "data"
    assert verdict.headline.startswith("rank 1 waits 40 ms per step for data; fix its loader and ")
    assert "up to" in verdict.headline


@pytest.mark.parametrize(
    ("val", "after", "collected", "kind"),
    [
        ({"loss": 0.1}, 0.0, 0.0, "validation"),
        (None, 4.0, 0.0, "epochs"),
        (None, 4.0, 4.0, "none"),
        (None, 0.0, 0.0, "none"),
    ],
)
def test_time_between_epochs_is_named(
    folder: Any, val: dict[str, float] | None, after: float, collected: float, kind: str
) -> None:
    run = folder(2)
    begin, validation = 1.0, 4.0 if val else 0.0
    for epoch in range(3):
        first = 20 * epoch + 1
        run.time_steps([healthy(), healthy()], steps=20, first=first, begin=begin - 0.0228 * first)
        begin += 20 * 0.0228 + validation
        facts = {"train": {"loss": 1.0, "collect_s": collected}, "val": val}
        run.add(0, "epoch", begin, epoch=epoch, step=20 * epoch + 20, **facts)
        begin += after
    run.end(60, at=begin - collected)
    verdict = judged(run)
    assert verdict.kind == kind
    if kind != "none":
        assert verdict.causes[0].facts["each_s"] == pytest.approx(4.0, rel=0.05)
        assert "4.0 s after each" in verdict.headline


def test_replayed_steps_are_judged_by_their_real_length(folder: Any) -> None:
    """Phases of an eager comparison step are shares; the graph itself takes 0.1 ms."""
    run = folder(2, {"device": "cuda:0", "device_uuid": ("GPU-a", "GPU-b")})
    for step in range(100, 2000, 100):
        for rank in range(2):
            eager = {"input_s": 0.0, "forward_s": 6e-4, "backward_s": 9e-4, "comm_s": 1e-4}
            eager |= {"optimizer_s": 4e-4, "checkpoint_s": 0.0, "other_s": 0.0, "step_s": 2e-3}
            waited = 100 * 3e-4 if rank == 1 else 0.0
            interval = {"interval_steps": 100, "interval_s": 0.04, "interval_input_s": waited}
            interval["interval_checkpoint_s"] = 0.0
            run.add(rank, "phases", step=step, source="check", **eager, **interval)
    verdict = judged(run)
    assert (verdict.kind, verdict.causes[0].ranks) == ("data", (1,))
    assert "rank 1 waits 300 us per step for data" in verdict.headline
    assert any("replayed as CUDA graphs" in note for note in verdict.notes)


def test_too_few_timed_steps_say_nothing(folder: Any) -> None:
    run = folder(2)
    run.log(20)
    verdict = judged(run)
    assert verdict.kind == "unknown" and "monitor=false" in verdict.headline


def test_durations_are_written_as_people_say_them() -> None:
    written = [duration(s) for s in (3e-6, 0.0123, 0.3, 2.5, 45, 150, 7300)]
    assert written == ["3 us", "12.3 ms", "300 ms", "2.5 s", "45 s", "2 min 30 s", "2 h 01 min"]
