"""What a rank process runs around the user's script: `python -m ...rank_main SCRIPT ARGS`.

It dies with its launcher, reports its first error, and leaves its group before it exits.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multi_gpu_training.distributed import progress_slot, stacks
from multi_gpu_training.distributed.cleanup import die_with_parent, end_workers, share_scratch
from multi_gpu_training.distributed.signal_thread import SILENT_ENDS, end_on_signals
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.launch.rank_errors import own_traceback, report, report_exit
from multi_gpu_training.python_internals import run_exit_functions, wait_for_threads


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
    """Call `work`. An error goes to the launcher, which shows the first one last."""
    die_with_parent(launcher)
    end_on_signals(*SILENT_ENDS)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    progress_slot.keep(error_file)
    share_scratch(error_file)
    stacks.start_sampling(error_file)
    try:
        return work()
    except SystemExit as stop:
        if error_file is not None:
            report_exit(stop)
        raise
    except KeyboardInterrupt:
        end_workers(all_children=True)
        raise SystemExit(130) from None
    except MultiGPUError as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        friendly = isinstance(error, ConfigError) or not os.environ.get("MGT_DEBUG")
        report(f"{error}{notes}", error.exit_code, error, friendly)
        raise SystemExit(error.exit_code) from None
    except BaseException as error:
        report(own_traceback(__file__), 1, error)
        raise SystemExit(1) from None


def _leave(code: object) -> None:
    """Exit without the interpreter's own teardown, in which gloo may abort or deadlock."""
    failed = code not in (None, 0)
    if not failed:
        wait_for_threads()
    end_workers(all_children=failed)
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    os._exit(int(code) if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
