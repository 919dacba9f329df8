"""The report of a run: read its folder, find why it is slow, show it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.extras import can_draw
from multi_gpu_training.monitoring.report.html import page
from multi_gpu_training.monitoring.report.picture import draw_run
from multi_gpu_training.monitoring.report.run_record import RunRecord, read_runs
from multi_gpu_training.safe_files import check_replaceable, write_atomically


def write_report(folders: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write the report of these runs and return where: RUN/report.html with RUN/metrics.png beside
    it for one run, report.html here for several, or `out`."""
    return write_page(read_runs(folders), out)


def write_page(runs: Sequence[RunRecord], out: Path | str | None = None) -> Path:
    if out is None:
        out = runs[0].path / "report.html" if len(runs) == 1 else "report.html"
    path = Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = path.parent / "metrics.png"
        if len(runs) == 1:
            check_replaceable(picture)  # before anything is written
        write_atomically(path, page(runs), mode=0o666)
        if len(runs) == 1 and can_draw(picture):
            drawn = io.BytesIO()
            draw_run(runs[0], drawn)
            if drawn.getvalue():
                write_atomically(picture, drawn.getvalue(), mode=0o666)
    except OSError as error:
        raise MultiGPUError(
            f"the report cannot be written to {error.filename or path}: {error.strerror}; choose "
            "another --out",
            code="MGT704",
        ) from error
    return path


__all__ = ["write_page", "write_report"]
