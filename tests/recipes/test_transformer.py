"""The transformer recipe: same on any number of ranks, learns, and is loaded by from_pretrained."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.training import adamw, difference, sgd
from ranks import run_ranks
from torch import Tensor
from transformer_folders import reviews, tiny_bert, transformers

import multi_gpu_training as public
from multi_gpu_training import Callback
from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.loader import Feeding, ShareLoader
from multi_gpu_training.data.order import ShuffledBatches
from multi_gpu_training.recipes import hugging_face
from multi_gpu_training.recipes.recipe import Job, find_recipe
from multi_gpu_training.recipes.transformer import text
from multi_gpu_training.recipes.transformer.attention import use_causal_attention
from multi_gpu_training.recipes.transformer.losses import is_direct
from multi_gpu_training.recipes.transformer.sequences import (
    IGNORED,
    MaskedSequences,
    Masking,
    Sequences,
)
from multi_gpu_training.recipes.transformer.tokens import ByteTokens

TINY = {"layers": 1, "width": 16, "heads": 2, "sequence_length": 24}
TASKS = {
    "causal": {},
    "causal-padded": {"layout": "padded"},
    "masked": {"task": "masked"},
    "masked-padded": {"task": "masked", "layout": "padded"},
    "classification": {"task": "classification"},
}


class Stop(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step == self.step:
            raise Stop


def build(options: dict[str, Any], **settings: Any) -> Job:
    recipe = find_recipe("transformer")
    torch.manual_seed(0)
    return recipe.build(
        recipe.config({"device": "cpu", **settings}), recipe.options(**{**TINY, **options})
    )


def train(
    folder: Path,
    settings: dict[str, Any],
    options: dict[str, Any],
    optimizer: Any = None,
    stop: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Metrics, weights and run folder, from a rank that keeps quiet; None where it was stopped."""
    recipe = find_recipe("transformer")
    jobs: list[Job] = []

    def build(config: Any, chosen: Any) -> Job:
        job = recipe.build(config, chosen)
        job.model.to(dtype)
        if optimizer is not None:
            job = dataclasses.replace(job, optimizer=optimizer)
        if stop is not None:
            job = dataclasses.replace(job, callbacks=[*job.callbacks, StopAfter(stop)])
        jobs.append(job)
        return job

    quiet = {
        "device": "cpu",
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "enable_fault_tolerance": False,
        "warmup_steps": 0,
    }
    chosen = recipe.options(**{**TINY, **options})
    try:
        result = dataclasses.replace(recipe, build=build).train(
            recipe.config({**quiet, **settings}), chosen
        )
    except Stop:
        return None
    weights = {name: value.detach().clone() for name, value in jobs[0].model.named_parameters()}
    return result.metrics, weights, result.folder


