"""Export: a trained model as a folder that programs without this package can run.

    safetensors    weights and description; `load` reads it again
    hf             a folder for from_pretrained, where the model is of Hugging Face
    torch-export   model.pt2, an ExportedProgram: PyTorch runs it
    onnx           model.onnx: onnxruntime and many others run it
    aoti           model.pt2, compiled by AOTInductor for this kind of machine
    executorch     model.pte for phones and small machines, lowered to XNNPACK

Each is run on real samples, in batches of 1 and 7, and compared with PyTorch before the folder gets
its name: the programs in a fresh process that does not have this package.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multi_gpu_training.compress.quantization import with_float_weights
from multi_gpu_training.delivery.bf16_weights import put_in_float32
from multi_gpu_training.delivery.loaded_model import LoadedModel, load_signed
from multi_gpu_training.delivery.model_card import model_card
from multi_gpu_training.delivery.model_folder import WEIGHTS, finish, new_folder, write_weights
from multi_gpu_training.errors import ConfigError, ModelError
from multi_gpu_training.extras import install, installed, quiet_torchao
from multi_gpu_training.safe_output import brief
from multi_gpu_training.torch_internals import compile_package

BATCHES = (1, 7)  # that an export is tried with
TRACED = 3  # samples that it is traced with: with one, torch would fix the batch at one
TOLERANCE = 1e-4
RUNNER = Path(__file__).with_name("run_exported.py.txt")
NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "executorch": ("executorch",)}


@dataclass(frozen=True)
class Check:
    """One comparison with PyTorch. same_first: of scores, how often the first class agrees."""

    where: str
    batch: int
    difference: float
    same_first: float | None = None


@dataclass(frozen=True)
class Exported:
    folder: Path
    to: str
    checks: list[Check]
    notes: list[str]

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def plain(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {"folder": str(self.folder), "to": self.to, "checks": checks, "notes": self.notes}


@dataclass
class Program:
    """What is exported: a function of tensors, and how far its inputs may vary."""

    module: nn.Module
    arguments: tuple[Tensor, ...]
    names: list[str]
    outputs: list[str]
    shapes: tuple[dict[int, Any], ...]
    max_batch: int
    length: tuple[int, int] | None
    notes: list[str] = field(default_factory=list)


def export(
    loaded: LoadedModel,
    to: str,
    folder: str | Path,
    *,
    max_batch: int = 1024,
    length: int | None = None,
    license_name: str = "unknown",
    tolerance: float = TOLERANCE,
) -> Exported:
    """Write the model in the format `to` as a new folder.

    length: the longest input of models that take sound or text. Raises ModelError where the
    result differs from PyTorch by more than `tolerance`; then nothing is left behind.
    """
    if to not in WRITERS:
        raise ConfigError(f"--to {brief(to)}: use one of {', '.join(WRITERS)}")
    missing = [name for name in NEEDED.get(to, ()) if not installed(name)]
    if missing:
        raise ConfigError(
            f"--to {to} needs {' and '.join(missing)}, which is not installed; run {install(to)}"
            if to == "executorch"
            else f"--to {to} needs {' and '.join(missing)}; run {install('export')}",
            code="MGT105",
        )
    path = Path(folder).expanduser()
    # A copy on the host in single precision: what the caller has stays as it is.
    model = copy.deepcopy(loaded.model).to("cpu")
    put_in_float32(model)
    halves = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    loaded = replace(loaded, model=model.float() if halves else model)
    notes = []
    methods = {step["method"] for step in loaded.pipeline.compression}
    if to == "hf" and methods & {"prune", "quantize"}:
        raise ConfigError(
            "--to hf: transformers would not know the layers of a pruned or quantised model; use "
            "--to onnx or safetensors"
        )
    if to != "safetensors" and "quantize" in methods:
        loaded = replace(loaded, model=with_float_weights(loaded.model))
        notes.append("the quantised weights are written as the float32 numbers that they stand for")
    if length is not None and to in ("safetensors", "hf"):
        raise ConfigError(
            f"length={length}: --to {to} writes weights, which any length fits; drop it"
        )
    program = None
    if to not in ("safetensors", "hf"):
        program = make_program(loaded, max_batch, length)
    batches, real = _batches(loaded, program)
    notes += [] if real else ["checked on made-up samples: the run's data are not at hand"]
    expected = [loaded.outputs(tensors) for tensors in batches]
    with new_folder(path) as draft:
        limits: dict[str, int | None] = dict.fromkeys(("max_batch", "shortest", "length"))
        if program is None:
            found = WRITERS[to](loaded, draft, batches)
        else:
            program.outputs = program.outputs or [f"output{i}" for i in range(len(expected[0]))]
            limits["max_batch"] = program.max_batch
            limits["shortest"], limits["length"] = program.length or (None, None)
            _write_schema(loaded, draft, to, limits, program.outputs)
            found = WRITERS[to](program, draft, batches)
            notes += program.notes
        checks = _compared(found, expected, to, tolerance)
        if not (draft / "schema.json").exists():
            _write_schema(loaded, draft, to, limits)
        facts = {**loaded.facts(), "to": to, "license": license_name, **limits}
        facts["checks"] = [asdict(check) for check in checks]
        (draft / "README.md").write_text(model_card(loaded, to, facts, notes))
        finish(draft, facts, loaded.description)
    return Exported(path, to, checks, notes)


def _batches(loaded: LoadedModel, program: Program | None) -> tuple[list[tuple[Tensor, ...]], bool]:
    """Real samples in the sizes to be tried, no longer than the program takes."""
    pipeline, longest = loaded.pipeline, None
    if program is not None and program.length is not None:
        longest = program.length[1]
    samples, real = loaded.example_samples(max(BATCHES))
    if longest is not None:
        samples = [pipeline.shorten(sample, longest) for sample in samples]
    return [pipeline.collate(samples[-size:]) for size in BATCHES], real


def make_program(loaded: LoadedModel, max_batch: int, length: int | None) -> Program:
    """The model as a function of tensors with a dynamic batch, ready to be exported."""
    module, lengths = loaded.pipeline.export_program(loaded.model, length)
    arguments = loaded.pipeline.collate(loaded.pipeline.synthetic(TRACED))
    sizes: dict[str, Any] = {"batch": torch.export.Dim("batch", min=1, max=max_batch)}
    shapes = []
    for spec in loaded.inputs:
        for side in spec.shape:
            if isinstance(side, str) and side not in sizes:
                shortest, longest = lengths or (2, None)
                sizes[side] = torch.export.Dim(side, min=shortest, max=longest)
        shapes.append({i: sizes[s] for i, s in enumerate(spec.shape) if isinstance(s, str)})
    return Program(
        module.eval(),
        arguments,
        [spec.name for spec in loaded.inputs],
        [spec.name for spec in loaded.output_specs],
        tuple(shapes),
        max_batch,
        lengths,
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the exporters of torch say about themselves and about missing libraries."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def traced(program: Program) -> torch.export.ExportedProgram:
    """The graph, or a ModelError that names what cannot be exported."""
    problem: Exception | None = None
    # torch cannot prove some comparisons of lengths that always hold, such as min(n, 4 n) = n,
    # and then refuses a side that has a name. Whether the graph is right is checked afterwards.
    for shapes in (program.shapes, _without_names(program.shapes)):
        try:
            with torch.no_grad(), _quietly():
                return torch.export.export(
                    program.module, program.arguments, dynamic_shapes=_as_given(program, shapes)
                )
        except Exception as error:  # torch raises nearly anything here
            problem = problem or error
    assert problem is not None
    raise ModelError(_cannot("torch.export", problem)) from problem


def _as_given(program: Program, shapes: tuple[dict[int, Any], ...]) -> tuple[Any, ...]:
    """The shapes as torch wants them: those of `*args` in a tuple of their own."""
    parameters = list(inspect.signature(program.module.forward).parameters.values())
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return shapes
    before = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*shapes[:before], shapes[before:])


def _without_names(shapes: tuple[dict[int, Any], ...]) -> tuple[dict[int, Any], ...]:
    """The same ranges, for torch to find out which of them are equal."""
    dynamic = torch.export.Dim.DYNAMIC
    return tuple(
        {axis: dynamic(min=side.min, max=side.max) for axis, side in sides.items()}
        for sides in shapes
    )


def _cannot(what: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{what} cannot export this model ({type(error).__name__}: {' '.join(lines[:3])[:400]}); "
        "use another format, such as safetensors"
    )


# The formats


def _safetensors(
    loaded: LoadedModel, folder: Path, batches: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    write_weights(loaded.model, folder, loaded.pipeline.compression)
    with tempfile.TemporaryDirectory() as other:  # as `load` will find it
        copied = Path(other) / "model"
        shutil.copytree(folder, copied)
        finish(copied, loaded.facts(), loaded.description)
        own = loaded.model if loaded.recipe == "custom" else None
        again = load_signed(copied, None, "cpu", model=own, trust=loaded.pipeline.trust)
    return [again.outputs(tensors) for tensors in batches]


def _hugging_face(
    loaded: LoadedModel, folder: Path, batches: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    saved = loaded.pipeline.save_pretrained(loaded.model, folder)
    if saved is None:
        raise ConfigError(
            f"--to hf: this {loaded.recipe} model is not one of transformers; use safetensors"
        )
    again = loaded.with_model(saved)
    return [again.outputs(tensors) for tensors in batches]


def _torch_export(
    program: Program, folder: Path, batches: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    torch.export.save(traced(program), folder / "model.pt2")
    return run_elsewhere(folder, program, batches)


def _aoti(
    program: Program, folder: Path, batches: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    graph = traced(program)
    try:
        with _quietly():
            compile_package(graph, folder / "model.pt2")
    except Exception as error:
        raise ModelError(_cannot("AOTInductor", error)) from error
    program.notes.append("compiled for this kind of machine; another one needs another export")
    return run_elsewhere(folder, program, batches)


def _onnx(
    program: Program, folder: Path, batches: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    graph = traced(program)
    try:
        with _quietly():
            torch.onnx.export(
                graph,
                (),
                folder / "model.onnx",
                dynamo=True,
                input_names=program.names,
                output_names=program.outputs,
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        raise ModelError(_cannot("torch.onnx", error)) from error
    return run_elsewhere(folder, program, batches)


def _executorch(
    program: Program, folder: Path, batches: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    quiet_torchao()  # which it imports
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
    except ImportError as error:
        raise ConfigError(
            f"--to executorch: executorch cannot be imported ({error}); run "
            f"{install('executorch')}",
            code="MGT105",
        ) from None
    keep_buffers(program.module)
    try:
        with _quietly():
            lowered = to_edge_transform_and_lower(
                traced(program), partitioner=[XnnpackPartitioner()]
            )
        left = sorted(
            {
                re.sub("<EdgeOpOverload: (.*?)>.*", r"\1", str(node.target))
                for node in lowered.exported_program().graph.nodes
                if node.op == "call_function" and "executorch_call_delegate" not in str(node.target)
            }
            - {"<built-in function getitem>"}
        )
        (folder / "model.pte").write_bytes(lowered.to_executorch().buffer)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(_cannot("ExecuTorch", error)) from error
    if left:
        program.notes.append(f"not lowered to XNNPACK, run by portable kernels: {', '.join(left)}")
    return run_elsewhere(folder, program, batches)


def keep_buffers(module: nn.Module) -> None:
    """Make every buffer one that is saved: XNNPACK's passes refuse graphs with others."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(name, buffer)


