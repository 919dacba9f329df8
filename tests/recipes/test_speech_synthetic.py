"""Voices of espeak-ng as further training data, and what a checkpoint knows of its recogniser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_speech_data import write_wav
from test_speech_tables import write_four

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.speech import SpeechOptions
from multi_gpu_training.recipes.speech.speech_pipeline import SpeechPipeline
from multi_gpu_training.recipes.speech.synthetic import Synthesis, choose_voices, speak_with

RATE = 8000
spoken_here = pytest.mark.skipif(
    shutil.which("espeak-ng") is None, reason="espeak-ng is not installed (apt install espeak-ng)"
)


@spoken_here
def test_voices_are_many_and_the_same_for_everyone() -> None:
    voices = choose_voices(Synthesis(40))
    assert len({voice.name for voice in voices}) == 40
    assert len({voice.pitch for voice in voices}) > 10
    assert voices == choose_voices(Synthesis(40)) != choose_voices(Synthesis(40, seed=1))
    assert choose_voices(Synthesis(3)) == voices[:3]
    said = speak_with(Synthesis(4), ["seven", "one", "seven"], RATE)
    assert [text for _, text in said] == ["one", "seven"] * 4
    again = speak_with(Synthesis(4), ["one", "seven"], RATE)
    for (sound, _), (other, _) in zip(said, again, strict=True):
        assert torch.equal(sound, other)
        assert sound.dtype == torch.int16 and 0.15 * RATE < len(sound) < 1.5 * RATE
        assert int(sound.abs().max()) > 1000
    assert len({tuple(sound.tolist()) for sound, _ in said}) == 8
    with pytest.raises(ConfigError, match=r"synthetic_language='qq': .* it speaks af, "):
        choose_voices(Synthesis(1, language="qq"))


@spoken_here
def test_they_say_what_training_says_and_are_never_tested_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = find_recipe("speech")
    given = {"data_dir": str(write_four(tmp_path)), "held_out_speaker": "ann"}
    plain = recipe.build(recipe.config({}), SpeechOptions(**given))
    job = recipe.build(recipe.config({}), SpeechOptions(**given, synthetic_voices=3))
    assert len(job.dataset) == len(plain.dataset) + 3 * 2
    assert len(job.val_dataset) == len(plain.val_dataset)
    lines = job.callbacks[0].lines  # type: ignore[attr-defined]
    assert any("on 6 utterances of 3 synthetic voices (eSpeak NG" in line for line in lines)
    # A test needs none of them, on a machine that may not have the program.
    monkeypatch.setenv("PATH", str(tmp_path))
    chosen = SpeechOptions(**given, synthetic_voices=3, synthetic_language="en-us")
    read = SpeechPipeline(dict(job.description or {}), chosen.model_dump())
    assert len(read.examples(2)) == 2
    assert read.evaluate(read.build_model())["wer"] > 0


def test_a_small_vocabulary_of_few_speakers_is_advised_to_take_more_voices(tmp_path: Path) -> None:
    recipe = find_recipe("speech")
    rows = [
        f"{write_wav(tmp_path / f'{who}{take}{word}.wav').name},{word},{who}"
        for who in ("ann", "bob", "eve")
        for take in range(6)
        for word in ("seven", "three")
    ]
    table = tmp_path / "words.csv"
    table.write_text("\n".join(["path,text,speaker", *rows]) + "\n")

    def lines(**given: object) -> str:
        options = SpeechOptions(data_dir=str(table), held_out_speaker="ann", **given)  # type: ignore[arg-type]
        job = recipe.build(recipe.config({}), options)
        return "\n".join(job.callbacks[0].lines)  # type: ignore[attr-defined]

    assert "only 2 speakers are trained on" in lines()
    assert "synthetic_voices=100 adds voices (needs espeak-ng)" in lines()
    assert "are trained on, and others" not in lines(lexicon="none")  # sentences of any words


def test_without_espeak_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"synthetic_voices=5 .* apt install espeak-ng"):
        speak_with(Synthesis(5), ["one"], RATE)


def test_voices_that_would_do_nothing_are_errors() -> None:
    recipe = find_recipe("speech")
    for given, told in (
        ({"synthetic_voices": 3}, "synthetic_voices=3 is for a folder of speech"),
        ({"synthetic_language": "de"}, "synthetic_language=de does nothing with"),
    ):
        with pytest.raises(ConfigError, match=told):
            recipe.build(recipe.config({}), SpeechOptions(**given))


# What a checkpoint knows


def pipeline(folder: Path, **options: object) -> SpeechPipeline:
    recipe = find_recipe("speech")
    chosen = SpeechOptions(data_dir=str(folder), held_out_speaker="ann", **options)  # type: ignore[arg-type]
    job = recipe.build(recipe.config({}), chosen)
    # As it lies in a checkpoint.
    described = json.loads(json.dumps(job.description))
    return SpeechPipeline(described, chosen.model_dump())


def test_a_checkpoint_reads_with_the_words_features_and_edges_of_its_training(
    tmp_path: Path,
) -> None:
    write_four(tmp_path)
    (tmp_path / "words.txt").write_text("three\nseven\nthirty\n")
    mine = pipeline(tmp_path, lexicon=str(tmp_path / "words.txt"))
    (tmp_path / "words.txt").unlink()  # it is in the checkpoint
    torch.manual_seed(0)
    model = mine.build_model().eval()
    assert model.features.normalise == "tilt"
    at = torch.arange(4000) / RATE
    voice = (8000 * torch.sin(2000 * at)).to(torch.int16)
    silence = torch.zeros(4000, dtype=torch.int16)
    found = [
        next(iter(mine.perform("predict", model, [sound], 1)))
        for sound in (voice, torch.cat([silence, voice, silence]))
    ]
    for result in found:
        assert result["text"] and set(result["text"].split()) <= {"three", "seven", "thirty"}
        assert [word["word"] for word in result["words"]] == result["text"].split()
        assert 0 < result["confidence"] < 1
    assert found[0]["text"] == found[1]["text"]
    assert found[0]["confidence"] == pytest.approx(found[1]["confidence"], abs=0.02)
    assert (found[0]["seconds"], found[1]["seconds"]) == (0.5, 1.5)
    free = pipeline(tmp_path, lexicon="none", normalise="bands", trim=0)
    assert free.decoder.lexicon is None and "trim_db" not in free.preprocessing
    assert free.build_model().features.normalise == "bands"


def test_a_checkpoint_of_version_01_is_read_as_it_was_trained(tmp_path: Path) -> None:
    write_four(tmp_path)
    old = pipeline(tmp_path, lexicon="none", normalise="bands", trim=0)
    del old.description["model"]["normalise"], old.description["lexicon"]
    known = ("data_dir", "layout", "held_out_speaker", "alphabet", "augment", "decoder")
    old.options = {name: old.options[name] for name in known} | {"held_out_speaker": None}
    assert old.build_model().features.normalise == "bands"
    assert old.decoder.lexicon is None
    [test] = old.parts(old.job(), "val")
    assert len(test) == 16  # the official test of all four, none of them held out
    old.options["augment"] = False
    assert len(old.parts(old.job(), "val")[0]) == 16
