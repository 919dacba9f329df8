"""The command line `mgt`. What a command does stands in a file that is imported when it runs."""

from __future__ import annotations

import errno
import os
import signal
import sys

from multi_gpu_training.errors import ConfigError, MultiGPUError, with_code
from multi_gpu_training.safe_output import protect_output

# `python -m torch.distributed.launch -m multi_gpu_training ...` puts it before the command.
LOCAL_RANK = ("--local-rank=", "--local_rank=")
# Limits of the machine that a command may meet anywhere, and what to do about them.
LIMITS = {
    errno.EMFILE: "this process may not open more; raise the limit (`ulimit -n`)",
    errno.ENFILE: "this machine may not open more; close other programs",
    errno.ENOSPC: "free some space, or choose another --save-dir",
    errno.EDQUOT: "free some space, or choose another --save-dir",
}
# What others refuse is no run that was to start.
STARTS_A_RUN = ("train", "resume", "run")


def main() -> None:
    protect_output()
    from multi_gpu_training.distributed.signal_thread import (
        SILENT_ENDS,
        end_no_more,
        end_on_signals,
    )

    end_on_signals(signal.SIGTERM, *SILENT_ENDS)
    from multi_gpu_training.cli.app import app

    words = sys.argv[1:]
    while words and words[0].startswith(LOCAL_RANK):
        words.pop(0)
    # What follows `run SCRIPT.py` is the script's.
    ours = words.index("run") if "run" in words else len(words)
    debug = "--debug" in words[:ours]
    if debug:
        words.remove("--debug")
        os.environ["MGT_DEBUG"] = "1"
    try:
        app(words, prog_name="mgt")  # completion looks for _MGT_COMPLETE
    except MultiGPUError as error:
        if _wants_traceback(debug):
            raise
        print(_told(error, words), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        told = LIMITS.get(error.errno or 0)
        if told is None or _wants_traceback(debug):
            raise
        print(with_code(f"{error.strerror}: {told}", "MGT704"), file=sys.stderr)
        sys.exit(1)
    except SystemExit as stop:
        if _is_usage_error(stop.__context__):  # typer has told it
            _suggest_runs(stop.__context__, words)
            print(with_code("", "MGT101").strip(), file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        end_no_more(signal.SIGTERM, *SILENT_ENDS)


def _wants_traceback(debug: bool) -> bool:
    """In a rank the error belongs to the launcher, which prints the first one once."""
    return debug or "MGT_DEBUG" in os.environ or "TORCHELASTIC_ERROR_FILE" in os.environ


def _suggest_runs(error: BaseException | None, words: list[str]) -> None:
    """Where a command lacks its RUN, the same command with the newest ones."""
    if type(error).__name__ != "MissingParameter" or words[:1] not in (["report"], ["resume"]):
        return
    from multi_gpu_training.cli.newest_runs import suggestions

    found = suggestions(words[0])
    if found:
        print("\n  ".join(["the newest runs here:", *found]), file=sys.stderr)


def _told(error: MultiGPUError, words: list[str]) -> str:
    """The message, under a heading that fits the command."""
    command = next((word for word in words if not word.startswith("-")), "")
    if isinstance(error, ConfigError) and command not in STARTS_A_RUN:
        return error.shown(error.under("This cannot be done:"))
    return error.shown()


def _is_usage_error(error: BaseException | None) -> bool:
    """Whether typer refused the words, rather than that it showed its help for want of any."""
    import typer

    usage_error = typer.BadParameter.__mro__[1]  # of click, or of the copy that typer may bring
    return isinstance(error, usage_error) and type(error).__name__ != "NoArgsIsHelpError"
