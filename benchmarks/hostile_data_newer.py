"""More hostile data: the formats that hostile_data.py leaves out. It adds these to its own."""

# ruff: noqa: E501 - one line per case reads best
from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Make = Callable[[Path], None]


def picture(kind: str, size: tuple[int, int] = (32, 32), mode: str = "RGB", **more: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, size, 1 if mode in ("1", "L", "I;16", "F", "P") else None).save(
        file, kind, **more
    )
    return file.getvalue()


def classes(files: dict[str, bytes | Make], good: int = 6) -> Make:
    """A folder per class with good images, and these files, whose names say where."""

    def make(data: Path) -> None:
        small = picture("png")
        for label in ("a", "b"):
            (data / label).mkdir()
            for number in range(good):
                (data / label / f"{number}.png").write_bytes(small)
        for name, content in files.items():
            path = data / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content(path) if callable(content) else path.write_bytes(content)

    return make


def chunk(kind: bytes, raw: bytes, crc: int | None = None) -> bytes:
    sum_ = zlib.crc32(kind + raw) if crc is None else crc
    return struct.pack(">I", len(raw)) + kind + raw + struct.pack(">I", sum_)


def png(
    *chunks: bytes, width: int = 32, height: int = 32, bits: int = 8, colour: int = 2, lace: int = 0
) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, lace)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IEND", b"")


def image_formats() -> Iterator[tuple[str, Make]]:
    webp = picture("webp")
    vp8x = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + b"\xff\xff\xff" + b"\xff\xff\xff"
    yield (
        "WebP canvas of 2**24",
        classes({"a/x.webp": b"RIFF" + struct.pack("<I", 400) + b"WEBP" + vp8x + webp[12:]}),
    )
    yield (
        "WebP 16,383 x 16,383",
        classes(
            {
                "a/x.webp": b"RIFF"
                + struct.pack("<I", 60)
                + b"WEBPVP8L"
                + struct.pack("<I", 40)
                + b"\x2f"
                + struct.pack("<I", (16382 | 16382 << 14))
                + bytes(36)
            }
        ),
    )
    yield "WebP cut", classes({"a/x.webp": webp[: len(webp) // 2]})
    frames = [frame_of(n) for n in range(300)]
    yield "WebP of 300 frames", classes({"a/x.webp": moving("webp", frames)})
    yield "GIF of 300 frames", classes({"a/x.gif": moving("gif", frames)})
    yield "PNG of 300 frames", classes({"a/x.png": moving("png", frames)})
    jpeg = bytearray(picture("jpeg"))
    place = jpeg.index(b"\xff\xc0")
    jpeg[place + 5 : place + 9] = struct.pack(">HH", 65500, 65500)
    yield "JPEG 65,500 x 65,500", classes({"a/x.jpg": bytes(jpeg)})
    yield "JPEG without an end", classes({"a/x.jpg": picture("jpeg")[:-40]})
    yield (
        "JPEG with 5 MB of comments",
        classes(
            {
                "a/x.jpg": b"\xff\xd8"
                + (b"\xff\xfe\xff\xff" + b"x" * 65533) * 80
                + picture("jpeg")[2:]
            }
        ),
    )
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\xff\xff\xff\xff\0\x63\0\0"
    yield (
        "JPEG EXIF of 2**32 values",
        classes(
            {
                "a/x.jpg": b"\xff\xd8\xff\xe1"
                + struct.pack(">H", len(exif) + 2)
                + exif
                + picture("jpeg")[2:]
            }
        ),
    )
    yield (
        "PNG wrong checksum",
        classes({"a/x.png": png(chunk(b"IDAT", zlib.compress(bytes(97 * 32)), 5))}),
    )
    yield (
        "PNG without palette",
        classes({"a/x.png": png(chunk(b"IDAT", zlib.compress(bytes(33 * 32))), colour=3)}),
    )
    yield (
        "PNG 3 bits",
        classes({"a/x.png": png(chunk(b"IDAT", zlib.compress(bytes(97 * 32))), bits=3)}),
    )
    yield (
        "PNG laced bomb",
        classes(
            {
                "a/x.png": png(
                    chunk(b"IDAT", zlib.compress(bytes(2**20))), width=20_000, height=20_000, lace=1
                )
            }
        ),
    )
    yield (
        "PNG profile bomb",
        classes(
            {
                "a/x.png": png(
                    chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(2**28))),
                    chunk(b"IDAT", zlib.compress(bytes(97 * 32))),
                )
            }
        ),
    )
    yield (
        "PNG 40,000 chunks",
        classes(
            {
                "a/x.png": png(
                    *[chunk(b"tEXt", b"k\0v")] * 40_000,
                    chunk(b"IDAT", zlib.compress(bytes(97 * 32))),
                )
            }
        ),
    )
    yield "PPM head", classes({"a/x.ppm": b"P6\n99999 99999\n255\n" + bytes(100)})
    yield "PGM comment", classes({"a/x.pgm": b"P5\n#" + b"x" * 3_000_000})
    yield "PPM digits", classes({"a/x.ppm": b"P6\n" + b"9" * 100_000 + b" 1\n255\n"})
    yield (
        "TIFF of 2**31 strips",
        classes(
            {
                "a/x.tif": tiff(
                    {256: 32, 257: 32, 258: 8, 259: 1, 262: 1, 273: 8, 278: 1, 279: 2**31 - 1}
                )
            }
        ),
    )
    yield (
        "TIFF 100,000 x 100,000",
        classes(
            {
                "a/x.tif": tiff(
                    {
                        256: 100_000,
                        257: 100_000,
                        258: 8,
                        259: 1,
                        262: 1,
                        273: 8,
                        278: 100_000,
                        279: 100,
                    }
                )
            }
        ),
    )
    yield (
        "BMP of a negative size",
        classes(
            {
                "a/x.bmp": b"BM"
                + struct.pack("<IHHI", 54, 0, 0, 54)
                + struct.pack("<IiiHHIIiiII", 40, -30000, -2147483648, 1, 24, 0, 0, 0, 0, 0, 0)
            }
        ),
    )
    yield (
        "EPS as PNG",
        classes(
            {
                "a/x.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(OWNED) (w) file closefile\n"
            }
        ),
    )
    yield (
        "SVG as PNG",
        classes(
            {
                "a/x.png": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
            }
        ),
    )
    yield "float TIFF of NaN", classes({"a/x.tif": nan_tiff()})


def frame_of(number: int) -> np.ndarray[Any, Any]:
    return np.full((32, 32, 3), number % 256, np.uint8)


def moving(kind: str, frames: list[np.ndarray[Any, Any]]) -> bytes:
    from PIL import Image

    first, *rest = map(Image.fromarray, frames)
    file = io.BytesIO()
    first.save(file, kind, save_all=True, append_images=rest)
    return file.getvalue()


def tiff(tags: dict[int, int]) -> bytes:
    entries = b"".join(
        struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items())
    )
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(200)


