"""Permuted sequential MNIST: 784 pixels, one a step, in a fixed random order, and one LMU.

    python benchmarks/psmnist.py --data ../mnist --out psmnist.json

A test of long memory: the digit is asked for after the last pixel. One LMU of order 468 over 784
steps and 346 units, 166,092 parameters, as Voelker et al. 2019 (97.15 %) and Chilkuri and
Eliasmith 2021 (98.49 %) have it. Trained through MultiGPUTrainingManager.fit on any device.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.recipes.image.image_data import Part, load_images
from multi_gpu_training.recipes.speech.lmu import LMU

PIXELS, ORDER, UNITS = 784, 468, 346
PERMUTATION_SEED = 92916


class PixelReader(nn.Module):
    """Grey pixels (batch, 784) as bytes -> ten logits, read from the memory after the last one."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lmu = LMU(1, UNITS, ORDER, float(PIXELS))
        # The memory writes what it is given, nothing else: as in the papers.
        nn.init.ones_(self.lmu.write.weight)
        nn.init.zeros_(self.lmu.write.bias)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(UNITS, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        signal = (pixels.to(self.head.weight.dtype) / 255.0 - 0.1307) / 0.3081
        logits: Tensor = self.head(self.dropout(self.lmu.final(signal.unsqueeze(2))))
        return logits


def permuted(part: Part, limit: int | None) -> TensorDataset:
    generator = torch.Generator().manual_seed(PERMUTATION_SEED)
    order = torch.randperm(PIXELS, generator=generator)
    return TensorDataset(part.images[:limit].flatten(1)[:, order], part.labels[:limit])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with MNIST's IDX files")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2,000 images, one epoch")
    parser.add_argument("--out", help="write the result there as JSON")
    args = parser.parse_args()

    data = load_images("mnist", args.data)
    limit = 2000 if args.quick else None
    torch.manual_seed(args.seed)
    model = PixelReader(args.dropout)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = MultiGPUConfig(
            device=args.device,
            training_mode="single",
            epochs=1 if args.quick else args.epochs,
            batch_size=args.batch_size,
            learning_rate=args.lr,
            weight_decay=args.weight_decay,
            schedule="cosine",
            warmup_steps=100,
            seed=args.seed,
            best_metric="accuracy",
            enable_fault_tolerance=False,
            tensorboard=False,
            log_every=200,
            progress="lines",
            save_dir=folder,
        )
        result = MultiGPUTrainingManager(config).fit(
            model, permuted(data.train, limit), permuted(data.test, limit)
        )
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    report = {
        "test_accuracy_after_the_last_epoch": result.metrics["accuracy"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": config.epochs,
        "steps": result.steps,
        "seconds": round(time.perf_counter() - started, 1),
        "device": name or str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(args).items() if k not in ("data", "out")},
    }
    print("| test | parameters | epochs | seconds | device |")
    print("|---|---|---|---|---|")
    print(
        f"| {report['test_accuracy_after_the_last_epoch']:.2%} | {report['parameters']:,} | "
        f"{config.epochs} | {report['seconds']} | {report['device']} |"
    )
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