WRITERS: dict[str, Callable[..., list[tuple[Tensor, ...]]]] = {
    "onnx": _onnx,
    "torch-export": _torch_export,
    "aoti": _aoti,
    "executorch": _executorch,
    "safetensors": _safetensors,
    "hf": _hugging_face,
}


# Checking


def run_elsewhere(
    folder: Path, program: Program, batches: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """Outputs of the exported program, run by its own run.py in a process without this package."""
    shutil.copy(RUNNER, folder / "run.py")
    with tempfile.TemporaryDirectory() as place:
        words = []
        for number, tensors in enumerate(batches):
            given: dict[str, Any] = {
                name: tensor.numpy() for name, tensor in zip(program.names, tensors, strict=True)
            }
            np.savez(Path(place) / f"in-{number}.npz", **given)
            words += [f"{place}/in-{number}.npz", f"{place}/out-{number}.npz"]
        alone = (
            "import runpy, sys; sys.argv = sys.argv[1:]; "
            "runpy.run_path(sys.argv[0], run_name='__main__'); "
            "assert 'multi_gpu_training' not in sys.modules"
        )
        # -I: neither PYTHONPATH nor the current folder lends it our code.
        command = [sys.executable, "-I", "-c", alone, str(folder.resolve() / "run.py"), *words]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=place, check=False)
        if ended.returncode:
            said = ended.stdout + ended.stderr
            # ExecuTorch names what its runtime lacks only in its log.
            lacks = ", ".join(dict.fromkeys(re.findall(r"Missing operator: \[\d+\] (\S+)", said)))
            lines = ended.stderr.strip().splitlines()
            why = f"its runtime has no {lacks}" if lacks else lines[-1][:300] if lines else "silent"
            raise ModelError(f"the exported program cannot be run ({why}); use another format")
        found = []
        for number in range(len(batches)):
            with np.load(Path(place) / f"out-{number}.npz", allow_pickle=False) as outputs:
                found.append(tuple(torch.from_numpy(outputs[name]) for name in program.outputs))
        return found


