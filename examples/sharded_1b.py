"""Train a Llama of 1.2 billion parameters with FSDP: no GPU ever holds the whole model.

    python examples/sharded_1b.py                              # all GPUs
    mgt run --num-gpus 2 examples/sharded_1b.py --tiny         # a few CPU ranks are enough
    mgt run --engine slurm --nodes 2 --gpus-per-node 8 examples/sharded_1b.py --steps 10000
    mgt checkpoints merge runs/custom/NAME model.safetensors   # one file from all parts

`fit` gets a function, not a model: each rank computes only its part of every weight, bit for bit
those that one GPU would start with. --data is a file of token numbers as uint32, such as a
tokenizer and numpy's `tofile` write; without it the tokens are the bytes of Python's reference.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

# The shape of Llama 3.2 1B.
FULL = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


class Tokens(Dataset):
    """Pieces of `length` tokens, read from the file when they are needed."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length]
        tokens = torch.tensor(piece.astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}  # the model shifts them itself


def read_tokens(path: Path | None) -> np.ndarray:
    if path is not None:
        return np.memmap(path, dtype=np.uint32, mode="r")
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics.values()).encode(), dtype=np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain a Llama with sharded weights.")
    parser.add_argument("--data", type=Path, help="token numbers as uint32; without: bytes")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64, help="texts over all GPUs")
    parser.add_argument("--accumulate", type=int, default=1, help="parts of a step, to save memory")
    parser.add_argument("--length", type=int, default=1024, help="tokens per text")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--tiny", action="store_true", help="eight steps of a tiny model")
    args = parser.parse_args()
    if args.tiny:
        args.steps, args.batch_size, args.length = 8, 6, 32

    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            training_mode="fsdp",
            global_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            max_steps=args.steps,
            learning_rate=args.lr,
            schedule="cosine",
            warmup_steps=args.steps // 20,
            max_grad_norm=1.0,
            use_gradient_checkpointing=not args.tiny,  # computes activations twice, keeps few
        )
    )
    tokens = read_tokens(args.data)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return LlamaForCausalLM(TINY if args.tiny else FULL)

    result = manager.fit(build, Tokens(tokens, args.length))
    manager.say(f"loss {result.metrics['loss']:.4f} after {result.steps} steps")


if __name__ == "__main__":
    main()
