"""Settings, commands, files and data that somebody prepared to break things: refused in words, at
once, in little memory. benchmarks/wrong_invocations.py, hostile_folders.py and hostile_data.py try
many more."""

from __future__ import annotations

import gzip
import json
import os
import resource
import struct
import subprocess
import sys
import wave
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Said, mgt_here
from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.event_crc import with_crc
from multi_gpu_training.monitoring.report import write_report

ONE = ("--multi-gpu", "single", "--num-gpus", "1", "device=cpu", "max_steps=1", "progress=off")
HUGE = "9" * 5000
Mgt = Callable[..., Said]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


def refused(said: Said, *words: str) -> None:
    assert said.code == 2, said
    assert "Traceback" not in said.err
    assert all(word in said.err for word in words), said.err


# Settings and flags


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", float("inf")),
        ("learning_rate", float("nan")),
        ("weight_decay", float("inf")),
        ("max_grad_norm", float("inf")),
        ("warmup_epochs", float("inf")),
        ("seed", 2**64),
        ("batch_size", 2**64),
        ("max_steps", 2**64),
        ("world_size", 3_000_000_000),
        ("local_rank", 2**40),
        ("grace_s", float("inf")),
        ("monitor_interval_s", float("inf")),
        ("timeout", 1e12),
        ("run_name", "a\0b"),
        ("run_name", "\udc80"),
        ("save_dir", "a\0b"),
        ("save_dir", "\udc80"),
        ("save_dir", "x" * 300),
        ("resume", "x" * 5000),
        ("epochs", 10**5000),
    ],
    ids=lambda value: ascii(value)[:12] if isinstance(value, (str, float)) else "number",
)
def test_a_setting_that_can_only_fail_later_is_refused_at_once(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        MultiGPUConfig(**{name: value})
    assert len(str(caught.value)) < 700


def test_a_hang_limit_may_still_be_infinite() -> None:
    assert MultiGPUConfig(hang_timeout_s=float("inf"), seed=2**63 - 1).seed == 2**63 - 1


def test_wrong_commands_are_refused_before_anything_is_started_or_measured(
    mgt: Mgt, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "ok.py").write_text("")
    os.mkfifo(tmp_path / "fifo")
    many = "1099511627776"
    for words, expected in (
        (("train", "image", "--num-gpus", many), ("--num-gpus", "at most")),
        (("run", "--num-gpus", many, "ok.py"), ("--num-gpus", "at most")),
        (("check", "--num-gpus", many), ("--num-gpus", "at most")),
        (("bench", "--ranks", many), ("--ranks", "at most")),
        (("verify", "image", "--ranks", many), ("--ranks", "at most")),
        (("verify", "image", "--device", "gpu"), ("--device gpu",)),
        (("bench", "image", "--out", "file"), ("--out", "not a folder")),
        (("estimate", "image", "--out", "file/x"), ("--out", "not a folder")),
        (("check", "--save-curve", "file/x"), ("--save-curve", "not a folder")),
        (("check", "--timeout", "nan"), ("--timeout nan",)),
        (("train", "image", *ONE, "--lr", "nan"), ("learning_rate",)),
        (("train", "image", *ONE, f"epochs={HUGE}"), ("epochs",)),
        (("train", "image", *ONE, "lr=" + "[" * 1000), ("nested",)),
        (("train", "image", *ONE, "world_size=.nan"), ("world_size",)),
        (("train", "image", *ONE, "device_ids=x"), ("device_ids",)),
        (("train", "image", *ONE, "recipe=speech"), ("recipe", "contradicts")),
        (("train", "x" * 5000), ("too long",)),
        (("train", "/"), ("names no file",)),
        (("report", "x" * 5000), ("too long",)),
        (("report", "file"), ("is a file, not a run folder",)),
        (("checkpoints", "\udc80"), ("UTF-8",)),
        (("run", "--cluster-token", ".", "ok.py"), ("--cluster-token", "not a regular file")),
        (("train", "speech", *ONE, "sample_rate=" + "9" * 30), ("sample_rate",)),
        (("estimate", "--price", "2", "--price-date", "soon"), ("--price-date",)),
    ):
        refused(mgt(*words), *expected)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "ok.py", "fifo"}


