"""Recorded steps against a hand-written loop in float64: how far apart are the weights?

    python benchmarks/gpu_exact.py --out gpu_exact.json

The hand-written loop is plain PyTorch: eager steps, a learning rate that is a Python float and a
cosine schedule. `fit` trains the same batches with its defaults, as a CUDA graph. The hand-written
loop also runs twice, which shows how far it is from itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import Recurrent, mlp, normalised
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

BATCH = 32


class ViT(nn.Module):
    """Patches of 7x7, four pre-norm blocks of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 64, 7, 7)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, 64))
        block = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(x).mean(1))  # type: ignore[no-any-return]


# name: model, shape of a sample
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (64,)),
    "CNN with BatchNorm": (lambda: normalised(True), (1, 28, 28)),
    "LSTM 2x256": (Recurrent, (8, 32)),
    "ViT, 4 blocks": (ViT, (1, 28, 28)),
}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(name: str, steps: int) -> tuple[nn.Module, TensorDataset, Any, Any]:
    build_model, shape = MODELS[name]
    torch.manual_seed(0)
    model = build_model().double()
    x = torch.randn(steps // 2 * BATCH, *shape, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 10, (len(x),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    return model, data, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def by_hand(name: str, steps: int, device: str) -> dict[str, Tensor]:
    model, data, optimizer, schedule = build(name, steps)
    model.to(device)
    for _ in range(2):
        for x, y in DataLoader(data, BATCH):
            optimizer.zero_grad()
            loss_fn(model, (x.to(device), y.to(device))).backward()
            optimizer.step()
            schedule.step()
    return {key: value.cpu().double() for key, value in model.state_dict().items()}


def ours(name: str, steps: int, device: str) -> tuple[dict[str, Tensor], str]:
    model, data, optimizer, schedule = build(name, steps)
    with tempfile.TemporaryDirectory(prefix="mgt-exact-") as folder:
        config = MultiGPUConfig(
            training_mode="single",
            device=device,
            batch_size=BATCH,
            epochs=2,
            use_mixed_precision=False,
            scheduler_unit="step",
            progress="off",
            tensorboard=False,
            save_dir=folder,
        )
        manager = MultiGPUTrainingManager(config)
        loader = DataLoader(data, BATCH)
        manager.fit(model, loader, loss_fn=loss_fn, optimizer=optimizer, scheduler=schedule)
        weights = manager.model.state_dict()
        mode = str(manager.trainer.execution.mode)
        return {key: value.cpu().double() for key, value in weights.items()}, mode


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative distance of a tensor, by norm, and its name.

    The key third of an attention's bias is left out and told by `keys_apart`: softmax does not
    change when all keys move alike, so its gradient is zero but for rounding, which Adam scales up.
    """
    far = []
    for key in a:
        one, other = a[key], b[key]
        if key.endswith("in_proj_bias"):
            (q, _, v), (q2, _, v2) = one.chunk(3), other.chunk(3)
            one, other = torch.cat([q, v]), torch.cat([q2, v2])
        far.append((float((one - other).norm() / one.norm().clamp(min=1e-300)), key))
    return max(far)


def keys_apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float | None:
    """The largest relative distance of a whole attention bias, keys included."""
    biases = [key for key in a if key.endswith("in_proj_bias")]
    return max((float((a[k] - b[k]).norm() / a[k].norm()) for k in biases), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path("gpu_exact.json"))
    options = parser.parse_args()
    torch.backends.cudnn.deterministic = True  # the hand-written loop then repeats itself
    print(
        "| model | steps | ours against by hand | in | with key biases | by hand, twice |\n"
        "|---|---|---|---|---|---|"
    )
    found = {}
    for name in MODELS:
        hand = by_hand(name, options.steps, options.device)
        again = by_hand(name, options.steps, options.device)
        weights, mode = ours(name, options.steps, options.device)
        (far, where), keys = apart(hand, weights), keys_apart(hand, weights)
        noise = apart(hand, again)[0]
        found[name] = {"ours": far, "in": where, "keys": keys, "again": noise, "mode": mode}
        print(
            f"| {name} | {options.steps} ({mode}) | {far:.1e} | {where} "
            f"| {'-' if keys is None else f'{keys:.1e}'} | {noise:.1e} |",
            flush=True,
        )
    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
