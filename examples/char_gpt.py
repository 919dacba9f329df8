"""A small GPT that learns to write, character by character, in the manner of nanoGPT.

    python examples/char_gpt.py                                # all GPUs, or the CPU
    python examples/char_gpt.py --text shakespeare.txt --steps 5000 --layers 6 --width 384
    mgt run --num-gpus 2 examples/char_gpt.py --tiny

Without --text it reads the language reference that Python ships for `help()`. The loss counts
characters, validation runs every 250 steps, and the trained model writes a sample at the end.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


class Windows(Dataset):
    """Every stretch of `length` characters is a sample; its target is the same, one further on."""

    def __init__(self, codes: Tensor, length: int, stride: int) -> None:
        self.codes, self.length = codes, length
        self.starts = range(0, len(codes) - length, stride)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.codes[self.starts[index] :][: self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No biases: softmax does not see that of the keys, which Adam would move by rounding.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, characters: int, length: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.norm(self.blocks(self.characters(codes) + self.positions(places))))

    @torch.no_grad()
    def write(self, start: Tensor, count: int) -> Tensor:
        for _ in range(count):
            chances = self(start[:, -self.length :])[:, -1].softmax(-1)
            start = torch.cat([start, torch.multinomial(chances, 1)], 1)
        return start


def loss_fn(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    codes, targets = batch
    # The mean, and what it was divided by: ranks are weighted by their characters.
    return F.cross_entropy(model(codes).flatten(0, 1), targets.flatten()), targets.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on the characters of a text.")
    parser.add_argument("--text", type=Path, help="a text file; without: Python's own reference")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64, help="over all GPUs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--tiny", action="store_true", help="seconds on a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.batch_size, args.layers, args.width, args.length = 20, 12, 2, 32, 32

    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            global_batch_size=args.batch_size,
            max_steps=args.steps,
            validate_every=250,
            limit_val_batches=20,
            learning_rate=1e-3,
            schedule="cosine",
            max_grad_norm=1.0,
        )
    )
    if args.text:
        text = args.text.read_text()
    else:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    codes = torch.tensor([numbers[character] for character in text])
    cut = len(codes) * 9 // 10
    train = Windows(codes[:cut], args.length, stride=args.length // 2)
    val = Windows(codes[cut:], args.length, stride=args.length)

    torch.manual_seed(0)
    model = CharGPT(len(alphabet), args.length, args.layers, heads=4, width=args.width)
    result = manager.fit(model, train, val, loss_fn=loss_fn)
    manager.say(f"validation loss per character: {result.metrics['loss']:.4f}")
    if manager.placement.is_main:
        start = codes[None, cut : cut + args.length].to(manager.placement.device)
        written = manager.model.eval().write(start, 40 if args.tiny else 400)[0].tolist()
        print("".join(alphabet[code] for code in written))


if __name__ == "__main__":
    main()
