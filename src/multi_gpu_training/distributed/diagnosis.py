"""Which rank failed first, where, and of what: from reports, exit codes and whereabouts."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed import whereabouts
from multi_gpu_training.distributed.restarts import Fault
from multi_gpu_training.errors import RankFailure


def first_failure(
    failures: Mapping[int, Any],
    error_files: Mapping[int, str],
    bystanders: Collection[int],
    begun_before: bool = False,
) -> tuple[Fault, RankFailure]:
    """The fault of the rank that failed first, and its error for people to read; the others
    failed because of it. begun_before: an earlier attempt came to its first step."""
    reports = []
    for file in error_files.values():
        with suppress(OSError, ValueError, KeyError, TypeError):
            reports.append(json.loads(Path(file).read_text())["mgt"])
    reported = {report["rank"] for report in reports}
    silent = {
        rank: failure
        for rank, failure in failures.items()
        if rank not in reported and failure.local_rank not in bystanders
    }
    # A rank that was killed could not say so, and took the others with it. Gloo and NCCL abort
    # by themselves where another rank is gone: that is no first cause.
    killed = [rank for rank in silent if silent[rank].exitcode != -signal.SIGABRT]
    if killed or not reports:
        rank = min(killed or silent or failures)
        return _silent_failure(rank, failures[rank], error_files, begun_before)
    return _reported_failure(min(reports, key=lambda report: report["time"]), begun_before)


def _reported_failure(report: Mapping[str, Any], begun_before: bool) -> tuple[Fault, RankFailure]:
    text = report["text"]
    if not report["friendly"]:
        text = "\n".join(f"[rank{report['rank']}]: {line}" for line in text.splitlines())
    error = RankFailure(text)
    error.exit_code = report["code"]
    begun = report["begun"]
    helps = report["restart"]
    fault = Fault(
        report["rank"],
        report["kind"],
        report["step"],
        begun,
        hopeless=helps == "never" or (helps == "once begun" and not (begun or begun_before)),
        contact=helps == "always",
    )
    return fault, error


def _silent_failure(
    rank: int, failure: Any, error_files: Mapping[int, str], begun_before: bool
) -> tuple[Fault, RankFailure]:
    signalled = failure.exitcode < 0
    how = (
        f"was ended by {failure.signal_name()}"
        if signalled
        else f"exited with code {failure.exitcode}"
    )
    found = whereabouts.of_rank(error_files.get(failure.local_rank, ""))
    where = "" if found.step is None else f", step {found.step}"
    error = RankFailure(f"[rank{rank}]: rank {rank} on {socket.gethostname()}{where} {how}")
    error.exit_code = 1 if signalled else failure.exitcode
    kind = failure.signal_name() if signalled else f"exit code {failure.exitcode}"
    asked_to_end = failure.exitcode in (130, 143)
    begun = found.begun or begun_before
    fault = Fault(
        rank,
        kind,
        found.step,
        found.begun,
        hopeless=asked_to_end or (not signalled and not begun),
        contact=failure.exitcode == -signal.SIGABRT,
    )
    return fault, error
