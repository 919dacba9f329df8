"""Kind of request: a trial of `mgt search`, which trains the user's script with other settings.

Nothing is measured here. The run keeps its folder, events and checkpoints.
"""

from __future__ import annotations

import math

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.own_batches import OwnBatches
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.measure.request import SYNONYMS, MeasuredRun, Measurement
from multi_gpu_training.training.callbacks import Callback
from multi_gpu_training.training.learning_rate import scale_factor

# Fields that a manager does not use where the script makes its own optimizer.
IN_OPTIMIZER = {"learning_rate": ("initial_lr", "lr"), "weight_decay": ("weight_decay",)}


class SearchTrial(Measurement):
    """Puts a trial's values into the script's config, and refuses those it would not use."""

    looks_into_steps = False

    def adapt(self, config: MultiGPUConfig) -> MultiGPUConfig:
        settings = dict(self.request.settings)
        given = {name: getattr(config, name) for name in config.model_fields_set}
        for name in settings:
            for other in SYNONYMS.get(name, ()):
                given.pop(other, None)
        if not TrainingMode(given.get("training_mode", "ddp")).has_ranks:
            settings.pop("world_size", None)
        changed = MultiGPUConfig(**{**given, **settings})
        # The script holds this object too, and may make its optimizer from it.
        for name in settings:
            setattr(config, name, getattr(changed, name))
        return changed

    def callbacks(self, run: MeasuredRun) -> list[Callback]:
        problems: list[str] = []
        settings = self.request.settings
        if run.step > 0:  # resumed: it was checked at its start, and rates may have moved since
            return []
        for name, keys in IN_OPTIMIZER.items():
            if name in settings and not _is_used(run, float(settings[name]), keys):
                problems.append(
                    f"--param {name}: the script makes its own optimizer and does not read {name}; "
                    f"give it config.{name} after the manager was made, or leave the optimizer out"
                )
        own = isinstance(run.train_loader, OwnBatches)
        for name in ("batch_size", "global_batch_size"):
            if name in settings and own:
                problems.append(
                    f"--param {name}: the script makes its own batches and does not read {name}; "
                    "give the dataset to the manager, or drop the parameter"
                )
        size = settings.get("batch_size")
        whole = run.trainer.config.global_batch_size
        if size is not None and not own and whole is None and run.sizes.per_rank != size:
            problems.append(
                f"--param batch_size={size}: the script's DataLoader takes {run.sizes.per_rank} "
                "samples instead; give the manager the dataset, or leave out its batch_size"
            )
        if problems:
            raise ConfigError(problems)
        return []


def _is_used(run: MeasuredRun, value: float, keys: tuple[str, ...]) -> bool:
    """Whether a group of the optimizer has the value, as it is or scaled with the batch."""
    optimizer = getattr(run.trainer, "optimizer", None)
    if optimizer is None:
        return True
    config = run.trainer.config
    base = config.base_batch_size or config.batch_size
    factor = scale_factor(config.lr_scaling, run.sizes.global_batch, base)
    for group in optimizer.param_groups:
        found = next((float(group[key]) for key in keys if key in group), math.nan)
        if any(math.isclose(found, value * scale, rel_tol=1e-6) for scale in (1.0, factor)):
            return True
    return False


MEASUREMENT = SearchTrial
