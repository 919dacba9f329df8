"""Models of Hugging Face: from a folder or the hub, and back into a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multi_gpu_training.checkpoint.store import load
from multi_gpu_training.distributed.sharding import is_split
from multi_gpu_training.errors import ModelError
from multi_gpu_training.recipes.user_data import library
from multi_gpu_training.training.callbacks import Run

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def transformers() -> Any:
    """The library, which only models of Hugging Face need."""
    needed = "models of Hugging Face need the transformers library"
    return library("transformers", needed, extra="transformer")


def has_weights(name: str) -> bool:
    """Whether a folder holds weights; what is not here is a hub name, and models there do."""
    path = Path(name).expanduser()
    if path.is_dir():
        return any(any(path.glob(end)) for end in WEIGHTS)
    return not path.is_file()


def fetch(kind: str, option: str, name: str, **more: Any) -> Any:
    """`kind.from_pretrained(name)` of transformers, with errors that say what to do."""
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(
            f"{option}={name!r} is not there; give a folder that save_pretrained has written, or "
            "a name of the Hugging Face hub"
        )
    try:
        with no_progress_bar():
            loader = getattr(transformers(), kind)
            # Explicitly: left open, transformers would ask on the terminal whether to run
            # code that came with the model.
            return loader.from_pretrained(
                str(path) if path.exists() else name, trust_remote_code=False, **more
            )
    except (OSError, ValueError, KeyError) as error:
        if path.exists():
            raise ModelError(
                f"{option}={name!r} cannot be loaded by {kind}: {first_line(error)}; give a folder "
                "that save_pretrained has written"
            ) from None
        raise ModelError(
            f"{option}={name!r} is no folder here, and the Hugging Face hub did not give it: "
            f"{first_line(error)}; check the name and the network, or fetch it where there is one "
            f"(hf download {name} --local-dir {Path(name).name}) and give the folder"
        ) from None


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """The console is the run's: no bar of transformers in it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def weights_to_keep(run: Run) -> tuple[dict[str, Any] | None, str]:
    """At the end of a run: the best weights, or None where only the model itself has any; and
    which these are, in words."""
    best = run.folder / "checkpoints" / "best"
    # Without fault tolerance nothing is saved: a file there would be an older run's.
    if run.config.enable_fault_tolerance and (best / "model.safetensors").is_file():
        return load(best).model, "the best"
    if any(is_split(p) for p in run.model.parameters()):
        raise ModelError(
            "training_mode=fully_sharded leaves a part of the model on each rank, and nothing was "
            "saved to export; train with enable_fault_tolerance=true"
        )
    return None, "the last"
