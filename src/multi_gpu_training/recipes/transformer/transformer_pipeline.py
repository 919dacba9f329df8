"""Language models and text classifiers after training: generate, score, fill in or classify."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.errors import ConfigError, DataError, ModelError
from multi_gpu_training.recipes.hugging_face import no_progress_bar, transformers
from multi_gpu_training.recipes.pipeline import (
    Pipeline,
    Result,
    TensorSpec,
    device_of,
    likeliest,
)
from multi_gpu_training.recipes.recipe import Job
from multi_gpu_training.recipes.tables import TABLES, read_text
from multi_gpu_training.recipes.transformer.lora import with_adapters
from multi_gpu_training.recipes.transformer.text import fields
from multi_gpu_training.recipes.transformer.tokens import ByteTokens, ModelTokens, Tokens
from multi_gpu_training.recipes.transformer.transformer_model import CLASSES, from_config
from multi_gpu_training.safe_output import brief

MOST_TOKENIZER = 2**26  # characters; a large one has 20 million
MASK = "[MASK]"  # what stands for a hidden token in a text to fill in
TASKS = {"causal": ("generate", "score"), "masked": ("fill",), "classification": ("classify",)}


def describe_text(model: Any, words: Tokens, options: Any) -> dict[str, Any]:
    config, adapters = model.config, None
    if options.lora_rank:
        adapters = {
            "rank": options.lora_rank,
            "alpha": options.lora_alpha,
            "targets": options.lora_targets,
        }
    found = {
        "recipe": "transformer",
        "task": options.task,
        "model": {"config": config.to_dict(), "adapters": adapters},
        "preprocessing": {
            "sequence_length": options.sequence_length,
            "tokenizer": describe_tokens(words),
        },
    }
    if options.task == "classification":
        found["labels"] = [str(name) for _, name in sorted(config.id2label.items())]
    return found


def describe_tokens(words: Tokens) -> dict[str, Any]:
    """The whole vocabulary: whoever loads the model need not have the tokenizer's folder."""
    if not isinstance(words, ModelTokens):
        return {"kind": "bytes"}
    tokenizer = words.tokenizer
    text = tokenizer.backend_tokenizer.to_str() if getattr(tokenizer, "is_fast", False) else None
    if text is None or len(text) > MOST_TOKENIZER:
        return {"kind": "name", "name": words.name}
    special = {
        name: str(word)
        for name, word in tokenizer.special_tokens_map.items()
        if isinstance(word, str)
    }
    return {
        "kind": "tokenizers",
        "json": text,
        "special": special,
        "longest": words.longest,
        "padding_side": tokenizer.padding_side,
    }


def rebuild_tokens(facts: dict[str, Any]) -> Tokens:
    if facts["kind"] == "bytes":
        return ByteTokens()
    if facts["kind"] == "name":
        raise ModelError(
            f"the tokenizer {facts['name']!r} of this run cannot be kept in a checkpoint; load the "
            "run's model/ folder with transformers instead"
        )
    tokenizers = importlib.import_module("tokenizers")
    fast = transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(facts["json"]),
        padding_side=facts["padding_side"],
        **({} if facts["longest"] is None else {"model_max_length": facts["longest"]}),
        **facts["special"],
    )
    return ModelTokens(fast, "of the checkpoint")


@dataclass(frozen=True)
class Text:
    """Tokens of one sample (int64) and how many of them were hidden, for `fill`."""

    ids: Tensor


class TextProgram(nn.Module):
    """input_ids and attention_mask -> logits, as a plain function of tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        more = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        logits: Tensor = out.logits
        return logits


def _merged(model: Any) -> Any:
    """With its adapters added to the matrices beside which they were trained."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


