"""A CNN for MNIST, Fashion-MNIST or scikit-learn's digits: one call of `fit`, with augmentation.

    python examples/mnist.py                                   # all GPUs, or the CPU; digits
    python examples/mnist.py --data-dir fashion-mnist          # a folder of IDX files
    mgt run --num-gpus 2 examples/mnist.py --epochs 2
    mgt verify examples/mnist.py                               # the same result on 1, 2, 3 ranks?

IDX files are those of MNIST and Fashion-MNIST, plain or as .gz: train-images-idx3-ubyte,
train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


def read_idx(folder: Path, name: str) -> Tensor:
    packed = folder / f"{name}.gz"
    raw = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / name).read_bytes()
    # Four bytes (the last: the number of dimensions), each dimension as a big-endian int, pixels.
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return torch.tensor(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape))


def load_data(folder: Path | None) -> list[TensorDataset]:
    """The training set and the test set: images of (1, height, width) in 0..1, and labels."""
    if folder is not None:
        parts = [
            (read_idx(folder, f"{part}-images-idx3-ubyte") / 255, f"{part}-labels-idx1-ubyte")
            for part in ("train", "t10k")
        ]
        return [TensorDataset(x.unsqueeze(1), read_idx(folder, y).long()) for x, y in parts]
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    return [TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])]


def build_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def add_noise(batch, random):
    """Runs on the device. `random` belongs to each sample: the number of GPUs changes nothing."""
    images, labels = batch
    return images + 0.1 * random.normal(*images.shape[1:]), labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify handwritten digits or clothes.")
    parser.add_argument("--data-dir", type=Path, help="IDX files; without: scikit-learn's digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="over all GPUs")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, help="train on only the first N samples")
    args = parser.parse_args()

    # With several GPUs, this starts the script once on each of them.
    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            global_batch_size=args.batch_size, epochs=args.epochs, learning_rate=args.lr, seed=0
        )
    )
    train, test = load_data(args.data_dir)
    if args.samples:
        train = TensorDataset(*train[: args.samples])
    torch.manual_seed(0)
    result = manager.fit(build_model(), train, test, augment=add_noise)
    manager.say(f"test accuracy {result.metrics['accuracy']:.2%}, run {result.folder}")


if __name__ == "__main__":
    main()
