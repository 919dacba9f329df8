"""The speech recipe learns, is the same on any number of ranks, and loses nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from parity.training import difference
from ranks import run_ranks
from torch import nn

from multi_gpu_training import Callback, TrainingMode
from multi_gpu_training.cli.train_command import TrainFlags, resolve
from multi_gpu_training.config_file import READY_CONFIGS
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.recipe import Job, find_recipe
from multi_gpu_training.recipes.speech import SpeechOptions
from multi_gpu_training.recipes.speech.corpora import DIGITS
from multi_gpu_training.recipes.speech.voice import RATE, letter


def write_digits(folder: Path, numbers: tuple[int, ...] = (4, 5, 6)) -> Path:
    """The ten digits in tones, as files of FSDD."""
    (folder / "recordings").mkdir(parents=True)
    for digit, word in enumerate(DIGITS):
        for number in numbers:
            like = max(number, 5)  # the test is one of the trained ones
            pitch, seconds = 1 + 0.01 * like, 0.04 + 0.004 * like
            sound = torch.cat([letter(c, round(seconds * RATE), pitch) for c in word])
            path = folder / f"recordings/{digit}_tones_{number}.wav"
            soundfile.write(path, 0.3 * sound.numpy(), RATE, subtype="PCM_16")
    return folder


class Stop(Exception):
    pass


class Watch(Callback):
    """Notes the rate of every step; stops as if killed after one of them."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.rates: list[float] = []

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        self.rates.append(float(manager.trainer.optimizer.param_groups[0]["lr"]))
        if step == self.stop:
            raise Stop


def train(
    folder: Path,
    settings: dict[str, Any],
    options: dict[str, Any],
    exact: bool = False,
    stop: int | None = None,
) -> Any:
    """Metrics, weights and rates; None where it was stopped. `exact`: float64, no dropout."""
    recipe = find_recipe("speech")
    jobs: list[Job] = []
    watch = Watch(stop)

    def build(config: Any, chosen: Any) -> Job:
        job = recipe.build(config, chosen)
        if exact:
            job.model.double()
            for module in job.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        job = dataclasses.replace(job, callbacks=[*job.callbacks, watch])
        jobs.append(job)
        return job

    quiet = {
        "device": "cpu",
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "enable_fault_tolerance": False,
    }
    try:
        result = dataclasses.replace(recipe, build=build).train(
            recipe.config({**quiet, **settings}), recipe.options(**options)
        )
    except Stop:
        return None
    weights = {name: value.detach().clone() for name, value in jobs[0].model.state_dict().items()}
    return result.metrics, weights, watch.rates


def test_it_learns_to_read_what_it_has_heard(tmp_path: Path) -> None:
    data = str(write_digits(tmp_path / "data"))
    settings = {"epochs": 40, "batch_size": 10, "base_batch_size": 10}
    options = {"data_dir": data, "augment": False, "buckets": 1}
    metrics, _, _ = train(tmp_path, settings, options)
    assert metrics["wer"] <= 0.1
    assert metrics["cer"] <= 0.05


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_two_and_three_ranks_learn_what_one_learns(tmp_path: Path, norm: str) -> None:
    # Odd batches, so that shares differ; augmentation on; the full rate from the first step.
    settings = {"global_batch_size": 7, "max_steps": 3, "warmup_epochs": 0, "sync_bn": True}
    options = {"data_dir": str(write_digits(tmp_path / "data")), "norm": norm, "buckets": 2}
    [(metrics, reference, _)] = run_ranks(1, train, tmp_path, settings, options, True)
    for ranks in (2, 3):
        for seen, ours, _ in run_ranks(ranks, train, tmp_path, settings, options, True):
            # AdamW in float64; 1e-12 was seen.
            assert max(difference(ours, reference).values()) <= 1e-9
            assert seen == pytest.approx(metrics, rel=1e-9)


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options = {"data_dir": str(write_digits(tmp_path / "data")), "buckets": 2}
    settings = {
        "epochs": 2,
        "global_batch_size": 8,
        "checkpoint_frequency": 1,
        "enable_fault_tolerance": True,
    }

    def run(name: str, resume: str | None, stop: int | None = None) -> list[Any]:
        more = {**settings, "run_name": name, "resume": resume}
        return run_ranks(2, train, tmp_path, more, options, False, stop)

    whole = run("whole", None)
    assert run("stopped", None, stop=4) == [None, None]
    for (metrics, ours, _), (expected, reference, _) in zip(
        run("stopped", "auto"), whole, strict=True
    ):
        assert all(torch.equal(ours[name], reference[name]) for name in reference)
        assert metrics == expected


