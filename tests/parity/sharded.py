"""Trainings whose parameters are split over the ranks, and the same by hand in one process.

Every case is a function of (folder, by_hand) that returns tensors by name, in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import corners
import torch
import torch.nn.functional as F
from tiny import manager_for
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from multi_gpu_training.errors import ModelError

Result = dict[str, Tensor]
SAMPLES, BATCH, EPOCHS = 22, 8, 2  # the last batch has six samples, so that some shares differ


class Cnn(nn.Module):
    """With BatchNorm, and a temperature: a parameter without rows that could be split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        block = lambda wide: nn.Sequential(  # noqa: E731
            nn.Conv2d(wide, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.blocks = nn.ModuleList([block(2), block(6), block(6)])
        self.head = nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))) * self.temperature


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(SAMPLES, 2, 5, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(pixels, torch.arange(SAMPLES) % 3)


def texts() -> TensorDataset:
    """Of very different lengths: -100 labels what does not count."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 31, (SAMPLES, 9), generator=generator)
    lengths = torch.randint(2, 10, (SAMPLES, 1), generator=generator)
    return TensorDataset(tokens, tokens.masked_fill(torch.arange(9) >= lengths, -100))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(6)
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 12, "n_layer": 3, "n_head": 2}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none)).double()


def token_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch[1][:, 1:]
    logits = model(input_ids=batch[0]).logits[:, :-1]
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return mean, (labels != -100).sum()


def class_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    folder: Path,
    by_hand: bool,
    model: nn.Module,
    data: TensorDataset,
    loss_fn: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    clip: float | None = None,
    **settings: Any,
) -> Result:
    if by_hand:
        moved = optimizer(model.parameters())
        for _ in range(EPOCHS):
            for start in range(0, SAMPLES, BATCH):
                moved.zero_grad()
                loss = loss_fn(model, [t[start : start + BATCH] for t in data.tensors])
                (loss[0] if isinstance(loss, tuple) else loss).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                moved.step()
        return corners.result(model)
    common = {"global_batch_size": BATCH, "shuffle": False, "epochs": EPOCHS, "report": False}
    manager = manager_for(
        folder, training_mode="fsdp", max_grad_norm=clip, **{**common, **settings}
    )
    # An optimizer of the model's own parameters, as most scripts build it.
    manager.fit(model, data, data, loss_fn=loss_fn, optimizer=optimizer(model.parameters()))
    return full(manager)


def full(manager: Any) -> Result:
    state = manager.trainer.full_state()
    return {n: v.detach().clone() for n, v in state.items() if v.dtype != torch.int64}


def mlp_accumulated(folder: Path, by_hand: bool) -> Result:
    torch.manual_seed(1)
    layers = [nn.Flatten(), nn.Linear(50, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(7, 3)).double()
    more = {"gradient_accumulation_steps": 3, "lr_scaling": "linear", "base_batch_size": BATCH}
    return train(folder, by_hand, model, images(), class_loss, corners.sgd, **more)


def cnn_with_batchnorm(folder: Path, by_hand: bool) -> Result:
    more = {"sync_bn": True, "fsdp_reshard": False}
    return train(folder, by_hand, Cnn(), images(), class_loss, corners.sgd, 0.1, **more)


def gpt2_of_uneven_tokens(folder: Path, by_hand: bool) -> Result:
    more = {"gradient_accumulation_steps": 2}
    return train(folder, by_hand, gpt2(), texts(), token_loss, corners.adamw, 0.5, **more)


def gpt2_recomputed(folder: Path, by_hand: bool) -> Result:
    more = {} if by_hand else {"use_gradient_checkpointing": True}
    return train(folder, by_hand, gpt2(), texts(), token_loss, corners.adamw, **more)


def float32(data: TensorDataset) -> TensorDataset:
    return TensorDataset(*(t.float() if t.is_floating_point() else t for t in data.tensors))


def cnn_in_float32(folder: Path, by_hand: bool) -> Result:
    model, data, more = Cnn().float(), float32(images()), {"sync_bn": True}
    return train(folder, by_hand, model, data, class_loss, corners.sgd, 0.1, **more)


def gpt2_in_float32(folder: Path, by_hand: bool) -> Result:
    model, more = gpt2().float(), {"gradient_accumulation_steps": 2}
    return train(folder, by_hand, model, texts(), token_loss, corners.sgd, 0.5, **more)


def by_plan(name: str) -> nn.Module:
    """A tiny model of Hugging Face that says how its layers are split."""
    import transformers

    torch.manual_seed(8)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    more = {**sizes, **heads, "tie_word_embeddings": name == "Qwen2"}
    config = getattr(transformers, f"{name}Config")(**more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    for parent in list(model.modules()):
        for attribute, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                # Theirs rounds to float32, whatever the model's type is.
                exact = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64)
                setattr(parent, attribute, exact)
    return model


def llama(folder: Path, by_hand: bool, **more: Any) -> Result:
    return train(folder, by_hand, by_plan("Llama"), texts(), token_loss, corners.adamw, 0.5, **more)


def mistral(folder: Path, by_hand: bool, **more: Any) -> Result:
    more |= {"gradient_accumulation_steps": 2}
    return train(
        folder, by_hand, by_plan("Mistral"), texts(), token_loss, corners.adamw, 0.5, **more
    )


def tied_qwen2(folder: Path, by_hand: bool, **more: Any) -> Result:
    return train(folder, by_hand, by_plan("Qwen2"), texts(), token_loss, corners.sgd, 0.5, **more)


def qwen3(folder: Path, by_hand: bool, **more: Any) -> Result:
    return train(folder, by_hand, by_plan("Qwen3"), texts(), token_loss, corners.adamw, 0.5, **more)


PLANNED = [llama, mistral, tied_qwen2, qwen3]


def in_teams(folder: Path, names: list[str]) -> dict[str, Result]:
    by_name = {case.__name__: case for case in PLANNED}
    return {name: by_name[name](folder, False, tensor_parallel=2) for name in names}


LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 2}, {"fsdp_copy_size": 2}, {"tensor_parallel": 2}, {},
    {"fsdp_copy_size": 2}, {"fsdp_copy_size": 2}, {"training_mode": "ddp"},
]  # fmt: skip


def by_hand_steps(count: int) -> tuple[Result, list[float]]:
    """So many steps of the same training, in one process, and the loss before each."""
    model, data, losses = by_plan("Llama"), texts(), []
    moved = corners.adamw(model.parameters())
    starts = [start for _ in range(count) for start in range(0, SAMPLES, BATCH)]
    for start in starts[:count]:
        losses.append(float(token_loss(model, list(data.tensors))[0].detach()))
        moved.zero_grad()
        token_loss(model, [t[start : start + BATCH] for t in data.tensors])[0].backward()
        moved.step()
    return corners.result(model), losses


def changing_layouts(folder: Path) -> tuple[Result, list[list[str]], list[float]]:
    """One training whose ranks are laid out anew after every step; its files; its validations."""
    written: list[list[str]] = []
    losses: list[float] = []
    for step, layout in enumerate(LAYOUTS):
        keeps = {"enable_fault_tolerance": True, "run_name": "laid out", "resume": "auto"}
        settings = {
            "global_batch_size": BATCH,
            "shuffle": False,
            "max_steps": step + 1,
            **keeps,
            "epochs": 9,
        }
        manager = manager_for(folder, **{"training_mode": "fsdp", **settings, **layout})
        manager.setup_training(
            by_plan("Llama"), texts(), texts(), loss_fn=token_loss, optimizer=corners.adamw
        )
        losses.append(manager.evaluate()["loss"])
        manager.loop.run()
        manager.finish()
        newest = folder / "custom" / "laid out" / "checkpoints" / f"step-{step + 1:08d}"
        written.append(sorted(path.name for path in newest.glob("shard-*")))
    return full(manager), written, losses


def refused_team(folder: Path) -> None:
    train(folder, False, gpt2(), texts(), token_loss, corners.sgd, tensor_parallel=2)


def in_copies(folder: Path) -> Result:
    """Two copies of the model, each over two ranks."""
    model = gpt2()
    return train(folder, False, model, texts(), token_loss, corners.adamw, 0.5, fsdp_copy_size=2)


WIDE = 100  # matrices of 100 x 100 float64 are large enough to be built in parts


class LayerwiseRates(torch.optim.Optimizer):
    """Each parameter's rate depends on its norm and its largest element, read as numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                size = float(p.norm()) + p.square().sum().item()
                scale = size / (1e-9 + p.grad.norm().item())
                p.add_(p.grad, alpha=-group["lr"] * scale)


class OwnNoise(LayerwiseRates):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad + torch.zeros(p.shape, dtype=p.dtype))