def test_config_files_that_are_bombs_are_refused(mgt: Mgt, tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [" + ", ".join([f"*{before}"] * 10) + "]")
    for text, expected in (
        ("recipe: image\n" + "\n".join(lines), "values"),
        ("recipe: image\na: &a [*a]", "contains itself"),
        ("recipe: " + "[" * 50_000, "nested too deeply"),
        ("recipe: image\nepochs: " + HUGE, "cannot be read"),
        ("recipe: image\n" + "#" * 2_000_000, "bytes"),
        ("recipe: image\nepochs: 1" + ":59" * 4000, "epochs"),
        ("recipe: [1]", "unknown recipe"),
    ):
        (tmp_path / "bad.yaml").write_text(text)
        refused(mgt("train", "bad.yaml", *ONE), expected)
    (tmp_path / "good.yaml").write_text("recipe: image\nepochs: &n 0\nmax_steps: *n")
    refused(mgt("train", "good.yaml", *ONE), "epochs=0")  # aliases as such are fine


# Data


def idx(magic: int, *shape: int) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape)


def repeated(head: bytes, times: int) -> bytes:
    """gzip of a head and so many MiB of zeros."""
    block = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = block.compress(bytes(2**20)) + block.flush(zlib.Z_FULL_FLUSH)
    first = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = first.compress(head) + first.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(7) + start + zeros * times + block.flush() + bytes(8)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (repeated(idx(2051, 16, 28, 28), 2000), "more than 12,544 bytes"),
        (repeated(idx(2051, 5_000_000, 28, 28), 3800), "no real data"),
        (gzip.compress(idx(2051, 2**32 - 1, 2**32 - 1, 2**32 - 1)), "no real data"),
    ],
    ids=["more than announced", "bomb", "head"],
)
def test_an_idx_bomb_is_not_unpacked(
    mgt: Mgt, tmp_path: Path, little_memory: None, images: bytes, words: str
) -> None:
    good = gzip.compress(idx(2051, 16, 28, 28) + bytes(16 * 784))
    labels = gzip.compress(idx(2049, 16) + bytes(i % 10 for i in range(16)))
    for part, raw in (("train", images), ("t10k", good)):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(raw)
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(labels)
    refused(mgt("train", "image", *ONE, "--data-dir", tmp_path), words)


def wav(rate: int, channels: int, samples: int) -> bytes:
    size = min(2**32 - 1, samples * channels * 2)
    form = struct.pack("<HHIIHH", 1, channels, rate, 0, (channels * 2) & 0xFFFF, 16)
    head = b"RIFF" + struct.pack("<I", min(2**32 - 1, 36 + size)) + b"WAVEfmt \x10\0\0\0"
    return head + form + b"data" + struct.pack("<I", size) + bytes(16_000)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (wav(8000, 1, 2**31 - 1), "has room for"),
        (wav(8000, 4000, 1), "channels"),
        (wav(2**32 - 1, 1, 8000), "Hz"),
        (wav(7993, 1, 8000), "cannot be resampled"),
        (None, "not a regular file"),
    ],
    ids=["length", "channels", "rate", "odd rate", "FIFO"],
)
def test_the_head_of_a_sound_file_is_not_believed(
    mgt: Mgt, tmp_path: Path, little_memory: None, content: bytes | None, words: str
) -> None:
    for number in range(10):
        with wave.open(str(tmp_path / f"{number}_jo_{number}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(16_000))
    bad = tmp_path / "7_jo_9.wav"
    os.mkfifo(bad) if content is None else bad.write_bytes(content)
    refused(mgt("train", "speech", *ONE, "--data-dir", tmp_path), words, "7_jo_9.wav")


def test_an_image_that_decodes_to_gigabytes_is_named(
    mgt: Mgt, tmp_path: Path, little_memory: None
) -> None:
    from PIL import Image

    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(6):
            Image.new("RGB", (8, 8)).save(tmp_path / label / f"{number}.png")
    Image.new("1", (1, 2_000_000)).save(tmp_path / "a" / "thin.png")
    Image.new("1", (9000, 9000)).save(tmp_path / "b" / "large.png")
    os.mkfifo(tmp_path / "b" / "fifo.png")
    said = mgt("train", "image", *ONE, "--data-dir", tmp_path, "image_size=32")
    refused(said, "thin.png", "large.png", "too many", "fifo.png", "not a regular file")


def test_tables_and_markets_of_nonsense_are_refused(
    mgt: Mgt, tmp_path: Path, little_memory: None
) -> None:
    header = b"Date,Open,High,Low,Close,Volume\n"
    for recipe, name, content, words in (
        ("ppo", "p.csv.gz", repeated(header, 800), "too large to be a market"),
        ("ppo", "p.csv.gz", gzip.compress(header)[:-9], "cannot be read as CSV"),
        ("ppo", "p.csv", header + b"\xff\n", "cannot be read as CSV"),
        ("transformer", "train.jsonl", b"[" * 100_000 + b"\n", "line 1"),
        ("transformer", "train.jsonl", b'{"text": ' + HUGE.encode() + b"}\n", "line 1"),
        ("transformer", "train.txt", bytes(10_000), "NUL"),
    ):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / name).write_bytes(content)
        refused(mgt("train", recipe, *ONE, "--data-dir", folder), words)


def test_code_that_comes_with_a_model_runs_only_when_asked_for(mgt: Mgt, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'OWNED')!r}, 'w').close()\n")
    mapped = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    config = {"model_type": "evil", "auto_map": mapped}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("train", "transformer", *ONE, f"model={tmp_path}", "tokenizer=bytes")
    refused(mgt(*words), "its own Python code", "trust_remote_code=true")
    assert not (tmp_path / "OWNED").exists()
    for key, value in (("n_layer", 10**9), ("vocab_size", 2**40), ("n_embd", 2**24)):
        gpt = {"model_type": "gpt2", "n_positions": 128, key: value}
        (tmp_path / "config.json").write_text(json.dumps(gpt))
        refused(mgt(*words), "model=")


