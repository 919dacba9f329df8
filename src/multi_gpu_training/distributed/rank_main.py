"""What a rank process runs around the user's script: `python -m ...rank_main SCRIPT ARGS`.

It dies with its launcher, reports its own first error, and leaves its group before it exits.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed import heartbeat, scratch, whereabouts
from multi_gpu_training.distributed.listening import end_on_signals
from multi_gpu_training.errors import ConfigError, LaunchError, MultiGPUError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    command = sys.argv[1:]
    launcher = None
    if command[0].startswith("--launcher="):
        launcher = int(command.pop(0).partition("=")[2])
    try:
        as_rank(lambda: run_command(command), launcher)
        code: object = 0
    except SystemExit as stop:
        code = stop.code
    _leave(code)


def run_command(command: list[str]) -> None:
    """Run a script or module as `python` would, in this process."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def as_rank(work: Callable[[], Any], launcher: int | None = None) -> Any:
    """Call `work`; an error is handed to the launcher, which shows the first one last."""
    die_with_parent(launcher)
    end_on_signals(signal.SIGUSR1)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    whereabouts.keep(error_file)
    scratch.join(error_file)
    heartbeat.begin(error_file)
    try:
        return work()
    except SystemExit as stop:
        if stop.code not in (None, 0) and "TORCHELASTIC_ERROR_FILE" in os.environ:
            code = 1 if isinstance(stop.code, str) else stop.code
            _report(f"exited with {stop.code}", code, stop)
        raise
    except KeyboardInterrupt:
        end_workers(all_children=True)
        raise SystemExit(130) from None
    except MultiGPUError as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        friendly = isinstance(error, ConfigError) or not os.environ.get("MGT_DEBUG")
        _report(f"{error}{notes}", error.exit_code, error, friendly)
        raise SystemExit(error.exit_code) from None
    except BaseException as error:
        _report(_own_traceback(), 1, error)
        raise SystemExit(1) from None


def install_error_hook() -> None:
    """Let an uncaught error of ours end a plain `python train.py` with its message alone.

    MGT_DEBUG=1 (`mgt --debug`) shows the traceback.
    """
    before = sys.excepthook
    if getattr(before, "_mgt", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, MultiGPUError) or os.environ.get("MGT_DEBUG"):
            before(kind, error, trace)
            return
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        # Not sys.stderr: there torch's hook of a rank has put a buffer that it prints after us.
        print(f"{error}{notes}", file=sys.__stderr__ or sys.stderr, flush=True)
        sys.exit(error.exit_code)

    hook._mgt = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def die_with_parent(parent: int | None = None) -> None:
    """Be killed when the parent is, which may have died before this line."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_workers(all_children: bool = False) -> None:
    """Kill the daemon processes of this one: loader workers do not listen to SIGTERM, and
    multiprocessing would wait for them for ever at exit."""
    # torch's handler would call a killed worker an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        if worker.daemon or all_children:
            worker.kill()


def _own_traceback() -> str:
    """The traceback from the user's file on, without our frames and runpy's before it."""
    kind, error, trace = sys.exc_info()
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(kind, error, trace)).rstrip()


def _restart_helps(error: BaseException) -> str:
    """Whether starting all ranks again may mend this: always, once begun (a mistake in a script
    shows before its first step), never."""
    if isinstance(error, MultiGPUError):
        if not error.restart_helps:
            return "never"
        return "always" if isinstance(error, LaunchError) else "once begun"
    if isinstance(error, SystemExit):
        return "never" if error.code in (130, 143) else "once begun"  # it was asked to end
    distributed = sys.modules.get("torch.distributed")
    if isinstance(error, (ConnectionError, TimeoutError)) or "/gloo/" in str(error):
        return "always"
    lost = distributed is not None and isinstance(error, distributed.DistError)
    return "always" if lost else "once begun"


def _kind(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _report(text: str, code: object, error: BaseException, friendly: bool = False) -> None:
    rank = os.environ.get("RANK", "0")
    where = f"rank {rank} on {socket.gethostname()}"
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    full = text if friendly or where in text else f"{text}\n({where})"
    if not file:
        print(full, file=sys.stderr, flush=True)
        return
    now, place = time.time(), whereabouts.here()
    record = {
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
            "step": place.step,
            "begun": place.begun,
            "restart": _restart_helps(error),
        },
    }
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: the launcher, which may end us now, fails on half a report.
        draft = Path(f"{file}.draft")
        draft.write_text(json.dumps(record))
        draft.replace(file)
    except OSError:
        print(full, file=sys.stderr, flush=True)


def _leave(code: object) -> None:
    """Exit without the interpreter's own teardown, in which gloo may abort or deadlock."""
    failed = code not in (None, 0)
    if not failed:
        threading._shutdown()  # type: ignore[attr-defined]  # threads finish, as python lets them
    end_workers(all_children=failed)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    os._exit(int(code) if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