def _compared(
    found: Sequence[tuple[Tensor, ...]],
    expected: Sequence[tuple[Tensor, ...]],
    to: str,
    tolerance: float,
) -> list[Check]:
    where = "loaded again" if to in ("safetensors", "hf") else "run in a fresh process"
    checks = []
    for ours, theirs in zip(expected, found, strict=True):
        worst = max(_apart(one, other) for one, other in zip(ours, theirs, strict=True))
        first = ours[0]
        same = None
        if first.ndim == 2 and first.shape == theirs[0].shape:
            same = float((first.argmax(1) == theirs[0].argmax(1)).double().mean())
        checks.append(Check(where, len(first), worst, same))
        if not worst <= tolerance:  # also NaN
            raise ModelError(
                f"--to {to}: the export differs from PyTorch by {worst:.3g} in a batch of "
                f"{len(first)}, more than {tolerance:g}; it was not written"
            )
    return checks


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _write_schema(
    loaded: LoadedModel,
    folder: Path,
    to: str,
    limits: dict[str, int | None],
    outputs: Sequence[str] = (),
) -> None:
    """What goes in and comes out, for people and for run.py."""
    files = {"onnx": "model.onnx", "executorch": "model.pte", "safetensors": WEIGHTS}
    schema = {
        "recipe": loaded.recipe,
        "to": to,
        "file": files.get(to, "model.pt2" if to != "hf" else WEIGHTS),
        "inputs": [spec.plain() for spec in loaded.inputs],
        "outputs": [spec.plain() for spec in loaded.output_specs]
        or [{"name": name} for name in outputs],
        "labels": loaded.labels,
        "preprocessing": _brief_preprocessing(loaded.pipeline.preprocessing),
        **limits,
    }
    (folder / "schema.json").write_text(json.dumps(schema, indent=1))


def _brief_preprocessing(facts: dict[str, Any]) -> dict[str, Any]:
    """Without the words of a tokenizer, which stand in model.json."""
    tokenizer = facts.get("tokenizer")
    if isinstance(tokenizer, dict):
        return {**facts, "tokenizer": {k: v for k, v in tokenizer.items() if k != "json"}}
    return facts