# Events


def test_a_report_of_events_with_fields_of_any_type_is_written(tmp_path: Path) -> None:
    head = {"v": 2, "run": "it", "attempt": 0, "rank": 0, "world_size": 1, "host": "h"}
    nonsense: list[Any] = ["x", [1], {"a": [1]}, 10**400, -1.5, 1e308, None, True, float("nan")]
    fields = (
        "loss",
        "samples_per_s",
        "step_s",
        "forward_s",
        "stall_s",
        "waited_s",
        "bytes",
        "train",
    )
    fields += ("val", "message", "level", "error", "global_batch", "cores", "device", "flops")
    fields += ("peak_flops", "memory_bytes", "peak_bytes", "write_s", "per_rank_batch", "values")
    kinds = ("rank", "step", "phases", "device", "epoch", "checkpoint", "run_end", "log", "stall")
    lines = []
    for number, value in enumerate(nonsense):
        for kind in (*kinds, "work", "fault", "shares", "validation", "metrics", "thinned"):
            told = {**head, "time": 1.79e9 + number, "event": kind, "step": number, "epoch": number}
            lines.append(with_crc(json.dumps({**told, **dict.fromkeys(fields, value)})))
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-0.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "config.yaml").write_text("epochs: 1" + ":59" * 4000)
    assert write_report([tmp_path]).stat().st_size > 1000
    many = {**head, "time": 1.8e9, "event": "rank", "step": 0, "world_size": 2**20}
    with (tmp_path / "events" / "rank-0.jsonl").open("ab") as file:
        file.write(with_crc(json.dumps(many)) + b"\n")
    assert write_report([tmp_path]).stat().st_size < 5_000_000


# Many more of each


@pytest.mark.engines
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["wrong_invocations", "hostile_folders", "hostile_data"])
def test_no_hostile_attempt_ends_in_a_traceback_a_hang_or_gigabytes(name: str) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / f"{name}.py"
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 0


def test_a_forecast_that_cannot_be_read_does_not_keep_a_run_from_its_resume(tmp_path: Path) -> None:
    settings = {"run_name": "it", "max_steps": 1, "training_mode": "single"}
    manager_for(tmp_path, **settings).fit(line(), points(), loss_fn=squares, optimizer=sgd)
    (tmp_path / "custom" / "it" / "forecast.json").write_bytes(bytes(5_000_000))
    again = manager_for(tmp_path, **{**settings, "max_steps": 2, "resume": "auto"})
    again.fit(line(), points(), loss_fn=squares, optimizer=sgd)
