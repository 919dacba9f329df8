"""A model as a folder by itself: weights, description, card, and a hash of every file.

    model.safetensors   plain names, loadable anywhere
    model.json          how the model is rebuilt and fed: as in checkpoints
    README.md           what it is, what it takes and gives, how good it was
    export.json         which files there are, their sizes and hashes; written last

Exports of every format have this form; with `model.safetensors` in it, `load` reads it again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from multi_gpu_training.checkpoint.integrity import DESCRIPTION, MOST_DESCRIPTION, is_plain_name
from multi_gpu_training.checkpoint.store import StoredModel
from multi_gpu_training.compress.compressed_model import sparse_weights
from multi_gpu_training.compress.tensor_packing import plain_tensors
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.safe_files import (
    Count,
    open_regular,
    parse_json,
    read_json,
    read_text,
    signed,
)
from multi_gpu_training.safe_files import digest as digest_of
from multi_gpu_training.state_dicts import json_text, model_state

INDEX = "export.json"
WEIGHTS = "model.safetensors"
FORMAT = 1
SPARSE = 2**30  # bytes; a larger file that is all holes would be hashed for minutes


def is_model_folder(path: Path) -> bool:
    return (path / INDEX).is_file()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name only once it is complete; an existing one is not
    touched."""
    folder = folder.expanduser()
    if os.path.lexists(folder):
        raise ConfigError(
            f"{folder} already exists; choose another --out, or remove it", code="MGT106"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); choose another --out",
            code="MGT704",
        ) from None
    try:
        yield draft
        draft.chmod(0o755)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_weights(
    model: nn.Module, folder: Path, compression: Sequence[Mapping[str, Any]] = ()
) -> None:
    """The weights under plain names; those that are tied under all of their names. Weights of a
    compressed model are packed."""
    if compression:
        packed = plain_tensors(model, sparse_weights(compression))
        save_file(packed, folder / WEIGHTS, metadata={"format": "pt"})
        return
    tensors, aliases, extra = model_state(model.state_dict())
    if extra:
        raise ConfigError(f"the model holds {', '.join(extra)}, which is not a tensor")
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    plain |= {name: plain[owner].clone() for name, owner in aliases.items()}
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})


def finish(folder: Path, facts: Mapping[str, Any], description: Mapping[str, Any]) -> None:
    """Write the description and, last, the index of everything that is in the folder."""
    (folder / DESCRIPTION).write_text(json_text(dict(description)))
    files = {
        path.relative_to(folder).as_posix(): file_facts(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != INDEX
    }
    index = signed({"format": FORMAT, **facts, "files": files})
    (folder / INDEX).write_text(json_text(index))


def file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": found}


def read_index(folder: Path) -> dict[str, Any]:
    """The index, after checking every file of it."""
    try:
        facts = parse_json(read_text(folder / INDEX), dict[str, Any], INDEX)
        if facts.get("format") != FORMAT:
            raise ValueError(f"{INDEX} has a format that this version does not know")
        if facts.get("sha256") != digest_of(facts):
            raise ValueError(f"{INDEX} was changed")
        for name, file in facts["files"].items():
            if not all(is_plain_name(part) for part in name.split("/")):
                raise ValueError(f"{INDEX} names {name!r:.80}, which is not a file in this folder")
            descriptor = open_regular(folder / name)  # no link out of the folder, no FIFO
            found = os.fstat(descriptor)
            os.close(descriptor)
            if found.st_size > SPARSE and found.st_blocks * 512 * 100 < found.st_size:
                raise ValueError(
                    f"{name} claims {found.st_size:,} bytes and has next to none on the disk"
                )
            if found.st_size != file.get("bytes") or file_facts(folder / name) != file:
                raise ValueError(f"{name} was changed")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{folder} is damaged: {reason!s:.300}; export it again", code="MGT701"
        ) from None
    return facts


class ModelFacts(BaseModel):
    """What an index says about the model; others have more in it."""

    step: Count = 0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    recipe: str | None = None
    metrics: dict[str, float] | None = None
    options: dict[str, Any] | None = None


def read_model_folder(folder: Path) -> StoredModel:
    """What `load` needs of a folder with weights."""
    facts = read_index(folder)
    if WEIGHTS not in facts["files"]:
        kind = facts.get("to", "another format")
        raise ConfigError(
            f"{folder} is an export to {kind}, which needs no training code; load the run that it "
            "came from, or use the program that its README names"
        )
    try:
        known = parse_json(read_text(folder / INDEX), ModelFacts, INDEX)
        tensors = load_file(folder / WEIGHTS)
        description = read_json(folder / DESCRIPTION, dict[str, Any], MOST_DESCRIPTION)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error!s:.300}); export it again",
            code="MGT701",
        ) from None
    return StoredModel(
        step=known.step,
        tensors=tensors,
        aliases={},
        extra={},
        description=description,
        config={"seed": known.seed, "recipe": known.recipe},
        facts={"metrics": known.metrics, "options": known.options},
    )
