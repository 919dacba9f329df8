"""Compress trained runs and hold the results to limits: points lost, size, perplexity.

    python benchmarks/compression.py --image runs/image/fashion --text runs/transformer/gpt2
    python benchmarks/compression.py --executorch runs/image/fashion runs/speech/digits
    python benchmarks/compression.py --speed runs/image/fashion runs/image/fashion-compressed/*
    python benchmarks/compression.py --programs compressed/executorch/*

--image: int8, 2:4 with fine-tuning and a student of a tenth lose at most 0.5, 1.0 and 1.5 points;
size and CPU latency stand beside each other. 2:4 saves time on GPUs only.
--text: int4 weights in groups of 32 and int8 embeddings; perplexity at most 1.05 of float32, the
file at most 0.35.
--executorch: int8 programs for XNNPACK, one thread, against float32 ones: output error, size,
latency, points lost, and the operators that XNNPACK does not take. Needs executorch 1.5 in an
environment of its own: `pip install executorch==1.5.1`.
--speed, --programs: only size and speed of what the other modes wrote, in turns and in about a
minute, for a time at which nothing else runs.

The runs come from `mgt train image --mode cnn --data-dir fashion-mnist` and
`mgt train transformer`, whose vocabulary of bytes is small.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import multi_gpu_training as mgt
from multi_gpu_training.compress.tensor_packing import plain_tensors
from multi_gpu_training.delivery.compress_run import HowToTrain, compress_run
from multi_gpu_training.delivery.compression_plan import MaxDrop, read_settings
from multi_gpu_training.delivery.compression_report import show_table
from multi_gpu_training.delivery.exports import keep_buffers
from multi_gpu_training.delivery.inference_speed import measure_together
from multi_gpu_training.delivery.onnx_int8 import OnnxModel

IMAGE = {
    "quantize:int8": 0.005,
    "quantize:onnx-int8": 0.005,
    "prune:2:4": 0.01,
    "distil:0.1": 0.015,
}
TEXT = {"quantize:int4": 0.05}
MOST_TEXT_BYTES = 0.35
ROWS, TURNS = 8, 300  # inputs with which programs are timed, and calls of each


def compress(run: str, limits: dict[str, float], epochs: int | None, out: Path) -> dict[str, Any]:
    from rich.console import Console

    loaded = mgt.load(run, device="cpu")
    settings = read_settings(list(limits))
    found = compress_run(loaded, settings, out, MaxDrop(), HowToTrain(epochs))
    show_table(found, Console(width=200))
    first, *rest = found.rows
    return {
        row.name: {
            "metric": found.metric,
            "before": first.metrics.get(found.metric),
            "after": row.metrics.get(found.metric),
            "lost": row.drop,
            "limit": limits[row.name],
            "size": row.bytes / first.bytes,
            "latency": row.speed.latency_s / first.speed.latency_s if row.bytes else None,
            "problem": row.problem,
            "holds": row.drop is not None and row.drop <= limits[row.name],
        }
        for row in rest
    }


# ExecuTorch


def executorch(run: str, folder: Path) -> dict[str, Any]:
    """One run as float32 and int8 programs in `folder`, and what became of it."""
    loaded = mgt.load(run, device="cpu")
    samples = loaded.example_samples(64)[0]
    longest = None
    if loaded.recipe == "speech":  # one length, as a device that listens to words would have
        longest = max(len(sound) for sound in all_sounds(loaded))
    program, _ = loaded.pipeline.export_program(loaded.model, longest)
    keep_buffers(program)
    rows = [padded(loaded.pipeline.collate([sample]), longest) for sample in samples]
    wanted = [first(program(*row)) for row in rows[:8]]
    shown: dict[str, Any] = {"run": run, "float": loaded.evaluate()}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(rows[:ROWS], folder / "inputs.pt")
    for name in ("float32", "int8"):
        exported = torch.export.export(program.eval(), rows[0], strict=False)
        if name == "int8":
            exported = quantized(exported.module(), rows)
        path = folder / f"{name}.pte"
        not_lowered = lower(exported, path)
        model = ExecutorchModel(path, longest)
        apart = [
            ((first(model.call(row)) - one).norm() / one.norm()).item()
            for row, one in zip(rows, wanted, strict=False)
        ]
        shown[name] = {
            "error": max(apart),
            "not_lowered": not_lowered,
            "metrics": loaded.with_model(model).evaluate(),
        }
        print(json.dumps(shown[name]), flush=True)
    return shown | {"speed": program_speeds(folder)}


def program_speeds(folder: Path) -> dict[str, Any]:
    """Bytes and latency of the programs in a folder. They take turns, row by row, so that other
    work on the machine slows down both alike."""
    rows = torch.load(folder / "inputs.pt", weights_only=True)
    paths = sorted(folder.glob("*.pte"))
    models = [ExecutorchModel(path, None) for path in paths]
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(TURNS):
        for model, found in zip(models, seconds, strict=True):
            began = time.perf_counter()
            model.call(rows[turn % len(rows)])
            if turn >= len(rows):  # the first calls prepare something
                found.append(time.perf_counter() - began)
    return {
        path.stem: {
            "bytes": path.stat().st_size,
            "latency_ms": 1000 * statistics.median(found),
            "slowest_tenth_ms": 1000 * statistics.quantiles(found, n=10)[-1],
        }
        for path, found in zip(paths, seconds, strict=True)
    }


def speeds(folders: list[str]) -> dict[str, Any]:
    """Sizes and speeds of a run and of models that were made of it, on one thread, in turns."""
    original = mgt.load(folders[0], device="cpu")
    batch = original.example_batch(64)
    programs: list[nn.Module] = [original.program]
    files: list[Path] = []
    for folder in map(Path, folders[1:]):
        onnx = folder / "model.onnx"
        programs.append(
            OnnxModel(onnx) if onnx.exists() else mgt.load(folder, device="cpu").program
        )
        files.append(onnx if onnx.exists() else folder / "model.safetensors")
    found = measure_together(programs, batch)
    whole = len(safetensors.torch.save(plain_tensors(original.model)))
    sizes = [whole, *(file.stat().st_size for file in files)]
    return {
        Path(folder).name: {
            "bytes": size,
            "size": size / whole,
            "latency_ms": 1000 * speed.latency_s,
            "latency": speed.latency_s / found[0].latency_s,
            "per_s": speed.samples_per_s,
            "throughput": speed.samples_per_s / found[0].samples_per_s,
        }
        for folder, size, speed in zip(folders, sizes, found, strict=True)
    }


def all_sounds(loaded: Any) -> list[Tensor]:
    dataset = loaded.pipeline.parts(loaded.job(), "val")[0]
    return [dataset[index][0] for index in range(len(dataset))]


def padded(row: tuple[Tensor, ...], longest: int | None) -> tuple[Tensor, ...]:
    if longest is None:
        return row
    sound, *rest = row
    return torch.nn.functional.pad(sound, (0, longest - sound.shape[1])), *rest


def first(outputs: Any) -> Tensor:
    found: Tensor = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    return found.float()


class ExecutorchModel(nn.Module):
    """A program as a module that can be evaluated: sample by sample, as it was lowered."""

    def __init__(self, path: Path, longest: int | None) -> None:
        super().__init__()
        from executorch.runtime import Runtime

        self.longest = longest
        self._method: Any = Runtime.get().load_program(path).load_method("forward")

    def call(self, row: tuple[Tensor, ...]) -> list[Tensor]:
        return [part.clone() for part in self._method.execute(list(row))]

    def forward(self, *tensors: Tensor) -> Any:
        count = len(tensors[0])
        rows = [
            self.call(padded(tuple(t[i : i + 1] for t in tensors), self.longest))
            for i in range(count)
        ]
        outputs = tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
        if self.longest is None:
            return outputs[0]
        scores, lengths = outputs
        return scores[:, : int(lengths.max())], lengths


def quantized(module: nn.Module, rows: list[tuple[Tensor, ...]]) -> Any:
    """int8 weights and activations of convolutions and linear layers."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    class LinearQuantizer(XNNPACKQuantizer):  # type: ignore[misc]
        def transform_for_annotation(self, model: Any) -> Any:
            return model  # it would turn the whole numbers that count frames into floats

    quantizer = XNNPACKQuantizer() if len(rows[0]) == 1 else LinearQuantizer()
    config = get_symmetric_quantization_config(is_per_channel=True)
    if len(rows[0]) == 1:
        quantizer.set_global(config)
    else:  # sound: powers and their logarithms span more than eight bits can
        quantizer.set_module_type(nn.Linear, config)
    prepared = prepare_pt2e(module, quantizer)
    for row in rows:  # the ranges of activations
        prepared(*row)
    return torch.export.export(convert_pt2e(prepared), rows[0], strict=False)


