"""Tables of recordings and Common Voice; tests by speaker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from test_speech_data import load, texts, write_festvox, write_fsdd, write_librispeech, write_wav
from torch import Tensor

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.speech import SpeechOptions, choose_size
from multi_gpu_training.recipes.speech.alphabet import Alphabet
from multi_gpu_training.recipes.speech.corpora import DIGITS
from multi_gpu_training.recipes.speech.speech_data import SpeechData
from multi_gpu_training.training.metrics import MetricsCollector

SPEAKERS = ("ann", "bob", "eve", "joe")


def write_clips(folder: Path, count: int = 24) -> list[dict[str, str]]:
    """Recordings, and the rows that name them."""
    rows = []
    for number in range(count):
        write_wav(folder / f"wavs/{number}.wav", rate=16000)
        text, speaker = DIGITS[number % 10].upper() + "!", SPEAKERS[number % len(SPEAKERS)]
        rows.append({"path": f"wavs/{number}.wav", "text": text, "speaker": speaker})
    return rows


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    mark = "\t" if path.suffix == ".tsv" else ","
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    path.write_text("".join(mark.join(line) + "\n" for line in lines))
    return path


def heard(data: SpeechData, part: str) -> list[str]:
    return sorted(clip.path.stem for clip in getattr(data, part) if clip.path)


@pytest.mark.parametrize("name", ["speech.csv", "speech.tsv", "speech.jsonl"])
def test_a_table_is_read_from_its_file_or_its_folder(tmp_path: Path, name: str) -> None:
    table = write_table(tmp_path / name, write_clips(tmp_path))
    data = load(table, split="official")
    assert (len(data.train), len(data.test), data.rate) == (23, 1, 16000)
    assert texts(data, "train")[:2] == ["zero", "one"]
    assert heard(load(tmp_path, split="official"), "train") == heard(data, "train")
    assert choose_size(SpeechOptions(data_dir=str(table))) == ("base", 16000)


def test_columns_go_by_the_names_that_others_give_them(tmp_path: Path) -> None:
    rows = write_clips(tmp_path)
    nemo = [{"audio_filepath": str(tmp_path / r["path"]), "text": r["text"]} for r in rows]
    hugging_face = [{"file_name": r["path"], "transcription": r["text"]} for r in rows]
    for number, renamed in enumerate((nemo, hugging_face)):
        data = load(write_table(tmp_path / f"{number}.jsonl", renamed))
        assert (len(data.train), len(data.test)) == (23, 1)


def test_parts_come_from_a_column_or_from_one_table_each(tmp_path: Path) -> None:
    rows = write_clips(tmp_path)
    parts = ["train"] * 16 + ["validation"] * 4 + ["test"] * 4
    whole = [{**row, "split": part} for row, part in zip(rows, parts, strict=True)]
    data = load(write_table(tmp_path / "all.csv", whole), split="official")
    assert (len(data.train), heard(data, "test")) == (16, ["16", "17", "18", "19"])
    assert data.notes == ["left alone: 4 utterances of the test part, since there is a dev part"]
    (tmp_path / "all.csv").unlink()
    for name, chosen in (("train", rows[:16]), ("dev", rows[16:20]), ("test", rows[20:])):
        write_table(tmp_path / f"{name}.csv", chosen)
    again = load(tmp_path, split="official")
    assert heard(again, "train") == heard(data, "train")
    assert heard(again, "test") == heard(data, "test")
    (tmp_path / "dev.csv").unlink()
    assert heard(load(tmp_path, split="official"), "test") == ["20", "21", "22", "23"]


def write_common_voice(folder: Path) -> Path:
    for part, numbers in (("train", range(6)), ("dev", range(6, 8)), ("test", range(8, 10))):
        lines = ["client_id\tpath\tsentence\tup_votes"]
        for number in numbers:
            path = write_wav(folder / f"clips/common_voice_en_{number}.wav", rate=48000)
            if number % 2:
                values, rate = soundfile.read(path)
                path.unlink()
                path = path.with_suffix(".mp3")
                soundfile.write(path, values, rate)
            # A quote that is not closed, as there are some in Common Voice.
            lines.append(f'{part}-{number}\t{path.name}\t"Say {DIGITS[number]}, he said.\t2')
        (folder / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def test_common_voice_is_read_with_its_parts_and_formats(tmp_path: Path) -> None:
    data = load(write_common_voice(tmp_path))
    assert (len(data.train), len(data.test), data.rate) == (6, 2, 16000)
    assert texts(data, "train")[:2] == ["say zero he said", "say one he said"]
    assert sorted(texts(data, "test")) == ["say seven he said", "say six he said"]
    assert "speech: common_voice, 6 utterances" in data.describe()
    assert "resampled to 16,000 Hz: 8 of 48,000 Hz" in data.notes


# Wrong tables


def problems(place: Path, **options: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        load(place, **options)
    return list(caught.value.problems)


def test_everything_wrong_with_a_table_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{**row, "split": "train"} for row in write_clips(tmp_path)]
    rows[1]["path"] = "wavs/nowhere.wav"
    rows[2]["text"] = "..."
    rows[3]["split"] = "holdout"
    rows[4]["path"] = rows[5]["path"]
    rows[6]["path"] = ""
    (tmp_path / "wavs/7.wav").write_text("this is text")
    rows[8]["text"] = "zéro"
    table = write_table(tmp_path / "speech.csv", rows)
    found = problems(table)
    wanted = {
        3: "wavs/nowhere.wav does not exist; add the file or take the line out",
        4: "says nothing of what is spoken in wavs/2.wav; write it down",
        5: "its split is 'holdout'; there are train, dev (or val) and test",
        7: f"wavs/5.wav is named before ({table}, line 6)",
        8: "names no file in its column of paths",
        9: "7.wav cannot be read as audio",
    }
    for line, text in wanted.items():
        assert any(f"{table}, line {line}: " in each and text in each for each in found), line
    assert any("'é' (1 times, first in " in each and "line 10)" in each for each in found)


def test_a_table_in_another_form_says_what_it_must_be(tmp_path: Path) -> None:
    rows = write_clips(tmp_path)
    renamed = [{"sound": row["path"], "text": row["text"]} for row in rows]
    [message] = problems(write_table(tmp_path / "a.csv", renamed))
    assert "a.csv: has the columns sound, text; it must name `path` and `text`" in message
    write_table(tmp_path / "b.csv", rows)
    [message] = problems(tmp_path)
    assert "holds 2 tables (a.csv, b.csv); point data_dir to one of them" in message
    (tmp_path / "words.txt").write_text("path text\n")
    [message] = problems(tmp_path / "words.txt")
    assert "words.txt: is not one of .jsonl, .csv, .tsv" in message
    partly = [{**row, "split": "train" if n else ""} for n, row in enumerate(rows)]
    [message] = problems(write_table(tmp_path / "b.csv", partly).parent / "b.csv")
    assert "b.csv, line 2: has no split, but other rows have one" in message
    broken = tmp_path / "c.jsonl"
    broken.write_text('{"path": "wavs/1.wav", "text": "one"}\n{"path": \n')
    assert "c.jsonl, line 2: " in problems(broken)[0]
    with pytest.raises(ConfigError, match="layout=fsdd is for a folder"):
        load(tmp_path / "b.csv", layout="fsdd")


# Tests by speaker


def groups(data: SpeechData) -> dict[tuple[str, bool], int]:
    found = [data.groups[clip.group] for clip in data.test]
    return {(g.speaker, g.known): found.count(g) for g in data.groups}


def write_four(folder: Path) -> Path:
    for digit in (3, 7):
        for speaker in SPEAKERS:
            for number in (0, 4, 5, 6):
                write_wav(folder / f"recordings/{digit}_{speaker}_{number}.wav")
    return folder


def test_where_speakers_are_known_one_is_tested_on_and_the_official_test_beside(
    tmp_path: Path,
) -> None:
    data = load(write_four(tmp_path))
    [held] = [speaker for speaker, known in groups(data) if not known]
    others = [name for name in SPEAKERS if name != held]
    # All of the one that is held out, and the official test part of the others.
    assert groups(data) == {(held, False): 8, **{(name, True): 4 for name in others}}
    assert not any(held in name for name in heard(data, "train"))
    assert {name[-1] for name in heard(data, "train")} == {"5", "6"}
    [note] = data.notes
    assert f"split by speaker: tested on {held}, not trained on (wer), and on the test" in note
    named = load(tmp_path, split="speaker", held_out_speaker="bob")
    assert groups(named)["bob", False] == 8 and groups(named)["ann", True] == 4


def test_speakers_are_drawn_by_the_seed(tmp_path: Path) -> None:
    write_four(tmp_path)

    def drawn(seed: int) -> str:
        [held] = [speaker for speaker, known in groups(load(tmp_path, seed=seed)) if not known]
        return held

    assert [drawn(seed) for seed in range(8)] == [drawn(seed) for seed in range(8)]
    assert len({drawn(seed) for seed in range(8)}) > 1


def test_a_corpus_keeps_its_own_test_where_that_says_more(tmp_path: Path) -> None:
    two = load(write_fsdd(tmp_path / "two"))  # one voice alone would be left to train on
    assert (len(two.train), len(two.test), two.notes) == (8, 8, [])
    official = load(write_four(tmp_path / "four"), split="official")
    assert (len(official.train), len(official.test)) == (16, 16)
    assert {group.known for group in official.groups} == {False}
    books = load(write_librispeech(tmp_path / "books"))  # its test has other speakers already
    assert (len(books.train), books.notes) == (3, [])
    with pytest.raises(ConfigError, match="split=speaker, but this corpus names 0 speakers"):
        load(write_festvox(tmp_path / "ru"), alphabet="data", split="speaker")


def test_a_table_without_a_split_is_tested_on_speakers_who_are_not_trained_on(
    tmp_path: Path,
) -> None:
    data = load(write_table(tmp_path / "speech.csv", write_clips(tmp_path)))
    assert (len(data.train), len(data.test)) == (18, 6)
    assert len(groups(data)) == 1


class Heard(torch.nn.Module):
    """A recogniser that hears "three" whatever is said."""

    def __init__(self, alphabet: Alphabet) -> None:
        super().__init__()
        self.labels = alphabet.encode("thre") + [0] + alphabet.encode("e")
        self.classes = alphabet.classes

    def forward(self, sound: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        path = torch.tensor(self.labels)
        logits = 50.0 * torch.nn.functional.one_hot(path, self.classes).float()
        return logits.expand(len(sound), -1, -1), torch.full((len(sound),), len(path))


def test_unseen_and_known_speakers_are_measured_apart_and_each_by_name(tmp_path: Path) -> None:
    write_four(tmp_path)
    (tmp_path / "recordings/7_bob_0.wav").unlink()  # bob says three alone, in the official test
    (tmp_path / "recordings/7_bob_4.wav").unlink()
    recipe = find_recipe("speech")
    chosen = SpeechOptions(data_dir=str(tmp_path), split="speaker", held_out_speaker="ann")
    job = recipe.build(recipe.config({}), chosen)
    test, metrics = job.val_dataset, MetricsCollector()
    model = Heard(job.eval_fn.keywords["alphabet"])
    for half in (range(7), range(7, len(test))):  # a batch may hold one kind alone
        job.eval_fn(model, test.collate([test[i] for i in half]), metrics)
    found = metrics.compute()
    assert list(found)[1:3] == ["wer", "cer"]
    assert found["wer"] == found["wer_of_ann"] == 0.5
    assert found["wer_known"] == pytest.approx(4 / 10)
    assert found["wer_known_of_bob"] == 0.0 and found["wer_known_of_eve"] == 0.5
    assert sum(name.startswith("wer") for name in found) == 6