def test_another_batch_size_goes_on_only_where_an_epoch_ends(tmp_path: Path) -> None:
    options = {"data_dir": str(write_digits(tmp_path / "data")), "buckets": 2}
    settings = {"global_batch_size": 8, "enable_fault_tolerance": True, "run_name": "run"}
    train(tmp_path, {**settings, "epochs": 1}, options)
    more = {"global_batch_size": 5, "resume": "auto", "epochs": 2}
    _, _, rates = train(tmp_path, {**settings, **more}, options)
    job = find_recipe("speech").build(find_recipe("speech").config({}), SpeechOptions(**options))
    assert len(rates) == len(job.dataset.global_batches(5))  # the second epoch, all of it
    middle = {**settings, "run_name": "middle", "checkpoint_frequency": 1}
    assert train(tmp_path, {**middle, "epochs": 1}, options, stop=3) is None
    with pytest.raises(ConfigError, match=r"forms other batches \(.*\): continue with global_b"):
        train(tmp_path, {**middle, **more}, options)


def test_beam_search_is_no_worse_on_what_was_learnt(tmp_path: Path) -> None:
    options = {"data_dir": str(write_digits(tmp_path / "data")), "decoder": "beam"}
    metrics, _, _ = train(tmp_path, {"max_steps": 2}, {**options, "beam_width": 4})
    assert metrics["wer"] > 0 and metrics["cer"] > 0


# The files of guide 004


def chosen(*words: str) -> Any:
    target, *extra = words
    _, config, options = resolve(TrainFlags(target, None, {}, {}, list(extra)))
    return config, options


def test_the_guides_files_act_as_their_keys_are_named() -> None:
    config, options = chosen("multi_gpu")
    assert config.recipe == "speech"
    assert options.size == "base"
    assert config.training_mode is TrainingMode.DISTRIBUTED_DATA_PARALLEL
    assert (config.backend, config.find_unused_parameters, config.sync_bn) == ("nccl", False, True)
    assert (config.global_batch_size, config.learning_rate) == (32, 2e-3)
    assert config.lr_scaling == "none"  # 2e-3 is scaled already
    single, _ = chosen("base_config")
    assert single.training_mode is TrainingMode.SINGLE
    assert (single.global_batch_size, single.learning_rate) == (16, 1e-3)
    off, _ = chosen("multi_gpu", "distributed.enabled=false", "distributed.backend=gloo")
    assert off.training_mode is TrainingMode.SINGLE
    named, _ = chosen("distributed", "recipe=speech")
    assert named.sync_bn and named.recipe == "speech"
    for name in ("base_config", "distributed", "multi_gpu"):
        assert (READY_CONFIGS / f"{name}.yaml").read_text().startswith("# ")


def test_rate_is_scaled_once_without_a_file_and_not_at_all_with_one(tmp_path: Path) -> None:
    options = {"data_dir": str(write_digits(tmp_path / "data"))}
    plain = {"max_steps": 1, "warmup_epochs": 0, "schedule": "constant"}
    for _, _, rates in run_ranks(2, train, tmp_path, plain, options):
        assert rates == [pytest.approx(2e-3)]  # 16 utterances on each of two ranks
    config, _ = chosen("multi_gpu")
    given = {name: getattr(config, name) for name in ("global_batch_size", "learning_rate")}
    given |= {"lr_scaling": config.lr_scaling, "sync_bn": config.sync_bn}
    for _, _, rates in run_ranks(2, train, tmp_path, {**plain, **given}, options):
        assert rates == [pytest.approx(2e-3)]
