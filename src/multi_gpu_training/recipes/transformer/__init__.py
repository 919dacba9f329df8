"""Language model (causal or masked) or text classifier of Hugging Face.

mgt train transformer                                     a small GPT-2 on Python's documentation
mgt train transformer --data-dir my-texts                 the same on the .txt files of a folder
mgt train transformer --model gpt2 --data-dir my-texts    a model of the hub, or of a folder
mgt train transformer --task masked                       a small BERT that fills in hidden tokens
mgt train transformer --task classification --data-dir reviews
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.recipe import Job, Options, Recipe
from multi_gpu_training.recipes.transformer.attention import use_causal_attention
from multi_gpu_training.recipes.transformer.export import Export
from multi_gpu_training.recipes.transformer.linear_cross_entropy import scores_budget_bytes
from multi_gpu_training.recipes.transformer.losses import (
    CausalLoss,
    ClassificationLoss,
    MaskedLoss,
    is_direct,
)
from multi_gpu_training.recipes.transformer.sequences import (
    MaskedSequences,
    Masking,
    Sequences,
    hold_back,
    masked_once,
    pack,
    pad,
    pad_lines,
    plain,
)
from multi_gpu_training.recipes.transformer.text import (
    Corpus,
    Labelled,
    read_corpus,
    read_labelled,
)
from multi_gpu_training.recipes.transformer.tokens import Tokens, load_tokens, require
from multi_gpu_training.recipes.transformer.transformer_model import (
    Task,
    check,
    from_config,
    label_numbers,
    load_config,
    load_model,
    set_labels,
    small_config,
)

SMALL = "small"


class TransformerOptions(Options):
    """What this recipe can be told beside the settings of every run."""

    task: Task = Field("causal", description="causal, masked or classification")
    model: str = Field(SMALL, description="small, a folder, a config file or a hub name")
    from_scratch: bool = Field(False, description="use only the model's config, not its weights")
    new_head: bool = Field(False, description="classification: a new head for the data's labels")
    layers: int = Field(2, gt=0, description="of model=small")
    width: int = Field(128, gt=0, description="of model=small")
    heads: int = Field(4, gt=0, description="of model=small")
    dropout: float = Field(0.0, ge=0, lt=1, description="of model=small")
    tokenizer: str | None = Field(None, description="bytes, a folder or a hub name; None: its own")
    pad_token: str | None = Field(None, description="word of the tokenizer to pad with")
    data_dir: str | None = Field(None, description="folder with text; None is pydoc_data")
    sequence_length: int = Field(128, gt=1, description="tokens of a sample")
    layout: Literal["packed", "padded"] = Field("packed", description="padded: a line a sample")
    mask_share: float = Field(0.15, gt=0, lt=1, description="masked: tokens to hide")


def build(config: MultiGPUConfig, options: TransformerOptions) -> Job:
    """Model, data and loss of the task; the optimizer is AdamW."""
    _check_together(options)
    own = SMALL if options.model == SMALL else options.model
    tokens = load_tokens(options.tokenizer or ("bytes" if own == SMALL else own), options.pad_token)
    if options.task == "classification":
        return _classification(options, tokens)
    return _language_model(options, tokens)


def _language_model(options: TransformerOptions, tokens: Tokens) -> Job:
    padded, masked = options.layout == "padded", options.task == "masked"
    require(tokens, pad=padded, mask=masked)
    corpus = read_corpus(options.data_dir)
    model = _model(options, tokens, None)
    train, val = _sequences(corpus, options, tokens)
    text = _describe(corpus.name, train, val, tokens, model)
    callbacks = [Export(tokens, text)]
    if masked:
        assert tokens.mask is not None
        masking = Masking(options.mask_share, tokens.mask, tokens.words, tuple(tokens.special()))
        return Job(
            model=model,
            dataset=MaskedSequences(train, masking),
            val_dataset=masked_once(val, masking),
            loss_fn=MaskedLoss(padded),
            callbacks=callbacks,
        )
    maskless = use_causal_attention(model, options.sequence_length)
    return Job(
        model=model,
        dataset=plain(train),
        val_dataset=plain(val),
        loss_fn=CausalLoss(padded, not maskless, is_direct(model), scores_budget_bytes()),
        callbacks=callbacks,
    )


def _classification(options: TransformerOptions, tokens: Tokens) -> Job:
    require(tokens, pad=True, mask=False)
    texts = read_labelled(options.data_dir)
    model = _model(options, tokens, texts.labels())
    train, val = _classified(texts, options, tokens, label_numbers(model.config))
    loss = ClassificationLoss()
    text = _describe(texts.name, train[0], val[0], tokens, model)
    return Job(
        model=model,
        dataset=plain(*train),
        val_dataset=plain(*val),
        loss_fn=loss,
        eval_fn=loss.evaluate,
        callbacks=[Export(tokens, text)],
    )


def _model(options: TransformerOptions, tokens: Tokens, labels: list[str] | None) -> Any:
    """The model, checked against the tokenizer, the sequences and the labels."""
    length = options.sequence_length
    if options.model == SMALL:
        sizes = options.layers, options.width, options.heads, options.dropout
        config = small_config(options.task, tokens.size, length, *sizes)
    else:
        config = load_config(options.model)
    check(config, length, tokens.size, None if options.model == SMALL else tokens.longest)
    fresh = options.model == SMALL or options.from_scratch
    if labels is not None:
        architectures = getattr(config, "architectures", None) or [""]
        has_head = any(name.endswith("ForSequenceClassification") for name in architectures)
        set_labels(config, labels, own=has_head and not fresh and not options.new_head)
    if options.layout == "padded" or labels is not None:
        config.pad_token_id = tokens.pad
    if fresh:
        return from_config(options.task, config)
    return load_model(options.task, options.model, config, options.new_head)


def _sequences(
    corpus: Corpus, options: TransformerOptions, tokens: Tokens
) -> tuple[Sequences, Sequences]:
    cut = pack if options.layout == "packed" else pad_lines
    train = cut(corpus.train, tokens, options.sequence_length)
    if corpus.val is None:
        return hold_back(train)
    return train, cut(corpus.val, tokens, options.sequence_length)


def _classified(
    texts: Labelled, options: TransformerOptions, tokens: Tokens, numbers: dict[str, int]
) -> tuple[tuple[Sequences, torch.Tensor], tuple[Sequences, torch.Tensor]]:
    """Samples and labels for training and validation."""
    found = [*texts.train, *(texts.val or [])]
    unknown = sorted({label for _, label in found if label not in numbers})
    if unknown:
        raise DataError(
            f"{texts.name}: the validation texts have the label {unknown[0]!r}, which no training "
            f"text has (they have {', '.join(numbers)}); correct it, or add texts for training"
        )
    samples = pad((tokens.encode_sample(t, options.sequence_length) for t, _ in found), tokens)
    labels = torch.tensor([numbers[label] for _, label in found])
    place = torch.arange(len(found))
    if texts.val is None:
        train, val = (part.tokens[:, 0].long() for part in hold_back(Sequences(place[:, None])))
    else:
        train, val = place[: len(texts.train)], place[len(texts.train) :]
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
    if options.task != "classification" and options.new_head:
        problems.append(f"new_head=true is for task=classification, not task={options.task}")
    if options.task != "masked" and "mask_share" in given:
        problems.append(f"mask_share={options.mask_share} is for task=masked, not {options.task}")
    if options.task == "classification" and "layout" in given and options.layout == "packed":
        problems.append("layout=packed is for language models; texts with a label each are padded")
    if problems:
        raise ConfigError(problems)


def _describe(name: str, train: Sequences, val: Sequences, tokens: Tokens, model: Any) -> str:
    """One line that says what is trained on what."""
    parameters = sum(p.numel() for p in model.parameters())
    return (
        f"{type(model).__name__} of {parameters:,} parameters; {name} as {tokens.describe()}: "
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
)
