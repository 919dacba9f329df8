"""The folder of a run: everything that shows a run reads it from here, never from the process."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.checkpoint.store import CheckpointStore
from multi_gpu_training.checkpoint.sync import CheckpointHosts, find_checkpoint_hosts
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_file import storable
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError, ConfigError
from multi_gpu_training.redaction import redact_command
from multi_gpu_training.run_places import is_url, name_problem
from multi_gpu_training.safe_files import (
    check_folder,
    clear_drafts,
    make_private,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    signed,
    write_atomically,
)
from multi_gpu_training.storage.event_mirror import fetch_events
from multi_gpu_training.storage.lease import Lease
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError
from multi_gpu_training.storage.remote_resume import (
    fetch_checkpoint,
    is_taken,
    latest_remote_run,
    open_remote_run,
    parse_address,
    run_url,
)

FORECAST = "forecast.json"


class RunFolder:
    """runs/<recipe>/<name>/ with config, environment, events, tensorboard and checkpoints.

    url: where it is uploaded to, if anywhere; `lease` is the right to do that, on rank 0.
    resume: the checkpoint to resume from, as it lies on this disk, or "auto".
    """

    def __init__(
        self,
        path: Path,
        lock: RunLock | None = None,
        hosts: CheckpointHosts | None = None,
        facts: dict[str, str] | None = None,
        url: str | None = None,
        lease: Lease | None = None,
        resume: str | None = None,
    ) -> None:
        self.path = path
        self.hosts = hosts
        self.url = url
        self.lease = lease
        self.resume = resume
        self._lock = lock
        self._facts = facts or {}  # name -> text of the files that describe the run

    def make_again(self) -> None:
        """Bring back what can be brought back after somebody deleted the folder in mid-run."""
        _make(self.path)
        for name, text in self._facts.items():
            write_atomically(self.path / name, text)
        if self._lock is not None:
            self._lock.release()  # of a file that is gone
            self._lock = RunLock(self.path, grace_s=0.0)

    def close(self) -> None:
        """Let another run have the folder."""
        if self._lock is not None:
            self._lock.release()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank}.jsonl"


def open_run(
    config: MultiGPUConfig,
    placement: Placement,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RunFolder:
    """The run's folder, chosen, made and locked by rank 0 and told to all. Collective.

    On a node with a disk of its own it has the same name in that node's save_dir. Where save_dir
    is a URL the folder is a local copy, which rank 0 brings up to date.
    """
    answer: dict[str, Any] = {}
    lock: RunLock | None = None
    lease: Lease | None = None
    path = Path()
    if placement.is_main:
        try:
            path = _choose(config, placement.identity)
            _make(path)
            lock = _locked(path)
            _keep_forecast(path, config.forecast)
            answer = {"name": path.name if path.parent == _base(config) else None}
            url = run_url(config, path)
            if url is not None:
                lease = open_remote_run(url, path, config, placement.identity, say)
            answer["resume"] = _fetched_checkpoint(config, path, say)
        except ConfigError as error:
            answer = {"problem": error.problems[0], "code": error.code}
        except StorageError as error:
            answer = {"problem": str(error), "code": "MGT707"}
        except CheckpointError as error:
            answer = {"problem": str(error), "code": error.code}
        except OSError as error:
            answer = {"problem": _unwritable(error, config), "code": "MGT704"}
    answer = placement.broadcast_json(answer)
    if "problem" in answer:
        _let_go(lock, lease)
        raise ConfigError(answer["problem"], code=answer["code"])
    if not placement.is_main:
        path = _told_path(config, placement.identity, answer.get("name"))
    facts: dict[str, str] = {}
    try:
        hosts = find_checkpoint_hosts(placement, path)
        if hosts.writes and not placement.is_main:
            lock = _locked(path)
            _fetch_own_events(config, path, placement.identity)
        if hosts.writes:
            facts = _facts(path, {**config.plain(), **(options or {})}, placement.identity)
            for name, text in facts.items():
                write_atomically(path / name, text)
    except OSError as error:
        _let_go(lock, lease)
        raise ConfigError(_unwritable(error, config), code="MGT704") from None
    resume = _local_checkpoint(config, path, answer.get("resume"))
    return RunFolder(path, lock, hosts, facts, run_url(config, path), lease, resume)


def _let_go(lock: RunLock | None, lease: Lease | None) -> None:
    if lease is not None:
        with contextlib.suppress(StorageError):
            lease.release()
    if lock is not None:
        lock.release()


def _fetched_checkpoint(
    config: MultiGPUConfig, path: Path, say: Callable[[str], None]
) -> str | None:
    """The name of the checkpoint that `resume` gives as a URL, brought to this disk."""
    if config.resume is None or not is_url(config.resume):
        return None
    address = parse_address(config.resume)
    own = address.folder(config) == path
    folder = path / "checkpoints" if own else address.fetched(config)
    return fetch_checkpoint(address, CheckpointStore(folder), say).name


def _local_checkpoint(config: MultiGPUConfig, path: Path, name: Any) -> str | None:
    """What `resume` names, on this disk; rank 0 told the checkpoint's name where it is a URL."""
    if config.resume is None or not is_url(config.resume):
        return config.resume
    address = parse_address(config.resume)
    if not isinstance(name, str) or not re.fullmatch("step-[0-9]{8,16}", name):
        raise ConfigError(f"refused {name!r:.200} as the name of a checkpoint, sent by rank 0")
    own = address.folder(config) == path
    return str((path / "checkpoints" if own else address.fetched(config)) / name)


