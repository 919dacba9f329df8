"""Folders of speech: three layouts, named problems, and batches of one length."""

from __future__ import annotations

import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from multi_gpu_training.data.batch import share_of
from multi_gpu_training.data.loader import Feeding, ShareLoader
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.speech import SpeechOptions, choose_size, load_speech
from multi_gpu_training.recipes.speech.alphabet import Alphabet, plain
from multi_gpu_training.recipes.speech.audio import read_header, read_sound, resample
from multi_gpu_training.recipes.speech.corpora import DIGITS
from multi_gpu_training.recipes.speech.dataset import BucketedBatches, Buckets, Speech, longest
from multi_gpu_training.recipes.speech.speech_data import SpeechData, Timing
from multi_gpu_training.recipes.speech.voice import speak, speak_all


def write_wav(path: Path, seconds: float = 0.5, rate: int = 8000, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    time = np.arange(round(seconds * rate)) / rate
    tone = (8000 * np.sin(2 * np.pi * 400 * time)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(tone[:, None], channels, 1).tobytes())
    return path


def write_fsdd(folder: Path) -> Path:
    for digit in (3, 7):
        for speaker in ("ann", "bob"):
            for number in (0, 4, 5, 6):
                write_wav(folder / f"recordings/{digit}_{speaker}_{number}.wav")
    return folder


def write_librispeech(folder: Path) -> Path:
    for part, chapter in (("train-clean-100", "19-198"), ("test-clean", "61-70968")):
        place = folder / part / chapter.replace("-", "/")
        place.mkdir(parents=True)
        lines = []
        for number in range(3):
            name = f"{chapter}-{number:04}"
            tone = np.sin(np.arange(16000) / 5).astype("float32")
            soundfile.write(place / f"{name}.flac", 0.3 * tone, 16000)
            lines.append(f"{name} THE CAT'S {DIGITS[number].upper()}")
        (place / f"{chapter}.trans.txt").write_text("\n".join(lines) + "\n")
    return folder


def write_festvox(folder: Path, count: int = 21) -> Path:
    lines = []
    for i in range(count):
        write_wav(folder / f"wav/utt_{i:02}.wav", rate=16000)
        lines.append(f'( utt_{i:02} "Да, {DIGITS[i % 10]}!" )')
    (folder / "etc").mkdir(parents=True, exist_ok=True)
    (folder / "etc/txt.done.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def load(folder: Path | None, **options: Any) -> SpeechData:
    seed = options.pop("seed", 0)
    chosen = SpeechOptions(data_dir=None if folder is None else str(folder), **options)
    _, rate = choose_size(chosen)
    return load_speech(chosen, Timing(rate // 100, 2), seed)


def texts(data: SpeechData, part: str) -> list[str]:
    return [data.alphabet.decode(clip.labels) for clip in getattr(data, part)]


# Layouts


def test_fsdd_is_cut_into_its_official_parts(tmp_path: Path) -> None:
    data = load(write_fsdd(tmp_path))
    assert (len(data.train), len(data.test), data.rate) == (8, 8, 8000)
    assert sorted(set(texts(data, "train"))) == ["seven", "three"]
    assert {c.path.stem[-1] for c in data.test if c.path} == {"0", "4"}
    assert load(tmp_path / "recordings").describe() == data.describe()


def test_a_speaker_can_be_held_out(tmp_path: Path) -> None:
    data = load(write_fsdd(tmp_path), held_out_speaker="bob")
    assert all("bob" in str(clip.path) for clip in data.test)
    assert not any("bob" in str(clip.path) for clip in data.train)
    assert (len(data.train), len(data.test)) == (8, 8)
    with pytest.raises(ConfigError, match="'eve' is not in this corpus; it has ann, bob"):
        load(tmp_path, held_out_speaker="eve")


def test_librispeech_is_cut_by_folder(tmp_path: Path) -> None:
    data = load(write_librispeech(tmp_path))
    assert sorted(texts(data, "train")) == ["the cat's one", "the cat's two", "the cat's zero"]
    assert len(data.test) == 3
    assert (data.rate, data.train[0].samples) == (16000, 16000)


def test_festvox_tests_on_every_20th_sentence(tmp_path: Path) -> None:
    data = load(write_festvox(tmp_path), alphabet="data")
    assert (len(data.train), len(data.test)) == (20, 1)
    assert texts(data, "test") == ["да nine"]
    assert texts(data, "train")[0] == "да zero"


def test_size_and_rate_follow_the_layout(tmp_path: Path) -> None:
    write_fsdd(tmp_path / "digits")
    write_librispeech(tmp_path / "books")
    found = [
        choose_size(SpeechOptions(data_dir=str(tmp_path / name))) for name in ("digits", "books")
    ]
    assert found == [("small", 8000), ("base", 16000)]
    assert choose_size(SpeechOptions()) == ("small", 8000)
    assert choose_size(SpeechOptions(size="base", sample_rate=8000)) == ("base", 8000)


def test_text_is_read_without_case_and_punctuation() -> None:
    assert plain("  Don\u2019t -- STOP, well-known!  ") == "don't stop well known"
    alphabet = Alphabet("ab ")
    assert alphabet.decode(alphabet.encode("a b")) == "a b"
    assert alphabet.classes == 4


def test_the_built_in_voice_is_named_as_such_and_always_the_same() -> None:
    data = load(None)
    assert "built-in synthetic voice" in data.describe()
    again = speak_all(3, seed=0)
    for clip, (sound, text) in zip(data.train[:3], again, strict=True):
        assert clip.sound is not None and torch.equal(clip.sound, sound)
        assert data.alphabet.decode(clip.labels) == text
    assert set(texts(data, "train")) != set(texts(data, "test"))
    assert not torch.equal(speak(1)[0][:400], speak(2)[0][:400])


# Wrong input


def problem(folder: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, **options)
    return str(caught.value)


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere' is not a folder; set it to one in the layout" in problem(tmp_path / "nowhere")


def test_empty_folder(tmp_path: Path) -> None:
    message = problem(tmp_path)
    assert "holds nothing: neither recordings/7_name_32.wav (FSDD)" in message
    assert "point to the folder that holds one of them" in message
    assert "has no training utterance" in problem(tmp_path, layout="fsdd")


def test_missing_transcripts(tmp_path: Path) -> None:
    extra = write_wav(write_fsdd(tmp_path / "fsdd") / "recordings/hello.wav")
    message = problem(tmp_path / "fsdd")
    assert f"1 sound files have no transcript: {extra}" in message
    books = write_librispeech(tmp_path / "books")
    listing = next(books.glob("train*/*/*/*.trans.txt"))
    listing.write_text("\n".join(listing.read_text().splitlines()[:2]))
    message = problem(books)
    assert "19-198-0002.flac; add its line to the .trans.txt beside it" in message
    listing.unlink()
    assert "3 sound files have no transcript" in problem(books)
    russian = write_festvox(tmp_path / "ru")
    write_wav(russian / "wav/more.wav")
    assert "more.wav; add its line to" in problem(russian, alphabet="data")


def test_transcript_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    (write_festvox(tmp_path) / "wav/utt_03.wav").unlink()
    assert "names 1 files that are not there: " in problem(tmp_path, alphabet="data")
    (tmp_path / "etc/txt.done.data").write_text("( utt_00 no quotes )")
    assert "line 1: '( utt_00 no quotes )' is not `( NAME" in problem(tmp_path)
    with pytest.raises(DataError, match="layout=festvox, but there is no"):
        load(tmp_path / "wav", layout="festvox")


def test_transcript_without_a_word(tmp_path: Path) -> None:
    listing = next(write_librispeech(tmp_path).glob("train*/*/*/*.trans.txt"))
    listing.write_text(listing.read_text() + "19-198-0009\n")
    assert "line 4: '19-198-0009' has no text" in problem(tmp_path)
    listing.write_text(listing.read_text().replace("THE CAT'S ZERO", "...").rsplit("\n", 2)[0])
    assert "19-198-0000.flac; write down what is said in it" in problem(tmp_path)


def test_characters_outside_the_alphabet(tmp_path: Path) -> None:
    message = problem(write_festvox(tmp_path))
    assert "2 characters lie outside alphabet=english: 'д' (21 times, first in " in message
    assert "set alphabet=data" in message
    assert "'o' (" in problem(tmp_path, alphabet="абвгд")
    with pytest.raises(ConfigError, match="holds no character"):
        load(tmp_path, alphabet=" ")


def test_other_rates_are_resampled_and_said_so(tmp_path: Path) -> None:
    write_wav(write_fsdd(tmp_path) / "recordings/3_ann_5.wav", rate=44100)
    write_wav(tmp_path / "recordings/3_ann_6.wav", rate=16000)
    data = load(tmp_path)
    assert data.notes == ["resampled to 8,000 Hz: 1 of 44,100 Hz, 1 of 16,000 Hz"]
    assert {clip.samples for clip in data.train} == {4000}
    assert load(tmp_path, sample_rate=16000).rate == 16000


def test_stereo_is_mixed_down_and_said_so(tmp_path: Path) -> None:
    path = write_wav(write_fsdd(tmp_path) / "recordings/3_ann_5.wav", channels=2)
    assert load(tmp_path).notes == ["mixed down to mono: 1 files with several channels"]
    mono = read_sound(write_wav(tmp_path / "mono.wav"), 8000)
    assert torch.equal(read_sound(path, 8000), mono)


def test_clips_that_are_too_short_are_left_out_and_counted(tmp_path: Path) -> None:
    write_wav(write_fsdd(tmp_path) / "recordings/7_ann_5.wav", seconds=0.05)
    write_wav(tmp_path / "recordings/7_ann_0.wav", seconds=0.05)
    data = load(tmp_path)
    assert (len(data.train), len(data.test)) == (7, 8)
    left_out, tests = data.notes
    assert left_out.startswith("left out of training: 1 of 8 clips, too short for their text")
    assert "7_ann_5.wav, 0.05 s of 0.08 s" in left_out
    assert tests.startswith("in the test part 1 of 8 clips are too short")
    for path in (tmp_path / "recordings").glob("*.wav"):
        write_wav(path, seconds=0.01)
    assert "all 8 training clips of fsdd are too short" in problem(tmp_path)


def test_files_that_are_no_audio_are_all_named(tmp_path: Path) -> None:
    write_fsdd(tmp_path)
    for name in ("3_ann_5", "7_bob_0"):
        (tmp_path / f"recordings/{name}.wav").write_text("this is text")
    message = problem(tmp_path)
    assert "3_ann_5.wav cannot be read as audio (" in message
    assert "7_bob_0.wav cannot be read as audio (" in message
    assert "fetch it again or remove it" in message


def test_missing_soundfile_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert "pip install 'multi-gpu-training[speech]'" in problem(write_librispeech_files(tmp_path))
    assert load(write_fsdd(tmp_path / "fsdd")).rate == 8000  # plain WAV needs no library


def write_librispeech_files(folder: Path) -> Path:
    """As write_librispeech, without the library that is missing here."""
    for part in ("train-a", "test-a"):
        place = folder / "books" / part / "1/2"
        place.mkdir(parents=True)
        (place / "1-2-0001.flac").write_bytes(b"fLaC")
        (place / "1-2.trans.txt").write_text("1-2-0001 HELLO\n")
    return folder / "books"


# Sound


@pytest.mark.parametrize(("found", "wanted"), [(16000, 8000), (8000, 16000), (44100, 16000)])
def test_a_resampled_tone_is_the_same_tone(found: int, wanted: int) -> None:
    hertz = 440.0

    def tone(rate: int) -> Tensor:
        return torch.sin(2 * torch.pi * hertz * torch.arange(rate) / rate)

    ours = resample(tone(found), found, wanted)
    assert len(ours) == wanted
    inner = slice(wanted // 10, -wanted // 10)
    assert float((ours[inner] - tone(wanted)[inner]).abs().max()) < 2e-3


def test_resampling_leaves_out_what_the_lower_rate_cannot_hold() -> None:
    high = torch.sin(2 * torch.pi * 6000 * torch.arange(16000) / 16000)
    assert float(resample(high, 16000, 8000)[800:-800].abs().max()) < 5e-3


def test_formats_read_alike(tmp_path: Path) -> None:
    plain_wav = write_wav(tmp_path / "a.wav")
    values, rate = soundfile.read(plain_wav, dtype="int16")
    soundfile.write(tmp_path / "a.flac", values, rate, subtype="PCM_16")
    soundfile.write(tmp_path / "wide.wav", values, rate, subtype="PCM_24")
    reference = read_sound(plain_wav, 8000)
    for name in ("a.flac", "wide.wav"):
        assert read_header(tmp_path / name) == read_header(plain_wav)
        assert torch.equal(read_sound(tmp_path / name, 8000), reference)


# Batches


def lengths_of(count: int) -> list[int]:
    return torch.randint(1000, 9000, (count,), generator=torch.Generator().manual_seed(2)).tolist()


def test_buckets_hold_everything_and_are_about_equally_full() -> None:
    samples = lengths_of(200)
    buckets = Buckets(samples, [n // 500 for n in samples], 5, 80)
    numbers = [buckets.number(n) for n in samples]
    assert all(40 - 8 <= numbers.count(i) <= 40 + 8 for i in range(5))
    for n in samples:
        bucket = buckets.fit(n, n // 500)
        assert bucket.samples >= n and bucket.samples % 80 == 0 and bucket.labels >= n // 500
    assert buckets.fit(99_999, 300).samples == 99_999  # a longer test than any training


def test_every_utterance_once_an_epoch_in_batches_of_one_bucket() -> None:
    numbers = [i % 3 for i in range(50)]
    source = BucketedBatches(numbers, 8)
    batches = list(source.batches(5, 0))
    assert len(batches) == len(source) == 8
    assert sorted(i for batch in batches for i in batch) == list(range(50))
    assert all(len({numbers[i] for i in batch}) == 1 for batch in batches)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    source, again = (BucketedBatches([i % 3 for i in range(50)], 8) for _ in range(2))
    order = list(source.batches(5, 2))
    torch.manual_seed(99)
    assert list(again.batches(5, 2)) == order
    assert list(source.batches(5, 3)) != order != list(source.batches(6, 2))
    mixed = [batch[0] % 3 for batch in order]
    assert mixed != sorted(mixed)  # long and short batches take turns


def seen(dataset: Speech, ranks: int, workers: int = 0) -> dict[int, tuple[Tensor, Tensor, int]]:
    """Each utterance as the loaders of all ranks give it: sound, draws and padded length."""
    found = {}
    for rank in range(ranks):
        feeding = Feeding(
            micro_size=8,
            seed=3,
            rank=rank,
            ranks=ranks,
            collate=dataset.collate,
            num_workers=workers,
            prefetch_factor=2 if workers else None,
        )
        for batch in ShareLoader(dataset, dataset.global_batches(8), feeding):
            share = share_of(batch)
            assert share is not None
            for row, index in enumerate(share.indices):
                sound = batch.sound[row, : batch.samples[row]]
                found[index] = (sound, batch.draws[row], batch.sound.shape[1])
    return found


def test_an_utterance_is_varied_and_padded_alike_on_any_rank_and_worker() -> None:
    data = load(None)
    clips = data.train[:40]
    lengths = [longest(clip.samples, 0.15) for clip in clips]
    buckets = Buckets(lengths, [len(clip.labels) for clip in clips], 3, 80)
    dataset = Speech(clips, data.rate, buckets, speed=0.15)
    reference = seen(dataset, 1)
    assert len(reference) == 40
    for index, (_, _, padded) in reference.items():  # whatever its speed is this time
        assert padded == buckets.fit(lengths[index], 0).samples
    changed = sum(len(reference[i][0]) != clip.samples for i, clip in enumerate(clips))
    assert changed > 30
    for ranks, workers in ((2, 0), (3, 0), (2, 1)):
        for index, (sound, draws, padded) in seen(dataset, ranks, workers).items():
            assert torch.equal(sound, reference[index][0])
            assert torch.equal(draws, reference[index][1])
            assert padded == reference[index][2]


def test_options_that_would_do_nothing_are_errors() -> None:
    recipe = find_recipe("speech")
    with pytest.raises(ConfigError) as caught:
        recipe.build(
            recipe.config({}),
            SpeechOptions(held_out_speaker="ann", layout="fsdd", beam_width=4),
        )
    message = str(caught.value)
    assert "held_out_speaker=ann is for a folder of speech; set data_dir" in message
    assert "layout=fsdd is for a folder" in message
    assert "beam_width=4 does nothing with decoder=greedy; set decoder=beam" in message


def test_the_recipe_tells_what_it_found(tmp_path: Path) -> None:
    recipe = find_recipe("speech")
    write_wav(write_fsdd(tmp_path) / "recordings/3_ann_5.wav", rate=16000)
    job = recipe.build(recipe.config({}), SpeechOptions(data_dir=str(tmp_path)))
    lines = job.callbacks[0].lines  # type: ignore[attr-defined]
    assert lines[0].startswith("speech: fsdd, 8 utterances")
    assert lines[1] == "resampled to 8,000 Hz: 1 of 16,000 Hz"


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE", "PCM_24"])
def test_floats_are_as_loud_as_integers(tmp_path: Path, kind: str) -> None:
    tone = 0.5 * np.sin(np.arange(800) * 0.3)
    soundfile.write(tmp_path / "plain.wav", tone, 8000, subtype="PCM_16")
    soundfile.write(tmp_path / "other.wav", tone, 8000, subtype=kind)
    plain, other = (read_sound(tmp_path / f"{n}.wav", 8000) for n in ("plain", "other"))
    assert int((plain.int() - other.int()).abs().max()) <= 1


def test_floats_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tone = np.zeros(800)
    tone[5] = np.nan
    soundfile.write(tmp_path / "nan.wav", tone, 8000, subtype="FLOAT")
    with pytest.raises(DataError, match="NaN or infinite"):
        read_sound(tmp_path / "nan.wav", 8000)
