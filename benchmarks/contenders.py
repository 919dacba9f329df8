"""One training task, written once for each way to train it.

Every contender trains the same model on the same samples per rank, with AdamW, clipping, a cosine
schedule and a log of loss and rate every `log_every` steps; no checkpoints, no progress bars.
Each follows its project's own documentation. The clock is in the model: one tick a forward pass,
so that whatever a loop does between two forward passes is counted, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES, CLASSES = 64, 10
PIXELS = 28
RATE, CLIP = 1e-3, 1.0
Tick = tuple[float, float]  # wall and CPU clock of this process, seconds


@dataclass
class Task:
    """`model_kind`: "mlp" of `layers` times `hidden`, or "cnn", whose width is `hidden`."""

    hidden: int
    layers: int
    batch: int  # per rank
    steps: int
    log_every: int
    folder: Path
    ranks: int
    model_kind: str = "mlp"
    ticks: list[Tick] = field(default_factory=list)

    def model(self) -> Net:
        torch.manual_seed(0)
        return Net(cnn(self.hidden) if self.is_cnn else mlp(self.hidden, self.layers), self.ticks)

    def dataset(self) -> TensorDataset:
        make = torch.Generator().manual_seed(1)
        samples = self.steps * self.batch * self.ranks
        if self.is_cnn:
            images = torch.randn(samples, 1, PIXELS, PIXELS, generator=make)
            return TensorDataset(images, images[:, 0, 0, :CLASSES].argmax(1))
        x = torch.randn(samples, FEATURES, generator=make)
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    @property
    def is_cnn(self) -> bool:
        return self.model_kind == "cnn"


def mlp(hidden: int, layers: int) -> nn.Module:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise([FEATURES, *[hidden] * layers]):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(hidden, CLASSES))


def cnn(width: int) -> nn.Module:
    """Four convolutions and two linear layers on images of 28x28; 0.44 million parameters at 32."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 49, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, CLASSES),
    )


class Net(nn.Module):
    def __init__(self, body: nn.Module, ticks: list[Tick]) -> None:
        super().__init__()
        self.body = body
        self.ticks = ticks

    def forward(self, x: Tensor) -> Tensor:
        self.ticks.append((time.perf_counter(), time.process_time()))
        return self.body(x)  # type: ignore[no-any-return]


class Log:
    """Rank 0 writes one JSON line every `log_every` steps: what a hand-written loop does."""

    def __init__(self, task: Task, name: str) -> None:
        path = task.folder / f"{name}.jsonl" if dist.get_rank() == 0 else Path(os.devnull)
        self.file = path.open("a")

    def write(self, **facts: float) -> None:
        self.file.write(json.dumps(facts) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def hand(task: Task) -> None:
    """A hand-written DDP loop."""
    dataset = task.dataset()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=task.batch, sampler=sampler)
    model = DistributedDataParallel(task.model())
    optimizer = AdamW(model.parameters(), lr=RATE)
    scheduler = CosineAnnealingLR(optimizer, T_max=task.steps)
    log = Log(task, "hand")
    total = torch.zeros(())
    model.train()
    sampler.set_epoch(0)
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        total += loss.detach()
        if step % task.log_every == 0:
            mean = total / task.log_every
            dist.all_reduce(mean)
            log.write(
                step=step,
                loss=mean.item() / task.ranks,
                lr=scheduler.get_last_lr()[0],
                grad_norm=norm.item(),
            )
            total.zero_()
    log.close()