def lower(exported: Any, path: Path) -> dict[str, int]:
    """Write the program; returns the operators that stay outside XNNPACK, and how often."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    counts: dict[str, int] = {}
    for node in edge.exported_program().graph.nodes:
        name = re.sub("<EdgeOpOverload: (.*?)>.*", r"\1", str(node.target))
        if node.op == "call_function" and "getitem" not in name and "delegate" not in name:
            counts[name] = counts.get(name, 0) + 1
    path.write_bytes(edge.to_executorch().buffer)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image")
    parser.add_argument("--text")
    parser.add_argument("--executorch", nargs="*", default=[])
    parser.add_argument("--speed", nargs="*", default=[], help="a run and compressed models of it")
    parser.add_argument("--programs", nargs="*", default=[], type=Path, help="folders with .pte")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--work", type=Path, default=Path("compressed"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    found: dict[str, Any] = {"machine": machine, "torch": torch.__version__}
    well = True
    if asked.image:
        found["image"] = compress(asked.image, IMAGE, asked.epochs, asked.work / "image")
        well = all(row["holds"] for row in found["image"].values())
    if asked.text:
        found["text"] = compress(asked.text, TEXT, asked.epochs, asked.work / "text")
        rows = found["text"].values()
        well = well and all(row["holds"] and row["size"] <= MOST_TEXT_BYTES for row in rows)
    torch.set_num_threads(1)
    if asked.executorch:
        work = asked.work / "executorch"
        found["executorch"] = [executorch(run, work / Path(run).name) for run in asked.executorch]
    if asked.speed:
        found["speed"] = speeds(asked.speed)
    if asked.programs:
        found["programs"] = {str(folder): program_speeds(folder) for folder in asked.programs}
    found["load"] = os.getloadavg()[0]
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print("passed" if well else "FAILED", file=sys.stderr)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
