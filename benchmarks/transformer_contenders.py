"""One contender of benchmarks/transformer.py: a process that trains GPT-2 in one way.

    python benchmarks/transformer_contenders.py NAME FOLDER

Each trains as its project's documentation says. The clock looks after every step, and makes the
process wait where it is another one's turn.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

RATE, CLIP = 3e-4, 1.0
LOG_EVERY = 20


@dataclass
class Task:
    folder: str
    device: str
    batch: int
    sequence: int
    warm: int
    rounds: int
    steps: int
    quick: bool
    settings: list[str] = field(default_factory=list)
    total: int = 0

    def __post_init__(self) -> None:
        self.total = self.warm + self.rounds * self.steps

    @property
    def backend(self) -> str:
        """Of torch.compile. Compiling for a CPU takes minutes and says nothing about a GPU."""
        return "aot_eager" if self.quick else "inductor"

    def model(self) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1003} if self.quick else {}
        settings = GPT2Config(**dropout, **size, attn_implementation="sdpa")
        return GPT2LMHeadModel(settings)

    def tokens(self, part: str) -> Tensor:
        found: Tensor = torch.load(Path(self.folder) / "tokens.pt")[part]
        return found


class Clock:
    """Counts steps; stops and waits for this process's turn between rounds."""

    def __init__(self, task: Task, name: str) -> None:
        self.task, self.name = task, name
        self.done = 0
        self.stage = 0
        self.seconds: list[float] = []
        self.born = time.perf_counter()
        self.warm_s = 0.0
        self.started = 0.0
        self.peak_bytes = 0
        self.note = ""

    def step(self) -> None:
        """To be called once after each step."""
        self.done += 1
        past = self.done - self.task.warm
        if past < 0 or past % self.task.steps or self.stage > self.task.rounds:
            return
        self.synchronise()
        now = time.perf_counter()
        if past == 0:
            self.warm_s = now - self.born
        else:
            self.seconds.append(now - self.started)
        if self.task.device == "cuda" and past == 0:
            torch.cuda.reset_peak_memory_stats()  # compiling and trying out are not the training
        elif self.task.device == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()
        self.wait_for_turn()
        self.started = time.perf_counter()

    def wait_for_turn(self) -> None:
        folder = Path(self.task.folder)
        (folder / f"{self.name}.ready.{self.stage}").touch()
        go = folder / f"{self.name}.go.{self.stage}"
        while not go.exists():
            time.sleep(0.01)
        self.stage += 1

    def synchronise(self) -> None:
        if self.task.device == "cuda":
            torch.cuda.synchronize()


class Labelled(Dataset[dict[str, Tensor]]):
    """Sequences under the names that Hugging Face models take."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def hugging_face(task: Task, clock: Clock, compiled: bool = False) -> Any:
    """https://huggingface.co/docs/transformers/perf_train_gpu_one: bf16, fused AdamW, SDPA."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    gpu = task.device == "cuda"
    arguments = TrainingArguments(
        output_dir=str(Path(task.folder) / clock.name),
        use_cpu=not gpu,
        per_device_train_batch_size=task.batch,
        max_steps=task.total,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        bf16=gpu,
        torch_compile=compiled,
        torch_compile_backend=task.backend if compiled else None,
        dataloader_num_workers=2 if gpu else 0,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = task.model()
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=Labelled(task.tokens("train")),
        callbacks=[Steps()],
    )
    trainer.train()
    return model


