"""The image recipe trains on users' images: the same on any number of ranks, resumed only with the
same images, with models from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_folders import COLOURS, TINY_VIT, corrupt, tiny_vit, write_images
from parity.training import sgd
from quiet_recipe import train_recipe
from ranks import run_ranks
from tiny import fork_workers
from torch import nn

from multi_gpu_training import ConfigError
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.recipes.recipe import Job, find_recipe

TINY_RESNET = {"hidden_sizes": [4, 4], "depths": [1, 1], "embedding_size": 4}
TINY_CONVNEXT = {"hidden_sizes": [4] * 4, "depths": [1] * 4}
MODELS: dict[str, dict[str, Any]] = {
    "cnn": {},
    "resnet": {"model": "resnet", "model_args": TINY_RESNET, "image_size": 32},
    "vit": {"model": "vit", "model_args": TINY_VIT},
}


def own_model(num_classes: int, image_size: int, width: int = 4) -> nn.Module:
    """What a user may write and name as `test_image_training:own_model`."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * image_size**2, width), nn.ReLU(), nn.Linear(width, num_classes)
    )


def no_model(num_classes: int) -> int:
    return num_classes


def train(
    folder: Path,
    settings: dict[str, Any],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    optimizer: Any = None,
) -> Any:
    """Metrics, weights and run folder, from a rank that keeps quiet."""
    fork_workers()
    return train_recipe(
        "image",
        folder,
        {"num_workers": 0, **settings},
        {"image_size": 16, **options},
        dtype,
        optimizer,
    )


def train_all(folder: Path, data: str) -> list[Any]:
    """Every model once, to start ranks once; the middle one with workers."""
    found = []
    for name, options in MODELS.items():
        # The full rate from the first step; an odd batch, so that the shares differ.
        settings = {"global_batch_size": 7, "max_steps": 3, "warmup_epochs": 0}
        settings["num_workers"] = 2 if name == "resnet" else 0
        chosen = {"data_dir": data, "corrupt": "skip", "flip": True, **options}
        metrics, weights, _ = train(folder, settings, chosen, torch.float64, sgd)
        found.append((name, metrics, weights))
    return found


def test_two_ranks_learn_from_files_what_one_learns(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos", 6)
    corrupt(photos / "red" / "01.jpg")
    one = run_ranks(1, train_all, tmp_path / "one", str(photos))[0]
    (photos / ".image-check.json").unlink()  # two ranks check at once, and find the same
    for rank in run_ranks(2, train_all, tmp_path / "two", str(photos)):
        for (name, expected, reference), (_, metrics, weights) in zip(one, rank, strict=True):
            # Not relative: the gradient of attention's key bias is rounding alone.
            apart = max(float((weights[key] - reference[key]).abs().max()) for key in reference)
            assert apart <= 1e-12, name
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-9), name


