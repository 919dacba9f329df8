"""A folder of mixed image files, some of them corrupt: is it trained on, and does decoding keep up?

    python benchmarks/image_folder.py --data DATA --out image_folder.json

Writes a folder of `--files` images in 30 classes (ten digits of MNIST, ten kinds of clothes of
Fashion-MNIST and ten hues of noise; without `--data` thirty hues), as PNG, JPEG and WebP, grey and
colour, from 28 to 400 pixels wide; `--corrupt` of them are cut short, empty or not images. Then it

1. trains with corrupt=error: all corrupt files must be named, and no other;
2. trains with corrupt=skip for `--epochs`, and reports the accuracy;
3. measures samples per second of the loader alone, by workers, and of the step alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from multi_gpu_training.errors import DataError
from multi_gpu_training.recipes.image.image_data import load_images
from multi_gpu_training.recipes.recipe import find_recipe

FORMATS = (".png", ".jpg", ".webp")


def sources(data: Path | None) -> list[tuple[str, Any]]:
    """(class, images) for thirty classes."""
    found: list[tuple[str, Any]] = []
    for name in ("mnist", "fashion-mnist") if data else ():
        images = load_images("auto", str(data / name)).train
        for label in range(10):
            found.append((f"{name}-{label}", images.images[images.labels == label].numpy()))
    noise = np.random.default_rng(0)
    for number in range(30 - len(found)):
        hue = np.array([np.cos(number * 0.63 + shift) for shift in (0, 2.1, 4.2)]) * 90 + 128
        pixels = noise.normal(hue, 40, (128, 28, 28, 3)).clip(0, 255).astype(np.uint8)
        found.append((f"hue-{number:02d}", pixels))
    return found


def write(folder: Path, files: int, corrupt: float, data: Path | None) -> set[str]:
    """The folder; the names of the files that are corrupt."""
    draw = np.random.default_rng(1)
    classes = sources(data)
    broken = set()
    for number in range(files):
        name, images = classes[number % len(classes)]
        image = Image.fromarray(images[draw.integers(len(images))])
        side = int(draw.integers(28, 400))
        image = image.resize((side, max(28, int(side * draw.uniform(0.6, 1.4)))))
        if draw.random() < 0.5:
            image = image.convert("RGB")
        path = folder / name / f"{number:05d}{FORMATS[draw.integers(3)]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        if draw.random() < corrupt:
            raw = path.read_bytes()
            damaged = (raw[: int(len(raw) * 0.6)], b"", b"<html>404</html>")
            path.write_bytes(damaged[draw.integers(3)])
            broken.add(str(path))
    return broken


def options_for(folder: Path, args: argparse.Namespace, **more: Any) -> Any:
    common = {"data_dir": str(folder), "image_size": args.size, "model": args.model}
    return find_recipe("image").options(**common, **more)


def named(folder: Path, args: argparse.Namespace) -> set[str]:
    """Files that the error names."""
    recipe, options = find_recipe("image"), options_for(folder, args)
    try:
        recipe.build(recipe.config({"device": args.device}, options), options)
    except DataError as error:
        return {problem.split(" cannot be decoded")[0] for problem in error.problems[1:]}
    return set()


def train(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    recipe, options = find_recipe("image"), options_for(folder, args, corrupt="skip")
    settings = {
        "device": args.device,
        "epochs": args.epochs,
        "save_dir": str(folder.parent / "runs"),
        "tensorboard": False,
        "progress": "off",
    }
    started = time.perf_counter()
    result = recipe.train(recipe.config(settings, options), options)
    return {**result.metrics, "seconds": time.perf_counter() - started}


def loader_rate(dataset: Any, workers: int, batch: int = 32) -> float:
    """Samples per second of decoding alone, from the second batch on."""
    more = {"prefetch_factor": 4} if workers else {}
    batches = iter(DataLoader(dataset, batch, shuffle=True, num_workers=workers, **more))
    next(batches)
    started, seen = time.perf_counter(), 0
    for images, _ in batches:
        seen += len(images)
    return seen / (time.perf_counter() - started)


def step_rate(job: Any, device: str, batch: int = 32, steps: int = 20) -> float:
    """Samples per second of forward, backward and AdamW, on one batch that is there already."""
    model = job.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    samples = [job.dataset[index] for index in range(batch)]
    images = torch.stack([image for image, _ in samples]).to(device)
    labels = torch.tensor([label for _, label in samples]).to(device)
    started = 0.0
    for step in range(steps + 5):
        if step == 5:
            _wait(device)
            started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    _wait(device)
    return steps * batch / (time.perf_counter() - started)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder with mnist/ and fashion-mnist/")
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--corrupt", type=float, default=0.05)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--model", help="as the recipe's; None: its CNN")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tenth of the files, one epoch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.files, args.epochs, args.workers = args.files // 10, 1, [0, 2]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "images"
        broken = write(folder, args.files, args.corrupt, args.data)
        found = named(folder, args)
        metrics = train(folder, args)
        recipe, options = find_recipe("image"), options_for(folder, args, corrupt="skip")
        job = recipe.build(recipe.config({"device": args.device}, options), options)
        step = step_rate(job, args.device)
        rates = {str(workers): loader_rate(job.dataset, workers) for workers in args.workers}
    result = {
        "machine": f"{platform.machine()}, torch {torch.__version__}, {args.device}",
        "files": args.files,
        "corrupt": len(broken),
        "named": len(found & broken),
        "named_wrongly": len(found - broken),
        "training": metrics,
        "step_samples_per_s": step,
        "loader_samples_per_s_by_workers": rates,
    }
    print(f"{args.files:,} files, {len(broken)} corrupt: {len(found & broken)} named, "
          f"{len(found - broken)} wrongly; accuracy {metrics['accuracy']:.3f} after {args.epochs} "
          f"epochs in {metrics['seconds']:.0f} s")  # fmt: skip
    print(f"| loader workers | samples/s of the loader | share of the step's {step:,.0f} |")
    print("|---|---|---|")
    for workers, rate in rates.items():
        print(f"| {workers} | {rate:,.0f} | {rate / step:.1f} |")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
