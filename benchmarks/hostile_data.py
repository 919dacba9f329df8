"""Hostile data: files that are not what they say, for every recipe.

    python benchmarks/hostile_data.py --out hostile_data.json
    python benchmarks/hostile_data.py --only speech --verbose

Bombs, heads that announce terabytes, formats inside other formats, nonsense in every field. Each is
given to its recipe as `data_dir` or `model`. Nothing may end in a traceback, hang, take more than
1 GiB, run code that came with the data, or be trained on as if nothing were wrong, unless it is
only odd.
"""

# ruff: noqa: E501 - one line per case reads best
from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import platform
import struct
import sys
import tempfile
import time
import wave
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from hostile_data_newer import ODD_NEWER, newer
from hostile_trial import attempt, mgt

ONE = ("--multi-gpu", "single", "--num-gpus", "1", "device=cpu", "max_steps=2", "progress=off")
ONE += ("report=false", "tensorboard=false", "enable_fault_tolerance=false")
Make = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    name: str
    words: tuple[str, ...]
    make: Make
    fails: bool = True


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


# image: IDX


def idx(magic: int, *shape: int) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape)


def packed_zeros(head: bytes, size: int) -> bytes:
    """gzip of a head and so many zeros, packed once and repeated: only its checksum is wrong."""
    if size < 2**20:
        return gzip.compress(head + bytes(size))
    start = b"\x1f\x8b\x08" + bytes(7)
    return start + deflated([(head, 1), (bytes(2**20), size >> 20)]) + bytes(8)


def deflated(parts: list[tuple[bytes, int]], wbits: int = -15) -> bytes:
    """(content, how often) as one stream."""
    found = []
    for number, (content, times) in enumerate(parts):
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        block = packer.compress(content) + packer.flush(zlib.Z_FULL_FLUSH)
        found.append(block * times)
        if number == len(parts) - 1:
            found.append(packer.flush())
    return (b"" if wbits < 0 else b"\x78\xda") + b"".join(found)


def idx_folder(images: bytes, labels: bytes | None = None, end: str = ".gz") -> Make:
    def make(data: Path) -> None:
        good = idx(2049, 16) + bytes(i % 10 for i in range(16))
        pictures = idx(2051, 16, 28, 28) + bytes(16 * 784)
        for part in ("train", "t10k"):
            raw = images if part == "train" else gzip.compress(pictures)
            (data / f"{part}-images-idx3-ubyte{end}").write_bytes(raw)
            told = labels if labels is not None and part == "train" else gzip.compress(good)
            (data / f"{part}-labels-idx1-ubyte{end}").write_bytes(told)

    return make


def image_idx() -> Iterator[tuple[str, Make]]:
    yield "bomb of 4 GiB", idx_folder(packed_zeros(idx(2051, 5_500_000, 28, 28), 4 << 30))
    yield "bomb, small head", idx_folder(packed_zeros(idx(2051, 16, 28, 28), 2 << 30))
    yield "bomb, no head", idx_folder(packed_zeros(b"", 1 << 30))
    yield (
        "head of 2**32 images",
        idx_folder(gzip.compress(idx(2051, 2**32 - 1, 2**32 - 1, 2**32 - 1))),
    )
    yield "labels bomb", idx_folder(gzip.compress(idx(2051, 16, 28, 28) + bytes(16 * 784)),
                                    packed_zeros(idx(2049, 2**32 - 1), 2 << 30))  # fmt: skip
    yield "cut gzip", idx_folder(packed_zeros(idx(2051, 16, 28, 28), 16 * 784)[:-20])
    yield "not gzip", idx_folder(b"hello" * 100)
    yield "zero sides", idx_folder(gzip.compress(idx(2051, 16, 0, 0)))
    yield "many members", idx_folder(gzip.compress(b"") * 200_000)

    def big(data: Path) -> None:
        idx_folder(b"", end="")(data)
        sparse(data / "train-images-idx3-ubyte", 8 << 30)
        with (data / "train-images-idx3-ubyte").open("r+b") as file:
            file.write(idx(2051, 10_956_552, 28, 28))

    yield "sparse 8 GiB", big

    def fifo(data: Path) -> None:
        idx_folder(b"x")(data)
        (data / "train-images-idx3-ubyte.gz").unlink()
        os.mkfifo(data / "train-images-idx3-ubyte.gz")

    yield "FIFO", fifo


