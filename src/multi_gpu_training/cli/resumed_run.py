"""The run that a command resumes, and the settings it was started with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.redaction import HIDDEN
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_output import brief

if TYPE_CHECKING:
    from multi_gpu_training.recipes.recipe import Recipe

# Which run it is and how it is resumed: that is for the command line to say.
NOT_TAKEN = {"recipe", "run_name", "save_dir", "local_dir", "rank", "local_rank", "forecast"}
NOT_TAKEN |= {"resume", "resume_anyway"}


def run_settings(run: str) -> dict[str, Any]:
    """Which run `mgt resume RUN` means, as settings: recipe, save_dir, run_name and resume."""
    folder = _folder(run)
    recipe = _read(folder).get("recipe", "custom")
    if is_url(run):
        from multi_gpu_training.storage.remote_resume import parse_address

        where, name = parse_address(run).url.rsplit("/", 2)[0], folder.name
    else:
        where, name = str(folder.parent.parent), folder.name
        if folder.parent.name != recipe:
            raise ConfigError(
                f"mgt resume {brief(run)}: this is a run of {brief(recipe)}, but is in a folder "
                f"{folder.parent.name}/; move it to SAVE_DIR/{recipe}/{name}, where it was made"
            )
    return {"recipe": recipe, "save_dir": where, "run_name": name, "resume": "auto"}


def _folder(run: str) -> Path:
    """The folder that holds the run's config.yaml, fetched where the run is at a URL."""
    if is_url(run):
        from multi_gpu_training.storage.remote_view import fetch_record

        return fetch_record(run)
    folder = Path(os.path.realpath(Path(run).expanduser()))  # resolve() raises at links in a circle
    if folder.parent.name == "checkpoints":
        folder = folder.parent.parent
    if not (folder / "config.yaml").is_file():
        inside = sorted(str(found.parent) for found in folder.glob("*/config.yaml"))
        hint = f"did you mean {', '.join(inside[-3:])}?" if inside else "give runs/RECIPE/NAME"
        raise ConfigError(
            f"mgt resume {brief(run)}: this is not a run folder; {hint}", code="MGT104"
        )
    return folder


def saved_settings(config: MultiGPUConfig) -> tuple[Path, dict[str, Any]] | None:
    """The folder of the run that `config` resumes, and its settings; None for a new run."""
    if config.resume is None:
        return None
    folder = _resumed_folder(config)
    if folder is None or not (folder / "config.yaml").is_file():
        return None
    settings = _read(folder)
    return (folder, settings) if settings.get("recipe") == config.recipe else None


def threads_before(config: MultiGPUConfig) -> int | None:
    """Threads that the run computed with which `config` resumes."""
    found = saved_settings(config)
    if found is None:
        return None
    from multi_gpu_training.safe_files import read_json

    try:
        threads = read_json(found[0] / "environment.json", dict[str, Any]).get("threads")
    except (OSError, ValueError):
        return None
    return threads if isinstance(threads, int) and 0 < threads <= 4096 else None


def _resumed_folder(config: MultiGPUConfig) -> Path | None:
    from multi_gpu_training.monitoring.run_folder import latest_run
    from multi_gpu_training.storage.remote_folder import StorageError
    from multi_gpu_training.storage.remote_resume import latest_remote_run

    base, name = config.local_save_dir / config.recipe, config.run_name
    if config.resume != "auto":
        path = Path(str(config.resume)).expanduser().resolve()
        return None if is_url(str(config.resume)) else path.parent.parent
    if not is_url(config.save_dir):
        return base / name if name is not None else latest_run(base)
    try:
        remote = latest_remote_run(config) if name is None else (0.0, name)
        return None if remote is None else _folder(f"{config.save_dir}/{base.name}/{remote[1]}")
    except (StorageError, ConfigError):
        return None  # not there yet; what is wrong with the storage is said when it is opened


def _read(folder: Path) -> dict[str, Any]:
    from multi_gpu_training.config_file import read_config_file

    return read_config_file(str(folder / "config.yaml"))


def taken_settings(
    recipe: Recipe, saved: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """What the resumed run was told and the command line does not say: of its settings those
    that the recipe would not choose by itself, so that it chooses the same way again."""
    kinds = recipe.options.model_fields
    told = {name: value for name, value in saved.items() if name not in given}
    own = {
        name: value
        for name, value in told.items()
        if name in kinds and value != kinds[name].get_default(call_default_factory=True)
    }
    known = {name: value for name, value in given.items() if name in kinds}
    mode = saved.get("training_mode", "ddp")
    usual = recipe.config({"training_mode": mode}, recipe.options(**{**own, **known})).plain()
    usual["training_mode"] = MultiGPUConfig().plain()["training_mode"]
    fields = {
        name: value
        for name, value in told.items()
        if name in usual and name not in NOT_TAKEN and value != usual[name]
    }
    if fields.get("global_batch_size") is not None and not _chosen("batch_size", fields):
        fields.pop("batch_size", None)  # the recipe's, which the global batch replaced
    if "training_mode" in given or "num_gpus" in given:
        for name in ("world_size", "device_ids"):
            fields.pop(name, None)  # they belong to the mode that it had
    taken = {**fields, **own}
    hidden = [name for name, value in taken.items() if HIDDEN in str(value)]
    if hidden:
        raise ConfigError(
            f"{', '.join(hidden)}: the run's config.yaml does not keep secrets; give it again"
        )
    return taken


def _chosen(name: str, fields: Mapping[str, Any]) -> bool:
    default = MultiGPUConfig.model_fields[name].default
    return name in fields and fields[name] != default


def resume_line(folder: Path, taken: Mapping[str, Any]) -> str:
    """What is taken over, in a line."""
    shown = ", ".join(f"{name}={brief(value, 60)}" for name, value in sorted(taken.items()))
    return f"resuming {os.path.relpath(folder)} with its settings" + (f": {shown}" if shown else "")
