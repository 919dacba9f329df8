"""`load`: a trained model in plain PyTorch, from what its checkpoint says about it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from image_folders import COLOURS, picture, write_images
from ranks import run_ranks
from tiny import line, points, quiet, sgd, squares
from torch import nn
from trained_runs import SMALL, run_of, train

import multi_gpu_training as mgt
from multi_gpu_training.checkpoint.merging import merge
from multi_gpu_training.delivery.model_folder import file_facts
from multi_gpu_training.delivery.rank_predictions import predict_on_ranks, ranks
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.extras import installed
from multi_gpu_training.safe_files import signed


def close(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Sums in other orders differ in the last digits of a float32."""
    assert theirs and ours == {name: pytest.approx(theirs[name], rel=1e-5) for name in ours}


# Recipes


def test_a_checkpoint_alone_is_enough_to_rebuild_and_feed_its_model(tmp_path: Path) -> None:
    run = run_of("image")
    shutil.copytree(run / "checkpoints" / "best", tmp_path / "step-00000012")
    loaded = mgt.load(tmp_path / "step-00000012", device="cpu")
    assert not loaded.model.training and loaded.labels == [str(n) for n in range(10)]
    assert "model.json" in json.loads((loaded.checkpoint / "manifest.json").read_text())["files"]
    raws = mgt.load(run, device="cpu").example_inputs(40)
    results = loaded.predict(raws, batch_size=16)
    scores = loaded.outputs(loaded.preprocess(raws))[0]
    assert [r["label"] for r in results] == [str(n) for n in scores.argmax(1).tolist()]
    assert loaded.read([scores], raws)[3]["score"] == pytest.approx(results[3]["score"], rel=1e-5)


def test_evaluate_gives_what_the_validation_of_the_training_gave() -> None:
    loaded = mgt.load(run_of("image"), device="cpu")
    close(loaded.evaluate(), loaded.metrics)
    close(loaded.evaluate(batch_size=7), loaded.metrics)


def test_a_smaller_model_is_rebuilt_saved_and_loaded_again(tmp_path: Path) -> None:
    loaded = mgt.load(run_of("image"), device="cpu")
    small = loaded.rebuild(width=4)
    raws = loaded.example_inputs(3)
    again = mgt.load(small.save(tmp_path / "small"), device="cpu")
    assert again.description["model"]["width"] == 4
    assert again.predict(raws) == small.predict(raws) != loaded.predict(raws)
    with pytest.raises(mgt.ConfigError, match="depth: the image model has no such argument"):
        loaded.rebuild(depth=3)
    (tmp_path / "small" / "model.json").write_text("{}")
    with pytest.raises(mgt.MultiGPUError, match=r"model\.json was changed; export it again"):
        mgt.load(tmp_path / "small")


def test_classes_of_other_data_are_found_by_their_names(tmp_path: Path) -> None:
    """Data without the first class number the others differently."""
    data = write_images(tmp_path / "photos")
    settings = {"max_steps": 20, "num_workers": 0, "learning_rate": 0.01}
    run = train("image", tmp_path, settings, {"data_dir": str(data), "image_size": 16})
    loaded = mgt.load(run, device="cpu")
    assert loaded.labels == sorted(COLOURS)
    close(loaded.evaluate(), loaded.metrics)
    others = tmp_path / "others"
    for label in ("green", "red"):
        (others / label).mkdir(parents=True)
        for number in range(20, 26):
            picture(label, number).save(others / label / f"{number}.png")
    files = sorted(others.rglob("*.png"))
    right = [r["label"] == f.parent.name for r, f in zip(loaded.predict(files), files, strict=True)]
    assert loaded.evaluate(others)["accuracy"] == pytest.approx(sum(right) / len(right))
    assert loaded.predict([picture("red", 1)])[0]["label"] in loaded.labels
    with pytest.raises(
        mgt.ConfigError, match=r"not prepared as the model was trained.*colour: 'rgb'"
    ):
        mgt.load(run_of("image"), device="cpu").evaluate(others)
    (others / "green").rename(others / "yellow")
    with pytest.raises(mgt.ConfigError, match="'yellow', which the model does not know"):
        loaded.evaluate(others)


