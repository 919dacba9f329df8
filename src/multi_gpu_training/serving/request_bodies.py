"""From the bytes of a request to inputs of a loaded model, and from its outputs to answers.

A body is one file (an image, a sound, a video, a text) or JSON: {"inputs": [...]}. A text in JSON
is never taken for a path: a client must not choose which files this machine reads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multi_gpu_training.delivery.loaded_model import LoadedModel
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.serving.http_limits import RequestRefused

FILES = {
    "image": {"accept": "image/*", "label": "Choose an image"},
    "video": {"accept": "video/*", "label": "Choose a video clip"},
    "speech": {"accept": "audio/*,.wav,.flac", "label": "Choose a recording (WAV, FLAC)"},
}
ENDINGS = {"audio/flac": ".flac", "audio/x-flac": ".flac", "video/webm": ".webm"}
JSON_TYPES = ("application/json", "text/json")
MOST_CHARACTERS = 100_000  # of a text


@dataclass(frozen=True)
class Item:
    """One input: its samples, or for tasks that make their own, the raw text."""

    raw: Any
    samples: list[Any]


class ServedModel:
    """A loaded model as the app wants it."""

    def __init__(self, loaded: LoadedModel, task: str | None = None) -> None:
        self.loaded, self.task = loaded, loaded.task(task)
        if self.task == "play":
            raise ConfigError("task=play plays whole episodes; serve act, or use `mgt predict`")
        if loaded.recipe == "custom":
            raise ConfigError(
                "the model of a script says nothing of what files or JSON it takes; load it with "
                "multi_gpu_training.load and serve it with your own app"
            )
        self.facts = facts_of(loaded, self.task)

    # Requests

    def decode(self, body: bytes, content_type: str, most: int) -> list[Item]:
        if content_type in JSON_TYPES or body[:1] == b"{":
            inputs = read_inputs(body)
            if len(inputs) > most:
                raise RequestRefused(
                    413,
                    f"the request has {len(inputs):,} inputs, {most:,} at most are taken; send "
                    "several requests",
                )
            return [self._item(self._from_json(value)) for value in inputs]
        if self.loaded.recipe == "transformer":
            return [self._item(self._text(_utf8(body)))]
        if self.loaded.recipe == "ppo":
            raise ValueError('send an observation as JSON: {"inputs": [[...]]}')
        if self.loaded.recipe == "image":
            return [self._item(body)]
        # Sound and video are read from a file, which is gone before the model is called.
        with tempfile.TemporaryDirectory(prefix="mgt-serve-") as folder:
            path = Path(folder) / f"upload{ENDINGS.get(content_type, '.wav')}"
            path.write_bytes(body)
            try:
                return [self._item(path)]
            except DataError as error:
                told = "; ".join(error.problems).replace(str(path), "the file")
                raise ValueError(told) from None

    def _item(self, raw: Any) -> Item:
        if self.task == "generate":
            self.loaded.pipeline.sample(raw)  # raises where it is not a text to go on from
            return Item(raw, [])
        return Item(None, self.loaded.pipeline.samples(raw))

    def _from_json(self, value: Any) -> Any:
        recipe = self.loaded.recipe
        if recipe == "transformer":
            return self._text(value)
        if recipe == "ppo":
            return value
        if not isinstance(value, list):
            wanted = "rows of pixels" if recipe == "image" else "numbers"
            raise ValueError(
                f"an input is a {type(value).__name__}; send {wanted} as a list, or the file "
                "itself as the body"
            )
        return _array(value, recipe)

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"an input is a {type(value).__name__}; send a text")
        if not value or len(value) > MOST_CHARACTERS:
            raise ValueError(f"a text has {len(value):,} characters; send 1 to {MOST_CHARACTERS:,}")
        return value

    # Answers

    def predict(self, items: list[Item]) -> Sequence[Any]:
        if self.task == "generate":
            return self.loaded.predict([item.raw for item in items], task=self.task)
        pipeline, loaded = self.loaded.pipeline, self.loaded
        every = [sample for item in items for sample in item.samples]
        rows: list[Any] = []
        for start in range(0, len(every), pipeline.batch_size):
            part = every[start : start + pipeline.batch_size]
            rows += pipeline.read(loaded.outputs(pipeline.collate(part)), part)
        found = []
        for item in items:
            mine, rows = rows[: len(item.samples)], rows[len(item.samples) :]
            found.append(pipeline.join(None, mine))
        return found


def read_inputs(body: bytes) -> list[Any]:
    """The inputs of a JSON body."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number that JSON has")

    try:
        found = json.loads(body, parse_constant=refuse)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("the body is not JSON: it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    inputs = found.get("inputs") if isinstance(found, dict) else None
    if not isinstance(inputs, list):
        raise ValueError('send {"inputs": [...]} with a list of inputs')
    return inputs


def _array(value: list[Any], recipe: str) -> Any:
    try:
        numbers = np.asarray(value)
    except ValueError:
        raise ValueError("an input has rows of different lengths") from None
    if numbers.dtype.kind not in "iuf":
        raise ValueError("an input holds something that is not a number")
    if recipe == "speech" and numbers.dtype.kind == "f":
        return numbers.astype(np.float32)
    low, high, kind = (-32768, 32767, np.int16) if recipe == "speech" else (0, 255, np.uint8)
    if numbers.dtype.kind == "f" or (
        numbers.size and not low <= numbers.min() <= numbers.max() <= high
    ):
        raise ValueError(f"an input must hold whole numbers from {low} to {high}")
    return numbers.astype(kind)


def _utf8(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise ValueError("the text is not in UTF-8") from None


def facts_of(loaded: LoadedModel, task: str) -> dict[str, Any]:
    """What the page and /health tell about the model."""
    recipe, labels = loaded.recipe, loaded.labels or []
    where = loaded.checkpoint
    run = (
        ""
        if where is None
        else (where.parent.parent if where.parent.name == "checkpoints" else where).name
    )
    named = f"{len(labels)} classes: {', '.join(labels[:20])}" if labels else ""
    about = [run, f"step {loaded.step}" if loaded.step else "", task, named]
    text: dict[str, Any] | None = None
    if recipe == "transformer":
        text = {"label": f"Text to {task}", "example": ""}
    elif recipe == "ppo":
        size = loaded.pipeline.arguments["observation_size"]
        text = {"label": "Observation (JSON)", "json": True, "example": json.dumps([0.0] * size)}
    return {
        "recipe": recipe,
        "task": task,
        "title": f"Try the {recipe} model",
        "about": " · ".join(part for part in about if part),
        "labels": labels,
        "draw": drawing(loaded),
        "files": FILES.get(recipe),
        "text": text,
    }


def drawing(loaded: LoadedModel) -> dict[str, float | None] | None:
    """How the page draws for the model: the pen's width, and how much of the image a drawing
    fills, as shares of its side. None where the images are not grey."""
    shape = loaded.inputs[0].shape
    if loaded.recipe != "image" or (len(shape) == 4 and shape[1] != 1):
        return None
    digits = loaded.labels == [str(number) for number in range(10)]
    if digits and int(shape[-1]) < 16:  # scikit-learn's, 8x8: from edge to edge, two pixels wide
        return {"pen": 0.16, "box": 1.0}
    return {"pen": 0.08, "box": 20 / 28 if digits else None}  # MNIST's fill 20 of 28 pixels
