"""Whole trainings from the start of the process to its exit: ours, a plain loop, and the peers.

    python benchmarks/process_times.py --task digits --device cpu --rounds 5
    python benchmarks/process_times.py --task digits,fashion --device cuda --fashion FOLDER

digits    three epochs of an MLP on scikit-learn's digits, batch 32, float32, validated per epoch
fashion   ten epochs of a small CNN on Fashion-MNIST, batch 128, bf16, shifted and mirrored images,
          validated and saved per epoch; ours is `mgt train image --mode cnn` with its defaults

Everybody trains with AdamW, validates and writes a checkpoint after every epoch, and prints the
last accuracy. The plain loop keeps its data on the device and uses the fused AdamW. Every training
is a process of its own; contenders take turns, in changing order. The clock starts before the
process does and stops when it has exited.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RATE = 1e-3
EPOCHS = {"digits": 3, "fashion": 10}
BATCH = {"digits": 32, "fashion": 128}


# What everybody trains. torch is imported by the child that trains, as part of what is timed.


def digits() -> Any:
    import torch
    from sklearn.datasets import load_digits

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def fashion() -> Any:
    import torch

    folder = Path(os.environ["FASHION"])

    def read(part: str) -> Any:
        kinds = {"images-idx3": 16, "labels-idx1": 8}
        bodies = []
        for kind, head in kinds.items():
            body = gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes())[head:]
            bodies.append(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        return bodies[0].view(-1, 28, 28), bodies[1].long()

    return read("train"), read("t10k")


def network(task: str) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    if task == "digits":
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    class Normalise(nn.Module):
        def forward(self, images: Any) -> Any:
            return ((images.float() - 72.9) / 90.0).unsqueeze(1)

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]

    # The network of `mgt train image --mode cnn`.
    body = [*convolution(1, 32), nn.MaxPool2d(2), *convolution(32, 64), *convolution(64, 64)]
    head = [nn.Flatten(), nn.LayerNorm(64 * 49), nn.Linear(64 * 49, 256), nn.ReLU()]
    return nn.Sequential(Normalise(), *body, nn.MaxPool2d(2), *head, nn.Linear(256, 10))


def moved(images: Any) -> Any:
    """Images shifted by up to two pixels, half of them mirrored: one gather for a batch."""
    import torch
    import torch.nn.functional as F

    count, side, device = len(images), images.shape[-1], images.device
    padded = F.pad(images, [2] * 4)
    offsets = torch.randint(0, 5, (count, 2), device=device)
    places = torch.arange(side, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(mirrored, side - 1 - places, places) + offsets[:, 1:]
    rows = places + offsets[:, :1]
    at = rows.unsqueeze(2) * padded.shape[-1] + columns.unsqueeze(1)
    return padded.view(count, -1).gather(1, at.view(count, -1)).view(images.shape)


def autocast(task: str, device: str) -> Any:
    import torch

    return torch.autocast(device, torch.bfloat16, enabled=task == "fashion" and device == "cuda")


def plain(task: str, device: str, folder: Path) -> float:
    import torch
    import torch.nn.functional as F

    (x, y), (vx, vy) = ([t.to(device) for t in part] for part in DATA[task]())
    model = network(task).to(device)
    batch, epochs = BATCH[task], EPOCHS[task]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=device == "cuda")
    steps = epochs * -(-len(x) // batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=device)
        for chosen in torch.randperm(len(x), device=device).split(batch):
            images = moved(x[chosen]) if task == "fashion" else x[chosen]
            optimizer.zero_grad()
            with autocast(task, device):
                loss = F.cross_entropy(model(images), y[chosen])
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.detach()
        model.eval()
        with torch.no_grad(), autocast(task, device):
            right = sum(
                (model(images).argmax(1) == labels).sum()
                for images, labels in zip(vx.split(1000), vy.split(1000), strict=True)
            )
        accuracy = float(right) / len(vx)
        print(f"epoch {epoch}: loss {float(total) * batch / len(x):.4f}, accuracy {accuracy:.4f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, folder / f"{epoch}.pt")
    return accuracy


def lightning(task: str, device: str, folder: Path) -> float:
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(task)

        def training_step(self, batch: Any, index: int) -> Any:
            images = moved(batch[0]) if task == "fashion" else batch[0]
            loss = F.cross_entropy(self.net(images), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
            self.log("accuracy", right, prog_bar=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
            steps = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    workers = {"num_workers": 4, "persistent_workers": True} if task == "fashion" else {}
    train, val = (TensorDataset(*part) for part in DATA[task]())
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=EPOCHS[task],
        precision="bf16-mixed" if task == "fashion" and device == "cuda" else "32-true",
        default_root_dir=folder,
        enable_progress_bar=False,
    )
    pinned = device == "cuda"
    trainer.fit(
        Module(),
        DataLoader(train, BATCH[task], shuffle=True, pin_memory=pinned, **workers),  # type: ignore[arg-type]
        DataLoader(val, 1000, pin_memory=pinned, **workers),  # type: ignore[arg-type]
    )
    return float(trainer.callback_metrics["accuracy"])


def hf(task: str, device: str, folder: Path) -> float:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(task)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            scores = self.net(moved(x) if task == "fashion" and self.training else x)
            return {"loss": F.cross_entropy(scores, labels), "logits": scores}

    class Named(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, part: Any) -> None:
            self.part = part

        def __len__(self) -> int:
            return len(self.part[0])

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": self.part[0][index], "labels": self.part[1][index]}

    train, val = DATA[task]()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=device == "cpu",
        bf16=task == "fashion" and device == "cuda",
        per_device_train_batch_size=BATCH[task],
        per_device_eval_batch_size=1000,
        num_train_epochs=EPOCHS[task],
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        dataloader_num_workers=4 if task == "fashion" else 0,
        dataloader_persistent_workers=task == "fashion",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=WithLoss(),
        args=arguments,
        train_dataset=Named(train),
        eval_dataset=Named(val),
        compute_metrics=lambda told: {
            "accuracy": float((told.predictions.argmax(1) == told.label_ids).mean())
        },
    )
    trainer.train()
    return float(trainer.state.log_history[-2]["eval_accuracy"])


def ours(task: str, device: str, folder: Path) -> float:
    if task == "fashion":
        from multi_gpu_training.cli import main

        words = ["train", "image", "--mode", "cnn", "--data-dir", os.environ["FASHION"]]
        words += ["--epochs", "10", "--batch-size", "128", "--num-gpus", "1", "--device", device]
        sys.argv = ["mgt", *words, "--save-dir", str(folder), "--run-name", "timed"]
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
        saved = json.loads((folder / "image/timed/metrics.json").read_text())
        return float(saved[-1]["val"]["accuracy"])

    from torch.utils.data import TensorDataset

    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

    config = MultiGPUConfig(
        training_mode="single", global_batch_size=BATCH[task], epochs=EPOCHS[task], device=device,
        learning_rate=RATE, save_dir=str(folder),
    )  # fmt: skip
    manager = MultiGPUTrainingManager(config)
    train, val = (TensorDataset(*part) for part in DATA[task]())
    return float(manager.fit(network(task), train, val).metrics["accuracy"])


DATA: dict[str, Callable[[], Any]] = {"digits": digits, "fashion": fashion}
WAYS: dict[str, Callable[[str, str, Path], float]] = {
    "plain": plain,
    "ours": ours,
    "lightning": lightning,
    "hf": hf,
}


def timed(way: str, task: str, device: str, log: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="mgt-process-times-") as folder:
        out = Path(folder) / "accuracy"
        command = [sys.executable, __file__, "--child", way, "--task", task]
        command += ["--device", device, "--out", str(out)]
        with log.open("a") as text:
            started = time.perf_counter()
            code = subprocess.run(command, stdout=text, stderr=text, cwd=folder).returncode
            seconds = time.perf_counter() - started
        if code:
            raise SystemExit(f"{way} on {task} ended with {code}; see {log}")
        return {"seconds": seconds, "accuracy": float(out.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="digits", help="digits, fashion, or both")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fashion", type=Path, help="folder with the IDX files of Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=Path("process_times.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory(prefix="mgt-saved-") as folder:
            accuracy = WAYS[options.child](options.task, options.device, Path(folder))
        options.out.write_text(str(accuracy))
        print(f"accuracy {accuracy:.4f}")
        return
    if options.fashion:
        os.environ["FASHION"] = str(options.fashion.resolve())
    log = options.out.with_suffix(".log").resolve()
    log.unlink(missing_ok=True)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for task in options.task.split(","):
        ways = options.ways.split(",")
        found[task] = {way: [] for way in ways}
        for number in range(options.rounds + 1):  # the first round fills the disk's caches
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                one = timed(way, task, options.device, log)
                print(f"{task}, round {number}: {way} {one['seconds']:.2f} s", flush=True)
                if number:
                    found[task][way].append(one)
    import torch

    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    facts = f"{machine}, {os.cpu_count()} cores; torch {torch.__version__}"
    options.out.write_text(json.dumps({"machine": facts, "found": found}, indent=1))
    print(f"\n{facts}, Python {platform.python_version()}\n")
    print("| task | way | seconds, median (range) | of the plain loop | accuracy |")
    print("|---|---|---|---|---|")
    for task, ways_found in found.items():
        base = [one["seconds"] for one in ways_found.get("plain", [])]
        for way, runs in ways_found.items():
            seconds = [one["seconds"] for one in runs]
            ratio = "-"
            if base:
                ratios = [mine / theirs for mine, theirs in zip(seconds, base, strict=True)]
                ratio = f"{statistics.median(ratios):.2f}"
            right = statistics.median(one["accuracy"] for one in runs)
            print(
                f"| {task} | {way} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to "
                f"{max(seconds):.2f}) | {ratio} | {right:.2%} |"
            )


if __name__ == "__main__":
    main()
