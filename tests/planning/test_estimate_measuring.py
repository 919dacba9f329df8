"""What `mgt estimate` measures of a script, on one rank under DDP."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from multi_gpu_training.data.batch import attach, share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.resident import ResidentBatch
from multi_gpu_training.measure.loader_rates import worker_counts
from multi_gpu_training.measure.request import MeasureRequest
from multi_gpu_training.measure.script_runner import MeasureError, ScriptRunner
from multi_gpu_training.measure.step_anatomy import first_samples
from multi_gpu_training.planning.estimate.profiling import Profiled, profile_training
from multi_gpu_training.planning.forecast.profile import StepProfile

START = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

x, y = torch.randn(60, 16), torch.randint(0, 4, (60,))
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self, spare=False):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(),
            nn.Linear(300, 4))
        if spare:
            self.spare = nn.Linear(3, 3)

    def forward(self, x):
        if len(x) > LIMIT:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.layers(x)


def manager(**settings):
    return MultiGPUTrainingManager(MultiGPUConfig(device="cpu", **settings))
"""
FIT = """
LIMIT = {limit}
manager(batch_size={batch}, {settings}).fit(Net(), TensorDataset(x, y), epochs={epochs})
"""
OWN_LOOP = """
LIMIT = 100
trainer = manager(gradient_accumulation_steps=2, find_unused_parameters=True)


def weighted(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    weight = batch[1] + 1.0
    return (loss * weight).sum() / weight.sum(), weight.sum()


trainer.setup_training(Net(spare=True), TensorDataset(x, y), loss_fn=weighted)
for step in range(14):
    trainer.trainer.train_step([x[:10], y[:10]])
trainer.finish()
"""

STREAM = """
LIMIT = 100


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(1000):
            yield {"x": torch.randn(5 + number % 3, 16), "y": number % 4}


def together(samples):
    wide = max(len(sample["x"]) for sample in samples)
    padded = [nn.functional.pad(s["x"], (0, 0, 0, wide - len(s["x"]))) for s in samples]
    return {"x": torch.stack(padded), "y": torch.tensor([s["y"] for s in samples])}


def mean_over_time(model, batch):
    return nn.functional.cross_entropy(model.layers[3:](batch["x"].mean(1) @ weight), batch["y"])


weight = torch.randn(16, 300)
net = Net()
net.layers[:2].requires_grad_(False)
data = torch.utils.data.DataLoader(Stream(), batch_size=6, collate_fn=together)
trainer = manager(training_mode="single", max_grad_norm=1.0)
_, loader, _ = trainer.setup_training(net, data, loss_fn=mean_over_time)
for epoch in range(3):
    trainer.train_epoch(loader, epoch)
"""

ROLLOUTS = """
LIMIT = 100
from multi_gpu_training.data.batch import attach
from multi_gpu_training.data.order import Share

trainer = manager(batch_size=12)
trainer.setup_training(Net(), TensorDataset(x, y))
for step in range(20):
    share = Share(0, step, tuple(range(12)), 12, 12, True, True, step)
    trainer.trainer.train_step(attach([x[:12], y[:12]], share))
"""


def run_in_rank(script: str, request: str) -> tuple[int, str]:
    """The script in a rank of the pool, in a group of one, as `mgt estimate` starts it."""
    names = {
        "MGT_MEASURE": request,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
    }
    os.environ.update(names)
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0), ""
    except Exception:
        return 1, traceback.format_exc()
    finally:
        sys.excepthook = hook
        dist.destroy_process_group()
        for name in names:
            del os.environ[name]
    return 0, ""


class WarmRunner(ScriptRunner):
    """Trains in a rank of the tests: seconds less for each case."""

    def start(self, request: MeasureRequest, log: Path) -> int:
        (script,) = self.command
        code, text = run_ranks(1, run_in_rank, script, request.save())[0]
        log.write_text(text)
        return code


@pytest.fixture
def estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(text: str, **settings: Any) -> Profiled:
        script = tmp_path / "script.py"
        script.write_text(START + text)
        runner = WarmRunner([str(script)], tmp_path / "cases", 6, 3, "cpu", **settings)
        return profile_training(runner, "a script")

    return run


def fit(batch: int = 8, limit: int = 1000, epochs: int = 7, settings: str = "") -> str:
    return FIT.format(batch=batch, limit=limit, epochs=epochs, settings=settings)


GRADIENTS = 4 * (17 * 300 + 600 + 301 * 300 + 301 * 4)


