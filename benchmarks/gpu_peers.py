"""The plain loop and the peers on one GPU, each as its project's documentation sets it up.

All train on batches that lie on the device, with AdamW and a log every `log_every` steps. The
clock is in the model: from one forward pass to another many steps later, with the device awaited
at both.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import Model, loss_fn, tensors
from torch import Tensor, nn
from torch.optim import AdamW

RATE = 1e-3


@dataclass
class Clock:
    """Reads the time at forward pass `warmup` and `warmup + steps`."""

    device: str
    warmup: int
    steps: int
    passes: int = 0
    read: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.warmup + self.steps + 1

    def tick(self) -> None:
        if self.passes in (self.warmup, self.warmup + self.steps):
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.read.append(time.perf_counter())
        self.passes += 1

    @property
    def step_s(self) -> float:
        return (self.read[1] - self.read[0]) / self.steps


class Timed(nn.Module):
    def __init__(self, inner: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.inner = inner
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.tick()
        return self.inner(x)  # type: ignore[no-any-return]


class Batches:
    """`steps` batches that lie on the device already: parts of one tensor, again and again."""

    def __init__(self, model: Model, device: str, steps: int) -> None:
        parts = (tensor.split(model.batch) for tensor in tensors(model, device))
        self.parts = [[x, y] for x, y in zip(*parts, strict=True) if len(x) == model.batch]
        self.steps = steps
        # What a Trainer asks a loader for.
        self.batch_size = model.batch
        self.dataset = range(steps * model.batch)
        self.batch_sampler = self.sampler = None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return islice(cycle(self.parts), self.steps)


class Named(Batches):
    """The same under the names that the Hugging Face Trainer passes on."""

    def __iter__(self) -> Iterator[Any]:
        return ({"x": x, "labels": y} for x, y in super().__iter__())


@dataclass
class Job:
    """One contender's work."""

    model: Model
    device: str
    clock: Clock
    log_every: int = 20
    bf16: bool = False
    channels_last: bool = False

    def net(self) -> Timed:
        torch.manual_seed(0)
        built = self.model.build().to(self.device)
        if self.channels_last:
            built = built.to(memory_format=torch.channels_last)
        return Timed(built, self.clock)

    def batches(self) -> Batches:
        return Batches(self.model, self.device, self.clock.total)

    def autocast(self) -> Any:
        return torch.autocast(self.device, torch.bfloat16) if self.bf16 else nullcontext()


class Log:
    """One JSON line every `log_every` steps, as a hand-written loop writes it."""

    def __init__(self, job: Job) -> None:
        self.every = job.log_every
        self.total = torch.zeros((), device=job.device)
        self.file = tempfile.TemporaryFile("w")  # noqa: SIM115

    def add(self, step: int, loss: Tensor) -> None:
        self.total += loss.detach()
        if step % self.every == 0:
            self.file.write(json.dumps({"step": step, "loss": self.total.item() / self.every}))
            self.total.zero_()

    def close(self) -> None:
        self.file.close()


def plain(job: Job) -> None:
    net = job.net()
    optimizer = AdamW(net.parameters(), lr=RATE)
    log = Log(job)
    for step, (x, y) in enumerate(job.batches(), start=1):
        if job.channels_last:
            x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with job.autocast():
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        log.add(step, loss)
    log.close()


def fabric(job: Job) -> None:
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator=job.device, devices=1)
    lightning.launch()
    net = job.net()
    model, optimizer = lightning.setup(net, AdamW(net.parameters(), lr=RATE))
    log = Log(job)
    for step, (x, y) in enumerate(job.batches(), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        lightning.backward(loss)
        optimizer.step()
        log.add(step, loss)
    log.close()


def accelerate(job: Job) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=job.device == "cpu")
    net = job.net()
    model, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=RATE))
    log = Log(job)
    for step, (x, y) in enumerate(job.batches(), start=1):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        log.add(step, loss)
    log.close()


def lightning(job: Job) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = loss_fn(self.net, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=RATE)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator=job.device,
            devices=1,
            max_epochs=1,
            log_every_n_steps=job.log_every,
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), job.batches())


class WithLoss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def hugging_face(job: Job) -> None:
    from transformers import Trainer, TrainingArguments

    class OnDevice(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return Named(job.model, job.device, job.clock.total)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=job.device == "cpu",
            max_steps=job.clock.total,
            per_device_train_batch_size=job.model.batch,
            learning_rate=RATE,
            max_grad_norm=0.0,  # the others do not clip either
            lr_scheduler_type="constant",
            logging_steps=job.log_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = WithLoss(job.net())
        trainer = OnDevice(
            model=model, args=arguments, optimizers=(AdamW(model.parameters(), lr=RATE), None)
        )
        with (Path(folder) / "log.txt").open("w") as file, redirect_stdout(file):
            trainer.train()


PEERS: dict[str, Callable[[Job], None]] = {
    "plain": plain,
    "fabric": fabric,
    "accelerate": accelerate,
    "lightning": lightning,
    "hf": hugging_face,
}
TITLES = {
    "plain": "plain loop",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "lightning": "Lightning Trainer",
    "hf": "Hugging Face Trainer",
}


def measure_peer(name: str, job: Job) -> dict[str, Any]:
    """Seconds a step and peak memory of one contender in this process."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if job.device == "cuda":
        torch.cuda.init()
    PEERS[name](job)
    if len(job.clock.read) != 2:
        raise RuntimeError(f"{name} took {job.clock.passes} steps, not {job.clock.total}")
    peak = torch.cuda.max_memory_allocated() if job.device == "cuda" else 0
    return {
        "step_mean_s": job.clock.step_s,
        "samples_per_s": job.model.batch / job.clock.step_s,
        "peak_bytes": peak,
        "steps": job.clock.steps,
    }