def batch_of(job: Job, count: int = 6) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*map(job.dataset.__getitem__, range(count)))]  # noqa: B905


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of two short documents with lines of very different lengths."""
    folder = tmp_path / "texts"
    folder.mkdir()
    line = "The quick brown fox jumps over the lazy dog. "
    lines = [line[: 2 + 7 * (i % 6)] for i in range(64)]
    (folder / "a.txt").write_text("\n".join(lines))
    (folder / "b.txt").write_text("\n\n".join(reversed(lines)))
    return folder


# Same result


@pytest.mark.parametrize("kind", TASKS)
def test_two_and_three_ranks_learn_what_one_learns(tmp_path: Path, texts: Path, kind: str) -> None:
    options = dict(TASKS[kind])
    if kind != "classification":
        options["data_dir"] = str(texts)
    # Seven samples over three ranks and two micro-batches: shares and token counts differ.
    settings = {"global_batch_size": 7, "max_steps": 3}
    metrics, reference, _ = run_ranks(
        1, train, tmp_path, settings, options, sgd, None, torch.float64
    )[0]
    settings["gradient_accumulation_steps"] = 2
    for world in (2, 3):
        for seen, ours, _ in run_ranks(
            world, train, tmp_path, settings, options, sgd, None, torch.float64
        ):
            apart = difference(ours, reference)
            # Softmax takes a key's bias away: its gradient is zero, it holds rounding alone.
            apart = {name: far for name, far in apart.items() if not name.endswith("key.bias")}
            assert max(apart.values()) <= 1e-9, max(apart, key=apart.__getitem__)
            # The sum of a step's weights travels as float64 here; metrics are float64 sums.
            assert seen["loss"] == pytest.approx(metrics["loss"], rel=1e-9)


def test_validation_loss_is_equal_on_any_number_of_ranks_with_the_recipes_own_settings(
    tmp_path: Path, texts: Path
) -> None:
    settings = {"global_batch_size": 6, "max_steps": 8, "learning_rate": 1e-3}
    options = {"data_dir": str(texts)}
    [one] = run_ranks(1, train, tmp_path, settings, options)
    for world in (2, 3):
        for seen, _, _ in run_ranks(world, train, tmp_path, settings, options):
            # AdamW in float32: rounding of gradients near zero becomes part of a step.
            assert seen["loss"] == pytest.approx(one[0]["loss"], rel=1e-4)


def test_hidden_tokens_are_the_samples_own_on_any_rank_and_in_any_epoch_others() -> None:
    numbers = torch.arange(40 * 24, dtype=torch.int32).view(40, 24) % 250
    dataset = MaskedSequences(Sequences(numbers), Masking(0.3, 257, 256, (256, 257, 258)))

    def looks(ranks: int, epoch: int) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for rank in range(ranks):
            feeding = Feeding(micro_size=16, seed=3, rank=rank, ranks=ranks)
            loader = ShareLoader(dataset, ShuffledBatches(40, 16), feeding)
            loader.seek(epoch)
            for batch in loader:
                share = share_of(batch)
                assert share is not None
                found.update(zip(share.indices, torch.stack(batch[:2], 1), strict=True))
        return found

    one = looks(1, 0)
    for ranks in (2, 3):
        other = looks(ranks, 0)
        assert all(torch.equal(one[i], other[i]) for i in range(40))
    later = looks(1, 1)
    assert not any(torch.equal(one[i], later[i]) for i in range(40))


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, texts: Path) -> None:
    options = {"task": "masked", "data_dir": str(texts)}
    settings = {
        "global_batch_size": 8,
        "epochs": 2,
        "checkpoint_frequency": 2,
        "enable_fault_tolerance": True,
        "run_name": "whole",
    }
    whole = run_ranks(2, train, tmp_path, settings, options, adamw)
    settings["run_name"] = "stopped"
    run_ranks(2, train, tmp_path, settings, options, adamw, 7)
    assert not (tmp_path / "transformer/stopped/model").exists()
    resumed = run_ranks(2, train, tmp_path, {**settings, "resume": "auto"}, options, adamw)
    for (metrics, ours, _), (expected, reference, _) in zip(resumed, whole, strict=True):
        assert all(torch.equal(ours[name], reference[name]) for name in reference)
        assert metrics == expected


# The losses


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_causal_loss_is_the_one_of_the_model_itself(texts: Path, layout: str) -> None:
    job = build({"layout": layout, "data_dir": str(texts)})
    assert job.loss_fn.direct
    assert not job.loss_fn.masked
    batch = batch_of(job, 12)
    mean, weight = job.loss_fn(job.model, batch)
    ids = batch[0].long()
    lengths = batch[1] if layout == "padded" else torch.full((12,), ids.shape[1])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    plain = transformers.GPT2LMHeadModel(job.model.config)
    plain.set_attn_implementation("eager")
    plain.load_state_dict(job.model.state_dict())
    labels = torch.where(mask.bool(), ids, IGNORED)
    own = plain(input_ids=ids, attention_mask=mask, labels=labels).loss
    assert int(weight) == int((lengths - 1).sum())
    assert float(mean.detach()) == pytest.approx(float(own.detach()), rel=1e-5)
    gradients = torch.autograd.grad(mean, list(job.model.parameters()))
    for mine, other in zip(
        gradients, torch.autograd.grad(own, list(plain.parameters())), strict=True
    ):
        assert float((mine - other).norm()) <= 1e-5 * float(other.norm()) + 1e-7


def test_a_model_that_bends_its_scores_is_not_taken_apart() -> None:
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 40,
    }
    scaled = transformers.GraniteConfig(**small, logits_scaling=2.0)
    straight = transformers.LlamaConfig(**small)
    assert not is_direct(transformers.GraniteForCausalLM(scaled))
    assert is_direct(transformers.LlamaForCausalLM(straight))


def test_a_model_with_a_window_keeps_its_own_attention() -> None:
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 40,
    }
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**small, sliding_window=8))
    assert not use_causal_attention(model, 16)
    ids = torch.arange(8)[None]
    before = model(ids).logits
    assert use_causal_attention(model, 8)
    assert torch.allclose(model(ids).logits, before, atol=1e-6)


def test_no_mask_is_built_for_packed_text(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: Any = None, is_causal: bool = False, **more: Any) -> Tensor:
        masks.append((attn_mask, is_causal))
        return attention(*args, attn_mask=attn_mask, is_causal=is_causal, **more)

    job = build({"data_dir": str(texts)})
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    job.loss_fn(job.model, batch_of(job))
    assert masks == [(None, True)]


@pytest.mark.parametrize("kind", ["causal", "masked-padded"])
def test_the_loss_compiles_as_one_graph(texts: Path, kind: str) -> None:
    job = build({**TASKS[kind], "data_dir": str(texts)})
    torch._dynamo.reset()
    compiled = torch.compile(job.loss_fn, backend="aot_eager", fullgraph=True, dynamic=False)
    batch = batch_of(job)
    found, expected = compiled(job.model, batch), job.loss_fn(job.model, batch)
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert int(found[1]) == int(expected[1])


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, texts: Path, kind: str) -> None:
    options = {**TASKS[kind], "data_dir": str(texts)}
    settings = {"max_steps": 2, "batch_size": 8}
    _, reference, _ = train(tmp_path / "a", settings, options, sgd)
    checkpointed = {**settings, "use_gradient_checkpointing": True}
    _, ours, _ = train(tmp_path / "b", checkpointed, options, sgd)
    # The same operations twice: at most their rounding differs.
    assert max(difference(ours, reference).values()) <= 1e-6


# Learning and handing over


@pytest.mark.slow
def test_the_default_model_learns_bytes_of_the_documentation(tmp_path: Path) -> None:
    settings = {"max_steps": 60, "epochs": 1, "learning_rate": 3e-3}
    options = {"width": 64, "sequence_length": 64}
    metrics, _, _ = train(tmp_path, settings, options)
    # The frequencies of the bytes alone give 3.2; guessing gives ln 259 = 5.6.
    assert metrics["loss"] < 3.1


def test_the_run_leaves_a_folder_that_from_pretrained_loads(tmp_path: Path, texts: Path) -> None:
    settings = {"max_steps": 4, "epochs": 1, "enable_fault_tolerance": True}
    _, weights, run = train(tmp_path, settings, {"data_dir": str(texts)})
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    loaded = dict(model.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert model.config._attn_implementation == "sdpa"
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    text = "Zwölf <Boxkämpfer>\n\tjagen €"
    assert tokenizer(text)["input_ids"] == ByteTokens().encode(text).tolist()
    assert tokenizer.decode(list(text.encode())) == text
    special = [tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.eos_token_id]
    assert special == [256, 257, 258]


def uphill(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, maximize=True)


def test_the_best_weights_are_handed_over_not_the_last(tmp_path: Path, texts: Path) -> None:
    from safetensors.torch import load_file

    # Uphill: the first epoch is better than the last.
    settings = {"epochs": 3, "schedule": "constant", "enable_fault_tolerance": True}
    _, last, run = train(tmp_path, settings, {"data_dir": str(texts)}, optimizer=uphill)
    best = load_file(run / "checkpoints/best/model.safetensors")
    given = dict(
        transformers.AutoModelForCausalLM.from_pretrained(run / "model").named_parameters()
    )
    name = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(given[name], best[name])
    assert not torch.equal(given[name], last[name])


def test_a_folder_is_fine_tuned_with_its_own_tokenizer_and_names_its_labels(tmp_path: Path) -> None:
    options = {
        "task": "classification",
        "model": str(tiny_bert(tmp_path / "bert")),
        "data_dir": str(reviews(tmp_path / "reviews")),
    }
    chosen = {"max_steps": 30, "batch_size": 8, "epochs": 20, "learning_rate": 1e-2}
    recipe = find_recipe("transformer")
    settings = {"device": "cpu", "progress": "off", "tensorboard": False, "save_dir": str(tmp_path)}
    found = recipe.train(
        recipe.config({**settings, **chosen}), recipe.options(**options, sequence_length=24)
    )
    assert found.metrics["accuracy"] == 1.0
    assert found.metrics["f1"] == 1.0
    classify = transformers.AutoModelForSequenceClassification.from_pretrained(
        found.folder / "model"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.folder / "model")
    number = int(classify(**tokenizer("text bbbbb 1", return_tensors="pt")).logits.argmax())
    assert classify.config.id2label[number] == "good"


def test_weights_of_a_folder_are_used_unless_from_scratch(tmp_path: Path, texts: Path) -> None:
    folder = tiny_bert(tmp_path / "bert", kind=transformers.BertForMaskedLM)
    there = transformers.BertForMaskedLM.from_pretrained(folder).state_dict()
    name = "bert.encoder.layer.0.attention.self.query.weight"
    recipe = find_recipe("transformer")
    for scratch in (False, True):
        options = recipe.options(
            task="masked",
            model=str(folder),
            from_scratch=scratch,
            data_dir=str(texts),
            sequence_length=16,
        )
        torch.manual_seed(5)
        model = recipe.build(recipe.config({"device": "cpu"}), options).model
        assert torch.equal(model.state_dict()[name], there[name]) is not scratch


# Guide 003's block, on a folder of the name that it asks for

GUIDE = """
from transformers import AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("bert-base-uncased")
tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")