def lightning(task: Task, clock: Clock, compiled: bool = False) -> Any:
    """https://lightning.ai/docs/pytorch/stable: bf16-mixed, and torch.compile of the model."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    gpu = task.device == "cuda"
    net = task.model()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(net, backend=task.backend) if compiled else net

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=0.0, fused=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # Lightning's own gradient_clip_val refuses fused optimizers.
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)

    class Steps(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    trainer = Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if gpu else "32-true",
        max_steps=task.total,
        log_every_n_steps=LOG_EVERY,
        logger=CSVLogger(task.folder, name=clock.name),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps()],
    )
    loader = DataLoader(
        Labelled(task.tokens("train")),
        batch_size=task.batch,
        num_workers=2 if gpu else 0,
        pin_memory=gpu,
        persistent_workers=gpu,
    )
    trainer.fit(Module(), loader)
    return net


def ours(task: Task, clock: Clock, execution: str = "compile") -> Any:
    """`manager.fit` with its own defaults, and the transformer recipe's loss and attention.

    Compiled: what step_execution=auto chooses by itself in a run that is long enough.
    """
    from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
    from multi_gpu_training.config_file import read_override
    from multi_gpu_training.recipes.transformer.attention import use_causal_attention
    from multi_gpu_training.recipes.transformer.linear_cross_entropy import scores_budget_bytes
    from multi_gpu_training.recipes.transformer.losses import CausalLoss, is_direct

    class Steps(Callback):
        def on_step_end(self, manager: Any, result: Any) -> None:
            clock.step()

    settings: dict[str, Any] = {
        "device": task.device,
        "batch_size": task.batch,
        "epochs": 1,
        "max_steps": task.total,
        "shuffle": False,
        "learning_rate": RATE,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "step_execution": execution,
        "log_every": LOG_EVERY,
        "enable_fault_tolerance": False,
        "tensorboard": False,
        "save_dir": str(Path(task.folder) / "runs"),
        "recipe": clock.name,
        **dict(map(read_override, task.settings)),
    }
    if task.quick:
        torch.compile = functools.partial(torch.compile, backend=task.backend)  # type: ignore[assignment]
    model = task.model()
    maskless = use_causal_attention(model, task.sequence)
    loss_fn = CausalLoss(False, not maskless, is_direct(model), scores_budget_bytes())
    manager = MultiGPUTrainingManager(MultiGPUConfig(**settings))
    manager.fit(model, TensorDataset(task.tokens("train")), loss_fn=loss_fn, callbacks=[Steps()])
    clock.note = f"{manager.trainer.execution.mode} {manager.trainer.execution.reason}"
    return model


def ours_cudnn(task: Task, clock: Clock) -> Any:
    """Ours, with cuDNN's attention kernels in place of FlashAttention's."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return ours(task, clock)


@dataclass(frozen=True)
class Contender:
    title: str
    train: Callable[[Task, Clock], Any]


CONTENDERS = {
    "hf": Contender("Hugging Face Trainer", hugging_face),
    "hf-compile": Contender(
        "Hugging Face Trainer, torch_compile=True", lambda t, c: hugging_face(t, c, True)
    ),
    "lightning": Contender("Lightning", lightning),
    "lightning-compile": Contender(
        "Lightning, torch.compile(model)", lambda t, c: lightning(t, c, True)
    ),
    "ours": Contender("multi-gpu-training, compiled", ours),
    "ours-cudnn": Contender("multi-gpu-training, cuDNN attention", ours_cudnn),
    "ours-auto": Contender(
        "multi-gpu-training, step_execution=auto", lambda t, c: ours(t, c, "auto")
    ),
    "ours-eager": Contender(
        "multi-gpu-training, step_execution=eager", lambda t, c: ours(t, c, "eager")
    ),
}


@torch.no_grad()
def validation_loss(model: Any, rows: Tensor, device: str) -> float:
    """Mean cross entropy of the next token, in bf16 on a GPU, summed up in float64."""
    model.to(device).eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids in rows.long().to(device).split(4):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=ids, use_cache=False).logits
        wanted = ids[:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted, reduction="sum")
        total += loss.double()
    return float(total) / (rows.shape[0] * (rows.shape[1] - 1))


def main() -> None:
    name, folder = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    task = Task(**json.loads((Path(folder) / "task.json").read_text()))
    clock = Clock(task, name)
    model = CONTENDERS[name].train(task, clock)
    if clock.stage != task.rounds + 1:
        raise RuntimeError(f"{name} took {clock.done} steps, not {task.total}")
    tokens = task.batch * task.sequence * task.steps
    found = {
        "tokens_per_s": [tokens / seconds for seconds in clock.seconds],
        "peak_bytes": clock.peak_bytes,
        "warm_s": clock.warm_s,
        "note": clock.note,
        "parameters": sum(p.numel() for p in model.parameters()),
        "val_loss": validation_loss(model, task.tokens("val"), task.device),
    }
    file = Path(folder) / f"{name}.json"
    file.with_suffix(".part").write_text(json.dumps(found))
    file.with_suffix(".part").rename(file)


if __name__ == "__main__":
    main()