def blocks_between() -> nn.Module:
    torch.manual_seed(1)
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))  # noqa: E731
    first = nn.Sequential(nn.Flatten(), nn.Linear(50, 8))
    return Deep(first, nn.ModuleList([block(), block()]), nn.Linear(8, 3)).double()


def penalised(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return class_loss(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())


def with_gradient_penalty(model: nn.Module, batch: list[Tensor]) -> Tensor:
    if not torch.is_grad_enabled():  # in validation
        return class_loss(model, batch)
    inputs = batch[0].detach().clone().requires_grad_()
    scores = model(inputs)
    (slope,) = torch.autograd.grad(scores.logsumexp(1).sum(), inputs, create_graph=True)
    return F.cross_entropy(scores, batch[1]) + 0.1 * slope.square().sum((1, 2, 3)).mean()


def layerwise_rates(folder: Path, by_hand: bool) -> Result:
    return train(folder, by_hand, blocks_between(), images(), class_loss, LayerwiseRates)


def state_before_the_first_step(folder: Path, by_hand: bool) -> Result:
    """Adagrad makes its state with the optimizer, of whole parameters."""
    adagrad = lambda parameters: torch.optim.Adagrad(parameters, lr=0.05)  # noqa: E731
    return train(folder, by_hand, blocks_between(), images(), class_loss, adagrad)


def penalty_on_whole_weights(folder: Path, by_hand: bool) -> Result:
    more = {} if by_hand else {"fsdp_blocks": []}
    return train(folder, by_hand, blocks_between(), images(), penalised, corners.sgd, **more)


def gradient_penalty_of_whole_weights(folder: Path, by_hand: bool) -> Result:
    more = {} if by_hand else {"fsdp_blocks": []}
    loss = with_gradient_penalty
    return train(folder, by_hand, blocks_between(), images(), loss, corners.sgd, **more)


def refusals(folder: Path) -> list[str]:
    """What is said of losses and optimizers that need more of a weight than its rows."""
    said = []
    adafactor = lambda parameters: torch.optim.Adafactor(parameters)  # noqa: E731
    for loss, optimizer in (
        (penalised, corners.sgd),
        (with_gradient_penalty, corners.sgd),
        (class_loss, adafactor),
        (class_loss, OwnNoise),
    ):
        manager = manager_for(folder, training_mode="fsdp", global_batch_size=BATCH)
        try:
            manager.fit(blocks_between(), images(), loss_fn=loss, optimizer=optimizer)
        except ModelError as error:
            said.append(str(error))
    return said


def wide() -> nn.Module:
    layers = [nn.Linear(WIDE, WIDE) for _ in range(3)]
    for layer in layers:
        nn.init.trunc_normal_(layer.weight, std=0.1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, WIDE), *layers, nn.Linear(WIDE, 3))
    return model.double()


