"""Classify your own pictures: a folder with one folder of PNG or JPEG files per class.

    python examples/image_folder.py --data-dir photos          # photos/cat/1.jpg, photos/dog/2.png
    python examples/image_folder.py                            # scikit-learn's digits as PNG files
    mgt run --num-gpus 2 examples/image_folder.py --workers 2

Loader workers decode the pictures. Random crops in `__getitem__` are seeded per sample, so it does
not matter which rank or worker reads it. The recipe `mgt train image --data-dir photos` needs no
code and does more.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

ENDINGS = (".png", ".jpg", ".jpeg")


class Pictures(Dataset):
    def __init__(self, files: list[Path], labels: list[str], size: int, train: bool) -> None:
        self.files, self.labels, self.size, self.train = files, labels, size, train

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.files[index]
        larger = self.size * 9 // 8
        with Image.open(path) as picture:
            picture = picture.convert("RGB").resize((larger, larger))
        spare = larger - self.size
        x, y = spare // 2, spare // 2
        if self.train:
            x, y = random.randint(0, spare), random.randint(0, spare)
        pixels = np.asarray(picture.crop((x, y, x + self.size, y + self.size)))
        return torch.tensor(pixels).permute(2, 0, 1) / 255, self.labels.index(path.parent.name)


class SmallCNN(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def write_digits(folder: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype(np.uint8)).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier on a folder of pictures.")
    parser.add_argument("--data-dir", type=Path, help="CLASS/*.png, CLASS/*.jpg; without: digits")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="over all GPUs")
    parser.add_argument("--size", type=int, default=32, help="pixels")
    parser.add_argument("--workers", type=int, default=0, help="loader processes per GPU")
    args = parser.parse_args()

    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            global_batch_size=args.batch_size,
            epochs=args.epochs,
            num_workers=args.workers,
            sync_bn=True,  # statistics over the whole batch, not over each GPU's part
            best_metric="accuracy",
        )
    )
    folder = args.data_dir or Path("digits-png")
    with manager.main_process_first():  # one rank per machine writes the files, the others wait
        if args.data_dir is None and not folder.exists():
            write_digits(folder)
    found = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in ENDINGS)
    if not found:
        parser.error(f"no pictures there; expected {folder}/CLASS/*.png or *.jpg")
    labels = sorted({path.parent.name for path in found})
    random.Random(0).shuffle(found)  # every rank must split alike
    cut = len(found) * 4 // 5
    train = Pictures(found[:cut], labels, args.size, train=True)
    val = Pictures(found[cut:], labels, args.size, train=False)

    torch.manual_seed(0)
    size = {"classes": len(labels), "width": 16}
    # The description stands in every checkpoint: load(run, model=SmallCNN) rebuilds the model.
    description = {"model": "image_folder:SmallCNN", "arguments": size, "labels": labels}
    result = manager.fit(SmallCNN(**size), train, val, description=description)
    manager.say(f"{len(labels)} classes, best accuracy {result.best:.2%}, run {result.folder}")


if __name__ == "__main__":
    main()
