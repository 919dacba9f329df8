"""Error reports of ranks: each writes what went wrong, and the launcher finds who failed first."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed import progress_slot
from multi_gpu_training.distributed.progress_slot import Phase
from multi_gpu_training.distributed.stacks import is_package_or_torch
from multi_gpu_training.errors import LaunchError, MultiGPUError, RankFailure, with_code
from multi_gpu_training.launch.restart_policy import Fault

_LEFT = "in the middle of training"

# Of files: a disk that is away for a moment raises others.
_WRONG_PATHS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_OF_THE_MACHINE = {"MemoryError", "OutOfMemoryError", "AcceleratorError", "TimeoutExpired"}
_MACHINE_WORDS = re.compile(
    r"out of memory|can't allocate memory|CUDA|CUBLAS|cuDNN|NCCL|HIP error|timed out"
    r"|killed by signal|exited unexpectedly"
)

# In the rank


def report(text: str, code: object, error: BaseException, friendly: bool = False) -> None:
    """Write this rank's error where its launcher finds it. friendly: without rank and host."""
    rank = os.environ.get("RANK", "0")
    where = f"rank {rank} on {socket.gethostname()}"
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    full = text if friendly or where in text else f"{text}\n({where})"
    if not file:
        print(with_code(full, _code(error)), file=sys.stderr, flush=True)
        return
    now, place = time.time(), progress_slot.here()
    record = {
        # torchrun reads this part.
        "message": {
            "message": text,
            "extraInfo": {"timestamp": str(int(now)), "py_callstack": text},
        },
        "mgt": {
            "text": full,
            "time": now,
            "code": code,
            "friendly": friendly,
            "rank": int(rank),
            "kind": _kind(error),
            "error_code": _code(error),
            "step": place.step,
            "begun": place.begun,
            "restart": _restart_helps(error),
        },
    }
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: torchrun, which may end us now, fails on half a report.
        draft = Path(f"{file}.draft")
        draft.write_text(json.dumps(record))
        draft.replace(file)
    except OSError:
        print(with_code(full, _code(error)), file=sys.stderr, flush=True)


def report_exit(stop: SystemExit) -> None:
    """Report a rank that leaves by sys.exit: with an error, or in the middle of training.

    Code 0 after training is no fault. In the middle of it the others lose this rank, and would be
    the only ones to say anything.
    """
    place = progress_slot.here()
    step = "" if place.step is None else f", step {place.step}"
    where = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}{step}"
    if stop.code not in (None, 0):
        code = 1 if isinstance(stop.code, str) else stop.code
        report(f"{where}: exited with {stop.code}", code, stop)
    elif place.begun and (place.phase is not Phase.ENDING or _in_training(stop)):
        report(f"{where}: exited with code 0 {_LEFT}", 1, stop)


def _in_training(error: BaseException) -> bool:
    """Whether it was raised inside a call of `fit`, `train_epoch` or `train_step`."""
    package, trace = Path(__file__).parent.parent, error.__traceback__
    ours = (str(package / "training"), str(package / "manager.py"))
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(ours):
            return True
        trace = trace.tb_next
    return False


def own_traceback(entry: str) -> str:
    """The current traceback from the user's file on, without runpy and the file `entry`.

    Of frames in this package and in torch only the innermost is shown, unless MGT_DEBUG is set:
    thirty of them would hide the few lines that the user can change.
    """
    kind, error, trace = sys.exc_info()
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == entry or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    assert kind is not None and error is not None
    shown = traceback.TracebackException(kind, error, trace)
    if os.environ.get("MGT_DEBUG"):
        return "".join(shown.format()).rstrip()
    hidden = _hide_frames(shown)
    text = "".join(shown.format()).rstrip()
    if not hidden:
        return text
    return (
        f"({hidden} frames in torch and multi_gpu_training hidden; MGT_DEBUG=1 shows them)\n{text}"
    )


def _hide_frames(shown: traceback.TracebackException) -> int:
    """Leave out, also in the errors that led to this one, the frames of libraries; how many."""
    chain: list[traceback.TracebackException] = [shown]
    hidden = 0
    for one in chain:  # which grows meanwhile
        chain += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        kept = [
            frame
            for frame in one.stack
            if frame is one.stack[-1] or not is_package_or_torch(frame.filename)
        ]
        hidden += len(one.stack) - len(kept)
        one.stack = traceback.StackSummary.from_list(kept)
    return hidden


def _restart_helps(error: BaseException) -> str:
    """Whether restarting all ranks may help: always, once begun, once a step was done, or never.

    A mistake in a script shows before its first step: hence "once begun". One in a model or a
    loss shows in that step: hence "once a step was done".
    """
    if getattr(error, "restart_helps", True) is False:  # by its class, or by a fault policy
        return "never"
    if isinstance(error, MultiGPUError):
        return "always" if isinstance(error, LaunchError) else "once begun"
    if isinstance(error, SystemExit):
        return "never" if error.code in (130, 143) else "once begun"  # it was asked to end
    if isinstance(error, (ConnectionError, TimeoutError)) or "/gloo/" in str(error):
        return "always"
    distributed = sys.modules.get("torch.distributed")  # imported only if the rank used it
    if distributed is not None and isinstance(error, distributed.DistError):
        return "always"
    return "once begun" if _may_pass(error) else "once a step was done"


