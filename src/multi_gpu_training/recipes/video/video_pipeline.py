"""Behaviour classifiers after training: from a video to what is seen in it, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.pipeline import Pipeline, Result, TensorSpec, likeliest
from multi_gpu_training.recipes.recipe import Options
from multi_gpu_training.recipes.video.frames import VIDEO_ENDINGS, InvalidVideo, decode
from multi_gpu_training.recipes.video.video_model import build_model

CLIPS_A_WINDOW = 2  # by default clips overlap by half
MOST_BYTES = 2**33  # decoded frames of one video


@dataclass(frozen=True)
class ClipOfVideo:
    """One clip, the number of its middle frame, and when that is shown, where the file says."""

    frames: Tensor
    centre: int
    seconds: float | None


def describe_video(
    architecture: str,
    frames: int,
    size: int,
    dropout: float,
    width: int,
    classes: Sequence[str],
    scaling: str | None,
) -> dict[str, Any]:
    return {
        "recipe": "video",
        "labels": list(classes),
        "model": {
            "architecture": architecture,
            "frames": frames,
            "size": size,
            "dropout": dropout,
            "width": width,
        },
        "preprocessing": {
            "colour": "grey",
            "frames": frames,
            "size": size,
            "scaling": scaling or "letterbox",
        },
    }


class VideoPipeline(Pipeline):
    """Raw input: a video file, or an array of grey frames, uint8 of (frames, size, size)."""

    recipe = "video"
    batch_size = 32
    every: int | None = None  # frames between two clips of a video

    @classmethod
    def recovered(
        cls, options: Mapping[str, Any], tensors: Mapping[str, Tensor], seed: int, trust: bool
    ) -> dict[str, Any]:
        if options.get("data_dir") is not None and not options.get("scaling"):
            options = {**options, "scaling": "stretch"}  # as all videos were up to version 0.1
        return super().recovered(options, tensors, seed, trust)

    def build_model(self) -> nn.Module:
        given = self.arguments
        return build_model(
            given["architecture"],
            int(given["frames"]),
            int(given["size"]),
            len(self.labels or ()),
            float(given["dropout"]),
            int(given["width"]),
        )

    def inputs(self) -> list[TensorSpec]:
        frames, size = self.arguments["frames"], self.arguments["size"]
        shape = ("batch", frames, size, size)
        return [TensorSpec("clips", "uint8", shape, "grey frames, pixels from 0 to 255")]

    def outputs(self) -> list[TensorSpec]:
        count = len(self.labels or ())
        return [TensorSpec("scores", "float32", ("batch", count), "one per class, before softmax")]

    def sample(self, raw: Any) -> Any:
        return self.samples(raw)[0]

    def samples(self, raw: Any) -> list[Any]:
        """Clips of a video, or the one clip that an array of as many frames is."""
        frames, times = self._frames(raw)
        length = int(self.arguments["frames"])
        every = self.every or max(1, length // CLIPS_A_WINDOW)
        count = len(frames)
        # A clip in the middle of each stretch; beyond an end its last frame is repeated.
        centres = [length // 2] if count == length else list(range(every // 2, count, every)) or [0]
        found = []
        for centre in centres:
            first = centre - length // 2
            places = np.arange(first, first + length).clip(0, count - 1)
            shown = times[min(centre, count - 1)] if times else None
            found.append(ClipOfVideo(torch.as_tensor(frames[places]), centre, shown))
        return found

    def _frames(self, raw: Any) -> tuple[Any, list[float] | None]:
        size = int(self.arguments["size"])
        if isinstance(raw, (Tensor, np.ndarray)):
            frames = np.asarray(raw)
            if frames.dtype != np.uint8 or frames.ndim != 3 or frames.shape[1:] != (size, size):
                raise DataError(
                    f"an array of {frames.dtype} and shape {frames.shape} was given; give grey "
                    f"frames as uint8 of (frames, {size}, {size}), or a video file"
                )
            return frames, None
        if not isinstance(raw, (str, Path)):
            raise DataError(f"a {type(raw).__name__} is not a video; give a file or an array")
        pictures, times = [], []
        letterbox = self.preprocessing["scaling"] == "letterbox"
        try:
            for picture, shown in decode(Path(raw), size, letterbox):
                pictures.append(picture)
                times.append(shown)
                if len(pictures) * size**2 > MOST_BYTES:
                    raise InvalidVideo("is too long to be held in memory; cut it into parts")
        except InvalidVideo as error:
            raise DataError(f"{raw} {error}; give a video file") from None
        known = [shown for shown in times if shown is not None]
        return np.stack(pictures), known if len(known) == len(pictures) else None

    def takes(self, path: Path) -> bool:
        return path.suffix.lower() in VIDEO_ENDINGS

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, ...]:
        return (torch.stack([clip.frames for clip in samples]),)

    def read(self, outputs: tuple[Tensor, ...], samples: Sequence[Any]) -> list[Result]:
        found = [likeliest(row, self.labels or ()) for row in outputs[0]]
        return [
            {**result, "frame": clip.centre, "seconds": clip.seconds}
            for result, clip in zip(found, samples, strict=True)
        ]

    def join(self, raw: Any, results: list[Result]) -> Result:
        """The class of most clips, and what follows what; neighbours alike are one entry."""
        if len(results) == 1:
            return results[0]
        timeline: list[Result] = []
        for result in results:
            if timeline and timeline[-1]["label"] == result["label"]:
                last = timeline[-1]
                last["last_frame"], last["last_seconds"] = result["frame"], result["seconds"]
                last["clips"] += 1
                last["score"] += (result["score"] - last["score"]) / last["clips"]
                continue
            timeline.append(
                {
                    "label": result["label"],
                    "first_frame": result["frame"],
                    "last_frame": result["frame"],
                    "first_seconds": result["seconds"],
                    "last_seconds": result["seconds"],
                    "clips": 1,
                    "score": result["score"],
                }
            )
        counts: dict[str, int] = {}
        for result in results:
            counts[result["label"]] = counts.get(result["label"], 0) + 1
        label = max(counts, key=lambda name: counts[name])
        return {
            "label": label,
            "score": counts[label] / len(results),
            "scores": {name: count / len(results) for name, count in counts.items()},
            "clips": len(results),
            "timeline": timeline,
        }

    def perform(
        self,
        task: str,
        model: nn.Module,
        raws: Sequence[Any],
        batch_size: int,
        first: int = 0,
        **how: Any,
    ) -> Iterator[Result]:
        self.every = how.pop("every", self.every)
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every={self.every}: use 1 or more frames between clips")
        return super().perform(task, model, raws, batch_size, first, **how)

    def run_options(self, data_dir: str | None = None) -> Options:
        """Other videos are scaled to what the model knows; those of the run are as it had them."""
        found = super().run_options(data_dir)
        facts = self.preprocessing
        scaled = {"frame_size": facts["size"], "resize": True} if data_dir is not None else {}
        if getattr(found, "data_dir", None) is not None:
            scaled["scaling"] = facts["scaling"]  # None in options of version 0.1 was stretch
        return found.model_copy(update=scaled)

    def synthetic(self, count: int) -> list[Any]:
        shape = tuple(int(side) for side in self.inputs()[0].shape[1:])
        noise = torch.Generator().manual_seed(0)
        clips = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=noise)
        return [ClipOfVideo(clip, shape[0] // 2, None) for clip in clips]


PIPELINE = VideoPipeline
