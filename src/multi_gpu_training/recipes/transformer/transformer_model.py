"""The model: a small one, or one of `transformers` from a config, a folder or the hub."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch

from multi_gpu_training.errors import ModelError
from multi_gpu_training.recipes.hugging_face import (
    check_memory,
    fetch,
    first_line,
    has_weights,
    stream_pretrained,
    transformers,
)
from multi_gpu_training.training.strategy.deferred_init import build_deferred, source_of

Task = Literal["causal", "masked", "classification"]

CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
}


def small_config(
    task: Task, size: int, length: int, layers: int, width: int, heads: int, dropout: float
) -> Any:
    """A GPT-2 for causal models, a BERT for the others, of the size asked for."""
    if width % heads:
        raise ModelError(
            f"width={width} cannot be divided over heads={heads}; use a multiple of {heads}"
        )
    if task == "causal":
        return transformers().GPT2Config(
            vocab_size=size,
            n_positions=length,
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
        )
    return transformers().BertConfig(
        vocab_size=size,
        max_position_embeddings=length,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        type_vocab_size=1,
    )


def from_config(task: Task, config: Any, trust: bool = False, in_parts: bool = False) -> Any:
    """A model with fresh weights, from torch's generator as it stands. in_parts: they are computed
    when the model is placed, each rank keeping its own part."""

    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"the config of this {config.model_type} model asks for quantized weights, and fresh "
            "ones are not; take quantization_config out of it",
            code="MGT404",
        )

    def build() -> Any:
        return getattr(transformers(), CLASSES[task]).from_config(
            config, dtype=torch.float32, trust_remote_code=trust
        )

    try:
        if in_parts:
            return build_deferred(build)
        check_memory(f"this {config.model_type} model", build)
        return build()
    except ModelError:
        raise
    except Exception as error:  # a config of nonsense fails in every way there is
        raise ModelError(
            f"a {config.model_type!r} model cannot do task={task}: {first_line(error)}"
        ) from None


def load_model(
    task: Task,
    name: str,
    config: Any,
    new_head: bool = False,
    trust: bool = False,
    in_parts: bool = False,
) -> Any:
    """The model in `name` with its weights, in float32; fresh weights where only a config is.

    new_head: its head may have another size than the config says; then it is learnt anew.
    in_parts: weights are read when the model is placed, each rank its own part.
    """
    if not has_weights(name):
        return from_config(task, config, trust, in_parts)
    if in_parts and not new_head and not trust and Path(name).expanduser().is_dir():
        kind = getattr(transformers(), CLASSES[task])
        return stream_pretrained(kind, Path(name).expanduser(), config=config)
    # By default the weights come in the type they were saved in; training in bf16 alone learns
    # badly, while mixed precision wants float32 weights.
    more: dict[str, Any] = {"ignore_mismatched_sizes": True} if new_head else {}
    more |= {"config": config, "dtype": torch.float32}
    return fetch(CLASSES[task], "model", name, trust, **more)


def one_layer(model: Any) -> Any:
    """For a model whose weights are still to come: one of its kind with a single layer, to try
    things out on. None for any other."""
    if source_of(model) is None:
        return None
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.random.fork_rng(devices=[]):
        return type(model)(config).float()


def check(config: Any, length: int, size: int, longest: int | None = None) -> None:
    """Raise where the model cannot take the sequences or the vocabulary. `longest`: what its
    tokenizer says it takes."""
    problems = []
    limits = [getattr(config, "max_position_embeddings", None), longest]
    longest = min((limit for limit in limits if limit is not None), default=length)
    if length > longest:
        problems.append(
            f"sequence_length={length} is longer than the {longest} tokens that this "
            f"{config.model_type} takes; use at most {longest}"
        )
    known = getattr(config, "vocab_size", None)
    if known is not None and size > known:
        problems.append(
            f"the tokenizer has {size:,} words but this {config.model_type} only {known:,}; use "
            "the tokenizer that belongs to the model"
        )
    if getattr(config, "output_router_logits", False):
        problems.append(
            "output_router_logits=true adds a loss that this recipe does not; set it to false in "
            "the model's config, or train with your own loss_fn (see docs/own-model.md)"
        )
    if problems:
        raise ModelError(problems)


def set_labels(config: Any, labels: list[str], own: bool) -> None:
    """Give the head one output a label; with `own`, the model has a head for its labels already."""
    if not own:
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
        return
    missing = [label for label in labels if label not in label_numbers(config)]
    if missing:
        raise ModelError(
            f"the data has the label {missing[0]!r}, which the model's head does not have (it has "
            f"{', '.join(map(str, config.id2label.values()))}); correct the labels, or set "
            "new_head=true to learn a new head"
        )


def label_numbers(config: Any) -> dict[str, int]:
    """Number of each label, under its name and, where names are only LABEL_0 and so on, as 0."""
    found = {str(name): number for name, number in config.label2id.items()}
    if all(name == f"LABEL_{number}" for name, number in found.items()):
        found |= {str(number): number for number in found.values()}
    return found
