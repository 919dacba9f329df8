"""Image classifier (MLP or CNN) on digits, MNIST or Fashion-MNIST.

mgt train image                                        digits, on the CPU in a minute
mgt train image --mode cnn --data-dir fashion-mnist    93 % and more on Fashion-MNIST
"""

from __future__ import annotations

from pydantic import Field

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.recipes.image.image_data import (
    CLASSES,
    SHIFT,
    DatasetName,
    Moved,
    load_images,
)
from multi_gpu_training.recipes.image.image_model import Mode, build_model
from multi_gpu_training.recipes.recipe import Announce, Job, Options, Recipe


class ImageOptions(Options):
    """What this recipe can be told beside the settings of every run."""

    mode: Mode = Field("flatten", description="flatten: an MLP; cnn: a convolutional net")
    data_dir: str | None = Field(None, description="folder with IDX files; None is digits")
    dataset: DatasetName = Field("auto", description="auto: by data_dir and its name")
    augment: bool = Field(True, description="shift images, and mirror those of clothes")


def build(config: MultiGPUConfig, options: ImageOptions) -> Job:
    """Model and data of this recipe; the loss is cross entropy, the optimizer AdamW."""
    data = load_images(options.dataset, options.data_dir)
    return Job(
        model=build_model(options.mode, data.size, CLASSES, *data.mean_and_spread),
        dataset=data.train.as_dataset(),
        val_dataset=data.test.as_dataset(),
        augment=Moved(SHIFT, data.flip) if options.augment else None,
        callbacks=[Announce(data.describe(options.augment))],
    )


def defaults_for(options: ImageOptions) -> dict[str, float]:
    """Sixty thousand images train in larger batches than the digits."""
    if options.data_dir is None:
        return {}
    return {"batch_size": 128, "base_batch_size": 128, "learning_rate": 2e-3}


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