def test_a_policy_acts_and_plays_the_same_episodes_again_and_records_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")  # gymnasium sets it
    pytest.importorskip("gymnasium")
    loaded = mgt.load(run_of("ppo"), device="cpu")
    first, second = loaded.predict(loaded.example_inputs(2))
    assert first["action"] in (0, 1) and len(first["state"]) == 4
    # A step goes on from the state of the one before.
    seen = loaded.example_inputs(2)
    after = loaded.predict([{"observation": seen[1], "state": first["state"]}])[0]
    assert after["value"] != second["value"]
    played = loaded.predict(range(3), task="play")
    assert played[2] == loaded.predict([2], task="play")[0] and played[0]["steps"] > 1
    if not installed("pygame"):
        with pytest.raises(mgt.ConfigError, match=r"cannot be rendered: pygame is not installed"):
            loaded.predict([0], task="play", record=str(tmp_path))
    else:
        recording = loaded.predict([0], task="play", record=str(tmp_path))[0]["recording"]
        assert Path(recording).read_bytes()[:6] == b"GIF89a"


def test_a_checkpoint_without_a_description_is_rebuilt_from_the_options_of_its_run(
    tmp_path: Path,
) -> None:
    """As up to version 0.1."""

    def undescribed(recipe: Any) -> Any:
        def build(config: Any, options: Any) -> Any:
            return dataclasses.replace(recipe.build(config, options), description=None)

        return dataclasses.replace(recipe, build=build)

    run = train("image", tmp_path, *SMALL["image"], undescribed)
    assert not (run / "checkpoints" / "best" / "model.json").exists()
    loaded = mgt.load(run, device="cpu")
    close(loaded.evaluate(), loaded.metrics)
    assert loaded.description["model"]["kind"] == "cnn"


# bf16


def products(model: nn.Module) -> list[torch.Tensor]:
    """The weights of linear layers and convolutions that no embedding shares."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
    return [
        part.weight
        for part in model.modules()
        if isinstance(part, kinds) and not any(part.weight is table for table in tables)
    ]


@pytest.mark.parametrize("recipe", SMALL)
def test_in_bf16_weights_are_halved_and_scores_stay_float32(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")  # gymnasium sets it
    exact = mgt.load(run_of(recipe), device="cpu")
    half = mgt.load(run_of(recipe), device="cpu", dtype="bf16")
    assert all(weight.element_size() == 2 for weight in products(half.model))
    batch = exact.example_batch(7)
    ours, theirs = exact.outputs(batch)[0], half.outputs(batch)[0]
    assert theirs.dtype is torch.float32 and not torch.equal(theirs, theirs.bfloat16().float())
    assert 0 < float((ours - theirs).norm() / ours.norm()) <= 2e-2
    task = "score" if "score" in half.tasks else None
    assert len(half.predict(half.example_inputs(2), task)) == 2
    assert set(half.evaluate()) == set(exact.evaluate())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["image", "transformer"])
def test_a_gpu_computes_in_bf16_what_the_cpu_does(recipe: str) -> None:
    here = mgt.load(run_of(recipe), device="cpu", dtype="bf16")
    there = mgt.load(run_of(recipe), device="cuda", dtype="bf16")
    batch = here.example_batch(7)
    ours, theirs = here.outputs(batch)[0], there.outputs(batch)[0]
    assert float((ours - theirs).norm() / ours.norm()) <= 5e-3
    assert not torch.equal(theirs, theirs.bfloat16().float())


class Close(nn.Module):
    """Scores that rounding to bf16 would make equal, and layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 8)
        self.inner, self.again = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.again.weight = self.inner.weight
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head, self.tied = nn.Linear(8, 3), nn.Linear(8, 5, bias=False)
        self.tied.weight = self.words.weight
        with torch.no_grad():
            self.head.bias.copy_(torch.tensor([13.0, 13.02, 12.98]))
            self.head.weight.mul_(1e-3)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.again(torch.relu(self.inner(self.words(tokens))))
        seen = self.attention(seen, seen, seen)[0].mean(1)
        return {"scores": self.head(seen), "words": self.tied(seen)}