def nan_tiff() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((32, 32), np.nan, np.float32)).save(file, "tiff")
    return file.getvalue()


def image_folders() -> Iterator[tuple[str, Make]]:
    """Names, links and tables."""

    def many(data: Path) -> None:
        for number in range(20_000):
            (data / f"c{number}").mkdir()

    yield "20,000 empty classes", many
    yield (
        "class with control characters",
        classes({"\x1b[2J\x07evil/0.png": picture("png"), "\x1b[2J\x07evil/1.png": picture("png")}),
    )
    yield (
        "class with a newline",
        classes({"a\nb/0.png": picture("png"), "a\nb/1.png": picture("png")}),
    )

    def undecodable(data: Path) -> None:
        classes({})(data)
        folder = data / os.fsdecode(b"\xff\xfe")
        folder.mkdir()
        for number in range(2):
            (folder / f"{number}.png").write_bytes(picture("png"))

    yield "class that is not UTF-8", undecodable
    yield "links in a circle", classes({"a/loop": lambda path: path.symlink_to("../../data")})
    yield "link to /", classes({"a/root": lambda path: path.symlink_to("/")})
    yield "link to /proc", classes({"proc": lambda path: path.symlink_to("/proc")})

    def nested(data: Path) -> None:
        classes({})(data)
        here = os.open(data / "a", os.O_RDONLY)
        for _ in range(150):
            os.mkdir("d" * 20, dir_fd=here)
            inner = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = inner
        os.close(here)

    yield "150 folders deep", nested
    yield (
        "part and class",
        classes({"train/a/0.png": picture("png"), "val/b/0.png": picture("png")}),
    )
    table = b"file_name,label\n"
    some = b"".join(b"%d.png,%s\n" % (n, b"ab"[n % 2 : n % 2 + 1]) for n in range(8))

    def tabled(text: bytes, name: str = "train.csv") -> Make:
        def make(data: Path) -> None:
            for number in range(8):
                (data / f"{number}.png").write_bytes(picture("png"))
            (data / name).write_bytes(text)

        return make

    yield "table outside", tabled(table + some + b"../../../../../../etc/passwd,a\n")
    yield "table device", tabled(table + some + b"/dev/zero,a\n")
    yield "table NUL", tabled(table + some + b"a\0b.png,a\n")
    yield "table long name", tabled(table + some + b"x" * 100_000 + b".png,a\n")
    yield "table 300,000 gone", tabled(table + b"gone.png,a\n" * 300_000)
    yield "table label of 1 MB", tabled(table + some + b"0.png," + b"x" * 10**6 + b"\n")
    yield (
        "table of 50,000 columns",
        tabled(b"file_name,label," + b",".join(b"c%d" % n for n in range(50_000)) + b"\n" + some),
    )
    yield (
        "table same columns",
        tabled(b"file_name,file_name,label,label\n" + b"0.png,1.png,a,b\n" * 8),
    )
    yield "jsonl types", tabled(b'{"file_name": ["0.png"], "label": {"a": 1}}\n' * 8, "train.jsonl")
    yield "jsonl number names", tabled(b'{"file_name": 5, "label": 1e400}\n' * 8, "train.jsonl")
    yield (
        "jsonl deep",
        tabled(b'{"file_name": "0.png", "label": ' + b"[" * 100_000 + b"\n", "train.jsonl"),
    )
    yield "empty file", tabled(b"")


