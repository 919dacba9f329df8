"""Compiles a step in another process while this one trains.

Compiling takes ten seconds to minutes of Python. In a thread it would slow training down many
times over; in this process it would stop it. So a child process gets the model without its weights,
the loss and one batch, compiles them, and leaves the result in torch's cache on disk. Compiling the
same step here then takes a few seconds.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.distributed.cleanup import Scratch
from multi_gpu_training.training.step_state import StepState

CHILD = "multi_gpu_training.training.runner.compile_child"
_KEPT_VALUES = 64  # tensors up to this size are sent with their values: code may read them
_CONTEXT_BYTES = 2**30  # GPU memory a second process takes before it computes anything


class HandOverError(Exception):
    """The step cannot be sent to another process; the message says why in a few words."""


class CompileAhead:
    """A compilation next to the training. done: it has ended. problem: why it failed, or None."""

    def __init__(self, state: StepState, batch: Any) -> None:
        self.problem: str | None = None
        self._scratch = Scratch()
        self._child: subprocess.Popen[bytes] | None = None
        try:
            packed = pack_step(state, batch)
            path = self._scratch.path / "step.pickle"
            path.write_bytes(packed)
            self._child = self._start(path)
        except (HandOverError, OSError) as error:
            self.problem = str(error)
            self.close()

    def _start(self, path: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", CHILD, str(path), str(os.getpid())]
        paths = [entry or str(Path.cwd()) for entry in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with (self._scratch.path / "log.txt").open("wb") as log:
            # Its own session: a Ctrl-C at the terminal is meant for the training.
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def done(self) -> bool:
        if self._child is None:
            return True
        if self._child.poll() is None:
            return False
        self.problem = self._outcome()
        self.close()
        return True

    def _outcome(self) -> str | None:
        assert self._child is not None
        try:
            outcome = json.loads((self._scratch.path / "outcome.json").read_text())
            problem: str | None = outcome["problem"]
            return problem
        except (OSError, ValueError, KeyError):
            return f"the process that compiled it ended with code {self._child.returncode}"

    def close(self) -> None:
        """Kill the child, whatever it is doing."""
        child, self._child = self._child, None
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._scratch.remove()


def fits_beside(state: StepState) -> bool:
    """Whether the GPU has room for a second process that computes one step."""
    device = state.placement.device
    if device.type != "cuda":
        return True
    needed = torch.cuda.max_memory_allocated(device) + _CONTEXT_BYTES
    return int(torch.cuda.mem_get_info(device)[0]) > 1.5 * needed


def pack_step(state: StepState, batch: Any) -> bytes:
    """Everything needed to compile a step, except the values of its tensors."""
    device, precision = state.placement.device, state.precision
    step = {
        "model": state.model,
        "trained": state.trained,
        "loss_fn": state.step_module.loss_fn,
        "batch": batch,
        "ddp": state.strategy.wrapper_settings(),
        "device": (device.type, device.index),
        "autocast": precision.dtype,
        "switches": switches(),
    }
    try:
        import cloudpickle
    except ImportError:
        raise HandOverError("cloudpickle is not installed (pip install cloudpickle)") from None
    target = io.BytesIO()
    pickler = cloudpickle.Pickler(target)
    # Looked up by exact type: tensor subclasses are sent unchanged.
    shapes = {Tensor: _as_shape, nn.Parameter: _as_shape}
    pickler.dispatch_table = {**copyreg.dispatch_table, **shapes}
    try:
        pickler.dump(step)
    except Exception as error:  # whatever the user's classes raise
        text = str(error).strip().splitlines()
        raise HandOverError(
            f"it cannot be given to another process: {(text or [''])[0][:120]}"
        ) from error
    return target.getvalue()


def _as_shape(tensor: Tensor) -> Any:
    values = None
    if tensor.layout != torch.strided:
        raise pickle.PicklingError(f"a tensor of layout {tensor.layout}")
    if tensor.numel() <= _KEPT_VALUES and not tensor.is_complex():
        values = tensor.detach().cpu().tolist()
    kept = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
    is_parameter = isinstance(tensor, nn.Parameter)
    return make_tensor, (*kept, tensor.device.type, is_parameter, values)


def make_tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    device: str,
    is_parameter: bool,
    values: Any,
) -> Tensor:
    """A tensor like the one in the other process: zeros, or its values if it is small."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    with torch.no_grad():
        if values is None:
            tensor.zero_()
        else:
            tensor.copy_(torch.tensor(values, dtype=dtype))
    if is_parameter:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def switches() -> dict[str, Any]:
    """The process-wide settings of torch that compiled code depends on."""
    return {
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": torch.get_default_dtype(),
    }


def set_switches(found: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = found["matmul_tf32"]
    torch.backends.cudnn.allow_tf32 = found["cudnn_tf32"]
    torch.backends.cudnn.benchmark = found["benchmark"]
    torch.use_deterministic_algorithms(found["deterministic"])
    torch.set_default_dtype(found["default_dtype"])