# image: files


def png(width: int, height: int, body: bytes = b"", colour: int = 2) -> bytes:
    def chunk(kind: bytes, raw: bytes) -> bytes:
        return struct.pack(">I", len(raw)) + kind + raw + struct.pack(">I", zlib.crc32(kind + raw))

    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def rows(width: int, height: int, planes: int) -> bytes:
    line, times = bytes(1 + width * planes), height
    while len(line) < 2**19 and times % 2 == 0:
        line, times = line * 2, times // 2
    raw = deflated([(line, times)], 15)
    return raw + zlib.adler32(line * times).to_bytes(4, "big") if height < 1000 else raw + bytes(4)


def image_folder(content: bytes | Make, end: str = "png") -> Make:
    def make(data: Path) -> None:
        small = png(32, 32, rows(32, 32, 3))
        for label in ("a", "b"):
            (data / label).mkdir()
            for number in range(10):
                (data / label / f"{number}.png").write_bytes(small)
        bad = data / "a" / f"bad.{end}"
        if callable(content):
            content(bad)
        else:
            bad.write_bytes(content)

    return make


def image_files() -> Iterator[tuple[str, Make]]:
    yield "PNG 30,000 x 30,000", image_folder(png(30_000, 30_000, rows(30_000, 30_000, 3)))
    yield "PNG 13,000 x 13,000", image_folder(png(13_000, 13_000, rows(13_000, 13_000, 4), 6))
    yield "PNG 2**31 wide", image_folder(png(2**31 - 1, 1))
    yield "PNG 1 x 40,000,000", image_folder(png(1, 40_000_000, rows(1, 40_000_000, 3)))
    yield "PNG 40,000,000 x 1", image_folder(png(40_000_000, 1, rows(40_000_000, 1, 3)))
    yield "PNG 0 x 0", image_folder(png(0, 0))
    yield "PNG without data", image_folder(png(100, 100))
    yield "PNG text bomb", image_folder(_text_bomb())
    yield "JPEG head only", image_folder(b"\xff\xd8\xff\xe0" + bytes(100), "jpg")
    yield (
        "GIF 65,535 x 65,535",
        image_folder(b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(50), "gif"),
    )
    yield "BMP 50,000 x 50,000", image_folder(_bmp(50_000, 50_000), "bmp")
    yield "TIFF loop", image_folder(b"II*\0\x08\0\0\0\0\0\x08\0\0\0", "tif")
    yield "text as PNG", image_folder(b"<script>alert(1)</script>")
    yield "sparse 8 GiB", image_folder(lambda path: sparse(path, 8 << 30))
    yield "FIFO", image_folder(lambda path: os.mkfifo(path))
    yield "device", image_folder(lambda path: path.symlink_to("/dev/zero"))
    yield "loop", image_folder(lambda path: path.symlink_to(path.name))
    yield "folder", image_folder(lambda path: path.mkdir())


def _text_bomb() -> bytes:
    raw = deflated([(bytes(2**20), 512)], 15) + bytes(4)
    kind = b"zTXt" + b"Comment\0\0" + raw
    text = struct.pack(">I", len(kind) - 4) + kind + struct.pack(">I", zlib.crc32(kind))
    whole = png(32, 32, rows(32, 32, 3))
    return whole[:33] + text + whole[33:]


def _bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


# image: tables and Arrow


def arrow_folder(change: Callable[[Path], None]) -> Make:
    def make(data: Path) -> None:
        change(data)

    return make


