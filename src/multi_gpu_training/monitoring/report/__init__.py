"""The report of a run: read its folder, find why it is slow, show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from multi_gpu_training.errors import MultiGPUError
from multi_gpu_training.monitoring.report.html import page
from multi_gpu_training.monitoring.report.picture import draw_run
from multi_gpu_training.monitoring.report.run_record import RunRecord, read_runs


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
        path.write_text(page(runs))
        if len(runs) == 1:
            draw_run(runs[0], path.parent / "metrics.png")
    except OSError as error:
        raise MultiGPUError(
            f"the report cannot be written to {path}: {error.strerror}; choose another --out"
        ) from error
    return path


__all__ = ["write_page", "write_report"]
