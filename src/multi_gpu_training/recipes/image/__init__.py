"""Image classifier on digits, MNIST, or your own images in a folder, a table or a dataset.

mgt train image                                        digits, on the CPU in a minute
mgt train image --mode cnn --data-dir fashion-mnist    93 % and more on Fashion-MNIST
mgt train image --data-dir photos                      photos/CLASS/*.jpg, or photos/train/CLASS
mgt train image --data-dir photos --model resnet       a small ResNet of Hugging Face; vit, convnext
mgt train image --data-dir photos --model ./my-vit     go on from a folder's weights
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import nn

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError, DataError, ModelError
from multi_gpu_training.portability import usable_cores
from multi_gpu_training.recipes.fine_tuning import PRETRAINED_RATE, high_rate_note
from multi_gpu_training.recipes.image import image_run
from multi_gpu_training.recipes.image.image_classifier import (
    Asked,
    ClassifierOf,
    build_body,
    read_preprocessing,
)
from multi_gpu_training.recipes.image.image_data import (
    CLASSES,
    SHIFT,
    DatasetName,
    Moved,
    load_images,
)
from multi_gpu_training.recipes.image.image_decoding import (
    DecodedImages,
    Preprocessing,
    check_images,
)
from multi_gpu_training.recipes.image.image_files import find_images, is_idx
from multi_gpu_training.recipes.image.image_list import FoundImages, ImageRef, class_counts_note
from multi_gpu_training.recipes.image.image_model import (
    Mode,
    Normalise,
    NormaliseChannels,
    build_model,
)
from multi_gpu_training.recipes.image.image_pipeline import describe_files, describe_grey
from multi_gpu_training.recipes.recipe import Announce, Job, Options, Recipe
from multi_gpu_training.recipes.user_data import shortened

IMAGE_SIZE = 64  # where neither the user nor a pretrained model says
CHECKED_AT_ONCE = 100_000  # images that check_images=auto decodes before training


class ImageOptions(Options):
    """What this recipe can be told beside the settings of every run."""

    mode: Literal["auto", Mode] = Field(
        "auto", description="flatten: an MLP; cnn: a convolutional net; auto: cnn for image files"
    )
    model: str | None = Field(
        None,
        description="vit, resnet, convnext, a folder, timm:NAME or package.module:function; "
        "default: as mode says",
    )
    model_args: dict[str, Any] = Field(
        {}, description="arguments of the model, such as {hidden_size: 96}"
    )
    from_scratch: bool = Field(False, description="use only the config of model's folder")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; only if you trust its author"
    )
    data_dir: str | None = Field(
        None, description="folder of images, table, dataset or IDX files; default: digits"
    )
    dataset: DatasetName = Field("auto", description="auto: by data_dir and its name")
    label_column: str | None = Field(
        None, description="label column of a table or dataset; default: label"
    )
    image_size: int | None = Field(
        None,
        ge=4,
        le=8192,
        description=f"side of an image file; default: {IMAGE_SIZE}, or the model's own",
    )
    fit: Literal["auto", "crop", "pad", "stretch"] = Field(
        "auto",
        description="how to fit image files of other shapes; auto: crop, or as the model does",
    )
    val_share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="share of image files for validation, if the data has no such part",
    )
    corrupt: Literal["error", "skip"] = Field(
        "error", description="what to do with image files that cannot be decoded"
    )
    check_images: Literal["auto", "all", "none"] = Field(
        "auto", description=f"decode all files before training; auto: up to {CHECKED_AT_ONCE:,}"
    )
    cache_dir: str | None = Field(
        None, description="where to keep what is known about the files; default: data_dir"
    )
    augment: bool = Field(True, description="shift images; mirror them as flip says")
    flip: bool | None = Field(
        None, description="mirror half of the images; default: only in Fashion-MNIST"
    )


FILES_ONLY = (
    "label_column",
    "image_size",
    "fit",
    "val_share",
    "corrupt",
    "check_images",
    "cache_dir",
)


def build(config: MultiGPUConfig, options: ImageOptions) -> Job:
    """Model and data of this recipe; the loss is cross entropy, the optimizer AdamW."""
    asked = asked_model(options)
    if asked is not None:
        asked.check()
    _check_together(options)
    if reads_files(options):
        return _from_files(config, options, asked)
    data = load_images(options.dataset, options.data_dir)
    normalise = Normalise(*data.mean_and_spread)
    if asked is None:
        mode: Mode = "flatten" if options.mode == "auto" else options.mode
        model = build_model(mode, data.size, CLASSES, normalise)
    elif asked.is_pretrained:
        raise ModelError(
            f"model={asked.name!r} has pretrained weights, which know image files in colour; give "
            "data_dir a folder of those, or set from_scratch=true"
        )
    else:
        body, _ = build_body(asked, [str(number) for number in range(CLASSES)], data.size, 1)
        model = ClassifierOf(normalise, body)
    flip = data.flip if options.flip is None else options.flip
    return Job(
        model=model,
        dataset=data.train.as_dataset(),
        val_dataset=data.test.as_dataset(),
        augment=Moved(SHIFT, flip) if options.augment else None,
        callbacks=[Announce(data.describe(options.augment, flip))],
        description=describe_grey(model, options.mode, asked, data),
    )


def asked_model(options: ImageOptions) -> Asked | None:
    if options.model is None:
        return None
    return Asked(options.model, options.model_args, options.from_scratch, options.trust_remote_code)


def reads_files(options: ImageOptions) -> bool:
    """Whether data_dir has images that are decoded, rather than IDX files or digits."""
    if options.data_dir is None or options.dataset != "auto":
        return False
    return not is_idx(Path(options.data_dir).expanduser())


def _check_together(options: ImageOptions) -> None:
    """Options that would do nothing are an error."""
    plain = ImageOptions.model_validate({})
    problems = []
    if not reads_files(options):
        problems = [
            f"{name}={getattr(options, name)} is for image files; set data_dir to a folder of "
            "them, or drop it"
            for name in FILES_ONLY
            if getattr(options, name) != getattr(plain, name)
        ]
    if options.model is None:
        problems += [
            f"{name}={getattr(options, name)} is for a model from elsewhere; set model, or drop it"
            for name in ("model_args", "from_scratch")
            if getattr(options, name)
        ]
    elif options.mode != "auto":
        problems.append(f"mode={options.mode} and model={options.model} both choose a model")
    if options.flip and not options.augment:
        problems.append("flip=true does nothing with augment=false; drop one of them")
    if options.corrupt == "skip" and options.check_images == "none":
        problems.append(
            "corrupt=skip must know which images are left before the first step; drop "
            "check_images=none"
        )
    if problems:
        raise ConfigError(problems)


# Image files


def _from_files(config: MultiGPUConfig, options: ImageOptions, asked: Asked | None) -> Job:
    assert options.data_dir is not None
    found = find_images(options.data_dir, options.label_column)
    to = _preprocessing(options, asked)
    skipped = _leave_out_corrupt(found, options, to)
    found.divide(options.val_share, config.seed)
    model, classes = _file_model(options, asked, found.classes, to)
    numbers = {name: number for number, name in enumerate(classes)}
    train, val = (
        DecodedImages(part.refs, [numbers[label] for label in part.labels], to)
        for part in (found.parts["train"], found.parts["val"])
    )
    flip, shift = bool(options.flip), max(1, to.height // 16)
    lines = _describe(found, to, model, shift if options.augment else 0, flip)
    note = high_rate_note(config.learning_rate) if asked and asked.is_pretrained else None
    root = Path(options.data_dir).expanduser()
    facts = image_run.ImageFacts(
        {
            "classes": classes,
            "preprocessing": to.facts(),
            "model": options.model or _mode(options),
            "model_args": options.model_args,
            **{part: image_run.digest(found.parts[part], root) for part in ("train", "val")},
        },
        config.resume_anyway,
    )
    lines += [note] if note else []
    return Job(
        model=model,
        dataset=train,
        val_dataset=val,
        augment=Moved(shift, flip) if options.augment else None,
        callbacks=[image_run.ImageRunFiles(lines, facts, skipped, to)],
        states={"images": facts},
        description=describe_files(model, _mode(options), asked, classes, to),
    )


def _mode(options: ImageOptions) -> Mode:
    return "cnn" if options.mode == "auto" else options.mode


def _preprocessing(options: ImageOptions, asked: Asked | None) -> Preprocessing:
    fit = None if options.fit == "auto" else options.fit
    if asked is not None and asked.is_pretrained:
        return read_preprocessing(asked, options.image_size, fit)
    side = options.image_size or IMAGE_SIZE
    return Preprocessing(side, side, side, fit or "crop")


def _file_model(
    options: ImageOptions, asked: Asked | None, classes: list[str], to: Preprocessing
) -> tuple[nn.Module, list[str]]:
    """The model, and the classes in the order of its outputs."""
    size, normalise = (to.height, to.width), NormaliseChannels(to.mean, to.std)
    if asked is None:
        return build_model(_mode(options), size, len(classes), normalise, to.channels), classes
    body, ordered = build_body(asked, classes, size, to.channels)
    settings = getattr(body, "config", None)
    takes = getattr(settings, "image_size", None)
    if takes is not None and takes not in (to.height, list(size), size):
        raise ModelError(
            f"model={asked.name!r} takes images of {takes}, not {to.height}x{to.width}; set "
            f"image_size={takes}, or drop it"
        )
    channels = getattr(settings, "num_channels", to.channels)
    if channels != to.channels:
        raise ModelError(
            f"model={asked.name!r} takes {channels} channels, but its preprocessing has "
            f"{to.channels}; correct image_mean and image_std, or num_channels"
        )
    return ClassifierOf(normalise, body), ordered


def _leave_out_corrupt(
    found: FoundImages, options: ImageOptions, to: Preprocessing
) -> dict[str, str]:
    """Take images out that cannot be decoded, or name all of them in an error."""
    assert options.data_dir is not None
    refs: list[ImageRef] = [ref for part in found.parts.values() for ref in part.refs]
    auto = options.check_images == "auto" and options.corrupt == "error"
    if options.check_images == "none" or (auto and len(refs) > CHECKED_AT_ONCE):
        found.notes.append(
            f"{len(refs):,} images are not checked beforehand: one that cannot be decoded ends the "
            "run when it is met (check_images=all looks first)"
        )
        return {}
    path = Path(options.data_dir).expanduser()
    cache = Path(options.cache_dir).expanduser() if options.cache_dir else path
    checked = check_images(refs, to, cache if cache.is_dir() else cache.parent)
    corrupt = {str(ref): why for ref, why in checked.corrupt.items()}
    if corrupt and options.corrupt == "error":
        raise DataError(
            [
                f"{len(corrupt):,} of {len(refs):,} images cannot be used; replace or remove them, "
                "or set corrupt=skip to train without them:",
                *(f"{name} {why}" for name, why in corrupt.items()),
            ]
        )
    how = "known from before" if checked.known else f"decoded in {checked.seconds:.1f} s"
    found.notes.append(f"checked: {len(refs):,} images, {how}")
    if corrupt:
        lost = set(checked.corrupt)
        for part, images in found.parts.items():
            found.parts[part] = images.select([ref not in lost for ref in images.refs])
        gone = sorted(set(found.classes) - set(found.parts["train"].labels))
        if gone:
            raise DataError(f"no image of the class {', '.join(gone)} can be decoded; add some")
        lines = shortened([f"{name} {why}" for name, why in corrupt.items()])
        found.notes.append(
            f"skipped {len(corrupt):,} of {len(refs):,} images (all in skipped-images.tsv of the "
            "run's folder): " + "; ".join(lines)
        )
    return corrupt


def _describe(
    found: FoundImages, to: Preprocessing, model: nn.Module, shift: int, flip: bool
) -> list[str]:
    train, val = found.parts["train"], found.parts["val"]
    body = model.body if isinstance(model, ClassifierOf) else model
    text = (
        f"images: {found.layout}, {len(found.classes)} classes, {len(train):,} for training and "
        f"{len(val):,} for validation, {to.describe()}; {type(body).__name__}"
    )
    if shift:
        mirrored = "and mirrored" if flip else "not mirrored (flip=true where that keeps the class)"
        text += f"; shifted by up to {shift} px, {mirrored}"
    return [text, class_counts_note(train), *found.notes]


def defaults_for(options: ImageOptions) -> dict[str, Any]:
    """Sixty thousand images train in larger batches than the digits; files need workers."""
    asked = asked_model(options)
    # Other people's models have BatchNorm, which must see the whole batch.
    theirs: dict[str, Any] = {} if asked is None else {"sync_bn": True}
    if asked is not None and asked.is_pretrained:
        theirs["learning_rate"] = PRETRAINED_RATE
    if options.data_dir is None:
        return theirs
    if not reads_files(options):
        return {"batch_size": 128, "base_batch_size": 128, "learning_rate": 2e-3, **theirs}
    workers = min(4, len(usable_cores()))
    return {"num_workers": workers, **theirs}


recipe = Recipe(
    name="image",
    defaults={
        "epochs": 20,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "base_batch_size": 32,  # the learning rate is for this many samples per step
        "schedule": "cosine",
        "warmup_epochs": 1,
        "weight_decay": 0.05,
        "best_metric": "accuracy",
    },
    options=ImageOptions,
    build=build,
    defaults_for=defaults_for,
)