def test_own_models_in_bf16_tell_close_scores_apart_and_survive_copies(tmp_path: Path) -> None:
    Close().train()
    torch.manual_seed(0)
    tokens = torch.randint(5, (12, 4))
    common = {"training_mode": "single", "run_name": "own", "enable_fault_tolerance": True}
    manager = mgt.MultiGPUTrainingManager(quiet(tmp_path, **common, learning_rate=1e-9))
    run = manager.fit(
        Close,
        torch.utils.data.TensorDataset(tokens, torch.zeros(12).long()),
        loss_fn=lambda output, target: output["scores"].square().mean(),
        optimizer=sgd,
        description={"inputs": [{"name": "tokens", "dtype": "int64", "shape": ["batch", 4]}]},
    ).folder
    exact = mgt.load(run, device="cpu", model=Close)
    half = mgt.load(run, device="cpu", model=Close, dtype="bf16")
    model = half.model
    assert model.again.weight is model.inner.weight and model.inner.weight.element_size() == 2
    assert model.tied.weight is model.words.weight and model.words.weight.element_size() == 4
    ours, theirs = exact.outputs((tokens,)), half.outputs((tokens,))
    assert torch.equal(ours[0].argmax(1), theirs[0].argmax(1))
    assert float((ours[0] - theirs[0]).abs().max()) < 1e-3
    copied = half.with_model(copy.deepcopy(model))
    assert torch.equal(copied.outputs((tokens,))[0], theirs[0])
    again = mgt.load(half.save(tmp_path / "saved"), device="cpu", model=Close)
    assert {part.dtype for part in again.model.parameters()} == {torch.float32}
    torch.testing.assert_close(again.outputs((tokens,)), ours, rtol=1e-2, atol=1e-2)
    with pytest.raises(ConfigError, match="cannot be trained; load it without dtype"):
        half.job()


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="dtype='int3': use float32 or bf16"):
        mgt.load(run_of("image"), device="cpu", dtype="int3")


# Scripts


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def fit(folder: Path, model: Any, settings: dict[str, Any] | None = None, **more: Any) -> Path:
    common = {"enable_fault_tolerance": True, "training_mode": "single", "run_name": "own"}
    manager = mgt.MultiGPUTrainingManager(quiet(folder, **common, **(settings or {})))
    return manager.fit(model, points(), loss_fn=squares, optimizer=sgd, **more).folder


def test_a_scripts_model_is_loaded_by_its_class_or_by_its_recorded_path(tmp_path: Path) -> None:
    run = fit(tmp_path, functools.partial(Net, width=3))
    samples = list(points()[:5][0])
    by_class = mgt.load(run, device="cpu", model=Net).predict(samples)
    assert by_class == mgt.load(run, device="cpu", model=Net(3)).predict(samples)
    assert by_class == mgt.load(run, device="cpu", trust=True).predict(samples)
    with pytest.raises(mgt.MultiGPUError, match=r"test_load:Net.*trust=True"):
        mgt.load(run, device="cpu")
    with pytest.raises(mgt.MultiGPUError, match="belongs to another model"):
        mgt.load(run, device="cpu", model=line())


