"""Speech recogniser (LMU, CTC) on digits, LibriSpeech or a built-in synthetic voice.

mgt train speech                                built-in synthetic voice, on the CPU in minutes
mgt train speech --data-dir fsdd                spoken digits
mgt train multi_gpu --data-dir LibriSpeech      the 7.17M model, as configs/multi_gpu.yaml says
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.recipes.recipe import Announce, Job, Options, Recipe
from multi_gpu_training.recipes.resumed_options import resumed_options
from multi_gpu_training.recipes.speech.augmentation import Augmentation
from multi_gpu_training.recipes.speech.corpora import (
    RATES,
    Division,
    Layout,
    SplitName,
    find_layout,
)
from multi_gpu_training.recipes.speech.dataset import Buckets, Speech, longest
from multi_gpu_training.recipes.speech.features import NormaliseName
from multi_gpu_training.recipes.speech.lexicon import Lexicon, choose_lexicon
from multi_gpu_training.recipes.speech.objective import Decoder, Objective, evaluate
from multi_gpu_training.recipes.speech.speech_data import SpeechData, Timing, built_in, from_folder
from multi_gpu_training.recipes.speech.speech_model import SIZES, NormName, Recogniser, SizeName
from multi_gpu_training.recipes.speech.speech_pipeline import describe_speech
from multi_gpu_training.recipes.speech.synthetic import Synthesis
from multi_gpu_training.recipes.speech.voice import RATE

# What a run of version 0.1 did, which had none of these options.
BEFORE: dict[str, Any] = {
    "split": "official",
    "normalise": "bands",
    "trim": 0.0,
    "speed": 0.15,
    "pitch": 0.0,
    "vocal_tract": 0.0,
    "noise": 0.0,
    "reverb": 0.0,
    "gain": 0.0,
    "equaliser": 0.0,
    "contour": 0.0,
    "compression": 0.0,
    "crop": 0.0,
    "rhythm": 0.0,
    "spec_augment": True,
    "lexicon": "none",
    "synthetic_voices": 0,
}
FEW_SPEAKERS = 10  # to learn a small vocabulary from, so that more voices are advised
VARIATIONS = (
    "speed",
    "pitch",
    "vocal_tract",
    "noise",
    "reverb",
    "gain",
    "equaliser",
    "contour",
    "compression",
    "crop",
    "rhythm",
    "spec_augment",
)


class SpeechOptions(Options):
    """What this recipe can be told beside the settings of every run."""

    data_dir: str | None = Field(
        None, description="folder of speech, or table of path,text; default: the built-in voice"
    )
    layout: Layout = Field("auto", description="layout of data_dir; auto: detect it")
    split: SplitName = Field(
        "auto",
        description="official: the corpus's own test; speaker: test on speakers not trained on; "
        "auto: by speaker where three or more are known, and the test has no others",
    )
    held_out_speaker: str | None = Field(
        None, description="test on this speaker, and do not train on it"
    )
    alphabet: str = Field("english", description="english, data, or the characters themselves")
    sample_rate: int | None = Field(
        None, ge=4000, le=192_000, description="samples per second; default: that of the layout"
    )
    size: Literal["auto", SizeName] = Field(
        "auto", description="small for digits and the built-in voice, base (7.17M) for sentences"
    )
    norm: NormName = Field(
        "layer", description="normalisation of the convolutions; batch obeys sync_bn"
    )
    normalise: NormaliseName = Field(
        "auto",
        description="features, tilt: by the loudness and the smooth part of the utterance's mean "
        "spectrum; utterance: by its loudness and each band; running: of what was heard so far; "
        "bands: as up to version 0.1; auto: running if streaming, else tilt",
    )
    trim: float = Field(
        30.0,
        ge=0,
        le=120,
        description="cut off both ends if this many dB quieter than the voice; 0: never",
    )
    streaming: bool = Field(False, description="let memories look back only, not ahead")
    augment: bool = Field(True, description="vary training utterances, as the next options say")
    speed: float = Field(0.2, ge=0, le=0.5, description="slower or faster by up to this share")
    pitch: float = Field(0.2, ge=0, le=0.5, description="lower or higher by up to this share")
    vocal_tract: float = Field(
        0.2, ge=0, le=0.5, description="shorter or longer by up to this share (VTLP)"
    )
    noise: float = Field(0.7, ge=0, le=1, description="share of utterances with noise")
    reverb: float = Field(0.5, ge=0, le=1, description="share of utterances in a room")
    gain: float = Field(6.0, ge=0, le=40, description="quieter or louder by up to this many dB")
    equaliser: float = Field(
        6.0, ge=0, le=40, description="microphones that colour the sound by up to this many dB"
    )
    contour: float = Field(
        6.0, ge=0, le=40, description="moments quieter or louder by up to this many dB"
    )
    compression: float = Field(
        0.3, ge=0, le=0.9, description="loudness evened out, or the opposite, by up to this share"
    )
    crop: float = Field(
        0.08, ge=0, le=1, description="either end cut off by up to this many seconds"
    )
    rhythm: float = Field(
        0.5,
        ge=0,
        le=2,
        description="the whole and each moment longer or shorter by up to this share",
    )
    spec_augment: bool = Field(True, description="hide bands and stretches of time")
    buckets: int = Field(6, ge=1, le=10_000, description="lengths that batches are padded to")
    decoder: Literal["greedy", "beam"] = Field("greedy", description="how to decode the test")
    beam_width: int = Field(8, ge=1, le=10_000, description="decoder=beam: prefixes to keep")
    lexicon: str = Field(
        "auto",
        description="words that are read: data (those of the training), none, or a file with one "
        "per line; auto: data where training says up to 100 words, ten times each on average",
    )
    synthetic_voices: int = Field(
        0, ge=0, le=1_000, description="trained on as well, spoken by espeak-ng, if installed"
    )
    synthetic_language: str = Field(
        "en", description="language of synthetic voices, as espeak-ng calls it"
    )


def build(config: MultiGPUConfig, options: SpeechOptions) -> Job:
    """Model, data, loss and error rates of this recipe; the optimizer is AdamW."""
    check(options)
    keep_resumed(options, resumed_options(config))
    size_name, rate = choose_size(options)
    size = SIZES[size_name]
    timing = Timing(round(rate / 100), size.subsampling)
    data = load_speech(options, timing, config.seed)
    normalise = options.normalise
    if normalise == "auto":
        normalise = "running" if options.streaming else "tilt"
    model = Recogniser(
        size, data.alphabet.classes, data.rate, options.norm, options.streaming, normalise
    )
    train, test = datasets(data, options, timing)
    trained = [data.alphabet.decode(clip.labels) for clip in data.train]
    words = choose_lexicon(
        options.lexicon, data.alphabet, trained, closed=options.data_dir is not None
    )
    lexicon = None if words is None else Lexicon(words, data.alphabet)
    decoder = Decoder(options.decoder, options.beam_width, lexicon)
    augmentation = augmentation_of(options, data.rate, timing)
    warp = augmentation is not None and bool(options.pitch or options.vocal_tract or options.rhythm)
    return Job(
        model=model,
        dataset=train,
        val_dataset=test,
        loss_fn=Objective(options.augment and options.spec_augment, warp),
        eval_fn=partial(evaluate, alphabet=data.alphabet, decoder=decoder, groups=data.groups),
        augment=augmentation,
        callbacks=[Announce(*announced(data, options, words))],
        description=describe_speech(
            model,
            data.alphabet,
            data.rate,
            options.norm,
            options.streaming,
            normalise,
            options.trim if options.data_dir is not None else 0.0,
            options.decoder,
            options.beam_width,
            words,
        ),
    )


def check(options: SpeechOptions) -> None:
    """Options that would do nothing are an error."""
    problems = []
    if options.data_dir is None:
        given = options.model_dump(
            include={"layout", "held_out_speaker", "split", "synthetic_voices"}
        )
        problems = [
            f"{name}={value} is for a folder of speech; set data_dir, or drop it"
            for name, value in given.items()
            if value not in (None, "auto", "official", 0)
        ]
    if "beam_width" in options.model_fields_set and options.decoder != "beam":
        problems.append(
            f"beam_width={options.beam_width} does nothing with decoder={options.decoder}; set "
            "decoder=beam, or drop it"
        )
    if not options.augment:
        problems += [
            f"{name}={getattr(options, name)} does nothing with augment=false; drop one of them"
            for name in VARIATIONS
            if name in options.model_fields_set and getattr(options, name)
        ]
    if "synthetic_language" in options.model_fields_set and not options.synthetic_voices:
        problems.append(
            f"synthetic_language={options.synthetic_language} does nothing with "
            "synthetic_voices=0; set synthetic_voices, or drop it"
        )
    if options.streaming and options.normalise in ("tilt", "utterance"):
        problems.append(
            f"normalise={options.normalise} needs the whole utterance, and streaming=true has what "
            "was heard so far; use normalise=running, or drop it"
        )
    if problems:
        raise ConfigError(problems)


def keep_resumed(options: SpeechOptions, had: dict[str, Any] | None) -> None:
    """Go on as the resumed run did where the user says nothing else. Written into `options`, and
    so into the checkpoints of this run."""
    if had is None:
        return
    if "equaliser" not in had and had.get("normalise") == "auto":
        # Between version 0.1 and `tilt`, auto chose this.
        had = {**had, "normalise": "running" if options.streaming else "utterance"}
    for name, before in BEFORE.items():
        idle = name in VARIATIONS and not options.augment
        if name not in options.model_fields_set and not idle:
            setattr(options, name, had.get(name, before))


def augmentation_of(options: SpeechOptions, rate: int, timing: Timing) -> Augmentation | None:
    """What is done to training utterances on the device; None for nothing."""
    names = set(VARIATIONS) - {"speed", "crop", "spec_augment"}
    given = options.model_dump(include=names)
    if not options.augment or not any(given.values()):
        return None
    return Augmentation(rate, **given, frame=timing.subsampling * timing.hop)


def announced(data: SpeechData, options: SpeechOptions, words: list[str] | None) -> list[str]:
    lines = [data.describe(), *data.notes]
    if options.augment:
        given = {name: getattr(options, name) for name in VARIATIONS}
        told = ", ".join(
            name if value is True else f"{name} {value:g}" for name, value in given.items() if value
        )
        lines.append(f"training utterances vary in: {told or 'nothing'}")
    if words is not None:
        where = "training transcripts" if options.lexicon in ("auto", "data") else options.lexicon
        lines.append(f"reads only the {len(words):,} words of {where} (lexicon=none reads any)")
        known = set(words)
        said = [word for clip in data.test for word in data.alphabet.decode(clip.labels).split()]
        unknown = sum(word not in known for word in said)
        if unknown:
            lines.append(
                f"of {len(said):,} words in the test, {unknown:,} are not among them and cannot "
                "be read"
            )
        if 0 < data.speakers < FEW_SPEAKERS and not options.synthetic_voices:
            lines.append(
                f"only {data.speakers} speakers are trained on, and others will be read worse; "
                "synthetic_voices=100 adds voices (needs espeak-ng)"
            )
    return lines


def choose_size(options: SpeechOptions) -> tuple[SizeName, int]:
    """The model's size, and the rate of the sound it hears."""
    if options.data_dir is None:
        layout, rate = "voice", RATE
    else:
        place = Path(options.data_dir).expanduser()
        layout = options.layout
        if layout == "auto":
            layout = find_layout(place) if place.exists() else "fsdd"  # missing is said later
        rate = RATES[layout]
    size: SizeName = "small" if layout in ("voice", "fsdd") else "base"
    return (size if options.size == "auto" else options.size), options.sample_rate or rate


def load_speech(options: SpeechOptions, timing: Timing, seed: int = 0) -> SpeechData:
    if options.data_dir is None:
        return built_in(timing, options.alphabet, options.sample_rate)
    return from_folder(
        Path(options.data_dir).expanduser(),
        options.layout,
        Division(options.split, options.held_out_speaker, seed),
        timing,
        options.alphabet,
        options.sample_rate,
        options.trim,
        Synthesis(options.synthetic_voices, options.synthetic_language, seed)
        if options.synthetic_voices
        else None,
    )


def datasets(data: SpeechData, options: SpeechOptions, timing: Timing) -> tuple[Speech, Speech]:
    """Training and test part, padded to the same few lengths."""
    speed = options.speed if options.augment else 0.0
    crop = options.crop if options.augment else 0.0
    # At their slowest: a bucket must hold what any epoch may draw.
    lengths = [longest(clip.samples, speed) for clip in data.train]
    labels = [len(clip.labels) for clip in data.train]
    buckets = Buckets(lengths, labels, options.buckets, 10 * timing.hop)
    return (
        Speech(data.train, data.rate, buckets, speed, options.trim, crop),
        Speech(data.test, data.rate, buckets, 0.0, options.trim),
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