def loss_function(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def ours(task: Task) -> None:
    """MultiGPUTrainingManager.fit with a loss function: what the other loops compute."""
    _fit(task, loss_function)


def ours_criterion(task: Task) -> None:
    """MultiGPUTrainingManager.fit with nn.CrossEntropyLoss(), which also gives the accuracy."""
    _fit(task, nn.CrossEntropyLoss())


def _fit(task: Task, loss_fn: Any) -> None:
    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

    config = MultiGPUConfig(
        device="cpu",
        batch_size=task.batch,
        epochs=1,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        schedule="cosine",
        log_every=task.log_every,
        enable_fault_tolerance=False,
        tensorboard=False,
        progress="off",
        save_dir=str(task.folder / "ours"),
    )
    # The optimizer is given, so that a better default of ours never counts as a cheaper loop.
    MultiGPUTrainingManager(config).fit(
        task.model(),
        task.dataset(),
        loss_fn=loss_fn,
        optimizer=lambda parameters: AdamW(parameters, lr=RATE),
    )


def accelerate(task: Task) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = task.model()
    optimizer = AdamW(model.parameters(), lr=RATE)
    # A prepared scheduler advances once a process and step.
    scheduler = CosineAnnealingLR(optimizer, T_max=task.steps * task.ranks)
    loader = DataLoader(task.dataset(), batch_size=task.batch, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    log = Log(task, "accelerate")
    total = torch.zeros(())
    model.train()
    for step, (x, y) in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.detach()
        if step % task.log_every == 0:
            mean = accelerator.gather(total / task.log_every).mean()
            lr = scheduler.get_last_lr()[0]
            log.write(step=step, loss=mean.item(), lr=lr, grad_norm=norm.item())
            total.zero_()
    log.close()


def fabric(task: Task) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    lightning = Fabric(accelerator="cpu", devices=task.ranks, strategy=strategy)
    lightning.launch()
    model = task.model()
    optimizer: Any = AdamW(model.parameters(), lr=RATE)
    scheduler = CosineAnnealingLR(optimizer, T_max=task.steps)
    model, optimizer = lightning.setup(model, optimizer)
    loader = DataLoader(task.dataset(), batch_size=task.batch, shuffle=True)
    loader = lightning.setup_dataloaders(loader)
    log = Log(task, "fabric")
    total = torch.zeros(())
    model.train()
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        lightning.backward(loss)
        norm = lightning.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        scheduler.step()
        total += loss.detach()
        if step % task.log_every == 0:
            mean = lightning.all_reduce(total / task.log_every)
            lr = scheduler.get_last_lr()[0]
            log.write(step=step, loss=mean.item(), lr=lr, grad_norm=norm.item())
            total.zero_()
    log.close()


def lightning_trainer(task: Task) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = loss_function(self.net, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), lr=RATE)
            scheduler = CosineAnnealingLR(optimizer, T_max=task.steps)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    trainer = Trainer(
        accelerator="cpu",
        devices=task.ranks,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        gradient_clip_val=CLIP,
        log_every_n_steps=task.log_every,
        logger=CSVLogger(task.folder, name="lightning"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(task.dataset(), batch_size=task.batch, shuffle=True)
    trainer.fit(Module(), loader)


class Labelled(Dataset[dict[str, Tensor]]):
    """The same samples under the names that the Hugging Face Trainer passes on."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.dataset[index]
        return {"x": x, "labels": y}


class NetWithLoss(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def hugging_face(task: Task) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(task.folder / "hugging_face"),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,  # what it chooses for its own models
        per_device_train_batch_size=task.batch,
        num_train_epochs=1,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        lr_scheduler_type="cosine",
        logging_steps=task.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = NetWithLoss(task.model())
    # Its own default is the fused AdamW; here everyone steps with the same one.
    optimizer: Optimizer = AdamW(model.parameters(), lr=RATE)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Labelled(task.dataset()),
        optimizers=(optimizer, None),
    )
    with (task.folder / "hugging_face.log").open("a") as file, redirect_stdout(file):
        trainer.train()


@dataclass(frozen=True)
class Contender:
    title: str
    train: Callable[[Task], None]
    package: str | None = None


CONTENDERS = {
    "hand": Contender("hand-written DDP loop", hand),
    "repeat": Contender("the same loop again (noise)", hand),
    "ours": Contender("multi-gpu-training", ours),
    "ours-criterion": Contender("multi-gpu-training, nn.CrossEntropyLoss()", ours_criterion),
    "accelerate": Contender("Accelerate", accelerate, "accelerate"),
    "fabric": Contender("Lightning Fabric", fabric, "lightning"),
    "lightning": Contender("Lightning Trainer", lightning_trainer, "lightning"),
    "hf": Contender("Hugging Face Trainer", hugging_face, "transformers"),
}


def quiet() -> None:
    """Keep the peers' notices (hardware found, number of workers) out of the result."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def forget() -> None:
    """Undo what a peer keeps for the whole process, so that each round starts alike."""
    torch.set_num_threads(1)
    try:
        from accelerate.state import AcceleratorState
    except ImportError:
        return
    AcceleratorState._reset_state(True)