def test_what_a_checkpoint_names_is_not_run_without_consent(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    hostile = {"model": "os:mkdir", "arguments": {"path": str(mark)}}
    run = fit(tmp_path, line(), description=hostile)
    with pytest.raises(mgt.MultiGPUError, match=r"'os:mkdir' builds its model.*--trust"):
        mgt.load(run, device="cpu")
    assert not mark.exists()
    with pytest.raises(mgt.ConfigError, match="description cannot be written as JSON"):
        fit(tmp_path / "other", line(), description={"model": "a:b", "labels": {1, 2}})


def test_a_script_that_says_nothing_is_told_what_to_pass(tmp_path: Path) -> None:
    run = fit(tmp_path, line())
    with pytest.raises(
        mgt.MultiGPUError, match=r"not the code that builds it; .*load\(run, model="
    ):
        mgt.load(run)


def test_with_a_key_only_what_it_signed_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for name in ("ours", "theirs"):
        keys.append(tmp_path / name)
        keys[-1].write_bytes(name.encode() * 8)
        keys[-1].chmod(0o600)
    ours, theirs = keys
    signed = fit(tmp_path / "signed", line(), settings={"signing_key_file": str(ours)})
    plain = fit(tmp_path / "plain", line())
    monkeypatch.setenv("MGT_VERIFY_KEY", str(ours))
    loaded = mgt.load(signed, device="cpu", model=line())
    with pytest.raises(mgt.MultiGPUError, match="it is not signed"):
        mgt.load(plain, device="cpu", model=line())
    with pytest.raises(mgt.MultiGPUError, match="another key than theirs"):
        mgt.load(signed, device="cpu", model=line(), verify_key=theirs)
    with pytest.raises(mgt.ConfigError, match="carry no signature"):
        mgt.load(loaded.save(tmp_path / "copy"), device="cpu", model=line())


# Several ranks


def _predicted(run: str, items: int) -> list[dict[str, Any]]:
    loaded = mgt.load(run, device="cpu")
    noise = torch.Generator().manual_seed(3)
    raws = list(torch.randint(17, (items, 8, 8), dtype=torch.uint8, generator=noise))
    with ranks(device="cpu") as placement:
        return predict_on_ranks(loaded, raws, placement, batch_size=64)


def test_two_ranks_predict_every_item_once_in_order_and_to_the_last_bit() -> None:
    run = str(run_of("image"))
    alone = _predicted(run, 1001)
    assert len(alone) == 1001
    for found in run_ranks(2, _predicted, run, 1001):
        assert found == alone


@pytest.mark.engines
def test_a_run_in_object_storage_is_loaded_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/remote"
    local = {"local_dir": str(tmp_path / "machine")}
    train("image", url, SMALL["image"][0] | local, SMALL["image"][1])
    loaded = mgt.load(f"{url}/image/small", device="cpu")
    close(loaded.evaluate(), loaded.metrics)
    assert str(loaded.checkpoint).startswith(str(tmp_path / "cache"))
    with pytest.raises(mgt.ConfigError, match="no such checkpoint; complete ones there: step-"):
        mgt.load(f"{url}/image/small/checkpoints/step-7")


@pytest.mark.engines
def test_a_vision_transformer_and_a_text_classifier_are_rebuilt_from_their_checkpoints(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    data = write_images(tmp_path / "photos")
    model = {"model": "vit", "model_args": {"hidden_size": 24, "num_hidden_layers": 1}}
    options = {"data_dir": str(data), "image_size": 16, **model}
    run = train("image", tmp_path, {"max_steps": 2, "num_workers": 0}, options)
    loaded = mgt.load(run, device="cpu")
    close(loaded.evaluate(), loaded.metrics)
    shutil.rmtree(data)
    assert loaded.predict([picture("red", 1)])[0]["label"] in COLOURS
    options = {"task": "classification", "width": 16, "sequence_length": 32}
    loaded = mgt.load(train("transformer", tmp_path, {"max_steps": 2}, options), device="cpu")
    close(loaded.evaluate(), loaded.metrics)
    assert loaded.predict(["a list of values"])[0]["label"] in loaded.labels


@pytest.mark.parametrize(
    "told",
    [
        {"step": [1]},
        {"step": -1},
        {"seed": "x"},
        {"seed": 10**30},
        {"options": [1]},
        {"metrics": {"loss": "x"}},
        {"recipe": ["image"]},
    ],
    ids=json.dumps,
)
def test_an_export_whose_index_says_what_cannot_be_is_refused_in_words(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    folder = mgt.load(run_of("image"), device="cpu").save(tmp_path / "saved")
    index = json.loads((folder / "export.json").read_text())
    del index["sha256"]
    (folder / "export.json").write_text(json.dumps(signed({**index, **told})))
    with pytest.raises(CheckpointError, match=next(iter(told))):
        mgt.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("model", "told", "words"),
    [
        ({"width": 50_000}, {}, "is not the description of these weights"),
        ({}, {"compression": [{"method": "quantize", "group": "x"}]}, "is not understood"),
        ({}, {"compression": [{"method": "prune", "kind": "structured"}]}, "is not understood"),
        ({}, {"compression": [5]}, "does not describe"),
        ({}, {"compression": [{"method": "prune", "kind": "2:4", "weights": 5}]}, "not describe"),
        ({}, {"preprocessing": {"colour": "grey", "levels": -1}}, "levels=-1"),
    ],
    ids=["gigabytes", "quantize", "prune", "number", "weights", "levels"],
)
def test_a_description_that_cannot_be_of_its_weights_is_refused_in_words(
    tmp_path: Path, model: dict[str, Any], told: dict[str, Any], words: str
) -> None:
    folder = mgt.load(run_of("image"), device="cpu").save(tmp_path / "saved")
    described = json.loads((folder / "model.json").read_text())
    described |= told
    described["model"] |= model
    (folder / "model.json").write_text(json.dumps(described))
    index = json.loads((folder / "export.json").read_text())
    del index["sha256"]
    index["files"]["model.json"] = file_facts(folder / "model.json")
    (folder / "export.json").write_text(json.dumps(signed(index)))
    with pytest.raises(CheckpointError, match=words):
        mgt.load(folder, device="cpu")


def test_arguments_that_fit_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no image model can be built with width=-1"):
        mgt.load(run_of("image"), device="cpu").rebuild(width=-1)


def test_a_tensor_that_shares_the_weights_of_none_is_named(tmp_path: Path) -> None:
    run = Path(shutil.copytree(run_of("image"), tmp_path / "run", symlinks=True))
    manifest = next((run / "checkpoints").glob("step-*/manifest.json"))
    facts = json.loads(manifest.read_text())
    del facts["sha256"]
    manifest.write_text(json.dumps(signed({**facts, "aliases": {"a": "b"}}), indent=1))
    with pytest.raises(CheckpointError, match="'a' is said to share"):
        mgt.load(run, device="cpu")
    with pytest.raises(CheckpointError, match="'a' is said to share"):
        merge(run, tmp_path / "merged.safetensors")