def flac(samples: int, rate: int = 8000, channels: int = 1, body: bytes = b"") -> bytes:
    packed = rate << 44 | (channels - 1) << 41 | 15 << 36 | samples
    info = struct.pack(">HH", 4096, 4096) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    return b"fLaC\x80" + len(info).to_bytes(3, "big") + info + body


def libri(content: bytes | Make, told: bytes = b"1-2-3 HELLO\n", name: str = "1-2-3.flac") -> Make:
    def make(data: Path) -> None:
        folder = data / "train-clean" / "1" / "2"
        folder.mkdir(parents=True)
        path = folder / name
        content(path) if callable(content) else path.write_bytes(content)
        (folder / "1-2.trans.txt").write_bytes(told)

    return make


def real_flac(rate: int = 8000, channels: int = 1) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros((8000, channels)), rate, format="FLAC")
    return file.getvalue()


def sounds() -> Iterator[tuple[str, Make]]:
    yield "FLAC of 2**36 samples, none there", libri(flac(2**36 - 1))
    yield "FLAC rate 655,350", libri(flac(2**30, 655_350))
    yield "FLAC cut", libri(real_flac()[:60])
    yield "FLAC noise", libri(flac(8000) + random.Random(1).randbytes(50_000))
    yield "FLAC bomb", libri(lambda path: long_flac(path))
    yield "FLAC picture of 16 MB", libri(b"fLaC\x06\xff\xff\xff" + bytes(2**24) + real_flac()[4:])
    yield "WAV named FLAC", libri(b"RIFF" + struct.pack("<I", 36) + b"WAVEfmt " + bytes(24))
    yield "Ogg named FLAC", libri(b"OggS" + bytes(500))
    yield "transcript of 100 MB", libri(real_flac(), b"1-2-3 " + b"A" * 10**8)
    yield "transcript names", libri(real_flac(), b"../../../etc/passwd HELLO\n")
    yield "transcript without letters", libri(real_flac(), "1-2-3 ١٢٣ 漢字\n".encode())
    yield "transcript of one letter a sample", libri(real_flac(), b"1-2-3 " + b"A " * 4000)
    yield "festvox name outside", festvox(b'( ../../../../etc/passwd "hello" )\n')
    yield "festvox long line", festvox(b"( " + b"a" * 300_000 + b' "hello" )\n')
    yield "festvox quotes", festvox(b'( a "' + b'"' * 200_000 + b'" )\n')
    yield "festvox NUL", festvox(b'( a\0b "hello" )\n')
    yield "festvox spaces", festvox(b"(" + b" " * 100_000 + b"\n")