class TransformerPipeline(Pipeline):
    """Raw input: a text, or its tokens as whole numbers."""

    recipe = "transformer"
    batch_size = 16

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.task: str = self.description["task"]
        self.tasks = TASKS[self.task]
        self.tokens = rebuild_tokens(self.preprocessing["tokenizer"])

    @property
    def length(self) -> int:
        return int(self.preprocessing["sequence_length"])

    def build_model(self) -> nn.Module:
        given = self.arguments
        settings = dict(given["config"])
        kind = settings.pop("model_type", None)
        known = transformers().CONFIG_MAPPING
        if kind not in known:
            raise ModelError(
                f"this model is of the type {kind!r:.80}, which transformers "
                f"{transformers().__version__} does not know; install a version that does",
                code="MGT404",
            )
        config = known[kind](**settings)
        model: nn.Module = from_config(self.task, config)  # type: ignore[arg-type]
        adapters = given.get("adapters")
        if adapters:
            how = adapters["rank"], adapters["alpha"], adapters["targets"]
            model = with_adapters(model, self.task, *how)  # type: ignore[arg-type]
        return model

    def changed(self, **changes: Any) -> Pipeline:
        """Changes are those of the model's config, as in n_layer=1."""
        config = dict(self.arguments["config"])
        unknown = [name for name in changes if name not in config]
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: the config of this {config.get('model_type')} has no such "
                f"setting; it has {', '.join(sorted(config))}",
                code="MGT102",
            )
        described = {
            **self.description,
            "model": {**self.arguments, "config": {**config, **changes}},
        }
        return type(self)(described, self.options, self.seed, self.trust)

    def program(self, model: nn.Module) -> nn.Module:
        return TextProgram(model)

    def export_program(
        self, model: nn.Module, length: int | None
    ) -> tuple[nn.Module, tuple[int, int] | None]:
        if length is not None and length > self.length:
            raise ConfigError(
                f"--length {length}: this model was trained on {self.length} tokens at most"
            )
        return self.program(_merged(copy.deepcopy(model))), (2, length or self.length)

    def save_pretrained(self, model: nn.Module, folder: Path) -> nn.Module:
        whole: Any = _merged(copy.deepcopy(model))
        with no_progress_bar():
            whole.save_pretrained(folder)
            self.tokens.save(folder)
            found: nn.Module = getattr(transformers(), CLASSES[self.task]).from_pretrained(
                folder, trust_remote_code=False, dtype=torch.float32
            )
        return found

    def inputs(self) -> list[TensorSpec]:
        shape = ("batch", "tokens")
        return [
            TensorSpec("input_ids", "int64", shape, "numbers of the tokenizer's words"),
            TensorSpec("attention_mask", "int64", shape, "1 for text, 0 for padding at the end"),
        ]

    def outputs(self) -> list[TensorSpec]:
        if self.labels is not None:
            shape: tuple[int | str, ...] = ("batch", len(self.labels))
            return [TensorSpec("scores", "float32", shape, "one per label, before softmax")]
        words = self.arguments["config"].get("vocab_size", self.tokens.size)
        shape = ("batch", "tokens", words)
        meaning = "of the next token" if self.task == "causal" else "of the hidden token"
        return [TensorSpec("scores", "float32", shape, f"{meaning}, before softmax")]

    # Raw input

    def sample(self, raw: Any) -> Text:
        if isinstance(raw, (Tensor, list)):
            ids = torch.as_tensor(raw).long()
            if ids.ndim != 1 or not len(ids):
                raise DataError("tokens are given as a list of whole numbers, one text each")
            if int(ids.min()) < 0 or int(ids.max()) >= self.tokens.size:
                raise DataError(f"there is a token outside 0 to {self.tokens.size - 1}")
            return Text(ids)
        if not isinstance(raw, str):
            raise DataError(f"a {type(raw).__name__} is not a text; give text, or its tokens")
        if self.task == "classification":
            ids = self.tokens.encode_sample(raw, self.length).long()
        elif self.task == "masked":
            ids = self._hidden(raw)
        else:
            ids = self.tokens.encode(raw).long()
        if not len(ids):
            raise DataError("the text is empty; give some")
        return Text(ids)

    def samples(self, raw: Any) -> list[Any]:
        """A text that is longer than the model's sequences is scored in parts."""
        ids = self.sample(raw).ids
        return [Text(part) for part in ids.split(self.length)]

    def _hidden(self, raw: str) -> Tensor:
        own = getattr(getattr(self.tokens, "tokenizer", None), "mask_token", None) or MASK
        parts = [self.tokens.encode(part).long() for part in raw.replace(own, MASK).split(MASK)]
        if len(parts) < 2:
            raise DataError(f"no token is hidden in this text; write {MASK} where one is")
        mask = torch.tensor([self.tokens.mask])
        return torch.cat(
            [part for pair in zip(parts, [mask] * len(parts), strict=True) for part in pair][:-1]
        )[: self.length]

    def shorten(self, sample: Any, longest: int) -> Any:
        return Text(sample.ids[:longest])

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, ...]:
        ids = torch.nn.utils.rnn.pad_sequence(
            [text.ids for text in samples], batch_first=True, padding_value=self.tokens.pad or 0
        )
        lengths = torch.tensor([len(text.ids) for text in samples])
        return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()

    def read(self, outputs: tuple[Tensor, ...], samples: Sequence[Any]) -> list[Result]:
        if self.labels is not None:
            return [likeliest(row, self.labels) for row in outputs[0]]
        how = self._score if self.task == "causal" else self._fill
        return [how(row, text.ids) for row, text in zip(outputs[0], samples, strict=True)]

    def _score(self, scores: Tensor, ids: Tensor) -> Result:
        """How well the text was foreseen; its first token is not."""
        chances = scores[: len(ids)].double().log_softmax(1)
        losses = -chances[:-1].gather(1, ids[1:, None]).sum().item()
        return {"tokens": len(ids), "foreseen": len(ids) - 1, "nll": losses}

    def _fill(self, scores: Tensor, ids: Tensor) -> Result:
        found = []
        assert self.tokens.mask is not None
        for place in ids.eq(self.tokens.mask).nonzero().flatten().tolist():
            best = scores[place].double().softmax(0).topk(5)
            words = [self.text([number]) for number in best.indices.tolist()]
            found.append(dict(zip(words, best.values.tolist(), strict=True)))
        return {"label": next(iter(found[0])) if found else None, "hidden": found}

    def join(self, raw: Any, results: list[Result]) -> Result:
        if self.task != "causal":
            return results[0]
        foreseen = sum(result["foreseen"] for result in results)
        nll = sum(result["nll"] for result in results)
        mean = nll / foreseen if foreseen else math.nan
        return {
            "tokens": sum(result["tokens"] for result in results),
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)) if foreseen else math.nan,
        }

    def text(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        if isinstance(self.tokens, ModelTokens):
            return str(self.tokens.tokenizer.decode(list(ids)))
        return bytes(number for number in ids if number < 256).decode("utf-8", "replace")

    def synthetic(self, count: int) -> list[Any]:
        noise = torch.Generator().manual_seed(0)
        size = min(self.tokens.words, self.tokens.size)
        return [
            Text(torch.randint(size, (min(self.length, 16 + number),), generator=noise))
            for number in range(count)
        ]

    def find(self, word: str, task: str) -> list[tuple[str, Any]]:
        """A text as it stands; of a file its lines or the rows of a table, to be scored the whole
        text."""
        path = Path(word)
        if len(word) > 255 or not path.is_file():
            if path.suffix in (".txt", *TABLES) and " " not in word:
                raise DataError(f"{word} does not exist; give a file, or a text")
            return [(brief(word, 60), word)]
        if path.suffix in TABLES:
            texts = [text for (text,) in fields(path, ("text",))]
            return [(f"{path}:{number}", text) for number, text in enumerate(texts, 1)]
        text = read_text(path)
        if task == "score":
            return [(str(path), text)]
        lines = [(f"{path}:{n}", line) for n, line in enumerate(text.splitlines(), 1)]
        return [(name, line) for name, line in lines if line.strip()]

    # Generation

    def perform(
        self,
        task: str,
        model: nn.Module,
        raws: Sequence[Any],
        batch_size: int,
        first: int = 0,
        **how: Any,
    ) -> Iterator[Result]:
        if task != "generate":
            return super().perform(task, model, raws, batch_size, first, **how)
        return (self.generate(model, raw, number, **how) for number, raw in enumerate(raws, first))

    @torch.no_grad()
    def generate(
        self,
        model: Any,
        raw: Any,
        number: int = 0,
        new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Result:
        """The text and what the model makes follow; the likeliest token at temperature 0."""
        if new_tokens < 1 or temperature < 0:
            raise ConfigError("new_tokens must be 1 or more, and temperature 0 or more")
        config, device = self.arguments["config"], device_of(model)
        room = config.get("n_positions") or config.get("max_position_embeddings") or self.length
        ids = self.sample(raw).ids.to(device)
        draws = torch.Generator().manual_seed(seed + number)
        first = len(ids)
        for _ in range(new_tokens):
            seen = ids[-int(room) :][None]
            scores = model(input_ids=seen, attention_mask=torch.ones_like(seen)).logits[0, -1]
            scores = scores.double().cpu()[: self.tokens.size]
            if temperature:
                following = torch.multinomial((scores / temperature).softmax(0), 1, generator=draws)
            else:
                following = scores.argmax()[None]
            ids = torch.cat([ids, following.to(device)])
            if int(following) == self.tokens.end:
                break
        added = ids[first:].tolist()
        return {"text": self.text(added), "tokens": len(added), "ids": added}

    # Data of the run

    def job(self, data_dir: str | None = None) -> Job:
        """The data alone come from the options: the model is the one that was described, and the
        folder that it was fine-tuned from may be gone."""
        config = MultiGPUConfig(
            seed=self.seed,
            training_mode=TrainingMode.SINGLE,
            recipe=self.recipe,
            num_workers=0,
        )
        module = importlib.import_module("multi_gpu_training.recipes.transformer")
        found: Job = module.job_around(
            self.run_options(data_dir), self.tokens, config, self.build_model()
        )
        return found

    def other_preprocessing(self, job: Job) -> list[str]:
        return []  # the job got this very tokenizer

    def parts(self, job: Job, part: str) -> list[Dataset[Any]]:
        if part == "all" and self.task == "masked":
            raise ConfigError(
                "part=all: of a masked model, tokens are hidden anew in each look at "
                "the training data; use part=val"
            )
        return super().parts(job, part)

    def raw_of(self, item: Any) -> Any:
        ids = item[0]
        if self.task == "classification" or len(item) > 2:
            ids = ids[: int(item[1])]
        return ids.tolist()


PIPELINE = TransformerPipeline
