"""Language model (causal or masked) or text classifier of Hugging Face.

mgt train transformer                                     a small GPT-2 on Python's documentation
mgt train transformer --data-dir my-texts                 the same on the .txt files of a folder
mgt train transformer --model gpt2 --data-dir my-texts    a model of the hub, or of a folder
mgt train transformer --task masked                       a small BERT that fills in hidden tokens
mgt train transformer --task classification --data-dir reviews
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.fine_tuning import PRETRAINED_RATE, high_rate_note
from multi_gpu_training.recipes.hugging_face import fetch, has_weights
from multi_gpu_training.recipes.recipe import Announce, Job, Options, Recipe
from multi_gpu_training.recipes.transformer import sequences, text, tokens
from multi_gpu_training.recipes.transformer import transformer_model as models
from multi_gpu_training.recipes.transformer.attention import use_causal_attention
from multi_gpu_training.recipes.transformer.export import Export
from multi_gpu_training.recipes.transformer.linear_cross_entropy import scores_budget_bytes
from multi_gpu_training.recipes.transformer.lora import with_adapters
from multi_gpu_training.recipes.transformer.losses import (
    CausalLoss,
    ClassificationLoss,
    MaskedLoss,
    is_direct,
)
from multi_gpu_training.recipes.transformer.sequences import Sequences
from multi_gpu_training.recipes.transformer.tokens import Tokens
from multi_gpu_training.recipes.transformer.transformer_model import Task
from multi_gpu_training.recipes.transformer.transformer_pipeline import describe_text
from multi_gpu_training.training.callbacks import Callback

SMALL = "small"


class TransformerOptions(Options):
    """What this recipe can be told beside the settings of every run."""

    task: Task = Field("causal", description="what to train")
    model: str = Field(SMALL, description="small, a folder, a config file or a hub name")
    from_scratch: bool = Field(False, description="use only the model's config, not its weights")
    new_head: bool = Field(False, description="classification: a new head for the data's labels")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; only if you trust its author"
    )
    lora_rank: int = Field(
        0,
        ge=0,
        le=2**14,
        description="train LoRA adapters of this rank (peft); 0: train the whole model",
    )
    lora_alpha: float | None = Field(None, gt=0, description="LoRA alpha; default: 2 x lora_rank")
    lora_targets: str = Field("all-linear", description="layers with adapters: q_proj,v_proj ...")
    layers: int = Field(2, gt=0, le=10_000, description="model=small: number of layers")
    width: int = Field(128, gt=0, le=2**17, description="model=small: width of a layer")
    heads: int = Field(4, gt=0, le=2**17, description="model=small: attention heads")
    dropout: float = Field(0.0, ge=0, lt=1, description="model=small: dropout")
    tokenizer: str | None = Field(
        None, description="bytes, a folder or a hub name; default: the model's own"
    )
    pad_token: str | None = Field(None, description="the tokenizer's token to pad with")
    data_dir: str | None = Field(None, description="folder or file with text; default: pydoc_data")
    sequence_length: int = Field(128, gt=1, le=2**22, description="tokens per sample")
    layout: Literal["packed", "padded"] = Field(
        "packed", description="packed: join documents; padded: one line per sample"
    )
    mask_share: float = Field(0.15, gt=0, lt=1, description="masked: share of tokens to hide")


def build(config: MultiGPUConfig, options: TransformerOptions) -> Job:
    """Model, data and loss of the task; the optimizer is AdamW."""
    _check_together(options)
    own = "bytes" if options.model == SMALL else options.model
    words = tokens.load_tokens(
        options.tokenizer or own, options.pad_token, options.trust_remote_code
    )
    return job_around(options, words, config)


def job_around(
    options: TransformerOptions, words: Tokens, config: MultiGPUConfig, model: Any = None
) -> Job:
    """The job for a model that is there already, or for the one that the options name."""
    how = _classification if options.task == "classification" else _language_model
    found = how(options, words, config, model)
    return replace(found, description=describe_text(found.model, words, options))


def _language_model(
    options: TransformerOptions, words: Tokens, config: MultiGPUConfig, model: Any = None
) -> Job:
    padded, masked = options.layout == "padded", options.task == "masked"
    tokens.require(words, pad=padded, mask=masked)
    corpus = text.read_corpus(options.data_dir)
    model = _model(options, words, None, config) if model is None else model
    cut = sequences.pad_lines if padded else sequences.pack
    train = cut(corpus.train, words, options.sequence_length)
    if corpus.val is None:
        train, val = sequences.hold_back(train, config.seed)
    else:
        val = cut(corpus.val, words, options.sequence_length)
    callbacks = _callbacks(options, config, words, corpus.name, (train, val), model)
    if masked:
        assert words.mask is not None
        special = tuple(words.special())
        masking = sequences.Masking(options.mask_share, words.mask, words.words, special)
        return Job(
            model=model,
            dataset=sequences.MaskedSequences(train, masking),
            val_dataset=sequences.masked_once(val, masking),
            loss_fn=MaskedLoss(padded),
            callbacks=callbacks,
        )
    probe = models.one_layer(model)
    maskless = use_causal_attention(model, options.sequence_length, probe)
    direct = is_direct(model if probe is None else probe)
    return Job(
        model=model,
        dataset=sequences.plain(train),
        val_dataset=sequences.plain(val),
        loss_fn=CausalLoss(padded, not maskless, direct, scores_budget_bytes()),
        callbacks=callbacks,
    )


def _classification(
    options: TransformerOptions, words: Tokens, config: MultiGPUConfig, model: Any = None
) -> Job:
    tokens.require(words, pad=True, mask=False)
    texts = text.read_labelled(options.data_dir)
    model = _model(options, words, texts.labels(), config) if model is None else model
    train, val = _classified(texts, options, words, models.label_numbers(model.config), config.seed)
    loss = ClassificationLoss()
    return Job(
        model=model,
        dataset=sequences.plain(*train),
        val_dataset=sequences.plain(*val),
        loss_fn=loss,
        eval_fn=loss.evaluate,
        callbacks=_callbacks(options, config, words, texts.name, (train[0], val[0]), model),
    )


def _model(
    options: TransformerOptions, words: Tokens, labels: list[str] | None, run: MultiGPUConfig
) -> Any:
    """The model, checked against the tokenizer, the sequences and the labels."""
    # Adapters are made beside weights that are there.
    sharded = run.training_mode in (TrainingMode.FULLY_SHARDED, TrainingMode.AUTO)
    in_parts = sharded and not options.lora_rank
    length, small = options.sequence_length, options.model == SMALL
    if small:
        sizes = options.layers, options.width, options.heads, options.dropout
        config = models.small_config(options.task, words.size, length, *sizes)
    else:
        config = fetch("AutoConfig", "model", options.model, options.trust_remote_code)
    models.check(config, length, words.size, None if small else words.longest)
    fresh = small or options.from_scratch
    if labels is not None:
        architectures = getattr(config, "architectures", None) or [""]
        has_head = any(name.endswith("ForSequenceClassification") for name in architectures)
        own = has_head and not fresh and not options.new_head
        models.set_labels(config, labels, own=own)
    if options.layout == "padded" or labels is not None:
        config.pad_token_id = words.pad
    trust, new_head, task = options.trust_remote_code, options.new_head, options.task
    if fresh:
        model = models.from_config(task, config, trust, in_parts)
    else:
        model = models.load_model(task, options.model, config, new_head, trust, in_parts)
    if not options.lora_rank:
        return model
    return with_adapters(model, task, options.lora_rank, options.lora_alpha, options.lora_targets)


def _classified(
    texts: text.Labelled,
    options: TransformerOptions,
    words: Tokens,
    numbers: dict[str, int],
    seed: int,
) -> tuple[tuple[Sequences, torch.Tensor], tuple[Sequences, torch.Tensor]]:
    """Samples and labels for training and validation."""
    found = [*texts.train, *(texts.val or [])]
    unknown = sorted({label for _, label in found if label not in numbers})
    if unknown:
        raise DataError(
            f"{texts.name}: the validation texts have the label {unknown[0]!r}, which no training "
            f"text has (they have {', '.join(numbers)}); correct it, or add texts for training"
        )
    encoded = (words.encode_sample(sample, options.sequence_length) for sample, _ in found)
    samples = sequences.pad(encoded, words)
    labels = torch.tensor([numbers[label] for _, label in found])
    if texts.val is None:
        train, val = sequences.parts(len(found), seed, [label for _, label in found])
    else:
        train, val = torch.arange(len(found)).tensor_split([len(texts.train)])
    return (samples.select(train), labels[train]), (samples.select(val), labels[val])


def _check_together(options: TransformerOptions) -> None:
    given = options.model_fields_set
    problems = []
    if options.model != SMALL:
        for name in ("layers", "width", "heads", "dropout"):
            if name in given:
                problems.append(
                    f"{name}={getattr(options, name)} is for model=small; {options.model!r} has "
                    f"its own: drop {name}, or change the model's config.json"
                )
    elif options.from_scratch:
        problems.append("from_scratch=true is for a model from elsewhere; model=small always is")
    for name in ("lora_alpha", "lora_targets"):
        if name in given and not options.lora_rank:
            problems.append(f"{name}={getattr(options, name)} does nothing without lora_rank")
    if options.task != "classification" and options.new_head:
        problems.append(f"new_head=true is for task=classification, not task={options.task}")
    if options.task != "masked" and "mask_share" in given:
        problems.append(f"mask_share={options.mask_share} is for task=masked, not {options.task}")
    if options.task == "classification" and "layout" in given and options.layout == "packed":
        problems.append("layout=packed is for language models; texts with a label each are padded")
    if problems:
        raise ConfigError(problems)


def _callbacks(
    options: TransformerOptions,
    config: MultiGPUConfig,
    words: Tokens,
    name: str,
    parts: tuple[Sequences, Sequences],
    model: Any,
) -> list[Callback]:
    """What is said at the start, and the model that is written at the end."""
    callbacks: list[Callback] = [Export(words, _describe(name, *parts, words, model))]
    note = high_rate_note(config.learning_rate) if is_pretrained(options) else None
    return [*callbacks, Announce(note)] if note else callbacks


def is_pretrained(options: TransformerOptions) -> bool:
    """Whether training starts from weights that someone has trained."""
    fresh = options.model == SMALL or options.from_scratch
    return not fresh and has_weights(options.model)


def defaults_for(options: TransformerOptions) -> dict[str, float]:
    """Weights that are trained already are only adjusted: a high rate would undo them."""
    return {"learning_rate": PRETRAINED_RATE} if is_pretrained(options) else {}


def _describe(name: str, train: Sequences, val: Sequences, words: Tokens, model: Any) -> str:
    """One line that says what is trained on what."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    part = "" if trained == parameters else f" ({trained:,} trained)"
    return (
        f"{type(model).__name__} of {parameters:,} parameters{part}; {name} as {words.describe()}: "
        f"{len(train):,} samples with {train.count():,} tokens for training, {len(val):,} with "
        f"{val.count():,} for validation"
    )


recipe = Recipe(
    name="transformer",
    defaults={
        "epochs": 3,
        "batch_size": 16,
        "learning_rate": 2e-3,
        "base_batch_size": 16,
        "schedule": "cosine",
        "warmup_steps": 20,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    },
    options=TransformerOptions,
    build=build,
    defaults_for=defaults_for,
)
