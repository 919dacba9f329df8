"""The options of the run that is resumed, for defaults that have changed since it began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.integrity import trusted_manifest
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.run_folder import latest_run
from multi_gpu_training.run_places import is_url
from multi_gpu_training.storage.remote_folder import StorageError
from multi_gpu_training.storage.remote_resume import newest_manifest


def resumed_options(config: MultiGPUConfig) -> dict[str, Any] | None:
    """The options in the newest checkpoint that `resume` would go on from; None for a new run.

    An option that is missing there did not exist when the checkpoint was written.
    """
    if config.resume is None:
        return None
    if is_url(config.resume) or (config.resume == "auto" and is_url(config.save_dir)):
        try:
            manifest = newest_manifest(config)
        except StorageError as error:
            raise ConfigError(str(error), code="MGT707") from None
        if manifest or is_url(config.resume):
            return dict(manifest.get("options") or {}) if manifest else None
    if config.resume != "auto":
        checkpoints = [Path(config.resume)]
    else:
        base = config.local_save_dir / config.recipe
        run = base / config.run_name if config.run_name else latest_run(base)
        checkpoints = [] if run is None else sorted(run.glob("checkpoints/step-*"))
    for checkpoint in reversed(checkpoints):
        manifest = trusted_manifest(checkpoint)
        if manifest:
            return dict(manifest.get("options") or {})
    return None
