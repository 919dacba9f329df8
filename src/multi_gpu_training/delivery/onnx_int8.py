"""Static int8 for onnxruntime: weights and activations, with ranges from real inputs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.compress.quantization import quietly
from multi_gpu_training.delivery.loaded_model import LoadedModel
from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.extras import install, installed

SAMPLES, CALIBRATION_BATCH = 256, 32
NEEDED = ("onnx", "onnxruntime", "onnxscript")
FILE = "model.onnx"


class OnnxModel(nn.Module):
    """An ONNX file as a module, so that it can be evaluated and timed like the others."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        import onnxruntime

        self.path = path
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self._names = [one.name for one in self._session.get_inputs()]

    def forward(self, *tensors: Tensor) -> Any:
        fed = dict(zip(self._names, (part.numpy() for part in tensors), strict=True))
        found = [torch.from_numpy(part) for part in self._session.run(None, fed)]
        return found[0] if len(found) == 1 else tuple(found)


def quantize_onnx(loaded: LoadedModel, folder: Path) -> Path:
    """Write `folder`/model.onnx in int8; ranges come from the run's validation inputs."""
    missing = [name for name in NEEDED if not installed(name)]
    if missing:
        raise ConfigError(
            f"quantize:onnx-int8 needs {', '.join(missing)}; run {install('export')}", code="MGT105"
        )
    batch = loaded.example_batch(SAMPLES)
    names = [spec.name for spec in loaded.inputs]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    with tempfile.TemporaryDirectory() as scratch, quietly(), contextlib.redirect_stdout(None):
        plain, prepared = Path(scratch) / "plain.onnx", Path(scratch) / "prepared.onnx"
        try:
            _export(loaded, batch, names, plain)
            _quantize(plain, prepared, path, batch, names)
        except Exception as error:  # either library fails in ways of its own
            raise ModelError(
                f"the model cannot become a static int8 ONNX file ({type(error).__name__}: "
                f"{str(error)[:200]}); use quantize:int8"
            ) from None
    return path


def _export(loaded: LoadedModel, batch: tuple[Tensor, ...], names: list[str], path: Path) -> None:
    rows = torch.export.Dim("batch")
    program = loaded.program.cpu().eval()
    made = torch.onnx.export(
        program,
        tuple(part[:2] for part in batch),
        dynamo=True,
        input_names=names,
        dynamic_shapes=tuple({0: rows} for _ in batch),
        verbose=False,
    )
    assert made is not None
    made.save(str(path))


def _quantize(
    plain: Path, prepared: Path, path: Path, batch: tuple[Tensor, ...], names: list[str]
) -> None:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Inputs(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._batches = self._cut()

        def _cut(self) -> Iterator[dict[str, Any]]:
            for start in range(0, len(batch[0]), CALIBRATION_BATCH):
                parts = [part[start : start + CALIBRATION_BATCH].numpy() for part in batch]
                yield dict(zip(names, parts, strict=True))

        def get_next(self) -> dict[str, Any] | None:
            return next(self._batches, None)

    quant_pre_process(str(plain), str(prepared))
    quantization.quantize_static(
        str(prepared),
        str(path),
        Inputs(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