def test_a_small_cnn_learns_the_colours(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos", 20)
    broken = corrupt(photos / "red" / "00.png")
    settings = {"epochs": 6, "batch_size": 8}
    options = {"data_dir": str(photos), "corrupt": "skip", "val_share": 0.3}
    metrics, _, run = train(tmp_path, settings, options)
    assert metrics["accuracy"] >= 0.7  # a fifth is grey: its class cannot be told
    facts = json.loads((run / "images.json").read_text())
    assert facts["classes"] == sorted(COLOURS)
    assert facts["preprocessing"]["height"] == 16
    assert str(broken) in (run / "skipped-images.tsv").read_text()


# Resuming


def test_a_run_is_resumed_only_with_the_same_classes_images_and_pixels(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos", 6)
    model = {"model": "resnet", "model_args": TINY_RESNET, "image_size": 32}
    settings = {"batch_size": 8, "enable_fault_tolerance": True, "run_name": "mine"}

    def go(data: Path, epochs: int = 2, **options: Any) -> Any:
        resume = {"resume": "auto", "epochs": epochs} if epochs > 1 else {"epochs": 1}
        chosen = {"data_dir": str(data), **model, **options}
        return train(tmp_path / "runs", {**settings, **resume}, chosen)

    go(photos, epochs=1)
    other = "had other images or preprocessed them differently"
    with pytest.raises(CheckpointError, match=rf"{other} \(preprocessing: "):
        go(photos, fit="stretch")
    # As many images as before, but another one among them.
    (photos / "red" / "00.png").rename(photos / "red" / "99.png")
    with pytest.raises(CheckpointError, match=rf"{other} \((train|val): "):
        go(photos)
    (photos / "red" / "99.png").rename(photos / "red" / "00.png")
    (photos / "red").rename(photos / "rose")
    with pytest.raises(CheckpointError, match=r"classes: 3 .*blue, green, red.* then, 3 .*rose"):
        go(photos)
    (photos / "rose").rename(photos / "red")
    moved = photos.rename(tmp_path / "elsewhere")
    metrics, _, _ = go(moved)
    assert metrics["loss"] > 0


# Models


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_images(tmp_path / "photos", 3)


def build(folder: Path, **options: Any) -> Job:
    recipe = find_recipe("image")
    torch.manual_seed(0)
    chosen = recipe.options(**{"data_dir": str(folder), "image_size": 16, **options})
    return recipe.build(recipe.config({"device": "cpu"}, chosen), chosen)


def problem(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(folder, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "args"), [("vit", TINY_VIT), ("resnet", TINY_RESNET), ("convnext", TINY_CONVNEXT)]
)
def test_architectures_of_hugging_face_are_built_for_the_classes(
    photos: Path, name: str, args: dict[str, Any]
) -> None:
    model = build(photos, model=name, model_args=args, image_size=32).model
    assert model.body.config.id2label == {0: "blue", 1: "green", 2: "red"}
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert model.eval()(images).shape == (2, 3)
    digits = find_recipe("image")
    chosen = digits.options(model=name, model_args=args)
    if name == "vit":  # which has a patch that fits 8x8; the others halve it too often
        body = digits.build(digits.config({}, chosen), chosen).model
        assert body.eval()(torch.zeros(2, 8, 8, dtype=torch.uint8)).shape == (2, 10)


def test_default_sizes_are_small_and_weights_that_are_not_pretrained_keep_their_rate(
    photos: Path,
) -> None:
    recipe = find_recipe("image")
    for name in ("vit", "resnet", "convnext"):
        job = build(photos, model=name, image_size=64)
        assert sum(p.numel() for p in job.model.parameters()) < 4_000_000
        config = recipe.config({}, recipe.options(data_dir=str(photos), model=name))
        assert config.learning_rate == 1e-3
        assert config.sync_bn  # a ResNet's batch is the whole batch


def test_a_pretrained_folder_brings_pixels_head_and_rate(tmp_path: Path, photos: Path) -> None:
    recipe = find_recipe("image")
    folder = tiny_vit(tmp_path / "vit", ("a", "b"))
    options = {"data_dir": str(photos), "model": str(folder)}
    assert recipe.config({}, recipe.options(**options)).learning_rate == 5e-5
    job = build(photos, model=str(folder), image_size=None)
    facts = job.states["images"].state_dict()
    assert facts["preprocessing"]["mean"] == pytest.approx([0.4, 0.5, 0.6])
    assert facts["preprocessing"]["std"] == pytest.approx([0.2, 0.25, 0.3])
    assert (facts["preprocessing"]["fit"], facts["preprocessing"]["height"]) == ("stretch", 16)
    assert job.model.body.config.id2label == {0: "blue", 1: "green", 2: "red"}
    # All but the head is as it was; a head that knows the classes stays, in its own order.
    transformers = pytest.importorskip("transformers")
    kind = transformers.ViTForImageClassification
    known = kind.from_pretrained(folder).state_dict()
    ours = job.model.body.state_dict()
    for name, value in known.items():
        assert name.startswith("classifier") or torch.equal(value, ours[name])
    other = tiny_vit(tmp_path / "knows", ("red", "green", "blue"))
    job = build(photos, model=str(other), image_size=None)
    assert job.states["images"].state_dict()["classes"] == ["red", "green", "blue"]
    assert torch.equal(
        job.model.body.classifier.weight, kind.from_pretrained(other).classifier.weight
    )
    labels = {
        Path(ref.path).parent.name: n
        for ref, n in zip(job.dataset.refs, job.dataset.labels, strict=True)
    }
    assert labels == {"red": 0, "green": 1, "blue": 2}
    # As many classes, but others: their head is of no use.
    stranger = tiny_vit(tmp_path / "stranger", ("x", "y", "z"))
    job = build(photos, model=str(stranger), image_size=None)
    theirs = kind.from_pretrained(stranger).classifier.weight
    assert not torch.equal(job.model.body.classifier.weight, theirs)
    assert job.model.body.config.id2label == {0: "blue", 1: "green", 2: "red"}


def test_a_trained_model_is_loaded_by_from_pretrained_and_trained_on(
    tmp_path: Path, photos: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    options = {"data_dir": str(photos), "model": "vit", "model_args": TINY_VIT}
    _, weights, run = train(tmp_path, {"max_steps": 2, "batch_size": 4}, options)
    found = transformers.AutoModelForImageClassification.from_pretrained(run / "model")
    assert found.config.id2label == {0: "blue", 1: "green", 2: "red"}
    for name, value in found.state_dict().items():
        assert torch.equal(value, weights[f"body.{name}"])
    again = build(photos, model=str(run / "model"), image_size=None)
    was = build(photos, model="vit", model_args=TINY_VIT).states["images"].state_dict()
    assert again.states["images"].state_dict()["preprocessing"] == was["preprocessing"]


def test_a_function_of_the_user_is_the_model(photos: Path) -> None:
    job = build(photos, model="test_image_training:own_model", model_args={"width": 5})
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    assert job.model(images).shape == (2, 3)
    assert job.model.body[1].out_features == 5
    assert "returned a int" in problem(photos, model="test_image_training:no_model")
    assert "cannot be imported" in problem(photos, model="no_such_module:model")
    assert "cannot be imported" in problem(photos, model="test_image_training:nothing")


def test_wrong_models_say_what_to_do(tmp_path: Path, photos: Path) -> None:
    assert "is not an architecture of transformers" in problem(photos, model="resnet5000")
    assert "cannot be built to classify images" in problem(photos, model="bert")
    message = problem(photos, model="vit", model_args={"widht": 3})
    assert "model_args has widht, which vit does not know" in message
    assert "hf download google/vit --local-dir vit" in problem(photos, model="google/vit")
    assert "from_scratch=true is for a folder" in problem(photos, model="vit", from_scratch=True)
    assert "pip install 'multi-gpu-training[timm]'" in problem(photos, model="timm:resnet18")
    folder = tiny_vit(tmp_path / "vit")
    assert "takes images of 16, not 32x32" in problem(photos, model=str(folder), image_size=32)
    facts = folder / "preprocessor_config.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "do_flip_channel_order": True}))
    message = problem(photos, model=str(folder), image_size=None)
    assert "do_flip_channel_order, which this recipe does not do" in message
    facts.unlink()
    message = problem(photos, model=str(folder), image_size=None)
    assert "has weights but no preprocessor_config.json" in message
    assert build(photos, model=str(folder), from_scratch=True).model.body.config.num_labels == 3
