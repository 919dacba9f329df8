"""Peak memory of batches that were not measured, and the largest batch that fits.

    python benchmarks/memory_forecast.py --out memory_forecast.json

Each model is trained for a few steps with two batch sizes; the peak with two others, one of them
larger, is forecast and then measured. With the memory limited, the largest batch that is said to
fit is trained: it must not run out. Needs a GPU; `--quick` shows on a CPU that the script works,
with peaks that a model of memory makes up.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import Recurrent, ResNet50, cnn, loss_fn
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.measure.memory_model import MemoryModel, MemoryPoint

STEPS = 8  # a recording is made after four; cuDNN has chosen by then
LIMIT = 1.35  # times what the larger measured batch took: the memory for the last trial
TARGET = 0.03


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.after(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Like GPT-2 small: 12 layers of 768, 50,257 tokens; the last of 256 is predicted as well."""

    def __init__(self, layers: int = 12, width: int = 768, tokens: int = 50257) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(1024, width)
        self.layers = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.norm(self.layers(self.tokens(x) + self.places(places)))
        return F.linear(hidden, self.tokens.weight)


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def mlp() -> nn.Module:
    """Of 1024-4096-4096-10."""
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def vectors(*shape: int, classes: int = 10) -> Callable[[int], TensorDataset]:
    def build(samples: int) -> TensorDataset:
        return TensorDataset(torch.randn(samples, *shape), torch.randint(classes, (samples,)))

    return build


def texts(length: int, tokens: int) -> Callable[[int], TensorDataset]:
    def build(samples: int) -> TensorDataset:
        found = torch.randint(tokens, (samples, length + 1))
        return TensorDataset(found[:, :-1].contiguous(), found[:, 1:].contiguous())

    return build


@dataclass(frozen=True)
class Subject:
    """measured: the two batches that the forecast sees. asked: those that it must foretell."""

    build: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]
    measured: tuple[int, int]
    asked: tuple[int, int]
    loss: Any = loss_fn


SUBJECTS = {
    "MLP 1024-4096-4096": Subject(mlp, vectors(1024), (4096, 8192), (6144, 32768)),
    "CNN of the image recipe": Subject(cnn, vectors(1, 28, 28), (1024, 2048), (1536, 8192)),
    "ResNet-50": Subject(ResNet50, vectors(3, 224, 224, classes=1000), (32, 64), (48, 192)),
    "LSTM 2x256": Subject(Recurrent, vectors(100, 32), (512, 1024), (768, 4096)),
    "GPT-2 small": Subject(Transformer, texts(256, 50257), (8, 16), (12, 48), next_token),
}
TINY = {
    "MLP 1024-4096-4096": Subject(lambda: nn.Linear(8, 10), vectors(8), (8, 16), (12, 64)),
    "GPT-2 small": Subject(
        lambda: Transformer(1, 64, 50), texts(8, 50), (2, 4), (3, 8), next_token
    ),
}


