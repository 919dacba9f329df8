"""`mgt checkpoints`: list what a run has saved, every byte checked; upload it, merge its shards."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from multi_gpu_training.checkpoint.inspection import CheckpointListing, ListedCheckpoint, inspect
from multi_gpu_training.checkpoint.merging import merge
from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.checkpoint.signature import read_signer
from multi_gpu_training.distributed.identity import ALONE
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.report.wording import metric, size
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_files import read_yaml
from multi_gpu_training.safe_output import printable
from multi_gpu_training.storage.remote_folder import StorageError
from multi_gpu_training.storage.remote_resume import parse_address
from multi_gpu_training.storage.remote_view import list_remote
from multi_gpu_training.storage.uploader import UploadPlan, upload_now

ROOM_FOR_METRICS = 100  # columns; in a narrower terminal they stand below the table


def merge_checkpoint(words: list[str], like: str | None) -> int:
    """Write the weights of a checkpoint into one file; say which."""
    if len(words) != 2:
        raise ConfigError("give a run and where to write: mgt checkpoints merge RUN OUT")
    run, out = map(Path, words)
    if not run.is_dir():
        raise ConfigError(f"mgt checkpoints merge {run}: no such folder", code="MGT104")
    file, step = merge(run, out, None if like is None else Path(like))
    print(printable(f"the weights of step {step}: {file}"))
    return 0


def show_checkpoints(run: str, as_json: bool, verify_key: str | None = None) -> int:
    """Print the checkpoints of a run; return 0 if there is an intact one to resume from, else 1."""
    given = Path(run)
    if is_url(run):
        return _show(list_remote(run), as_json)
    if not given.is_dir():
        found = "not a folder" if given.exists() else "no such folder"
        raise ConfigError(
            f"mgt checkpoints {run}: {found}; give a run folder like runs/RECIPE/NAME",
            code="MGT104",
        )
    return _show(inspect(given, read_signer(verify_key, signs=False)), as_json)


def upload_run(run: str, url: str | None, wait_s: float) -> int:
    """Upload what a run's local copy holds and its storage lacks; 0 if all of it is there now."""
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"mgt checkpoints upload {run}: no run there; give a run folder, such as the local "
            "copy that the run named",
            code="MGT104",
        )
    try:
        settings = read_yaml(folder / "config.yaml")
    except (OSError, ValueError) as error:
        raise ConfigError(f"mgt checkpoints upload {run}: {error}", code="MGT707") from None
    save = str(settings.get("save_dir", ""))
    if url is None and is_url(save):
        url = f"{save}/{settings.get('recipe', 'custom')}/{folder.resolve().name}"
    if url is None:
        raise ConfigError(f"mgt checkpoints upload {run}: its save_dir is not a URL; add --to URL")
    address = parse_address(url)
    last, best = int(settings.get("keep_last", 3)), int(settings.get("keep_best", 1))
    lock = RunLock(folder, grace_s=0.0)  # a run that trains uploads by itself
    try:
        plan = UploadPlan(folder, address.url, ALONE, last, best)
        missing = upload_now(plan, print, wait_s)
    except StorageError as error:
        raise ConfigError(f"mgt checkpoints upload: {error}", code="MGT707") from None
    finally:
        lock.release()
    if not missing:
        print(f"everything is at {address.url}")
    return 1 if missing else 0


def _show(listing: CheckpointListing, as_json: bool) -> int:
    if as_json:
        print(json.dumps(listing.plain(), indent=1))
    else:
        console = Console(highlight=False, soft_wrap=True)
        if not console.is_terminal:
            console.width = 160  # in a file or a pipe nothing needs to be cut
        _print(listing, console)
    return 0 if listing.newest_intact is not None else 1


def _print(listing: CheckpointListing, console: Console) -> None:
    table = Table()
    wide = console.width >= ROOM_FOR_METRICS
    titles = ["checkpoint", "epoch", "saved", "ranks", "size", "", "state"]
    for title in [*titles, "metrics"] if wide else titles:
        table.add_column(title, no_wrap=title != "metrics", overflow="fold")
    below = []
    for item in listing.checkpoints:
        row = _row(item, "complete" if listing.remote else "intact")
        metrics = ", ".join(f"{name} {metric(name, value)}" for name, value in item.metrics.items())
        if wide:
            row.append(metrics)
        elif metrics:
            below.append(f"{item.name}: {metrics}")
        table.add_row(*(escape(printable(cell)) for cell in row))
    if listing.checkpoints:
        console.print(table)
    for line in below:
        console.print(printable(line), markup=False)
    for item in listing.checkpoints:
        if item.problem is not None:
            text = printable(f"{item.name} is damaged: {item.problem}")
            console.print(text, markup=False)
    if listing.lineage_problem is not None:
        console.print(printable(listing.lineage_problem), markup=False)
    if listing.leftovers:
        names = printable(", ".join(listing.leftovers))
        console.print(f"unfinished, cleared by the next start or save: {names}", markup=False)
    if listing.owner is not None:
        by = listing.owner
        text = f"in use by process {by.get('pid', '?')} on {by.get('host', '?')}"
        console.print(text, markup=False)
    if listing.newest_intact is None:
        console.print(f"no intact checkpoint in {listing.folder}", markup=False)
    else:
        console.print(f"--resume auto continues from {listing.newest_intact}", markup=False)


def _row(item: ListedCheckpoint, well: str) -> list[str]:
    state = "damaged" if item.problem is not None else well
    if not item.current:
        state += ", abandoned"
    return [
        item.name,
        "?" if item.epoch is None else str(item.epoch + 1),
        (item.created or "?")[:16].replace("T", " "),
        "?" if item.world_size is None else str(item.world_size),
        size(item.bytes) or "?",
        "best" if item.best else "",
        state,
    ]