def built_in_parts(folder: Path) -> dict[str, Any]:
    """A model given as a function, what a validation says that leaves ranks unequal batches, and
    predictions; before and after training."""
    held: list[int] = []

    def look(module: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():  # in validation: which weights are whole by now?
            held.append(sum(not hasattr(p, "to_local") for p in manager.model.parameters()))

    manager = manager_for(
        folder, training_mode="fsdp", global_batch_size=8, shuffle=False, epochs=2, seed=9
    )
    data, odd = images(), images()
    odd.tensors = tuple(t[:13] for t in odd.tensors)
    manager.setup_training(wide, data, odd, loss_fn=class_loss, optimizer=corners.sgd)
    for layer in manager.model:
        layer.register_forward_pre_hook(look)
    found = {"before": full(manager), "loss before": manager.evaluate()["loss"]}
    manager.train_epoch(manager.train_loader, 0)
    found |= {"after": full(manager), "loss after": manager.validate_epoch()["loss"]}
    found |= {"outputs": manager.predict(odd), "most whole": max(held, default=0)}
    manager.finish()
    return found | {"streamed": streamed(folder)}


def save_pretrained(folder: Path) -> Result:
    """A GPT-2 in a folder, in two files; returns its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 151, "n_positions": 16, "n_embd": 128, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(folder, max_shard_size="1MB")
    return {name: value.clone() for name, value in model.state_dict().items()}


class Deep(nn.Module):
    def __init__(self, first: nn.Module, blocks: nn.ModuleList, last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, blocks, last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def deep(by_hand: bool, folder: Path, dropout: float = 0.0, **settings: Any) -> Any:
    """Three equal blocks between two layers; the manager, unless by hand."""
    torch.manual_seed(1)
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))  # noqa: E731
    noise = [nn.Dropout(dropout)] if dropout else []
    first = nn.Sequential(nn.Flatten(), *noise, nn.Linear(50, 8))
    blocks = nn.ModuleList([block(), block(), block()])
    model = Deep(first, blocks, nn.Linear(8, 3)).double()
    if by_hand:
        return train(folder, True, model, images(), class_loss, corners.sgd, 0.5)
    config = {"global_batch_size": BATCH, "shuffle": False, "epochs": EPOCHS, "report": False}
    # deterministic: compiled from the first step on.
    config |= {"training_mode": "fsdp", "max_grad_norm": 0.5, "deterministic": True}
    manager = manager_for(folder, step_execution="compile", **config, **settings)
    manager.fit(model, images(), images(), loss_fn=class_loss, optimizer=corners.sgd)
    return manager


def compiled_blocks(
    folder: Path, fails_on: int, dropout: float = 0.0
) -> tuple[Result, str, str, int]:
    """With a compiler that changes nothing but counts, or fails on one rank: the weights, how steps
    ran and why, and how often compiled code was called."""
    calls = []

    def compile_it(function: Any, **_: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if int(os.environ.get("RANK", 0)) == fails_on:
                raise torch._dynamo.exc.Unsupported("no compiler here")
            calls.append(torch.is_grad_enabled())
            return function(*args, **kwargs)

        return called

    with mock.patch.object(torch, "compile", compile_it):
        manager = deep(False, folder, dropout)
    run = manager.trainer.execution
    assert all(calls)  # never in validation
    return full(manager), run.mode, run.reason, len(calls)


def really_compiled(folder: Path, recomputes: bool) -> tuple[Result, str, str]:
    manager = deep(False, folder, use_gradient_checkpointing=recomputes)
    run = manager.trainer.execution
    return full(manager), run.mode, run.reason


def compiled_otherwise(folder: Path) -> list[str]:
    """Why steps of models that cannot be compiled block by block run as they are."""
    reasons = []
    more = {"step_execution": "compile", "deterministic": True}
    for model, settings in (
        (gpt2(), {"use_gradient_checkpointing": True}),
        (nn.Sequential(nn.Flatten(), nn.Linear(50, 3)).double(), {}),
        (Cnn(), {"sync_bn": True}),
    ):
        manager = manager_for(
            folder, training_mode="fsdp", global_batch_size=BATCH, **more, **settings
        )
        data, loss = (
            (texts(), token_loss)
            if settings.get("use_gradient_checkpointing")
            else (images(), class_loss)
        )
        manager.setup_training(model, data, loss_fn=loss, optimizer=corners.sgd)
        reasons.append(manager.trainer.execution.reason)
        manager.finish()
    return reasons


def streamed(folder: Path) -> Result:
    """The weights that ranks have read from such a folder, each its own rows."""
    from transformers import AutoModelForCausalLM

    from multi_gpu_training.recipes.hugging_face import stream_pretrained

    manager = manager_for(folder, training_mode="fsdp", global_batch_size=8)
    build = lambda: stream_pretrained(AutoModelForCausalLM, folder / "gpt2")  # noqa: E731
    manager.setup_training(build, texts(), loss_fn=token_loss)
    state = full(manager)
    manager.finish()
    return state


CASES = [
    mlp_accumulated,
    cnn_with_batchnorm,
    gpt2_of_uneven_tokens,
    gpt2_recomputed,
    layerwise_rates,
    state_before_the_first_step,
    penalty_on_whole_weights,
    gradient_penalty_of_whole_weights,
]
FLOAT32 = [cnn_in_float32, gpt2_in_float32]
# Those of the corners that sharded training refuses.
REFUSED = {
    corners.unfreeze: "frozen, unfrozen or added",
    corners.add_a_group: "frozen, unfrozen or added",
    corners.hooks_on_gradients: "would be lost; use callbacks",
    corners.hooks_that_add_up: "would be lost; use callbacks",
    corners.criterion_that_learns: "trains those of the model alone",
    corners.another_head: "frozen, unfrozen or added",
    corners.add_a_group: "frozen, unfrozen or added",
    corners.criterion_that_learns: "holds parameters of the loss",
    corners.sparse_gradients: "sparse=True",
    corners.complex_parameters: "several types: complex128, float64",
    corners.compiled_by_the_user: "torch.compile wraps",
    corners.zipped_batches: "no sample in the micro-batch",
    corners.gan_with_batchnorm: "mixed torch.Tensor and DTensor",
    corners.hooks_on_gradients: "hooks on .* would be lost",
    corners.hooks_that_add_up: "hooks on .* would be lost",
}


def run(folder: Path, names: list[str]) -> dict[str, Result]:
    """Some cases, one after another, and any corner: many trainings in one start of the ranks."""
    by_name = {case.__name__: case for case in (*CASES, *FLOAT32)}
    return {
        name: by_name[name](folder, False) if name in by_name else sharded_corner(folder, name)
        for name in names
    }


def sharded_corner(folder: Path, name: str) -> Result:
    """One of the corners, but with its parameters split."""
    made: list[Any] = []
    plain, result = corners.manager_for, corners.result

    def sharded(folder: Path, **settings: Any) -> Any:
        made.append(manager_for(folder, training_mode="fsdp", **settings))
        return made[-1]

    def gathered(model: nn.Module) -> Result:
        return full(next(manager for manager in made if manager.model is model))

    corners.manager_for, corners.result = sharded, gathered
    try:
        return corners.train(folder, name)
    finally:
        corners.manager_for, corners.result = plain, result
