"""Behaviour classifier (3D CNN) on rendered clips or videos with annotations.

mgt train video                          rendered clips, declared as such, on the CPU too
mgt train video --data-dir recordings    videos with one table in seconds or frames, an export of
                                         BORIS, or one annotation CSV each
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import nn

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.recipe import Job, Options, Recipe
from multi_gpu_training.recipes.resumed_options import resumed_options
from multi_gpu_training.recipes.video.clips import (
    Augment,
    AugmentClips,
    Clips,
    Parts,
    Video,
    VideoData,
    as_dataset,
    class_counts,
    class_weights,
    split_by_video,
)
from multi_gpu_training.recipes.video.event_tables import Selection, Unit
from multi_gpu_training.recipes.video.folder import Labelling, Unlabelled, load_folder
from multi_gpu_training.recipes.video.rendering import NAMES, render
from multi_gpu_training.recipes.video.report import ClassReport, distribution
from multi_gpu_training.recipes.video.video_model import WIDTH, Architecture, build_model
from multi_gpu_training.recipes.video.video_pipeline import describe_video

RENDERED_SIZE, REAL_SIZE = 32, 256
RENDERED_WIDTH = 16
Scaling = Literal["letterbox", "stretch"]
OF_FOLDERS = ("annotations", "time_unit", "unlabelled", "subject", "ignore", "stride", "scaling")


class VideoOptions(Options):
    """What this recipe can be told beside the settings of every run."""

    data_dir: str | None = Field(None, description="folder with Videos/; default: rendered videos")
    architecture: Architecture = Field("fast", description="the faster net, or that of the guide")
    frames: int = Field(17, ge=1, le=4096, description="frames per clip")
    frame_size: int | None = Field(
        None,
        ge=8,
        le=8192,
        description=f"side of a frame; default: {REAL_SIZE}, or {RENDERED_SIZE} where rendered",
    )
    width: int | None = Field(
        None,
        ge=1,
        le=2**14,
        description="channels of the first layer; default: 32, or 16 where rendered",
    )
    dropout: float = Field(0.5, ge=0, lt=1, description="dropout before the last layer")
    augment: Augment = Field(
        "auto",
        description="none, shift, or turn: shift and quarter turns; auto: turn where rendered, "
        "else shift",
    )
    val_share: float = Field(0.2, gt=0, lt=1, description="share of the videos for validation")
    weight_cap: float = Field(10.0, gt=0, description="largest weight of a class in the loss")
    annotations: str | None = Field(
        None,
        description="table for all videos; default: the only one in data_dir, else one per video",
    )
    time_unit: Unit | None = Field(
        None, description="unit of start and end, if the table's header does not say"
    )
    unlabelled: Unlabelled = Field(
        "error",
        description="what to do with videos without labels; background: label them as a class",
    )
    subject: str | None = Field(None, description="use only this subject of a BORIS export")
    ignore: str | None = Field(None, description="behaviours to leave out, like a,b")
    stride: int = Field(1, ge=1, description="make a clip of every n-th labelled frame")
    resize: bool = Field(False, description="scale videos of other sizes while reading")
    scaling: Scaling | None = Field(
        None,
        description="letterbox: keep the shape and add grey bars; stretch: fill the frame. "
        "Default: as the resumed run did, else letterbox",
    )
    strict: bool = Field(
        False, description="stop at a video that cannot be read, instead of skipping it"
    )
    cache_dir: str | None = Field(
        None, description="where to keep decoded frames; default: data_dir/FrameCache"
    )
    memory_gib: float = Field(4.0, ge=0, description="keep clips in memory up to this size")
    videos: int = Field(100, ge=10, description="how many videos to render without data_dir")


def build(config: MultiGPUConfig, options: VideoOptions) -> Job:
    """Model, clips and weighed loss of this recipe; the optimizer is AdamW."""
    size = options.frame_size or (REAL_SIZE if options.data_dir else RENDERED_SIZE)
    refuse_idle(options)
    if options.scaling is None and options.data_dir is not None:
        # As the resumed run did: up to version 0.1 every video was stretched. Written into the
        # checkpoints of this run.
        had = resumed_options(config)
        options.scaling = "letterbox" if had is None else had.get("scaling") or "stretch"
    data = load(options, size, config.num_workers)
    width = options.width or (WIDTH if options.data_dir else RENDERED_WIDTH)
    architecture, frames, dropout = options.architecture, options.frames, options.dropout
    model = build_model(architecture, frames, size, len(data.classes), dropout, width)
    parts = split_by_video(data, options.val_share, config.seed)
    counts = class_counts(parts.train, len(data.classes))
    weights = class_weights(counts, data.classes, options.weight_cap)
    train, val = (
        as_dataset(Clips(videos, options.frames), options.memory_gib)
        for videos in (parts.train, parts.val)
    )
    lines = [*describe(data, parts), *distribution(data.classes, counts, weights)]
    return Job(
        model=model,
        dataset=train,
        val_dataset=val,
        loss_fn=nn.CrossEntropyLoss(weight=weights),
        augment=augmentation(options),
        callbacks=[ClassReport(data.classes, lines)],
        description=describe_video(
            architecture, frames, size, dropout, width, data.classes, options.scaling
        ),
    )


def load(options: VideoOptions, size: int, threads: int) -> VideoData:
    """The videos of data_dir, or rendered ones."""
    if options.data_dir is None:
        made = render(options.videos, size)
        videos = [
            Video(f"rendered-{number:03d}", frames, trials)
            for number, (frames, trials) in enumerate(made)
        ]
        note = f"videos: rendered here, not filmed, {size}x{size} (set data_dir to use your own)"
        return VideoData(videos, NAMES, [note])
    cache = Path(options.cache_dir).expanduser() if options.cache_dir else None
    folder = Path(options.data_dir).expanduser()
    ignored = tuple(name.strip() for name in (options.ignore or "").split(",") if name.strip())
    labelling = Labelling(
        Path(options.annotations).expanduser() if options.annotations else None,
        Selection(options.time_unit, options.subject, ignored),
        options.unlabelled,
        options.stride,
        options.frames,
    )
    letterbox = options.scaling != "stretch"
    return load_folder(
        folder, size, options.resize, options.strict, cache, threads, letterbox, labelling
    )


def refuse_idle(options: VideoOptions) -> None:
    """An option that would do nothing is a mistake of whoever set it."""
    if options.data_dir is not None:
        return
    fields = type(options).model_fields
    idle = [name for name in OF_FOLDERS if getattr(options, name) != fields[name].default]
    if idle:
        said = ", ".join(f"{name}={getattr(options, name)}" for name in idle)
        raise ConfigError(f"{said} means nothing for rendered videos; set data_dir, or drop it")


def augmentation(options: VideoOptions) -> AugmentClips | None:
    kind = options.augment
    if kind == "auto":
        kind = "turn" if options.data_dir is None else "shift"
    return None if kind == "none" else AugmentClips(kind)


def describe(data: VideoData, parts: Parts) -> list[str]:
    """What is trained on, in the words of the guide."""
    train, held_out = (
        sum(len(video.trials) for video in part) for part in (parts.train, parts.val)
    )
    lines = [
        *data.notes,
        f"Found {len(data.videos)} unique videos with {train + held_out} total trials",
        f"Train trials: {train}, Val trials: {held_out} "
        f"({len(parts.train)} and {len(parts.val)} videos)",
    ]
    val = class_counts(parts.val, len(data.classes)).tolist()
    unseen = [name for name, count in zip(data.classes, val, strict=True) if count == 0]
    if unseen:
        lines.append(f"not in the validation videos: {', '.join(unseen)}; F1 is over the others")
    return lines


recipe = Recipe(
    name="video",
    defaults={
        "epochs": 100,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "base_batch_size": 128,
        "schedule": "cosine",
        "warmup_epochs": 1,
        "weight_decay": 0.01,
        "num_workers": 4,
        "sync_bn": True,
        "best_metric": "f1",
    },
    options=VideoOptions,
    build=build,
)
