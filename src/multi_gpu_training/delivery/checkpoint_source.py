"""From a run folder, a checkpoint folder or a URL to the one checkpoint that is meant."""

from __future__ import annotations

import re
from pathlib import Path

from multi_gpu_training.checkpoint.integrity import MANIFEST
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_output import brief
from multi_gpu_training.storage.remote_folder import StorageError
from multi_gpu_training.storage.remote_resume import RunAddress, fetch_checkpoint, parse_address
from multi_gpu_training.storage.remote_run import RemoteRun, on_timeline

BEST = "best"


def find_checkpoint(where: str | Path, checkpoint: str | None = None) -> Path:
    """The folder of the checkpoint on this disk; what lies elsewhere is fetched first.

    checkpoint: best, or a name such as step-00000100. By default the best one, where a run has
    said which that is, else the newest. Never another one because that is damaged.
    """
    if checkpoint is not None and not re.fullmatch(r"best|step-[0-9]{1,16}", checkpoint):
        raise ConfigError(f"checkpoint={brief(checkpoint)}: use best, or a name like step-00000100")
    if isinstance(where, str) and is_url(where):
        return _fetched(where, checkpoint)
    given = Path(where).expanduser()
    if (given / MANIFEST).is_file():
        if checkpoint is not None:
            raise ConfigError(f"{given} is a checkpoint itself; drop checkpoint={checkpoint}")
        return given.resolve()  # `best` is a link
    folder = given if given.name == "checkpoints" else given / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(_no_run(given), code="MGT104")
    store = CheckpointStore(folder)
    current = [path for path in store.folders() if store.on_timeline(path)]
    if checkpoint not in (None, BEST):
        step = int(str(checkpoint).removeprefix("step-"))
        if not store.path_of(step).is_dir():
            names = ", ".join(path.name for path in store.folders()[:8]) or "none"
            raise ConfigError(f"{given} has no {checkpoint}; it has {names}")
        return store.path_of(step)
    best = folder / BEST
    if best.is_dir():
        return folder / best.resolve().name
    if checkpoint == BEST:
        raise ConfigError(f"{given}: no checkpoint was marked as the best; name one (step-N)")
    if not current:
        raise CheckpointError(
            f"{given} holds no checkpoint yet; train longer, or give another run", code="MGT701"
        )
    return current[0]


def other_checkpoints(path: Path) -> list[str]:
    """Names of intact checkpoints beside a damaged one, newest first."""
    store = CheckpointStore(path.parent)
    return [p.name for p in store.folders() if p != path and store.verifier.damage(p) is None]


def _no_run(given: Path) -> str:
    if not given.exists():
        return f"{given} does not exist; give a run folder such as runs/image/NAME"
    if not given.is_dir():
        return f"{given} is a file; give a run folder such as runs/image/NAME"
    if (given / "model.onnx").is_file():
        return f"{given} holds an ONNX model, which onnxruntime runs; give the run that it is of"
    runs = sorted(str(path.parent) for path in given.glob("*/checkpoints") if path.is_dir())
    runs = runs or sorted(str(p.parent) for p in given.glob("*/*/checkpoints") if p.is_dir())
    hint = f"did you mean {runs[-1]}?" if runs else "give the folder of a run, or a checkpoint"
    return f"{given} is not a run folder: there is no `checkpoints` in it; {hint}"


def _fetched(url: str, checkpoint: str | None) -> Path:
    address = parse_address(url)
    if address.checkpoint is not None and checkpoint is not None:
        raise ConfigError(f"{url} names a checkpoint itself; drop checkpoint={checkpoint}")
    wanted = address.checkpoint or checkpoint
    try:
        run = RemoteRun(address.url)
        if wanted is None:
            entries = run.lineage()
            complete = [
                one
                for one in run.checkpoints()
                if one.complete and (not one.manifest or on_timeline(one.manifest, entries))
            ]
            if not complete:
                raise ConfigError(f"{url} holds no complete checkpoint; give SAVE_DIR/RECIPE/NAME")
            wanted = run.best() or complete[0].name
        found = RunAddress(address.url, wanted)
        store = CheckpointStore(found.fetched(MultiGPUConfig()))
        return fetch_checkpoint(found, store, lambda _: None)
    except StorageError as error:
        raise ConfigError(f"{url}: {error}", code="MGT707") from None
    except ConfigError as error:
        problems = [text.removeprefix("--resume ") for text in error.problems]
        raise ConfigError(problems, code=error.code) from None