def _may_pass(error: BaseException) -> bool:
    """Whether an error may be that of a machine, which the same code does not meet again."""
    if hasattr(error, "restart_helps"):
        return True
    if isinstance(error, OSError):
        return not isinstance(error, _WRONG_PATHS)
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _OF_THE_MACHINE) or _MACHINE_WORDS.search(str(error)) is not None


def _code(error: BaseException) -> str:
    """The code of the failure; what the user's own code raises has that of a failed rank."""
    if isinstance(error, MultiGPUError):
        return error.code
    return "MGT603" if type(error).__name__ == "OutOfMemoryError" else RankFailure.code


def _kind(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# In the launcher


def first_failure(
    codes: Mapping[int, int],
    error_files: Mapping[int, str],
    bystanders: Collection[int],
    begun_before: bool = False,
    host: Callable[[int], str] = lambda rank: socket.gethostname(),
) -> tuple[Fault, RankFailure]:
    """The fault of the rank that failed first, and its error for people to read.

    The other ranks failed because of it. `codes` are exit codes by rank, negative for signals; 0
    for ranks that ended by themselves.
    begun_before: an earlier attempt reached its first step. `host` names the machine of a rank.
    """
    reports = []
    for file in error_files.values():
        with suppress(OSError, ValueError, KeyError, TypeError):
            reports.append(json.loads(Path(file).read_text())["mgt"])
    failed = {rank: code for rank, code in codes.items() if code}
    left = _left_early(codes, error_files, reports, host)
    reports = [report for report in reports if codes.get(report["rank"]) != 0]
    lost_contact = all(report["restart"] == "always" for report in reports)
    silent = [
        rank
        for rank in failed
        if rank not in {report["rank"] for report in reports} and rank not in bystanders
    ]
    if left and lost_contact and all(codes[rank] == -signal.SIGABRT for rank in silent):
        rank = min(left)
        return left[rank]
    # A killed rank could not report, and took the others with it. Gloo and NCCL abort where
    # another rank is gone: SIGABRT is not a first cause.
    killed = [rank for rank in silent if codes[rank] != -signal.SIGABRT]
    if killed or not reports:
        rank = min(killed or silent or failed)
        file = error_files.get(rank, "")
        return _silent_failure(rank, codes[rank], file, begun_before, host(rank))
    return _reported_failure(min(reports, key=lambda report: report["time"]), begun_before)


def _left_early(
    codes: Mapping[int, int],
    error_files: Mapping[int, str],
    reports: Sequence[Mapping[str, Any]],
    host: Callable[[int], str],
) -> dict[int, tuple[Fault, RankFailure]]:
    """Ranks that exited with code 0 in the middle of training, by sys.exit or without a word."""
    found = {}
    told = {report["rank"]: report for report in reports}
    for rank in (rank for rank, code in codes.items() if code == 0):
        place = progress_slot.of_rank(error_files.get(rank, ""))
        if rank in told or (place.begun and place.phase is not Phase.ENDING):
            step = "" if place.step is None else f", step {place.step}"
            text = f"rank {rank} on {host(rank)}{step}: exited with code 0 {_LEFT}"
            fault = Fault(rank, f"exit code 0 {_LEFT}", place.step, place.begun)
            found[rank] = fault, RankFailure(f"[rank{rank}]: {text}")
    return found


def _reported_failure(report: Mapping[str, Any], begun_before: bool) -> tuple[Fault, RankFailure]:
    text = report["text"]
    if not report["friendly"]:
        text = "\n".join(f"[rank{report['rank']}]: {line}" for line in text.splitlines())
    error = RankFailure(text, code=report.get("error_code"))
    error.exit_code = report["code"]
    begun, step = report["begun"], report["step"]
    helps = report["restart"]
    reached = begun
    if helps == "once a step was done":  # in this attempt, or before the checkpoint it began from
        reached = begun and step is not None and step > 1
    fault = Fault(
        report["rank"],
        report["kind"],
        step,
        begun,
        hopeless=helps == "never" or (helps != "always" and not (reached or begun_before)),
        contact=helps == "always",
    )
    return fault, error


def _silent_failure(
    rank: int, code: int, error_file: str, begun_before: bool, host: str
) -> tuple[Fault, RankFailure]:
    """The fault of a rank that wrote no report, from its exit code and its progress."""
    signalled = code < 0
    kind = _signal_name(-code) if signalled else f"exit code {code}"
    how = f"was ended by {kind}" if signalled else f"exited with code {code}"
    if kind == "SIGILL":  # some sandboxes announce Intel's AMX and forbid it
        how += (
            ": this CPU refuses an instruction; for bf16 on a CPU set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
        )
    found = progress_slot.of_rank(error_file)
    where = "" if found.step is None else f", step {found.step}"
    error = RankFailure(
        f"[rank{rank}]: rank {rank} on {host}{where} {how}", code="MGT601" if signalled else None
    )
    error.exit_code = 1 if signalled else code
    asked_to_end = code in (130, 143)
    begun = found.begun or begun_before
    fault = Fault(
        rank,
        kind,
        found.step,
        found.begun,
        hopeless=asked_to_end or (not signalled and not begun),
        contact=code == -signal.SIGABRT,
    )
    return fault, error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