def _parquet(data: Path, columns: dict[str, Any], **more: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(columns)
    if "features" in more:
        table = table.replace_schema_metadata({b"huggingface": more["features"]})
    pyarrow.parquet.write_table(table, data / "train.parquet", compression="zstd")


def image_arrow() -> Iterator[tuple[str, Make]]:
    if importlib.util.find_spec("pyarrow") is None:
        return
    small = png(32, 32, rows(32, 32, 3))
    yield (
        "parquet bomb",
        lambda data: _parquet(
            data, {"image": [bytes(2**26)] * 40, "label": [i % 2 for i in range(40)]}
        ),
    )
    yield (
        "parquet features",
        lambda data: _parquet(
            data, {"image": [small] * 20, "label": [0, 1] * 10}, features=b"[" * 50_000
        ),
    )
    yield (
        "parquet features list",
        lambda data: _parquet(
            data, {"image": [small] * 20, "label": [0, 1] * 10}, features=b'{"info": [1]}'
        ),
    )
    yield (
        "parquet outside",
        lambda data: _parquet(
            data, {"image": ["../../../../etc/passwd"] * 20, "label": [0, 1] * 10}
        ),
    )
    yield (
        "parquet device",
        lambda data: _parquet(data, {"image": ["/dev/zero"] * 20, "label": [0, 1] * 10}),
    )
    yield (
        "parquet garbage",
        lambda data: (data / "train.parquet").write_bytes(b"PAR1" + bytes(500) + b"PAR1"),
    )
    yield (
        "arrow garbage",
        lambda data: (data / "train.arrow").write_bytes(
            b"\xff\xff\xff\xff" + b"\xff\xff\xff\x7f" * 9
        ),
    )

    def state(data: Path) -> None:
        _parquet(data, {"image": [small] * 20, "label": [0, 1] * 10})
        (data / "state.json").write_text('{"_data_files": 5}')

    yield "state.json", state


# speech


def wav(rate: int, channels: int, samples: int, body: bytes, width: int = 2) -> bytes:
    size = min(2**32 - 1, samples * channels * width)
    block = (channels * width) & 0xFFFF
    head = struct.pack("<HHIIHH", 1, channels, rate, (rate * block) & 0xFFFFFFFF, block, width * 8)
    return (
        b"RIFF" + struct.pack("<I", min(2**32 - 1, 36 + size)) + b"WAVEfmt " + struct.pack("<I", 16)
        + head + b"data" + struct.pack("<I", size) + body
    )  # fmt: skip


def speech_folder(content: bytes | Make, name: str = "7_x_9.wav") -> Make:
    def make(data: Path) -> None:
        (data / "recordings").mkdir()
        for number in range(12):
            with wave.open(
                str(data / "recordings" / f"{number % 10}_jo_{number}.wav"), "wb"
            ) as file:
                file.setparams((1, 2, 8000, 0, "NONE", ""))
                tone = np.sin(np.arange(8000) * 0.3) * 9000
                file.writeframes(tone.astype("<i2").tobytes())
        bad = data / "recordings" / name
        content(bad) if callable(content) else bad.write_bytes(content)

    return make


def speech() -> Iterator[tuple[str, Make]]:
    sound = bytes(16000)
    yield "head of 2 G samples", speech_folder(wav(8000, 1, 2**31 - 1, sound))
    yield "head of 2**32 bytes", speech_folder(wav(8000, 1, 2**32, sound))
    yield "65,535 channels", speech_folder(wav(8000, 65535, 2**15, sound))
    yield "0 channels", speech_folder(wav(8000, 0, 8000, sound))
    yield "rate 0", speech_folder(wav(0, 1, 8000, sound))
    yield "rate 1", speech_folder(wav(1, 1, 8000, sound))
    yield "rate 2**32 - 1", speech_folder(wav(2**32 - 1, 1, 8000, sound))
    yield "rate 7,999", speech_folder(wav(7999, 1, 8000, sound))
    yield "rate 15,991", speech_folder(wav(15_991, 1, 8000, sound))
    yield "rate 767,999", speech_folder(wav(767_999, 1, 8000, sound))
    yield "width 0", speech_folder(wav(8000, 1, 8000, sound, 0))
    yield "width 255", speech_folder(wav(8000, 1, 8000, sound, 255))
    yield "empty", speech_folder(b"")
    yield "RIFF only", speech_folder(b"RIFF")
    yield "no samples", speech_folder(wav(8000, 1, 0, b""))
    yield "text", speech_folder(b"hello\n" * 1000)
    yield "FIFO", speech_folder(lambda path: os.mkfifo(path))
    yield "device", speech_folder(lambda path: path.symlink_to("/dev/zero"))

    def long(path: Path) -> None:
        sparse(path, 4_000_000_000)
        with path.open("r+b") as file:
            file.write(wav(8000, 1, 1_999_999_000, b""))

    yield "sparse 4 GB", speech_folder(long)
    flac = (
        b"fLaC\x80\0\0\x22\x10\0\x10\0\0\0\0\0\0\0"
        + b"\x01\xf4\x00\xff\xff\xff\xff\xff"
        + bytes(16)
    )
    yield "FLAC of 2**36 samples", _librispeech(flac)
    yield "FLAC garbage", _librispeech(b"fLaC" + bytes(1000))
    yield (
        "AU head",
        speech_folder(struct.pack(">4sIIIII", b".snd", 24, 2**32 - 2, 3, 8000, 1) + sound),
    )
    yield "transcript binary", _librispeech(b"fLaC", bytes(range(256)) * 10)


def _librispeech(content: bytes, told: bytes = b"1-2-3 HELLO\n") -> Make:
    def make(data: Path) -> None:
        folder = data / "train-clean" / "1" / "2"
        folder.mkdir(parents=True)
        (folder / "1-2-3.flac").write_bytes(content)
        (folder / "1-2.trans.txt").write_bytes(told)

    return make


# video


def video_folder(
    content: bytes | Make, name: str = "bad.mp4", table: bytes = b"frame,class\n0,walk\n1,sit\n"
) -> Make:
    def make(data: Path) -> None:
        (data / "Videos").mkdir()
        (data / "Annotations").mkdir()
        bad = data / "Videos" / name
        content(bad) if callable(content) else bad.write_bytes(content)
        (data / "Annotations" / f"{Path(name).stem}.csv").write_bytes(table)

    return make


def _real(path: Path, size: int = 64, frames: int = 40) -> None:
    import av

    with av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            array = np.full((size, size, 3), number % 255, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(array, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def video() -> Iterator[tuple[str, Make]]:
    yield "text", video_folder(b"hello" * 1000)
    yield "empty", video_folder(b"")
    yield "MP4 head only", video_folder(b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2avc1mp41")
    yield "MP4 box of 2**63", video_folder(b"\0\0\0\x01moov" + b"\x7f" + b"\xff" * 7 + bytes(100))
    yield (
        "playlist",
        video_folder(
            b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/passwd\n#EXT-X-ENDLIST\n"
        ),
    )
    yield (
        "playlist, network",
        video_folder(b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n"),
    )
    yield "concat", video_folder(b"ffconcat version 1.0\nfile /etc/passwd\n")
    yield (
        "AVI garbage",
        video_folder(b"RIFF\xff\xff\xff\xffAVI LIST\xff\xff\xff\xffhdrl" + bytes(200), "bad.avi"),
    )
    yield (
        "GIF 65,535",
        video_folder(b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(500), "bad.mkv"),
    )
    yield "sparse 8 GiB", video_folder(lambda path: sparse(path, 8 << 30))
    yield "FIFO", video_folder(lambda path: os.mkfifo(path))
    yield "device", video_folder(lambda path: path.symlink_to("/dev/zero"))

    def real(path: Path) -> None:
        _real(path)

    for name, table in {
        "binary": bytes(range(256)) * 100,
        "frame of 5,000 digits": b"frame,class\n" + b"9" * 5000 + b",walk\n",
        "frame 10**17": b"frame,class\n99999999999999999,walk\n",
        "negative": b"frame,class\n-1,walk\n",
        "field of 300 KB": b"frame,class\n1," + b"x" * 300_000 + b"\n",
        "times": b"file,start_s,end_s,label\nbad.mp4,inf,nan,walk\nbad.mp4,1e400,-1,sit\n",
        "end 1e308": b"file,start_s,end_s,label\nbad.mp4,0,1e308,walk\n",
    }.items():
        yield f"annotation: {name}", video_folder(real, table=table)


# ppo


HEADER = b"Date,Open,High,Low,Close,Volume\n"


def market(content: bytes | Make, name: str = "prices.csv") -> Make:
    def make(data: Path) -> None:
        path = data / name
        content(path) if callable(content) else path.write_bytes(content)

    return make


def ppo() -> Iterator[tuple[str, Make]]:
    yield "gzip bomb, one line", market(packed_zeros(HEADER, 2 << 30), "prices.csv.gz")
    row = b"2020-01-02,1,2,1,1,5\n"
    lines = b"\x1f\x8b\x08" + bytes(7) + deflated([(HEADER, 1), (b"\n" * 2**20, 600)])
    yield "gzip bomb, many lines", market(lines, "prices.csv.gz")
    yield "cut gzip", market(gzip.compress(HEADER + row * 1000)[:-30], "prices.csv.gz")
    yield "not gzip", market(HEADER + row, "prices.csv.gz")
    yield "binary", market(bytes(range(256)) * 100)
    yield "NUL", market(HEADER + b"\0" * 1000)
    yield "field of 60 KB", market(HEADER + b"2020-01-02," + b"9" * 60_000 + b",2,1,1,5\n")
    yield "quote", market(HEADER + b'"' + b"x\n" * 300_000)
    yield "sparse 8 GiB", market(lambda path: sparse(path, 8 << 30))
    yield "FIFO", market(lambda path: os.mkfifo(path))
    yield "device", market(lambda path: path.symlink_to("/dev/zero"))
    yield "infinity", market(HEADER + b"2020-01-02,inf,inf,1,1,5\n")
    yield "dates", market(HEADER + b"99999-01-01,1,2,1,1,5\n")
    yield "zero days", market(HEADER)
    yield (
        "1e308",
        market(
            HEADER
            + b"".join(b"20%02d-01-02,1e308,1e308,1e-308,1e308,5\n" % y for y in range(10, 30))
        ),
    )


# transformer


def text(content: bytes | Make, name: str = "train.txt") -> Make:
    return market(content, name)


def transformer() -> Iterator[tuple[str, Make]]:
    yield "binary", text(bytes(range(256)) * 100)
    yield "sparse 8 GiB", text(lambda path: sparse(path, 8 << 30))
    yield "NUL", text(bytes(50_000_000))
    yield "FIFO", text(lambda path: os.mkfifo(path))
    yield "device", text(lambda path: path.symlink_to("/dev/zero"))
    yield "jsonl deep", text(b"[" * 200_000 + b"\n", "train.jsonl")
    yield "jsonl huge integer", text(b'{"text": ' + b"9" * 50_000 + b"}\n", "train.jsonl")
    yield "jsonl list", text(b"[1]\n" * 100, "train.jsonl")
    yield "jsonl types", text(b'{"text": {"a": [1]}}\n' * 50, "train.jsonl")
    yield "csv quote", text(b"text,label\n" + b'"' + b"x\n" * 100_000, "train.csv")
    yield "csv NUL", text(b"text,label\n\0,1\n", "train.csv")
    yield "utf-16", text("hello\n".encode("utf-16") * 1000)
    yield "empty", text(b"")


def model_folder(config: dict[str, Any] | bytes, code: bool = False) -> Make:
    def make(data: Path) -> None:
        raw = config if isinstance(config, bytes) else json.dumps(config).encode()
        (data / "config.json").write_bytes(raw)
        if code:
            (data / "evil.py").write_text("open('OWNED', 'w').close()\nclass C: pass\n")

    return make


def models() -> Iterator[tuple[str, Make]]:
    gpt = {
        "model_type": "gpt2",
        "vocab_size": 259,
        "n_positions": 128,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
    }
    mapped = {
        "AutoConfig": "evil.C",
        "AutoModelForCausalLM": "evil.C",
        "AutoTokenizer": ["evil.C", None],
    }
    yield "auto_map", model_folder({**gpt, "model_type": "evil", "auto_map": mapped}, code=True)
    yield (
        "auto_map beside a known type",
        model_folder({**gpt, "n_embd": 7.5, "auto_map": mapped}, code=True),
    )
    for key, value in {
        "n_layer": 10**9, "n_embd": 2**30, "vocab_size": 2**40, "n_positions": 2**40, "n_head": 0,
        "n_inner": 2**33, "n_layer ": [1], "activation_function": "os.system",
    }.items():  # fmt: skip
        yield f"{key.strip()}={value}", model_folder({**gpt, key.strip(): value})
    yield "negative", model_folder({**gpt, "n_embd": -8})
    yield "types", model_folder({**gpt, "n_layer": "x", "vocab_size": {}})
    yield "weights of terabytes", model_folder({**gpt, "n_embd": 2**20, "n_layer": 4000})
    yield "deep", model_folder(b"[" * 300_000)
    yield "list", model_folder(b"[1, 2]")
    yield "huge integer", model_folder(b'{"model_type": "gpt2", "n_layer": ' + b"9" * 50_000 + b"}")
    yield "binary", model_folder(bytes(range(256)) * 10)

    def big(data: Path) -> None:
        sparse(data / "config.json", 4 << 30)

    yield "config of 4 GiB", big

    def pickled(data: Path) -> None:
        import pickle

        class Evil:
            def __reduce__(self) -> Any:
                return os.system, ("touch OWNED",)

        model_folder(gpt)(data)
        (data / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))

    yield "pickle", pickled

    def tensors(data: Path) -> None:
        model_folder(gpt)(data)
        (data / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")

    yield "safetensors head", tensors


GROUPS: dict[str, tuple[tuple[str, ...], Callable[[], Iterator[tuple[str, Make]]]]] = {
    "image idx": (("train", "image", *ONE, "--data-dir", "data"), image_idx),
    "image files": (("train", "image", *ONE, "--data-dir", "data", "image_size=32"), image_files),
    "image arrow": (("train", "image", *ONE, "--data-dir", "data", "image_size=32"), image_arrow),
    "speech": (("train", "speech", *ONE, "--data-dir", "data", "sample_rate=8000"), speech),
    "video": (("train", "video", *ONE, "--data-dir", "data", "frame_size=32", "strict=true"), video),
    "ppo": (("train", "ppo", *ONE, "--data-dir", "data", "num_envs=2", "hidden=8"), ppo),
    "transformer": (("train", "transformer", *ONE, "--data-dir", "data"), transformer),
    "model": (("train", "transformer", *ONE, "model=./data", "tokenizer=bytes", "sequence_length=16"), models),
}  # fmt: skip
GROUPS |= newer(ONE)
ODD = ODD_NEWER | {
    "no samples",
    "AU head",
    "folder",
    "jsonl types",
    "PNG text bomb",
    "PNG 2**31 wide",
    "1e308",
    "parquet features",
    "parquet features list",
}


def cases(groups: list[str]) -> list[Case]:
    return [
        Case(f"{group}: {name}", words, make, name not in ODD)
        for group in groups
        for words, each in [GROUPS[group]]
        for name, make in each()
    ]


def tried(case: Case) -> list[str]:
    """Make the data, train on them, and say what is wrong with how that ended."""
    with tempfile.TemporaryDirectory(prefix="hostile-data-") as temporary:
        base = Path(temporary)
        (base / "data").mkdir()
        case.make(base / "data")
        ended = attempt(mgt(*case.words), base)
        found = ended.problems(case.fails)
        if any(base.rglob("OWNED")):
            found.append("ran code that came with the data")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name holds one of these")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--part", default="", help="2/5: every fifth, from the second on")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from wrong_invocations import warm_up

    warm_up()
    wanted = [word for word in given.only.split(",") if word]
    bad: dict[str, list[str]] = {}
    count, begun = 0, time.monotonic()
    part, parts = map(int, (given.part or "1/1").split("/"))
    for case in cases(given.groups.split(","))[part - 1 :: parts]:
        if wanted and not any(word in case.name for word in wanted):
            continue
        count += 1
        problems = tried(case)
        if problems:
            bad[case.name] = problems
        if problems or given.verbose:
            print(case.name, *(f"\n    {problem}" for problem in problems), flush=True)
    print(f"{count} hostile data files, {len(bad)} with problems, {time.monotonic() - begun:.0f} s")
    if given.out is not None:
        told = {"python": platform.python_version(), "files": count, "bad": bad}
        given.out.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
