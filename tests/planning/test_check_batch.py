"""The batch of `mgt check RECIPE`: recommended, measured and trained by its command are one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from processes import mgt_here

from multi_gpu_training.cli import train_command as train
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.feeding import BatchSizes, batch_sizes
from multi_gpu_training.measure.footprint import COUNTED as COUNTED_FILE
from multi_gpu_training.measure.footprint import StepFootprint
from multi_gpu_training.measure.memory_model import MemoryModel, MemoryParts, MemoryPoint
from multi_gpu_training.measure.request import SIZES, MeasureRequest
from multi_gpu_training.measure.script_runner import ScriptRunner
from multi_gpu_training.planning.check import recommendation, training_fit
from multi_gpu_training.planning.check.check_report import Finding, Level
from multi_gpu_training.planning.check.checkup import Checkup
from multi_gpu_training.planning.check.training_fit import Fitting, MeasuredSpeed, TrainingFit

COUNTED = {"parameters": 10**6, "activations": 10**5, "samples": 1437, "in_memory": True}
Rate = Callable[[BatchSizes], float]


class Machine:
    """Ranks that train nothing: sizes by the config's own arithmetic, speed by `rate` samples a
    second, and memory for `largest` samples a rank."""

    def __init__(self, config: MultiGPUConfig, largest: int = 10_000, rate: Rate | None = None):
        self.config = config
        self.largest = largest
        self.rate: Rate = rate or (lambda sizes: 900.0 * sizes.ranks)
        self.trained: list[BatchSizes] = []

    def start(self, runner: ScriptRunner, request: MeasureRequest, log: Path) -> int:
        request.save()
        out = Path(request.out)
        sizes = batch_sizes(StepFootprint(request).adapt(self.config), request.ranks)
        (out / SIZES).write_text(json.dumps(asdict(sizes)))
        if sizes.per_rank > self.largest:
            log.write_text("OutOfMemoryError: out of memory\n")
            return 1
        self.trained.append(sizes)
        log.write_text("")
        record: dict[str, Any] = {
            "step_times_s": [sizes.global_batch / self.rate(sizes)] * 4,
            "samples_per_step": sizes.global_batch,
            "per_rank_batch": sizes.per_rank,
            "accumulation": sizes.accumulation,
            "copies": sizes.ranks,
            "global_batch": sizes.global_batch,
            "peak_bytes": 10**8 + sizes.per_rank * 10**4,
            "reserved_bytes": 10**8,
            "precision": "float32",
        }
        (out / COUNTED_FILE).write_text(json.dumps(COUNTED))
        for rank in range(request.ranks):
            (out / f"rank-{rank}.json").write_text(json.dumps(record))
        return 0


def resolved(words: list[str]) -> tuple[MultiGPUConfig, int]:
    """The config and the number of ranks of `mgt train WORDS`."""
    words, ranks = list(words), None
    if "--num-gpus" in words:
        place = words.index("--num-gpus")
        ranks = int(words[place + 1])
        del words[place : place + 2]
    _, config, _ = train.resolve(train.TrainFlags(words[0], ranks, {}, {}, words[1:]))
    return config, ranks or 1


@pytest.mark.parametrize(
    ("words", "largest", "expected"),
    [
        ([], 10_000, BatchSizes(32, 1, 2, 64)),
        (["global_batch_size=64"], 10_000, BatchSizes(32, 1, 2, 64)),
        (["global_batch_size=65"], 10_000, BatchSizes(33, 1, 2, 65)),
        (["global_batch_size=64", "--batch-size", "8"], 10_000, BatchSizes(8, 4, 2, 64)),
        (["--batch-size", "8", "--grad-accum-steps", "2"], 10_000, BatchSizes(8, 2, 2, 32)),
        # One rank has no room for all of a global batch, two have.
        (["global_batch_size=64"], 40, BatchSizes(32, 1, 2, 64)),
        # Too large for two as well: the step stays, in smaller parts.
        (["global_batch_size=64"], 20, BatchSizes(16, 2, 2, 64)),
        (["--batch-size=32", "grad_accum_steps=2"], 10, BatchSizes(8, 8, 2, 128)),
        (["global_batch_size=64", "grad_accum_steps=4"], 5, BatchSizes(4, 8, 2, 64)),
    ],
)
def test_the_command_trains_the_batch_that_was_measured_and_recommended(
    words: list[str],
    largest: int,
    expected: BatchSizes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, _ = resolved(["image", *words])
    machine = Machine(config, largest)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ScriptRunner, "start", lambda *given: machine.start(*given))
    monkeypatch.setattr(Checkup, "run", lambda self: None)
    said = mgt_here(monkeypatch, capsys, "check", "image", *words, "--device", "cpu")
    lines = said.out.strip().splitlines()
    assert machine.trained[-1] == expected
    recommended = f"ddp, 2 CPU ranks, {recommendation.batch_text(expected)}, 0 loader workers"
    assert recommended in " ".join(said.out.split())
    trained, ranks = resolved(shlex.split(lines[-1])[2:])
    assert batch_sizes(trained, ranks) == expected
    assert trained.base_batch_size == config.base_batch_size


def test_a_batch_is_said_with_all_its_parts() -> None:
    said = recommendation.batch_text
    assert said(BatchSizes(32, 1, 1, 32)) == "32 samples"
    assert said(BatchSizes(8, 2, 1, 16)) == "8 samples, 2 accumulated, 16 per step"
    assert said(BatchSizes(32, 1, 2, 64)) == "32 samples each, 64 per step"
    assert said(BatchSizes(8, 2, 2, 32)) == "8 samples each, 2 accumulated, 32 per step"


def measured(
    folder: Path,
    config: MultiGPUConfig,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int = 2,
    **machine: Any,
) -> tuple[TrainingFit, list[Finding], Machine]:
    there = Machine(config, **machine)
    monkeypatch.setattr(ScriptRunner, "start", lambda *given: there.start(*given))
    said: list[Finding] = []
    runner = ScriptRunner(["train.py"], folder, 4, 1, "cpu", ranks_at_hand=ranks)
    found = Fitting(runner, ranks, [], 2**33, said.append).measure()
    assert found is not None
    return found, [*said, *training_fit.judge(found, None)], there


def test_a_global_batch_that_two_ranks_can_share_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MultiGPUConfig(global_batch_size=64)
    found, said, _ = measured(tmp_path, config, monkeypatch, largest=40)
    assert said[0].level is Level.WARN and "2 CPU ranks take 32 each" in said[0].text
    assert "32 samples per CPU rank take" in said[1].text
    script = recommendation.recommend(found, ["train.py"], 0, 2).command
    assert script.endswith("MultiGPUConfig(num_workers=0, use_mixed_precision=False)")


def test_smaller_parts_keep_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without base_batch_size the rate is scaled from batch_size, which changes here."""
    config = MultiGPUConfig(batch_size=32, lr_scaling="linear")
    found, said, _ = measured(tmp_path, config, monkeypatch, largest=10)
    assert said[0].level is Level.FAIL
    assert "--batch-size 8 global_batch_size=64" in said[0].remedy
    assert found.chosen.settings == {
        "batch_size": 8,
        "global_batch_size": 64,
        "base_batch_size": 32,
    }


