"""Where torch keeps compiled code: a folder private to this user, because it is loaded and run.

torch's own choice, TMPDIR/torchinductor_USER, stays behind in the temporary folder of every job,
and whoever first creates a folder of that name decides what it holds.
"""

from __future__ import annotations

import atexit
import os
import stat
from pathlib import Path

from multi_gpu_training.distributed.cleanup import Scratch
from multi_gpu_training.safe_files import make_private

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compile_cache() -> None:
    """Make torch keep compiled code in the user's cache folder, unless the user names another. If
    that folder is not private, use one that is removed with this process."""
    if os.environ.get(_VARIABLE):
        return
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        folder = Path(home) / "multi-gpu-training" / "compiled"
        for path in (folder.parent, folder):
            make_private(path)
            _check_private(path)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        scratch = Scratch()
        atexit.register(scratch.remove)
        folder = scratch.path
    os.environ[_VARIABLE] = str(folder)


def _check_private(path: Path) -> None:
    found = path.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & others:
        raise OSError(f"{path} is not a folder of this user alone")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"{path} cannot be written")
