"""How fast the video recipe trains, how well it tells behaviours apart, how fast it reads videos.

    python benchmarks/video.py --parts speed --out video-speed.json
    python benchmarks/video.py --parts f1 --out video-f1.json
    python benchmarks/video.py --parts decode --video open-field.mp4 --device cpu
    python benchmarks/video.py --parts filmed --video open-field.mp4 --device cpu

speed: both nets on clips of 17x256x256 bytes that lie on the device, in bf16, channels last and
compiled: by a hand-written loop, which is the ceiling, and by `MultiGPUTrainingManager.fit`.
f1: the recipe as `mgt train video` runs it, on rendered videos.
decode: a real video, decoded into the frame cache, and clips read back from it.
filmed: a real video, cut into pieces, with one table in seconds that says in which half-seconds
much moves: from the files to a trained model. The labels are measured, no person's judgement.

A part that fails is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.video.annotations import Trial
from multi_gpu_training.recipes.video.clips import Clips, Video
from multi_gpu_training.recipes.video.frames import load_frames
from multi_gpu_training.recipes.video.video_model import (
    WIDTH,
    GuideNet,
    build_model,
    operations,
    parameter_count,
    to_pixels,
)

CLASSES = 10
TARGETS = {"guide": 460, "guide-nhwc": 460, "fast": 2000}


class GuideNetChannelsLast(GuideNet):
    """The guide's net with its single input channel declared last, which changes the layout of
    the largest activation. The same arithmetic."""

    def forward(self, clips: Tensor) -> Tensor:
        pixels = to_pixels(clips, self.head).unsqueeze(-1).permute(0, 4, 1, 2, 3)
        scores: Tensor = self.head(self.features(pixels))
        return scores


def net(name: str, options: argparse.Namespace) -> nn.Module:
    if name == "guide-nhwc":
        return GuideNetChannelsLast(CLASSES, 0.5)
    return build_model(name, options.frames, options.size, CLASSES, 0.5)


def main() -> int:
    options = arguments()
    print(f"{device_name(options.device)}, torch {torch.__version__}", flush=True)
    results: dict[str, Any] = {
        "machine": device_name(options.device),
        "torch": torch.__version__,
        "command": ["python", *sys.argv],
    }
    parts: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
        "speed": speed,
        "f1": scores,
        "decode": decoding,
        "filmed": filmed,
    }
    failed = 0
    for name in options.parts.split(","):
        try:
            results[name] = parts[name](options)
        except Exception:
            failed += 1
            results[name] = [{"failed": traceback.format_exc()}]
            traceback.print_exc()
        print(table(name, results[name]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1))
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--parts", default="speed", help="speed, f1, decode, filmed; several with commas between")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--nets", default="fast,guide", help="fast, guide, guide-nhwc (speed only)")
    add("--batch", type=int, default=128)
    add("--steps", type=int, default=40, help="measured steps of each loop")
    add("--warm-up", type=int, default=15)
    add("--frames", type=int, default=17)
    add("--size", type=int, default=256)
    add("--clips", type=int, default=1024, help="clips that lie on the device")
    add("--no-compile", action="store_true", help="by hand without torch.compile")
    add("--no-autotuner", action="store_true", help="fit without cuDNN's search for algorithms")
    add("--executions", default="compile", help="step_execution of fit; several with commas")
    add("--f1-epochs", default="fast=40,guide=40", help="epochs of each net in f1")
    add("--f1-batch", type=int, default=64)
    add("--f1-rate", type=float, default=2e-3, help="learning rate in f1")
    add("--videos", type=int, default=100, help="rendered videos in f1")
    add("--video", type=Path, help="a file for decode and filmed")
    add("--filmed-epochs", type=int, default=6)
    add("--quick", action="store_true", help="tiny sizes: does it run at all?")
    add("--out", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.steps, options.warm_up = 4, 3, 2
        options.size, options.clips, options.videos = 32, 24, 10
        options.f1_epochs, options.executions = "fast=1,guide=1", "eager"
    return options


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {len(os.sched_getaffinity(0))} cores"


# Speed


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in options.nets.split(","):
        model = net(name, options)
        billions = operations(model, options.frames, options.size) / 1e9
        facts = {"net": name, "parameters": parameter_count(model), "GMAC a clip": billions}
        loops: dict[str, Callable[[], float]] = {"by hand": partial(by_hand, name, options)}
        for execution in options.executions.split(","):
            loops[f"fit, {execution}"] = partial(by_fit, name, options, execution)
        for loop, run in loops.items():
            free_memory(options)
            try:
                rate = run()
            except Exception as error:
                traceback.print_exc()
                rows.append({**facts, "loop": loop, "failed": repr(error)[:300]})
                continue
            rows.append(
                {
                    **facts,
                    "loop": loop,
                    "clips/s": rate,
                    "TFLOP/s": rate * billions * 6 / 1e3,  # backward is twice forward
                    "peak GiB": peak_gib(options),
                    "target": TARGETS[name],
                }
            )
            print(rows[-1], flush=True)
    return rows


def synthetic(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    random = torch.Generator(device=options.device).manual_seed(0)
    shape = (options.clips, options.frames, options.size, options.size)
    clips = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8, device=options.device)
    labels = torch.randint(0, CLASSES, shape[:1], generator=random, device=options.device)
    return clips, labels


def by_hand(name: str, options: argparse.Namespace) -> float:
    """Clips a second of the shortest loop one would write."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    model: Any = net(name, options).to(options.device)
    model = model.to(memory_format=torch.channels_last_3d)
    compiled = model if options.no_compile else torch.compile(model)
    on_gpu = options.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=on_gpu)
    clips, labels = synthetic(options)
    order = torch.randint(0, len(clips), (options.warm_up + options.steps, options.batch))
    order = order.to(options.device)

    def step(index: Tensor) -> None:
        with torch.autocast(options.device, torch.bfloat16):
            loss = F.cross_entropy(compiled(clips.index_select(0, index)), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for index in order[: options.warm_up]:
        step(index)
    synchronise(options)
    started = time.perf_counter()
    for index in order[options.warm_up :]:
        step(index)
    synchronise(options)
    return options.steps * options.batch / (time.perf_counter() - started)


class Clock(Callback):
    """Notes when the warm-up ended and when the last step did."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ticks: list[float] = []

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step in (self.options.warm_up, self.options.warm_up + self.options.steps):
            synchronise(self.options)
            self.ticks.append(time.perf_counter())


def by_fit(name: str, options: argparse.Namespace, execution: str) -> float:
    """Clips a second of `MultiGPUTrainingManager.fit`, with the same arithmetic."""
    clips, labels = synthetic(options)
    # Whole batches only, so that every step has one shape; as many epochs as it takes.
    kept = len(clips) // options.batch * options.batch
    total = options.warm_up + options.steps
    wanted = {
        "training_mode": "single",
        "device": options.device,
        "batch_size": options.batch,
        "epochs": -(-total * options.batch // kept),
        "max_steps": total,
        "use_mixed_precision": True,
        "channels_last": True,
        "step_execution": execution,
        "cudnn_benchmark": not options.no_autotuner,
        "fused_optimizer": options.device == "cuda",
        "allow_tf32": True,
        "enable_fault_tolerance": False,
        "consistency_check_every": 0,
        "log_every": total,
        "tensorboard": False,
        "progress": "off",
    }
    known = {key: value for key, value in wanted.items() if key in MultiGPUConfig.model_fields}
    clock = Clock(options)
    with tempfile.TemporaryDirectory() as folder:
        config = MultiGPUConfig(**known, save_dir=folder)
        manager = MultiGPUTrainingManager(config)
        torch.manual_seed(0)
        manager.fit(
            net(name, options),
            TensorDataset(clips[:kept], labels[:kept]),
            loss_fn=nn.CrossEntropyLoss(),
            callbacks=[clock],
        )
    started, ended = clock.ticks
    return float(options.steps * options.batch / (ended - started))


def free_memory(options: argparse.Namespace) -> None:
    torch.compiler.reset()
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(options: argparse.Namespace) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else 0.0


def synchronise(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


# Quality


def scores(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Macro F1 of each net on held-out rendered videos, trained by the recipe as it is."""
    recipe = find_recipe("video")
    epochs = dict(part.split("=") for part in options.f1_epochs.split(","))
    rows = []
    for name in options.nets.split(","):
        free_memory(options)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            settings = {
                "training_mode": "single",
                "device": options.device,
                "epochs": int(epochs[name]),
                "batch_size": options.f1_batch,
                "learning_rate": options.f1_rate,
                "save_dir": folder,
                "tensorboard": False,
                "enable_fault_tolerance": False,
                "progress": "lines",
                "num_workers": 0,  # the clips are tensors: nothing is left for workers to do
            }
            chosen = {
                "architecture": name,
                "frame_size": options.size,
                "width": WIDTH,
                "videos": options.videos,
            }
            result = recipe.train(recipe.config(settings), recipe.options(**chosen))
            classes = (result.folder / "classes.csv").read_text()
        rows.append(
            {
                "net": name,
                "size": options.size,
                "epochs": int(epochs[name]),
                "best macro F1": result.best,
                "last macro F1": result.metrics["f1"],
                "accuracy": result.metrics["accuracy"],
                "seconds": time.perf_counter() - started,
                "history": [round(epoch["val"]["f1"], 4) for epoch in result.history],
                "classes": classes,
            }
        )
    return rows


# Reading


def decoding(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Frames a second into the cache, and clips a second out of it, in one process."""
    if options.video is None:
        raise SystemExit("--parts decode needs --video FILE")
    with tempfile.TemporaryDirectory() as folder:
        decoded = load_frames([options.video], options.size, Path(folder))
        if decoded.invalid:
            raise SystemExit(f"{options.video} {decoded.invalid[options.video]}")
        frames = decoded.frames[options.video]
        again = load_frames([options.video], options.size, Path(folder))
        centres = tuple(range(len(frames)))
        trial = Trial(0, len(frames) - 1, centres, (0,) * len(centres))
        clips = Clips([Video("video", frames, [trial])], options.frames)
        order = torch.randperm(len(clips)).tolist()[:1000]
        started = time.perf_counter()
        for index in order:
            clips[index]
        seconds = time.perf_counter() - started
    return [
        {
            "video": options.video.name,
            "frames": len(frames),
            "size": options.size,
            "decoded frames/s": len(frames) / decoded.seconds,
            "found again, s": again.seconds,
            "clips/s from the cache": len(order) / seconds,
        }
    ]


# From files to a model


def filmed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train on pieces of a real video, labelled by one table in seconds."""
    if options.video is None:
        raise SystemExit("--parts filmed needs --video FILE")
    size, started = 64, time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        rows = cut_and_label(options.video, folder, pieces=8)
        (folder / "labels.csv").write_text("\n".join(["file,start_s,end_s,label", *rows]))
        recipe = find_recipe("video")
        quiet = {"progress": "off", "tensorboard": False, "save_dir": name, "num_workers": 0}
        config = recipe.config(
            {**quiet, "epochs": options.filmed_epochs, "batch_size": 32, "device": options.device}
        )
        chosen = recipe.options(
            data_dir=str(folder), frame_size=size, width=8, resize=True, stride=3
        )
        ready = time.perf_counter()
        found = recipe.train(config, chosen)
    return [
        {
            "video": options.video.name,
            "rows of the table": len(rows),
            "epochs": options.filmed_epochs,
            "macro F1, best epoch": max(entry["val"]["f1"] for entry in found.history),
            "cut and label, s": ready - started,
            "decode and train, s": time.perf_counter() - ready,
        }
    ]


def cut_and_label(video: Path, folder: Path, pieces: int) -> list[str]:
    """Write the video as several, with the times of its frames; rows of a table for them."""
    import av

    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        shown = [(frame.pts, frame.to_ndarray(format="gray")) for frame in container.decode(stream)]
        tick = stream.time_base
    spans = []
    for piece in range(pieces):
        part = shown[len(shown) * piece // pieces : len(shown) * (piece + 1) // pieces]
        path = folder / f"piece{piece}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=30)
            stream.height, stream.width, stream.pix_fmt = *part[0][1].shape, "yuv420p"
            stream.bit_rate = 4_000_000
            for pts, picture in part:
                frame = av.VideoFrame.from_ndarray(picture, format="gray")
                frame.pts, frame.time_base = pts - part[0][0], tick
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        times = [float((pts - part[0][0]) * tick) for pts, _ in part]
        moved = [0.0] + [
            float(abs(two[::4, ::4].astype(int) - one[::4, ::4]).mean())
            for (_, one), (_, two) in pairwise(part)
        ]
        for half in range(int(2 * times[-1])):
            inside = [m for t, m in zip(times, moved, strict=True) if half <= 2 * t < half + 1]
            spans.append((path.name, half / 2, (half + 1) / 2, sum(inside) / max(1, len(inside))))
    typical = statistics.median(amount for *_, amount in spans)
    return [
        f"{file},{start},{end},{'moves' if amount > typical else 'rests'}"
        for file, start, end, amount in spans
    ]


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown, without what is too long for it."""
    columns = list(
        dict.fromkeys(key for row in rows for key in row if key not in ("history", "classes"))
    )
    lines = [f"## {name}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [row.get(column, "-") for column in columns]
        shown = [
            f"{cell:,.3g}"
            if isinstance(cell, float) and abs(cell) < 100
            else f"{cell:,.0f}"
            if isinstance(cell, (int, float))
            else str(cell)
            for cell in cells
        ]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