def train(subject: Subject, batch: int, device: str) -> MemoryPoint:
    """Some steps with this batch through `fit`; what they took at most."""
    clean(device)
    data = subject.data(2 * batch)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="mgt-memory-") as folder:
        config = MultiGPUConfig(
            training_mode="single",
            batch_size=batch,
            max_steps=STEPS,
            epochs=STEPS,
            device=device,
            data_on_gpu=False if device == "cuda" else None,
            progress="off",
            tensorboard=False,
            enable_fault_tolerance=False,
            save_dir=folder,
        )
        manager = MultiGPUTrainingManager(config)
        manager.fit(subject.build(), data, loss_fn=subject.loss)
    if device == "cpu":
        return MemoryPoint(batch, 10**8 + 10**6 * batch)
    torch.cuda.synchronize()
    return MemoryPoint(batch, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def clean(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def largest_that_fits(subject: Subject, forecast: MemoryModel, device: str) -> dict[str, Any]:
    """Limit the memory, train the largest batch that is said to fit, and see."""
    top = forecast.measured[-1]
    limit = int((top.reserved_bytes or top.peak_bytes) * LIMIT)
    batch = forecast.largest_batch(limit)
    if not batch:
        return {"limit_bytes": limit, "batch": batch, "trained": None}
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        clean(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        point = train(subject, batch, device)
        return {
            "limit_bytes": limit,
            "batch": batch,
            "trained": True,
            "peak_bytes": point.peak_bytes,
            "used": point.peak_bytes / limit,
        }
    except torch.OutOfMemoryError as error:
        return {"limit_bytes": limit, "batch": batch, "trained": False, "error": str(error)[:300]}
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def examine(name: str, subject: Subject, device: str) -> dict[str, Any]:
    """One model: measure two batches, forecast two others, and the largest that fits."""
    begun = time.perf_counter()
    points = [train(subject, batch, device) for batch in subject.measured]
    forecast = MemoryModel.from_points(points)
    assert forecast is not None
    asked = []
    for batch in subject.asked:
        found = train(subject, batch, device)
        told, needed = forecast.peak(batch), forecast.needed(batch)
        asked.append(
            {
                "batch": batch,
                "forecast_bytes": told,
                "measured_bytes": found.peak_bytes,
                "error": told / found.peak_bytes - 1,
                "needed_bytes": needed,
                "reserved_bytes": found.reserved_bytes,
                "safe": needed >= found.peak_bytes,
            }
        )
    return {
        "model": name,
        "measured": [[p.per_rank_batch, p.peak_bytes, p.reserved_bytes] for p in points],
        "asked": asked,
        "largest": largest_that_fits(subject, forecast, device),
        "seconds": time.perf_counter() - begun,
    }


def megabytes(count: float) -> str:
    return f"{count / 2**20:,.0f}"


def table(rows: list[dict[str, Any]], device: str) -> str:
    lines = [
        f"Peak memory in MB on {device}: two batches measured, two others forecast, then measured.",
        "",
        "| model | measured | forecast for | forecast | measured | error | largest fitting in "
        "| trained | of the limit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | failed: {row['error']} |  |  |  |  |  |  |  |")
            continue
        seen = ", ".join(f"{size}: {megabytes(peak)}" for size, peak, _ in row["measured"])
        for number, asked in enumerate(row["asked"]):
            last = ["", "", ""]
            if not number:
                top = row["largest"]
                trained = {True: "yes", False: "OUT OF MEMORY", None: "-"}[top["trained"]]
                used = f"{top['used']:.0%}" if "used" in top else "-"
                last = [f"{megabytes(top['limit_bytes'])} MB: {top['batch']}", trained, used]
            lines.append(
                f"| {row['model'] if not number else ''} | {seen if not number else ''} "
                f"| {asked['batch']} | {megabytes(asked['forecast_bytes'])} "
                f"| {megabytes(asked['measured_bytes'])} | {asked['error']:+.1%} "
                f"| {' | '.join(last)} |"
            )
    errors = [abs(asked["error"]) for row in rows for asked in row.get("asked", [])]
    if errors:
        ran_out = sum(row.get("largest", {}).get("trained") is False for row in rows)
        unsafe = sum(not asked["safe"] for row in rows for asked in row.get("asked", []))
        lines += [
            "",
            f"Mean error {sum(errors) / len(errors):.2%} (limit {TARGET:.0%}), largest "
            f"{max(errors):.2%}; out of memory where it was said to fit: {ran_out}; measured above "
            f"what was called enough: {unsafe}.",
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("memory_forecast.json"))
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--models", help="parts of their names, separated by commas")
    options = parser.parse_args()
    if not options.quick and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --quick shows that the script works")
    device = "cpu" if options.quick else "cuda"
    subjects = TINY if options.quick else SUBJECTS
    wanted = (options.models or "").lower().split(",")
    name = "a CPU, made up" if options.quick else torch.cuda.get_device_name()
    # What every training has, the workspaces of cuBLAS, is there before the first is measured.
    train(next(iter(subjects.values())), 8, device)
    rows: list[dict[str, Any]] = []
    for model, subject in subjects.items():
        if not any(part in model.lower() for part in wanted):
            continue
        try:
            rows.append(examine(model, subject, device))
        except (RuntimeError, AssertionError) as error:
            rows.append({"model": model, "error": f"{type(error).__name__}: {error}"[:200]})
        text = table(rows, name)
        data = {"device": name, "torch": str(torch.__version__), "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(data, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
    print(table(rows, name))
    good = all("asked" in row and row["largest"]["trained"] is not False for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