def test_a_step_is_taken_apart(estimated: Any, tmp_path: Path) -> None:
    profile = estimated(fit(settings="bucket_cap_mb=0.2")).profile
    assert profile.per_rank_batch == 8 and profile.accumulation == 1
    assert len(profile.step_times_s) == 6
    assert min(profile.forward_s, profile.backward_s, profile.optimizer_s) > 0
    # DDP's buckets, rebuilt in the order in which gradients come: all of the gradients once, and
    # the four bytes in which the weight of a step travels.
    assert profile.gradient_bytes == GRADIENTS + 4
    assert len(profile.buckets) == 2
    ready = [bucket.ready_s for bucket in profile.buckets]
    assert ready == sorted(ready) and ready[0] >= 0 and ready[-1] <= 1.5 * profile.backward_s
    assert profile.parameter_bytes == GRADIENTS
    assert (profile.dataset_samples, profile.epochs, profile.max_steps) == (60, 7, None)
    assert profile.loader_rates.keys() == {0} and profile.loader_rates[0] > 0
    assert [point.per_rank_batch for point in profile.memory] == [4, 8]
    assert profile.device == "CPU" and profile.power_w is None
    profile.save(tmp_path / "profile.json")
    assert StepProfile.load(tmp_path / "profile.json") == profile


def test_a_loop_of_ones_own_is_measured_with_what_it_has(estimated: Any) -> None:
    """Seven steps of two micro-batches, losses with weights, BatchNorm, and a layer without use:
    too few for the warm-up and the measuring, so that the last one is repeated."""
    found = estimated(OWN_LOOP)
    profile = found.profile
    assert profile.accumulation == 2 and profile.per_rank_batch == 10
    assert len(profile.step_times_s) == 6
    assert profile.gradient_bytes == GRADIENTS + 4 * 12 + 4
    assert profile.loader_rates == {}  # it does not use the loader
    assert [point.per_rank_batch for point in profile.memory] == [10]
    assert any("one batch size only" in note for note in found.notes)
    assert profile.epochs is None


def test_a_stream_of_dicts_has_no_length_and_no_rates(estimated: Any) -> None:
    profile = estimated(STREAM).profile
    assert profile.per_rank_batch == 6
    assert profile.dataset_samples is None and profile.loader_rates == {}
    assert profile.gradient_bytes == 4 * (301 * 300 + 301 * 4) + 4  # the rest is frozen


def test_batches_that_are_only_placed_like_the_loaders_have_no_epochs(estimated: Any) -> None:
    """As rollouts of an agent: the dataset is a number of environments."""
    profile = estimated(ROLLOUTS).profile
    assert profile.per_rank_batch == 12
    assert profile.dataset_samples is None and profile.loader_rates == {}


def test_a_static_graph_and_separate_gradients_have_buckets_too(estimated: Any) -> None:
    profile = estimated(
        fit(settings="static_graph=True, use_gradient_as_bucket_view=False")
    ).profile
    assert profile.gradient_bytes == GRADIENTS + 4


def test_compressed_gradients_count_half_and_synchronised_norms_are_named(estimated: Any) -> None:
    settings = "fp16_compression=True, sync_bn=True, global_batch_size=16, max_steps=50"
    found = estimated(fit(settings=settings))
    assert found.profile.gradient_bytes == (GRADIENTS + 4) // 2
    assert any("sync_bn exchanges the statistics of 1 layers" in note for note in found.notes)
    assert found.profile.scaling == "strong" and found.profile.max_steps == 50
    assert found.profile.accumulation == 2


def test_a_batch_that_does_not_fit_is_halved_until_it_does(estimated: Any) -> None:
    found = estimated(fit(batch=32, limit=12))
    assert found.profile.per_rank_batch == 8
    assert found.notes[0].startswith("batch_size=32 does not fit on this GPU: measured, and")


def test_a_model_that_never_fits_is_an_error_that_says_what_to_do(estimated: Any) -> None:
    with pytest.raises(MeasureError, match=r"(?s)even with a batch of 1: .*gradient_checkpoint"):
        estimated(fit(batch=4, limit=0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ended without a MultiGPUTrainingManager"),
        (
            "LIMIT = 9\nmanager().setup_training(Net(), TensorDataset(x, y))",
            "before enough steps were trained through the manager",
        ),
        ("raise ValueError('of its own')", "ValueError: of its own"),
    ],
)
def test_a_script_that_gives_nothing_to_measure_is_told_why(
    estimated: Any, text: str, said: str
) -> None:
    with pytest.raises(MeasureError, match=said):
        estimated(text)


def test_batches_of_every_kind_can_be_cut() -> None:
    share = Share(0, 3, (5, 6, 7, 8), 4, 8, True, True, 3)
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    own = first_samples({"x": x, "y": y, "scale": torch.tensor(2.0)}, 2)
    assert own["x"].shape == (2, 2) and own["y"].tolist() == [0, 1] and own["scale"] == 2
    ours = first_samples(attach([x, y], share), 3)
    assert ours[0].shape == (3, 2)
    assert share_of(ours) == replace(share, indices=(5, 6, 7), count=3)
    resident = first_samples(ResidentBatch(torch.tensor([3, 1, 2, 0]), (x, y), share), 1)
    assert resident.gather(resident.index)[1].tolist() == [3]
    placed = share_of(resident)
    assert placed is not None and placed.count == 1


def test_workers_are_tried_up_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        class feeding:
            num_workers = 3

        gathers = False

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    assert worker_counts(Loader()) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