def _fetch_own_events(config: MultiGPUConfig, path: Path, identity: Identity) -> None:
    """On a further machine with an empty disk: the events that were written there before."""
    url = run_url(config, path)
    if url is None or any((path / "events").glob("*.jsonl")):
        return
    with contextlib.suppress(StorageError, FileNotFoundError, ValueError):
        fetch_events(RemoteFolder(url), path / "events", identity.rank)


def _make(path: Path) -> None:
    """The folder of a run, which only its owner may read: it may hold paths, data and names."""
    make_private(path)
    make_private(path / "events")


def _locked(path: Path) -> RunLock:
    """The folder's lock, and with it the right to tidy up after whoever was killed here."""
    lock = RunLock(path)
    if lock.held:
        try:
            clear_drafts(path)
            if (path / "checkpoints").is_dir():
                check_folder(path / "checkpoints")
                CheckpointStore(path / "checkpoints").clear_leftovers()
        except BaseException:
            lock.release()
            raise
    return lock


def _base(config: MultiGPUConfig) -> Path:
    return config.local_save_dir / config.recipe


def _told_path(config: MultiGPUConfig, identity: Identity, name: Any) -> Path:
    """This rank's folder for the run that rank 0 named; None: the one of the resumed checkpoint.

    Rank 0 may be on another machine, and may not be who it claims to be. Only a plain name is
    taken from it, and every path follows from this rank's own config.
    """
    if name is None:
        resumed = _resumed_run(config)
        if resumed is None:
            raise ConfigError(
                "rank 0 resumes from a checkpoint outside save_dir, but resume="
                f"{config.resume!r} on {identity.host}; give every machine the same --resume"
            )
        return resumed
    problem = name_problem(name) if isinstance(name, str) else "it is not text"
    if problem is None and config.run_name not in (None, name):
        problem = f"this machine was started with run_name={config.run_name!r}"
    if problem is None and _is_another_run(_base(config) / name, config, identity):
        problem = f"{_base(config) / name} on {identity.host} belongs to another run"
    if problem is not None:
        raise ConfigError(f"refused {name!r:.200} as the run's name, sent by rank 0: {problem}")
    return _base(config) / str(name)


def _is_another_run(path: Path, config: MultiGPUConfig, identity: Identity) -> bool:
    """Whether a run that this launch did not begin lies at `path`, where none was asked for."""
    if config.run_name is not None or config.resume is not None or not identity.on_several_hosts:
        return False
    try:
        facts = read_json(path / "environment.json", dict[str, Any])
        return bool(facts["run_id"] != identity.run_id)
    except (OSError, ValueError, KeyError):
        return any(path.glob("checkpoints/step-*"))