def festvox(listing: bytes) -> Make:
    def make(data: Path) -> None:
        (data / "etc").mkdir()
        (data / "wav").mkdir()
        (data / "etc/txt.done.data").write_bytes(listing)

    return make


def long_flac(path: Path) -> None:
    """Four hours of silence in a few kilobytes."""
    import soundfile

    with soundfile.SoundFile(path, "w", 8000, 1, format="FLAC") as file:
        silence = np.zeros(8000 * 600)
        for _ in range(24):
            file.write(silence)


def clips(table: bytes, name: str = "annotations.csv", **video: Any) -> Make:
    """A real short video, and a table for it."""

    def make(data: Path) -> None:
        from hostile_data import _real

        (data / "Videos").mkdir()
        _real(data / "Videos" / "a.mp4", **video)
        (data / name).write_bytes(table)

    return make


def videos() -> Iterator[tuple[str, Make]]:
    boris = b"Observation id,Media file,Total length,FPS,Subject,Behavior,Behavioral category,Modifiers,Behavior type,Start (s),Stop (s),Duration (s)\n"
    yield "BORIS times", clips(boris + b"o,a.mp4,1.6,25,s,walk,,,STATE,nan,inf,1\n")
    yield "BORIS stop before start", clips(boris + b"o,a.mp4,1.6,25,s,walk,,,STATE,1.5,0.1,-1.4\n")
    yield "BORIS type", clips(boris + b"o,a.mp4,1.6,25,s,walk,,,DANCE,0,1,1\n")
    yield "BORIS FPS", clips(boris + b"o,a.mp4,1e308,0,s,walk,,,STATE,0,1e308,1\n")
    yield "BORIS media outside", clips(boris + b"o,../../etc/passwd,1.6,25,s,walk,,,STATE,0,1,1\n")
    yield (
        "BORIS 200,000 rows",
        clips(boris + b"o,a.mp4,1.6,25,s,walk,,,STATE,0,0.1,0.1\n" * 200_000),
    )
    tabular = b"Time,Media file path,Total length,FPS,Subject,Behavior,Behavioral category,Comment,Status\n"
    yield "BORIS unended", clips(tabular + b"0.1,a.mp4,1.6,25,s,walk,,,START\n" * 5)
    yield "BORIS stop first", clips(tabular + b"0.1,a.mp4,1.6,25,s,walk,,,STOP\n")
    yield "BORIS status", clips(tabular + b"0.1,a.mp4,1.6,25,s,walk,,,PAUSE\n")
    yield "frames 10**17 apart", clips(b"file,start,end,label\na.mp4,0,99999999999999999,walk\n")
    yield (
        "200,000 classes",
        clips(
            b"file,start_s,end_s,label\n" + b"".join(b"a.mp4,0,1,c%d\n" % n for n in range(200_000))
        ),
    )
    yield (
        "class with control characters",
        clips(b"file,start_s,end_s,label\na.mp4,0,0.8,\x1b[2Jx\na.mp4,0.8,1.6,y\n"),
    )
    yield "header only", clips(b"file,start_s,end_s,label\n")
    yield "utf-16", clips("file,start_s,end_s,label\na.mp4,0,1,x\n".encode("utf-16"))
    yield (
        "video of 1 x 1",
        clips(b"file,start_s,end_s,label\na.mp4,0,0.8,x\na.mp4,0.8,1.6,y\n", size=2),
    )

    def cut(data: Path) -> None:
        clips(b"file,start_s,end_s,label\na.mp4,0,0.8,x\na.mp4,0.8,1.6,y\n")(data)
        path = data / "Videos" / "a.mp4"
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2 :] = random.Random(2).randbytes(len(raw) // 2)
        path.write_bytes(raw)

    yield "noise from the middle on", cut


def prices() -> Iterator[tuple[str, Make]]:
    head = b"Date,Open,High,Low,Close,Volume\n"
    day = b"".join(
        b"2020-%02d-%02d,1,2,0.5,1,5\n" % (m, d) for m in range(1, 13) for d in range(1, 29)
    )

    def file(text: bytes, name: str = "prices.csv") -> Make:
        return lambda data: (data / name).write_bytes(text) and None  # type: ignore[func-returns-value]

    yield "zero prices", file(head + day.replace(b",1,2,0.5,1,", b",0,0,0,0,"))
    yield "negative prices", file(head + day.replace(b",1,2,", b",-1,2,"))
    yield "low above high", file(head + day.replace(b"2,0.5", b"0.5,2"))
    yield "days twice", file(head + day + day)
    yield "days backwards", file(head + b"\n".join(reversed(day.split(b"\n"))))
    yield "words", file(head + day.replace(b",5\n", b",many\n"))
    yield "digits", file(head + day + b"2021-01-02," + b"9" * 5000 + b",1,1,1,1\n")
    yield "columns twice", file(b"Date,Open,Open,High,Low,Close,Volume\n" + day)
    yield "no close", file(b"Date,Open\n2020-01-02,1\n")
    yield "columns 100,000", file(b",".join([b"x"] * 100_000) + b"\n")
    yield "gzip in gzip", file(gzip.compress(gzip.compress(head + day)), "prices.csv.gz")
    yield (
        "5,000 files",
        lambda data: [(data / f"f{n}.csv").write_bytes(head) for n in range(5000)] and None,
    )  # type: ignore[func-returns-value]


def texts() -> Iterator[tuple[str, Make]]:
    def file(text: bytes, name: str = "train.jsonl") -> Make:
        return lambda data: (data / name).write_bytes(text) and None  # type: ignore[func-returns-value]

    yield file(b'{"text": "\\ud800\\udfff\\ud800"}\n' * 200)
    yield "NaN", file(b'{"text": NaN}\n' * 20)
    yield "keys twice", file(b'{"text": "a", "text": 5}\n' * 20)
    yield "one line of 200 MB", file(b'{"text": "' + b"x" * 200_000_000 + b'"}\n')
    yield "two million empty objects", file(b"{}\n" * 2_000_000)
    yield "no text", file(b'{"label": "x"}\n' * 100)
    yield "cut line", file(b'{"text": "hello"}\n' * 50 + b'{"text": "hel')
    yield "csv of quotes", file(b'text\n"' + b'""' * 2_000_000, "train.csv")
    yield "tsv columns", file(b"\t".join([b"c"] * 200_000) + b"\n" + b"x\n", "train.tsv")
    yield "train.txt a folder", lambda data: (data / "train.txt").mkdir()
    yield (
        "train in two forms",
        lambda data: [(data / f"train.{end}").write_text("x") for end in ("jsonl", "csv")] and None,
    )  # type: ignore[func-returns-value]


def tokenizers() -> Iterator[tuple[str, Make]]:
    """Model folders with tokenizers and weights that are not what they say."""
    gpt = {
        "model_type": "gpt2",
        "vocab_size": 300,
        "n_positions": 64,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
    }

    def folder(**files: Any) -> Make:
        def make(data: Path) -> None:
            (data / "config.json").write_text(json.dumps(gpt))
            (data / "evil.py").write_text("open('OWNED', 'w').close()\nclass C: pass\n")
            for name, content in files.items():
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                (data / name.replace("__", ".")).write_bytes(raw)

        return make

    bpe = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "added_tokens": [],
    }
    yield "tokenizer deep", folder(tokenizer__json=b"[" * 300_000)
    yield "tokenizer list", folder(tokenizer__json=[1])
    yield "tokenizer empty", folder(tokenizer__json=b"")
    yield "tokenizer type", folder(tokenizer__json={**bpe, "model": {"type": "Evil"}})
    yield (
        "tokenizer ids",
        folder(
            tokenizer__json={**bpe, "model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}}
        ),
    )
    yield (
        "tokenizer negative",
        folder(tokenizer__json={**bpe, "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
    )
    yield (
        "tokenizer merges",
        folder(
            tokenizer__json={**bpe, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}
        ),
    )
    yield (
        "tokenizer pattern",
        folder(
            tokenizer__json={
                **bpe,
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                },
            }
        ),
    )
    yield (
        "tokenizer code",
        folder(
            tokenizer__json=bpe,
            tokenizer_config__json={
                "auto_map": {"AutoTokenizer": ["evil.C", None]},
                "tokenizer_class": "C",
            },
        ),
    )
    yield (
        "tokenizer class",
        folder(tokenizer_config__json={"tokenizer_class": "os.system"}, tokenizer__json=bpe),
    )
    yield (
        "tokenizer larger than the model",
        folder(
            tokenizer__json={
                **bpe,
                "model": {
                    "type": "BPE",
                    "vocab": {chr(97 + n % 26) * (1 + n // 26): n for n in range(2000)},
                    "merges": [],
                },
            }
        ),
    )
    yield "vocab.json garbage", folder(vocab__json=b"\xff\xfe", merges__txt=b"#version\na b c d\n")
    yield (
        "template code",
        folder(
            tokenizer__json=bpe,
            chat_template__jinja=b"{{ ''.__class__.__mro__[1].__subclasses__() }}",
        ),
    )
    head = json.dumps(
        {"wte": {"dtype": "F32", "shape": [2**40, 8], "data_offsets": [0, 2**45]}}
    ).encode()
    yield (
        "weights head",
        folder(tokenizer__json=bpe, model__safetensors=len(head).to_bytes(8, "little") + head),
    )
    yield (
        "weights index outside",
        folder(
            tokenizer__json=bpe,
            model__safetensors__index__json={
                "metadata": {},
                "weight_map": {"wte.weight": "../../../../etc/passwd"},
            },
        ),
    )
    yield (
        "weights NaN",
        folder(
            tokenizer__json=bpe,
            model__safetensors=one_tensor(
                b"transformer.wte.weight", np.full((300, 8), np.nan, np.float32)
            ),
        ),
    )
    yield (
        "generation config",
        folder(
            tokenizer__json=bpe, generation_config__json={"max_length": 10**12, "num_beams": -5}
        ),
    )


def one_tensor(name: bytes, values: np.ndarray[Any, Any]) -> bytes:
    head = json.dumps(
        {
            name.decode(): {
                "dtype": "F32",
                "shape": list(values.shape),
                "data_offsets": [0, values.nbytes],
            }
        }
    ).encode()
    return len(head).to_bytes(8, "little") + head + values.tobytes()


def newer(
    one: tuple[str, ...],
) -> dict[str, tuple[tuple[str, ...], Callable[[], Iterator[tuple[str, Make]]]]]:
    image = ("train", "image", *one, "--data-dir", "data", "image_size=32")
    return {
        "image formats": (image, image_formats),
        "image folders": (image, image_folders),
        "sounds": (("train", "speech", *one, "--data-dir", "data", "sample_rate=8000"), sounds),
        "videos": (("train", "video", *one, "--data-dir", "data", "frame_size=32", "strict=true", "length=4"), videos),
        "prices": (("train", "ppo", *one, "--data-dir", "data", "num_envs=2", "hidden=8", "window=8"), prices),
        "texts": (("train", "transformer", *one, "--data-dir", "data", "sequence_length=16", "width=8"), texts),
        "tokenizers": (("train", "transformer", *one, "model=./data", "sequence_length=16"), tokenizers),
    }  # fmt: skip


# What is only odd: it may be trained on.
ODD_NEWER = {
    "tokenizer class",
    "WebP of 300 frames", "GIF of 300 frames", "PNG of 300 frames", "JPEG with 5 MB of comments",
    "JPEG EXIF of 2**32 values", "PNG profile bomb", "PNG 40,000 chunks", "PNG wrong checksum", "JPEG without an end",
    "float TIFF of NaN", "class with control characters", "class with a newline", "class that is not UTF-8", "links in a circle",
    "150 folders deep", "PNG without palette", "train in two forms", "columns twice", "days twice",
    "link to /", "tokenizer code", "template code", "generation config", "tokenizer pattern", "video of 1 x 1",
    "FLAC picture of 16 MB", "table label of 1 MB", "table of 50,000 columns", "keys twice", "BORIS 200,000 rows", "weights NaN",
    "one line of 200 MB", "BORIS unended", "20,000 empty classes", "tokenizer larger than the model", "noise from the middle on",
    "jsonl types", "jsonl number names", "FLAC bomb", "table same columns", "200,000 classes",
}  # fmt: skip
