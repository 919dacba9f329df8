"""What sharding costs where there is nothing to share: one rank, fsdp against the plain step.

    python benchmarks/fsdp_step.py --out fsdp_step.json      # one GPU, NCCL
    python benchmarks/fsdp_step.py --form compile            # both compiled
    python benchmarks/fsdp_step.py --quick                   # a small model on one CPU rank, gloo

A Llama-shaped model (1.1 billion parameters by default) trains in bf16 mixed precision with
activation checkpointing and AdamW, once unsharded and once with training_mode=fsdp on a group of
one rank, both in the same form. Both live side by side in one process, and rounds of steps
alternate between them; the ratio is that of their median steps. Their losses must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

FORMS = {"eager": "eager", "compile": "compiled (sharded: block by block)"}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read = nn.Linear(width, 3 * width, bias=False)
        self.write = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.read(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        return self.write(found.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64 or 4 * width
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.attention = Attention(width, heads)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        inner = self.norms[1](x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    """The shape of a Llama, without its rotations, which cost next to nothing."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    logits = model(batch[0])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch[0][:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--form", choices=("eager", "compile"), default="eager")
    parser.add_argument("--gather-bf16", action="store_true", help="fsdp_gather_dtype=bf16")
    parser.add_argument("--quick", action="store_true", help="a small model on the CPU")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.quick:
        small = {"words": 200, "width": 64, "layers": 2, "heads": 2, "batch": 2, "length": 32}
        vars(given).update(small, rounds=2, steps=2)
    found = measure(given)
    text = table(given, found)
    print(text)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))
        given.out.with_suffix(".md").write_text(text + "\n")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    # A group of one rank, as a launcher would have made it.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    with tempfile.TemporaryDirectory(prefix="fsdp-step-") as folder:
        managers = {mode: prepared(given, mode, folder) for mode in ("single", "fsdp")}
        sharded = managers["fsdp"].trainer.strategy.wrapped
        assert sharded is not managers["fsdp"].trainer.state.step_module, "fsdp has no group here"
        times: dict[str, list[float]] = {mode: [] for mode in managers}
        losses: dict[str, list[float]] = {mode: [] for mode in managers}
        for round_number in range(given.rounds + 1):
            order = list(managers) if round_number % 2 else list(managers)[::-1]
            for mode in order:
                spent, loss = steps(given, managers[mode], round_number)
                losses[mode].append(loss)
                if round_number:  # the first one warms up
                    times[mode] += spent
        parameters = sum(p.numel() for p in managers["single"].model.parameters())
        for manager in managers.values():
            manager.finish()
    median = {mode: statistics.median(spent) for mode, spent in times.items()}
    return {
        "machine": machine(),
        "settings": {k: v for k, v in vars(given).items() if k != "out"},
        "parameters": parameters,
        "step_s": median,
        "ratio": median["fsdp"] / median["single"],
        "losses": losses,
        "times_s": times,
    }


def prepared(given: argparse.Namespace, mode: str, folder: str) -> MultiGPUTrainingManager:
    gather = {"fsdp_gather_dtype": "bf16"} if given.gather_bf16 and mode == "fsdp" else {}
    gather |= {} if given.quick else {"mixed_precision_dtype": "bf16"}
    config = MultiGPUConfig(
        training_mode=mode, device="cpu" if given.quick else "cuda", step_execution=given.form,
        deterministic=given.form == "compile",  # compile before the first step, not after some
        use_mixed_precision=not given.quick, use_gradient_checkpointing=True,
        progress="off", tensorboard=False, monitor=False, report=False, save_dir=folder,
        run_name=mode, enable_fault_tolerance=False, consistency_check_every=0, **gather,
    )  # fmt: skip
    manager = MultiGPUTrainingManager(config)
    sizes = given.words, given.width, given.layers, given.heads
    manager.setup_training(lambda: Llama(*sizes), loss_fn=loss_fn)
    return manager


def steps(
    given: argparse.Namespace, manager: MultiGPUTrainingManager, number: int
) -> tuple[list[float], float]:
    """A round: the time of each step, and the loss of the last."""
    generator = torch.Generator().manual_seed(number)
    size = given.batch, given.length
    tokens = torch.randint(given.words, size, generator=generator).to(manager.placement.device)
    spent = []
    for _ in range(given.steps):
        _wait(manager.placement.device)
        begun = time.perf_counter()
        result = manager.trainer.train_step([tokens])
        _wait(manager.placement.device)
        spent.append(time.perf_counter() - begun)
    return spent, float(result.loss)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(given: argparse.Namespace, found: dict[str, Any]) -> str:
    pairs = zip(found["losses"]["single"], found["losses"]["fsdp"], strict=True)
    apart = max(abs(a - b) / abs(a) for a, b in pairs)
    lines, kind = [found["machine"], ""], "float32" if given.quick else "bf16 mixed precision"
    lines += [
        f"{found['parameters'] / 1e9:.2f} billion parameters, {given.batch} x {given.length} "
        f"tokens, {kind}, activation checkpointing, AdamW, both {FORMS[given.form]}.",
        "",
        "| | median step |",
        "|---|---|",
        *(f"| {mode} | {1e3 * value:.1f} ms |" for mode, value in found["step_s"].items()),
        f"| fsdp / single | {found['ratio']:.3f} |",
        "",
        f"Losses of the rounds differ by {apart:.1e} at most.",
    ]
    return "\n".join(lines)


def machine() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
