"""`mgt export`: a trained model as a folder for programs without this package."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from multi_gpu_training.cli.evaluate_command import checked_source
from multi_gpu_training.delivery.exports import export
from multi_gpu_training.delivery.loaded_model import load


def export_run(
    run: str,
    to: str,
    out: str | None,
    checkpoint: str | None,
    max_batch: int,
    length: int | None,
    license_name: str,
    trust: bool,
    as_json: bool,
) -> int:
    loaded = load(checked_source(run, checkpoint), device="cpu", trust=trust)
    source = Path(os.path.realpath(Path(run).expanduser()))
    folder = Path(out) if out else Path("exports") / f"{loaded.recipe}-{source.name}-{to}"
    done = export(loaded, to, folder, max_batch=max_batch, length=length, license_name=license_name)
    if as_json:
        print(json.dumps(done.plain(), indent=1))
        return 0
    table = Table("checked", "batch", "largest difference", "same first class")
    for check in done.checks:
        same = "" if check.same_first is None else f"{check.same_first:.1%}"
        table.add_row(check.where, str(check.batch), f"{check.difference:.2g}", same)
    console = Console(highlight=False)
    if done.checks:
        console.print(table)
    for note in done.notes:
        console.print(note, markup=False)
    console.print(f"{done.bytes / 2**20:.2f} MiB: {done.folder}", markup=False)
    return 0
