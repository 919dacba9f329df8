"""Speech recogniser (LMU, CTC) on digits, LibriSpeech or a built-in synthetic voice.

mgt train speech                                built-in synthetic voice, on the CPU in minutes
mgt train speech --data-dir fsdd                spoken digits
mgt train multi_gpu --data-dir LibriSpeech      the 7.17M model, as configs/multi_gpu.yaml says
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.recipe import Announce, Job, Options, Recipe
from multi_gpu_training.recipes.speech.corpora import RATES, Layout, find_layout
from multi_gpu_training.recipes.speech.dataset import Buckets, Speech, longest
from multi_gpu_training.recipes.speech.objective import Objective, evaluate
from multi_gpu_training.recipes.speech.speech_data import SpeechData, Timing, built_in, from_folder
from multi_gpu_training.recipes.speech.speech_model import SIZES, NormName, Recogniser, SizeName
from multi_gpu_training.recipes.speech.speech_pipeline import describe_speech
from multi_gpu_training.recipes.speech.voice import RATE


class SpeechOptions(Options):
    """What this recipe can be told beside the settings of every run."""

    data_dir: str | None = Field(None, description="folder of speech; None is the built-in voice")
    layout: Layout = Field("auto", description="of data_dir; auto: by what it holds")
    held_out_speaker: str | None = Field(None, description="tested on, and not trained on")
    alphabet: str = Field("english", description="english, data, or the characters themselves")
    sample_rate: int | None = Field(
        None, ge=4000, le=192_000, description="None: that of the layout"
    )
    size: Literal["auto", SizeName] = Field(
        "auto", description="small for digits and the built-in voice, base (7.17M) for sentences"
    )
    norm: NormName = Field("layer", description="of the convolutions; batch obeys sync_bn")
    streaming: bool = Field(False, description="memories look back only, not ahead as well")
    augment: bool = Field(True, description="other speeds, and SpecAugment")
    buckets: int = Field(6, ge=1, le=10_000, description="lengths that batches are padded to")
    decoder: Literal["greedy", "beam"] = Field("greedy", description="how tests are read")
    beam_width: int = Field(8, ge=1, le=10_000, description="decoder=beam: prefixes that are kept")


def build(config: MultiGPUConfig, options: SpeechOptions) -> Job:
    """Model, data, loss and error rates of this recipe; the optimizer is AdamW."""
    check(options)
    size_name, rate = choose_size(options)
    size = SIZES[size_name]
    timing = Timing(round(rate / 100), size.subsampling)
    data = load_speech(options, timing)
    model = Recogniser(size, data.alphabet.classes, data.rate, options.norm, options.streaming)
    train, test = datasets(data, options, timing)
    lines = [data.describe(), *data.notes]
    if options.augment:
        lines.append("training at other speeds (0.85 to 1.15) and with SpecAugment")
    return Job(
        model=model,
        dataset=train,
        val_dataset=test,
        loss_fn=Objective(options.augment),
        eval_fn=partial(
            evaluate, alphabet=data.alphabet, decoder=options.decoder, width=options.beam_width
        ),
        callbacks=[Announce(*lines)],
        description=describe_speech(
            model,
            data.alphabet,
            data.rate,
            options.norm,
            options.streaming,
            options.decoder,
            options.beam_width,
        ),
    )


def check(options: SpeechOptions) -> None:
    """Options that would do nothing are an error."""
    problems = []
    if options.data_dir is None:
        given = options.model_dump(include={"layout", "held_out_speaker"})
        problems = [
            f"{name}={value} is for a folder of speech; set data_dir, or drop it"
            for name, value in given.items()
            if value not in (None, "auto")
        ]
    if "beam_width" in options.model_fields_set and options.decoder != "beam":
        problems.append(
            f"beam_width={options.beam_width} does nothing with decoder={options.decoder}; set "
            "decoder=beam, or drop it"
        )
    if problems:
        raise ConfigError(problems)


def choose_size(options: SpeechOptions) -> tuple[SizeName, int]:
    """The model's size, and the rate of the sound it hears."""
    if options.data_dir is None:
        layout, rate = "voice", RATE
    else:
        folder = Path(options.data_dir).expanduser()
        layout = options.layout
        if layout == "auto":
            layout = find_layout(folder) if folder.is_dir() else "fsdd"  # missing is said later
        rate = RATES[layout]
    size: SizeName = "small" if layout in ("voice", "fsdd") else "base"
    return (size if options.size == "auto" else options.size), options.sample_rate or rate


def load_speech(options: SpeechOptions, timing: Timing) -> SpeechData:
    if options.data_dir is None:
        return built_in(timing, options.alphabet, options.sample_rate)
    return from_folder(
        Path(options.data_dir).expanduser(),
        options.layout,
        options.held_out_speaker,
        timing,
        options.alphabet,
        options.sample_rate,
    )


def datasets(data: SpeechData, options: SpeechOptions, timing: Timing) -> tuple[Speech, Speech]:
    """Training and test part, padded to the same few lengths."""
    # At their slowest: a bucket must hold what any epoch may draw.
    lengths = [longest(clip.samples, options.augment) for clip in data.train]
    labels = [len(clip.labels) for clip in data.train]
    buckets = Buckets(lengths, labels, options.buckets, 10 * timing.hop)
    return (
        Speech(data.train, data.rate, buckets, varied=options.augment),
        Speech(data.test, data.rate, buckets, varied=False),
    )


recipe = Recipe(
    name="speech",
    defaults={
        "epochs": 20,
        "batch_size": 16,
        "learning_rate": 1e-3,
        "base_batch_size": 16,
        "lr_scaling": "linear",
        "schedule": "cosine",
        "warmup_epochs": 1,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "best_metric": "wer",
    },
    options=SpeechOptions,
    build=build,
)