def _resumed_run(config: MultiGPUConfig) -> Path | None:
    """The run that holds the checkpoint named by `resume`: training continues in its folder."""
    if config.resume is None or config.resume == "auto":
        return None
    if is_url(config.resume):
        return parse_address(config.resume).folder(config)
    given = Path(config.resume).resolve()
    return given.parent.parent if given.parent.name == "checkpoints" else None


def _unwritable(error: OSError, config: MultiGPUConfig) -> str:
    return (
        f"cannot write the run folder {error.filename or config.save_dir}: {error.strerror}; "
        "choose another --save-dir"
    )


def _choose(config: MultiGPUConfig, identity: Identity) -> Path:
    base = _base(config)
    if config.run_name is not None:
        return base / config.run_name
    if identity.attempt and identity.run_id:
        restarted = _run_of(base, identity.run_id)
        if restarted is not None:
            return restarted
    resumed = _resumed_run(config)
    if resumed is not None:
        return resumed
    remote = is_url(config.save_dir)
    if config.resume == "auto":
        found = _latest_anywhere(config) if remote else latest_run(base)
        if found is not None:
            return found
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ["", *(f"-{i}" for i in range(2, 1000))]:
        path = base / (name + suffix)
        if remote and is_taken(config, path.name):
            continue
        base.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
            return path
        except FileExistsError:
            continue
    raise FileExistsError(f"{base / name} and 999 more exist")


def latest_run(base: Path) -> Path | None:
    """The run under `base` that saved a checkpoint last."""
    saved = _saved(base)
    return max(saved)[1] if saved else None


def _saved(base: Path) -> list[tuple[float, Path]]:
    return [(c.lstat().st_mtime, c.parent.parent) for c in base.glob("*/checkpoints/step-*")]


def _latest_anywhere(config: MultiGPUConfig) -> Path | None:
    """The run that saved a checkpoint last, on this disk or in object storage."""
    saved, remote = _saved(_base(config)), latest_remote_run(config)
    if remote is not None:
        saved.append((remote[0], _base(config) / remote[1]))
    return max(saved)[1] if saved else None


def _run_of(base: Path, run_id: str) -> Path | None:
    """The run that ranks of this launch began before they were restarted.

    A script that trains several runs must name them: after a restart nobody can tell whether its
    first run is the first one again, or the one that is left.
    """
    found = []
    for file in sorted(base.glob("*/environment.json")):
        try:
            if read_json(file, dict[str, Any]).get("run_id") == run_id:
                found.append(file.parent)
        except (OSError, ValueError):
            continue
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(
            f"restarted, but this launch began {len(found)} runs without a run_name ({names}), and "
            "they cannot be told apart; give each its own run_name, and start it again with "
            "--resume auto"
        )
    return found[0] if found else None


def _facts(path: Path, settings: dict[str, Any], identity: Identity) -> dict[str, str]:
    """The files that describe the run, with hashes by which the report finds a changed one."""
    texts = {"config.yaml": OmegaConf.to_yaml(storable(settings))}
    hashed = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    # The report says what is wrong with one that cannot be read; training does without it.
    with contextlib.suppress(OSError, ValueError):
        hashed[FORECAST] = hashlib.sha256(read_bytes(path / FORECAST)).hexdigest()
    facts = {"run_id": identity.run_id, **environment(), "files": hashed}
    return {**texts, "environment.json": json.dumps(signed(facts), indent=1)}


def _keep_forecast(path: Path, forecast: str | None) -> None:
    """A copy of what was expected of this run, for the report that compares it."""
    if forecast is None:
        return
    given = Path(forecast)
    file = given / FORECAST if given.is_dir() else given
    try:
        text = read_text(file.resolve())
        found = parse_json(text, dict[str, Any], file.name)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"forecast={forecast} cannot be read: {error}") from None
    if not isinstance(found.get("gpus"), dict):
        raise ConfigError(
            f"forecast={forecast} is not a forecast; give the forecast.json of `mgt estimate`"
        )
    write_atomically(path / FORECAST, text)


def environment() -> dict[str, Any]:
    """Versions and hardware, for whoever must repeat the run."""
    packages = ("torch", "numpy", "safetensors", "multi-gpu-training")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return {
        "command": redact_command(sys.orig_argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
