"""Train on several ranks from a notebook cell.

Ranks are new processes, so it does not matter whether the notebook has used CUDA. A function of a
cell exists in the notebook only: cloudpickle ships it, with the classes and values that it uses.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.launcher import launch_distributed_training
from multi_gpu_training.safe_output import brief

_THREADS = "OMP_NUM_THREADS"


def notebook_launch(
    function: Callable[..., Any], num_ranks: int = -1, args: Sequence[Any] = (), **options: Any
) -> Any:
    """Run `function(*args)` on `num_ranks` ranks (-1: one per GPU) and return rank 0's result.

    Blocks until all ranks have ended. An exception in a rank, or the kernel's interrupt, ends all
    of them; the next call starts afresh. A failed run is not restarted, unless `max_restarts` says
    so; the other `options` are those of `launch_distributed_training`.
    """
    if not callable(function):
        raise ConfigError(f"{brief(function)} cannot be called; give a function that trains")
    threads = os.environ.get(_THREADS)
    try:
        payload = _shipped(function, tuple(args))
        answer = launch_distributed_training(
            _call_shipped, num_ranks, (payload,), **{"max_restarts": 0, **options}
        )
        return pickle.loads(answer) if isinstance(answer, bytes) else answer
    finally:
        # The launcher divides the cores by this number of ranks; the next call may have another.
        if threads is None:
            os.environ.pop(_THREADS, None)


def _shipped(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The function and its arguments as bytes that another process can read."""
    try:
        import cloudpickle
    except ImportError:
        if not _importable(function):
            raise LaunchError(
                f"{getattr(function, '__qualname__', function)} is defined in a notebook cell, "
                "where other processes cannot find it; pip install cloudpickle, or move the "
                "function into a module and import it"
            ) from None
        return pickle.dumps((function, args))

    class HostPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> None:
            """Refuse values on a device: every rank would copy them to the same one."""
            torch = sys.modules.get("torch")  # not imported here: ranks shall start quickly
            if torch is not None and isinstance(value, torch.Tensor) and not value.is_cpu:
                raise LaunchError(
                    f"{getattr(function, '__qualname__', function)} uses a tensor of shape "
                    f"{tuple(value.shape)} on {value.device}, which the notebook holds; build the "
                    "model and data inside the function, or move them with .cpu() first"
                )

    written = io.BytesIO()
    try:
        HostPickler(written).dump((function, args))
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise LaunchError(
            f"{getattr(function, '__qualname__', function)} uses something that cannot be sent to "
            f"another process ({error}); create open files, locks and managers inside the function"
        ) from error
    return written.getvalue()


def _importable(function: Callable[..., Any]) -> bool:
    main = sys.modules["__main__"]
    inside = getattr(function, "__module__", None) == "__main__" and not hasattr(main, "__file__")
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return not inside


def _call_shipped(payload: bytes) -> bytes:
    """In a rank: call the function, and send back its result in the same way."""
    # A notebook is a pipe, to which Python would write only every 8 kB.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    function, args = pickle.loads(payload)
    result = function(*args)
    try:
        import cloudpickle

        return bytes(cloudpickle.dumps(result))
    except ImportError:
        return pickle.dumps(result)
