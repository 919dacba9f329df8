"""What belongs to a run on image files beside its weights: classes, preprocessing, images."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.recipes.hugging_face import no_progress_bar, weights_to_keep
from multi_gpu_training.recipes.image.image_classifier import PROCESSOR, ClassifierOf
from multi_gpu_training.recipes.image.image_decoding import Preprocessing
from multi_gpu_training.recipes.image.image_list import ImageList
from multi_gpu_training.recipes.user_data import listed
from multi_gpu_training.safe_files import write_atomically
from multi_gpu_training.training.callbacks import Callback, Run


class ImageFacts:
    """Saved with the run, so that a resume with other classes, pixels or images is refused: the
    weights would load, and be wrong."""

    def __init__(self, facts: Mapping[str, Any], resume_anyway: bool = False) -> None:
        self.resume_anyway = resume_anyway
        self.facts: dict[str, Any] = json.loads(json.dumps(facts))

    def state_dict(self) -> dict[str, Any]:
        return self.facts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        changed = [name for name, was in state.items() if self.facts.get(name) != was]
        if changed and not self.resume_anyway:
            lines = [
                f"{name}: {_short(state[name])} then, {_short(self.facts.get(name))} now"
                for name in changed
            ]
            raise CheckpointError(
                "the checkpoint's run had other images or preprocessed them differently ("
                + "; ".join(lines)
                + "); resume with the same data and options, start a new run, or set "
                "resume_anyway=true",
                code="MGT703",
            )


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} ({listed([str(one) for one in value])})"
    return str(value)


def digest(images: ImageList, root: Path) -> str:
    """Count and hash of names and labels: the same wherever the folder lies."""
    found = hashlib.blake2b(digest_size=8)
    for ref, label in zip(images.refs, images.labels, strict=True):
        place = os.path.relpath(ref.path, root)
        found.update(f"{place}\0{ref.row}\0{label}\n".encode())
    return f"{len(images):,} images ({found.hexdigest()})"


@dataclass(eq=False)
class ImageRunFiles(Callback):
    """Says what is trained on; writes `images.json` (classes and preprocessing), the list of
    skipped images, and at the end `model/` for from_pretrained if the model is of Hugging Face."""

    lines: Sequence[str]
    facts: ImageFacts
    skipped: Mapping[str, str]
    preprocessing: Preprocessing

    def on_setup(self, run: Run) -> None:
        for line in self.lines:
            run.say(line)
        if not run.placement.is_main:
            return
        write_atomically(run.folder / "images.json", json.dumps(self.facts.facts, indent=1))
        if self.skipped:
            text = "".join(f"{name}\t{why}\n" for name, why in self.skipped.items())
            write_atomically(run.folder / "skipped-images.tsv", text)

    def on_end(self, run: Run) -> None:
        body: Any = run.model.body if isinstance(run.model, ClassifierOf) else None
        if not run.placement.is_main or sys.exception() is not None:
            return  # a run that failed or was stopped leaves its checkpoints, not a result
        if not hasattr(body, "save_pretrained"):
            return
        folder = run.folder / "model"
        weights, which = weights_to_keep(run)
        if weights is not None:
            own = {name: value for name, value in weights.items() if name.startswith("body.")}
            weights = {name.removeprefix("body."): value for name, value in own.items()}
        with no_progress_bar():
            body.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
        (folder / PROCESSOR).write_text(json.dumps(processor_facts(self.preprocessing), indent=1))
        padded = "; pad images yourself, no processor does" * (self.preprocessing.fit == "pad")
        run.say(f"{which} weights for from_pretrained: {folder}{padded}")


def processor_facts(to: Preprocessing) -> dict[str, Any]:
    """The preprocessing in the words of Hugging Face, which has none for black bars: `fit`."""
    crop = {"height": to.height, "width": to.width}
    cropped = to.fit == "crop"
    return {
        "image_processor_type": "ViTImageProcessor" if not cropped else "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": to.resize} if cropped else crop,
        "do_center_crop": cropped,
        **({"crop_size": crop} if cropped else {}),
        "resample": to.resample,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(to.mean),
        "image_std": list(to.std),
        "fit": to.fit,
    }
