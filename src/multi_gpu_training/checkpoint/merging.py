"""The weights of a checkpoint, in shards or not, as one plain file or a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from multi_gpu_training.checkpoint import durable
from multi_gpu_training.checkpoint.inspection import inspect
from multi_gpu_training.checkpoint.store import check_aliases, load
from multi_gpu_training.errors import CheckpointError, ConfigError

_WEIGHTS = "model.safetensors"
# What a folder of `save_pretrained` holds beside weights.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")


def merge(given: Path, out: Path, like: Path | None = None) -> tuple[Path, int]:
    """Write the weights of a checkpoint, or of a run's newest intact one, into one file.

    out: a `.safetensors` file, or a folder to be. like: a folder that `save_pretrained` has
    written; its config and tokenizer are copied, and `from_pretrained` loads the result. Returns
    the file and the step it is of.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another name", code="MGT106")
    if like is not None and not (like / "config.json").is_file():
        raise ConfigError(f"--like {like}: no config.json in it; give a save_pretrained folder")
    if like is not None and out.suffix == ".safetensors":
        raise ConfigError(f"--like makes a folder, but {out} is the name of a file; drop one")
    found = inspect(given)
    chosen = next((c for c in found.checkpoints if c.name == found.newest_intact), None)
    if chosen is None:
        problems = [f"{c.name} is damaged: {c.problem}" for c in found.checkpoints if c.problem]
        raise CheckpointError(
            "; ".join([f"no intact checkpoint in {given}", *problems]), code="MGT701"
        )
    snapshot = load(Path(chosen.path))
    weights = {name: tensor.contiguous() for name, tensor in snapshot.model.items()}
    # Tied weights under all their names: whoever reads this may not know what is tied to what.
    check_aliases(Path(chosen.path), snapshot.aliases, weights)
    weights |= {name: weights[owner].clone() for name, owner in snapshot.aliases.items()}
    folder = out.suffix != ".safetensors"
    file = out / _WEIGHTS if folder else out
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}-{durable.own_name()}")
    save_file(weights, draft, metadata={"format": "pt"})
    durable.flush(draft)
    draft.rename(file)
    for pattern in _COMPANIONS if like is not None else ():
        for companion in sorted(like.glob(pattern)) if like is not None else ():
            if not companion.name.endswith(".index.json"):
                shutil.copy(companion, file.parent / companion.name)
    durable.flush(file.parent)
    return file, snapshot.step