# Multi-GPU training works out of the box
config = MultiGPUConfig(training_mode=TrainingMode.DATA_PARALLEL)
manager = MultiGPUTrainingManager(config)
"""


def test_a_bare_bert_trains_in_data_parallel_mode_with_the_users_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_bert(tmp_path / "bert-base-uncased")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {name: getattr(public, name) for name in public.__all__}
    exec(GUIDE, names)
    model, tokenizer, manager = names["model"], names["tokenizer"], names["manager"]
    texts = [("ab" * (1 + i % 5), i % 2) for i in range(20)]

    def collate(samples: list[tuple[str, int]]) -> dict[str, Tensor]:
        words = tokenizer([text for text, _ in samples], padding=True, return_tensors="pt")
        return {**words, "labels": torch.tensor([label for _, label in samples])}

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        rest = {key: value for key, value in batch.items() if key != "labels"}
        pooled = model(**rest).pooler_output
        return torch.nn.functional.cross_entropy(pooled[:, :2], labels)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loader = torch.utils.data.DataLoader(texts, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    manager.config.progress = "off"
    result = manager.fit(model, loader, loss_fn=loss_fn, epochs=1)
    assert result.steps == 5
    assert not torch.equal(model.pooler.dense.weight, before["pooler.dense.weight"])


# Fine-tuning


def test_pretrained_weights_get_a_rate_that_keeps_them(tmp_path: Path) -> None:
    recipe = find_recipe("transformer")
    folder = str(tiny_bert(tmp_path / "bert"))

    def rate(**options: Any) -> float:
        return recipe.config({}, recipe.options(**options)).learning_rate

    assert rate() == 2e-3
    assert 2e-5 <= rate(model=folder) <= 5e-5
    assert 2e-5 <= rate(model="gpt2") <= 5e-5
    assert rate(model=folder, from_scratch=True) == 2e-3
    assert rate(model=f"{folder}/config.json") == 2e-3
    (tmp_path / "bert" / "model.safetensors").unlink()
    assert rate(model=folder) == 2e-3  # a config alone makes fresh weights
    given = recipe.config({"learning_rate": 3e-3}, recipe.options(model="gpt2"))
    assert given.learning_rate == 3e-3


@pytest.mark.parametrize(("rate", "said"), [(2e-3, True), (1e-3, False)])
def test_a_high_rate_for_pretrained_weights_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: float, said: bool
) -> None:
    folder = str(tiny_bert(tmp_path / "bert", kind=transformers.BertForMaskedLM))
    options = {"model": folder, "task": "masked", "sequence_length": 16}
    settings = {"max_steps": 1, "learning_rate": rate, "progress": "lines"}
    recipe = find_recipe("transformer")
    quiet = {"device": "cpu", "tensorboard": False, "save_dir": str(tmp_path)}
    recipe.train(recipe.config({**quiet, **settings}), recipe.options(**options))
    shown = " ".join(capsys.readouterr().out.split())
    assert ("learning_rate=0.002 is high for pretrained weights" in shown) == said


def test_fine_tuning_with_the_defaults_beats_training_from_scratch(tmp_path: Path) -> None:
    """One tiny model, taught half of a text; then 20 steps on the other half, for three seeds."""
    found = text.read_corpus(None).train
    for name, part in (("first", found[::2]), ("second", found[1::2])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part))
    taught = {"data_dir": str(tmp_path / "first.txt"), "sequence_length": 64}
    _, _, folder = train_with_defaults(
        tmp_path, {"max_steps": 80}, {**taught, "layers": 1, "width": 32, "heads": 2}
    )
    options = {**taught, "model": f"{folder}/model", "data_dir": str(tmp_path / "second.txt")}
    for seed in range(3):
        same = {"max_steps": 20, "seed": seed}
        tuned = train_with_defaults(tmp_path, same, options)[0]["loss"]
        fresh = train_with_defaults(tmp_path, same, {**options, "from_scratch": True})[0]["loss"]
        assert tuned < fresh - 0.1, f"seed {seed}: {tuned} against {fresh}"


def train_with_defaults(folder: Path, settings: dict[str, Any], options: dict[str, Any]) -> Any:
    recipe = find_recipe("transformer")
    quiet = {
        "device": "cpu",
        "progress": "off",
        "tensorboard": False,
        "save_dir": str(folder),
        "enable_fault_tolerance": False,
    }
    chosen = recipe.options(**options)
    result = recipe.train(recipe.config({**quiet, **settings}, chosen), chosen)
    return result.metrics, None, result.folder


def test_what_torchao_says_about_its_own_import_is_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hugging_face.transformers()
    logging.getLogger("torchao").warning("Failed to load _C_mxfp8.so: Could not load this library")
    logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass and is now", "Kind")
    logging.getLogger("torchao").warning("this scheme is slow")
    assert [record.getMessage() for record in caplog.records] == ["this scheme is slow"]