def test_the_batch_of_a_data_loader_is_left_alone() -> None:
    memory = MemoryModel.from_points([MemoryPoint(24, 10**7)])
    assert memory is not None
    sizes = BatchSizes(24, 1, 1, 24)  # the config says nothing, and its default is 32
    found = TrainingFit(
        "GPU",
        {"batch_size": 32, "global_batch_size": None},
        COUNTED,
        MemoryParts.of(COUNTED, 24, 10**7),
        memory,
        10**9,
        "float32",
        [MeasuredSpeed("1 GPU", "single", 1, 100.0, 0.24, sizes)],
    )
    chosen = recommendation.recommend(found, ["train.py"], 0, 1)
    assert chosen.batch_size == 24 and "batch_size" not in chosen.command


def held_up(*at: int) -> Rate:
    """Two ranks 1.8 times as fast as one, but those cases of one rank were held up."""
    cases = iter(range(100))
    return lambda sizes: 1800.0 if sizes.ranks > 1 else 200.0 if next(cases) in at else 1000.0


@pytest.mark.parametrize(
    ("at", "times", "busy", "ranks"),
    [((), 3, False, 2), ((0,), 5, False, 2), ((0, 2), 5, True, 1)],
)
def test_a_speed_up_that_cannot_be_is_measured_again_and_not_recommended_by(
    at: tuple[int, ...],
    times: int,
    busy: bool,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = MultiGPUConfig(batch_size=32)
    found, said, machine = measured(tmp_path, config, monkeypatch, rate=held_up(*at))
    assert len(machine.trained) == times
    chosen = recommendation.recommend(found, ["train.py"], 0, 2)
    assert (found.too_busy, chosen.ranks) == (busy, ranks)
    warned = [one for one in said if one.topic == "speed"]
    assert [one.level for one in warned] == [Level.WARN] * busy
    if busy:
        assert "9.00 times as fast as one" in warned[0].text
        assert "too busy to tell" in chosen.reasons[0] and "measured" not in chosen.reasons[0]
        assert [row[3] for row in recommendation.time_rows(found)] == ["1.00x", "?"]
    else:
        assert "1.80 times as fast as one (measured)" in chosen.reasons[0]


def test_larger_parts_may_be_faster_than_each_rank_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has no room for 30 samples and takes 15 at a time; each of three takes 20."""
    config = MultiGPUConfig(global_batch_size=60)
    found, _, _ = measured(
        tmp_path,
        config,
        monkeypatch,
        ranks=3,
        largest=25,
        rate=lambda sizes: 900.0 * sizes.ranks * (1 if sizes.per_rank > 15 else 0.5),
    )
    assert not found.too_busy
    assert found.chosen.batch == BatchSizes(20, 1, 3, 60)
