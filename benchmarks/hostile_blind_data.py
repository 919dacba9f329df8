"""40 hostile data files of another style: what exports, cameras, spreadsheets and careless hands make.

    python benchmarks/hostile_blind_data.py --out blind_data.json
    python benchmarks/hostile_blind_data.py --only video --verbose

The older campaigns announce terabytes and cut files short. Here files are valid as far as a reader
looks, and wrong in what they mean, or use a corner of their format. Each is given to its recipe as
`data_dir` or `model`; `ODD` names those that may also be trained on. Nothing may end in a traceback,
hang, take more than 1 GiB, or run code that came with the data.
"""

# ruff: noqa: E501 - one line per case reads best
from __future__ import annotations

import argparse
import gzip
import json
import platform
import re
import struct
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from hostile_data import (
    HEADER,
    ONE,
    Make,
    idx,
    idx_folder,
    market,
    model_folder,
    speech_folder,
    wav,
)
from hostile_data_newer import chunk, classes, clips, libri, picture, real_flac
from hostile_trial import attempt, files_below, mgt


def pngs(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture("png"))


def images() -> Iterator[tuple[str, Make]]:
    head = picture("png")[:33]
    body = picture("png")[33:]
    profile = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(300 << 20), 9))
    yield "a colour profile of 300 MB", classes({"a/x.png": head + profile + body})
    yield "an archive behind the picture", classes({"a/x.png": picture("png") + zipped()})
    yield "a drawing named PNG", classes({"a/x.png": b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY a "aaaaaaaaaa">]><svg xmlns="http://www.w3.org/2000/svg">&a;</svg>'})  # fmt: skip
    yield "an EXIF block of zeros", classes({"a/x.jpg": picture("jpeg")[:2] + b"\xff\xe1\xff\xffExif\0\0MM\0*\xff\xff\xff\xff" + bytes(65519) + picture("jpeg")[2:]})  # fmt: skip
    yield "CMYK, 16 bits, palette and one bit", classes({"a/c.jpg": picture("jpeg", mode="CMYK"), "a/s.png": picture("png", mode="I;16"), "b/p.gif": picture("gif", mode="P"), "b/o.png": picture("png", mode="1")})  # fmt: skip
    yield "labels that differ in case", lambda data: pngs(data, *(f"{c}/{n}.png" for c in ("Cat", "cat", "CAT ") for n in range(5)))  # fmt: skip
    yield "one image per class", lambda data: pngs(data, *(f"c{n}/0.png" for n in range(12)))
    yield "one class", lambda data: pngs(data, *(f"only/{n}.png" for n in range(12)))
    yield "labels of control characters", lambda data: pngs(data, *(f"{c}/{n}.png" for c in ("a\n\x1b[2J", "b\u202e") for n in range(8)))  # fmt: skip
    yield "a notebook's folder as a class", lambda data: pngs(data, *(f"{c}/{n}.png" for c in ("a", "b", ".ipynb_checkpoints", "__MACOSX") for n in range(6)))  # fmt: skip
    yield "val of other classes", lambda data: pngs(data, *(f"train/{c}/{n}.png" for c in "ab" for n in range(6)), *(f"val/{c}/{n}.png" for c in "xy" for n in range(3)))  # fmt: skip
    yield "val without images", lambda data: (pngs(data, *(f"train/{c}/{n}.png" for c in "ab" for n in range(6))), (data / "val").mkdir())  # type: ignore[func-returns-value]  # fmt: skip

    def table(text: str) -> Make:
        def make(data: Path) -> None:
            pngs(data, *(f"{n}.png" for n in range(12)))
            (data / "train.csv").write_text(text)

        return make

    rows = [f"{n}.png{{0}}{'cat' if n % 2 else 'dog'}\n" for n in range(12)]
    yield "a table with semicolons", table("file_name;label\n" + "".join(rows).replace("{0}", ";"))
    yield "a table with a mark and CR only", table("\ufefffile_name,label\r" + "".join(rows).replace("{0}", ",").replace("\n", "\r"))  # fmt: skip
    yield "a table with another label each", table("file_name,label\n" + "".join(f"{n}.png,l{n}\n" for n in range(12)))  # fmt: skip
    yield "a table that contradicts itself", table("file_name,label\n" + "".join(f"{n}.png,{c}\n" for n in range(12) for c in ("cat", "dog")))  # fmt: skip
    yield "a table of environment variables", table("file_name,label\n/proc/self/environ,cat\n0.png,dog\n1.png,cat\n")  # fmt: skip
    yield "a table of missing labels", table("file_name,label\n" + "".join(f"{n}.png,{'' if n % 3 else 'NaN'}\n" for n in range(12)))  # fmt: skip


def zipped() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../evil.py", "x" * 10**6)
    return file.getvalue()


def idx_files() -> Iterator[tuple[str, Make]]:
    pictures = gzip.compress(idx(2051, 16, 28, 28) + bytes(16 * 784))
    yield "labels above nine", idx_folder(pictures, gzip.compress(idx(2049, 16) + bytes(range(240, 256))))  # fmt: skip
    yield "fewer labels than images", idx_folder(pictures, gzip.compress(idx(2049, 8) + bytes(8)))
    yield "numbers with the small end first", idx_folder(gzip.compress(struct.pack("<4I", 2051, 16, 28, 28) + bytes(16 * 784)))  # fmt: skip
    yield "floats", idx_folder(gzip.compress(idx(0x0D03, 16, 28, 28) + bytes(16 * 784 * 4)))
    yield "another size than the test", idx_folder(gzip.compress(idx(2051, 16, 32, 32) + bytes(16 * 1024)))  # fmt: skip
    yield "bytes after the end", idx_folder(gzip.compress(idx(2051, 16, 28, 28) + bytes(16 * 784 + 999)))  # fmt: skip


def chunks(*parts: tuple[bytes, bytes], kind: bytes = b"RIFF", size: int | None = None) -> bytes:
    body = b"".join(name + struct.pack("<I", len(raw)) + raw + b"\0" * (len(raw) % 2) for name, raw in parts)  # fmt: skip
    return kind + struct.pack("<I", 4 + len(body) if size is None else size) + b"WAVE" + body


def sounds() -> Iterator[tuple[str, Make]]:
    def fmt(tag: int, bits: int, channels: int = 1, rate: int = 8000) -> tuple[bytes, bytes]:
        block = channels * bits // 8
        return b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits)

    tone = (np.sin(np.arange(8000) * 0.3) * 9000).astype("<i2").tobytes()
    bad = np.sin(np.arange(8000) * 0.3).astype("<f4")
    bad[4000:] = np.nan
    yield "floats with NaN", speech_folder(chunks(fmt(3, 32), (b"data", bad.tobytes())))
    yield "floats of 1e38", speech_folder(chunks(fmt(3, 32), (b"data", np.full(8000, 1e38, "<f4").tobytes())))  # fmt: skip
    yield "ADPCM", speech_folder(chunks(fmt(17, 4), (b"data", tone)))
    yield "data before the format", speech_folder(chunks((b"data", tone), fmt(1, 16)))
    yield "two formats", speech_folder(chunks(fmt(1, 16), fmt(1, 8, 2, 44_100), (b"data", tone)))
    yield "two data chunks", speech_folder(chunks(fmt(1, 16), (b"data", tone), (b"data", tone)))
    yield "RF64 of 2**62 bytes", speech_folder(chunks((b"ds64", struct.pack("<QQQI", 2**62, 2**62, 2**61, 0)), fmt(1, 16), (b"data", tone), kind=b"RF64", size=2**32 - 1))  # fmt: skip
    yield "24 bits, cut in a sample", speech_folder(chunks(fmt(1, 24), (b"data", tone[:-1])))
    yield "two voices in opposite phase", speech_folder(chunks(fmt(1, 16, 2), (b"data", np.repeat((np.sin(np.arange(8000) * 0.3) * 9000).astype("<i2"), 2).reshape(-1, 2).dot(np.diag([1, -1])).astype("<i2").tobytes())))  # fmt: skip
    yield "silence", speech_folder(wav(8000, 1, 8000, bytes(16_000)))
    yield "a thousandth of a second", speech_folder(wav(8000, 1, 8, tone[:16]))
    yield "a name of foreign digits", speech_folder(wav(8000, 1, 8000, tone), "\u0667_x_\u0669.wav")
    yield "a name without a digit", speech_folder(wav(8000, 1, 8000, tone), "seven_x_9.wav")
    yield "a transcript of another chapter", libri(real_flac(), b"9-9-9 HELLO\n")
    yield "a transcript twice", libri(real_flac(), b"1-2-3 HELLO\n1-2-3 GOODBYE\n")
    yield "a manifest of JSON", lambda data: ((data / "manifest.json").write_text('[{"path": "a.wav", "text": "hi"}]'), (data / "a.wav").write_bytes(wav(8000, 1, 8000, tone)))  # type: ignore[func-returns-value]  # fmt: skip


def videos() -> Iterator[tuple[str, Make]]:
    boris = b"Observation id,Media file,Total length,FPS,Subject,Behavior,Behavioral category,Modifiers,Behavior type,Start (s),Stop (s),Duration (s)\n"
    yield "BORIS with decimal commas", clips(boris + b'o,a.mp4,"1,6",25,s,walk,,,STATE,"0,1","0,9","0,8"\n')  # fmt: skip
    yield "BORIS with semicolons", clips(boris.replace(b",", b";") + b"o;a.mp4;1,6;25;s;walk;;;STATE;0,1;0,9;0,8\n")  # fmt: skip
    yield "BORIS points only", clips(boris + b"o,a.mp4,1.6,25,s,blink,,,POINT,0.5,0.5,NA\n")
    yield "BORIS of another length", clips(boris + b"o,a.mp4,3600,30,s,walk,,,STATE,0,0.8,0.8\no,a.mp4,3600,30,s,sit,,,STATE,1800,3600,1800\n")  # fmt: skip
    yield "BORIS of two subjects at once", clips(boris + b"o,a.mp4,1.6,25,s,walk,,,STATE,0,1.6,1.6\no,a.mp4,1.6,25,t,sit,,,STATE,0,1.6,1.6\n")  # fmt: skip
    yield (
        "labels after the end",
        clips(b"file,start_s,end_s,label\na.mp4,10,20,walk\na.mp4,30,40,sit\n"),
    )
    yield "labels of a file in another case", clips(b"file,start_s,end_s,label\nA.MP4,0,0.8,walk\nA.MP4,0.8,1.6,sit\n")  # fmt: skip
    yield "times as minutes and seconds", clips(b"file,start_s,end_s,label\na.mp4,0:00,0:01,walk\na.mp4,0:01,0:02,sit\n")  # fmt: skip
    yield (
        "overlapping labels",
        clips(b"file,start_s,end_s,label\na.mp4,0,1.2,walk\na.mp4,0.4,1.6,sit\n"),
    )
    yield "one label", clips(b"file,start_s,end_s,label\na.mp4,0,1.6,walk\n")
    yield "an Excel file named CSV", clips(zipped())
    yield "a page of a login named CSV", clips(b"<!DOCTYPE html><html><body>Please log in</body></html>\n")  # fmt: skip


def prices() -> Iterator[tuple[str, Make]]:
    def days(change: Any = lambda n, row: row, count: int = 140) -> bytes:
        rows = (f"2020-{1 + n // 28:02d}-{1 + n % 28:02d},100,101,99,100,5" for n in range(count))
        return HEADER + "\n".join(change(n, row) for n, row in enumerate(rows)).encode() + b"\n"

    yield "thousands with commas", market(days(lambda n, row: row.replace("100", '"1,000.00"')))
    yield "dates of two kinds", market(days(lambda n, row: row if n % 2 else row.replace("2020-01-", "01/").replace("2020-02-", "02/")))  # fmt: skip
    yield "days and months exchanged", market(HEADER + b"".join(f"{d:02d}/{m:02d}/2020,1,1,1,1,5\n".encode() for m in (1, 2) for d in range(1, 28)))  # fmt: skip
    yield "gaps of null", market(days(lambda n, row: row if n % 5 else row.replace("100", "null")))
    yield "five days", market(days(count=5))
    yield "a split of a thousand to one", market(days(lambda n, row: row if n < 20 else row.replace("100", "0.1").replace("101", "0.11").replace("99", "0.09")))  # fmt: skip
    yield "a volume below zero", market(days(lambda n, row: row.replace(",5", ",-5")))
    yield "prices that never change", market(days(lambda n, row: row.split(",")[0] + ",1,1,1,1,0"))
    yield "a page of a login", market(b"<html>Too many requests</html>\n")


def texts() -> Iterator[tuple[str, Make]]:
    def file(raw: bytes, name: str) -> Make:
        return lambda data: (data / name).write_bytes(raw) and None  # type: ignore[func-returns-value]

    line = b'{"text": "hello there, general"}\n'
    yield "an array named JSONL", file(b"[" + b",".join([line.strip()] * 50) + b"]", "train.jsonl")
    yield "Windows-1252", file(b'{"text": "caf\xe9 \x93hi\x94"}\n' * 50, "train.jsonl")
    yield "objects over several lines", file(b'{\n  "text": "hello"\n}\n' * 50, "train.jsonl")
    yield "empty texts", file(b'{"text": ""}\n' * 50, "train.jsonl")
    yield "one word", file(b"hello", "train.txt")
    yield "gzip named text", file(gzip.compress(line * 500), "train.txt")
    yield "CR only", file(line.replace(b"\n", b"\r") * 50, "train.jsonl")
    yield "a picture named text", file(picture("png") * 50, "train.txt")
    yield "a table with the text unnamed", file(b"a,b\n1,2\n" * 50, "train.csv")


def models() -> Iterator[tuple[str, Make]]:
    gpt = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1}  # fmt: skip

    def folder(config: dict[str, Any], **files: Any) -> Make:
        def make(data: Path) -> None:
            model_folder(config, code=True)(data)
            for name, content in files.items():
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                path = data / name.replace("__", ".")
                path.write_bytes(raw)

        return make

    def weights(shape: list[int], name: str = "transformer.wte.weight") -> bytes:
        size = 4 * int(np.prod(shape))
        header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()  # fmt: skip
        return struct.pack("<Q", len(header)) + header + bytes(size)

    yield "weights of another shape", folder(gpt, model__safetensors=weights([100, 8]))
    yield "weights of another model", folder(gpt, model__safetensors=weights([3, 3], "conv.weight"))
    yield "an index that leads outside", folder(gpt, model__safetensors__index__json={"metadata": {}, "weight_map": {"transformer.wte.weight": "../../outside/precious"}})  # fmt: skip
    yield "an index of missing shards", folder(gpt, model__safetensors__index__json={"metadata": {"total_size": 10**15}, "weight_map": {f"w{n}": f"model-{n:05d}.safetensors" for n in range(5)}})  # fmt: skip
    yield "a smaller vocabulary than the text", folder({**gpt, "vocab_size": 20})
    yield "shorter positions than the text", folder({**gpt, "n_positions": 4})
    yield (
        "a type that cannot be",
        folder({**gpt, "torch_dtype": "float8_quux", "dtype": "os.system"}),
    )
    yield "a template that computes", folder(gpt, tokenizer_config__json={"tokenizer_class": "GPT2Tokenizer", "chat_template": "{% for i in range(10**9) %}x{% endfor %}"})  # fmt: skip
    yield "an adapter of a folder elsewhere", folder(gpt, adapter_config__json={"base_model_name_or_path": "/etc", "peft_type": "LORA", "auto_mapping": {"base_model_class": "evil.C"}})  # fmt: skip
    yield "generation settings of text", folder(gpt, generation_config__json={"max_length": "many", "do_sample": []})  # fmt: skip
    yield "quantized by an unknown method", folder({**gpt, "quantization_config": {"quant_method": "evil", "load_in_4bit": True}})  # fmt: skip


GROUPS: dict[str, tuple[tuple[str, ...], Any]] = {
    "image": (("train", "image", *ONE, "--data-dir", "data", "image_size=32"), images),
    "idx": (("train", "image", *ONE, "--data-dir", "data"), idx_files),
    "speech": (("train", "speech", *ONE, "--data-dir", "data", "sample_rate=8000"), sounds),
    "video": (("train", "video", *ONE, "--data-dir", "data", "frame_size=64", "strict=true", "frames=4"), videos),
    "ppo": (("train", "ppo", *ONE, "--data-dir", "data", "num_envs=2", "hidden=8", "window=4", "episode_days=8"), prices),
    "text": (("train", "transformer", *ONE, "--data-dir", "data", "sequence_length=16", "width=8"), texts),
    "model": (("train", "transformer", *ONE, "model=./data", "tokenizer=bytes", "sequence_length=16"), models),
}  # fmt: skip
# What may also be trained on: only odd, or told in a warning.
ODD = {
    "a colour profile of 300 MB", "an archive behind the picture", "an EXIF block of zeros", "CMYK, 16 bits, palette and one bit",
    "labels that differ in case", "one image per class", "labels of control characters", "a notebook's folder as a class", "a table with a mark and CR only",
    "a table with another label each", "bytes after the end", "two data chunks", "two voices in opposite phase", "silence", "val without images",
    "24 bits, cut in a sample", "two formats", "a table with semicolons", "labels above nine", "floats of 1e38", "a transcript twice", "RF64 of 2**62 bytes",
    "BORIS with decimal commas", "BORIS with semicolons", "BORIS of two subjects at once", "a split of a thousand to one", "prices that never change",
    "an array named JSONL", "CR only", "objects over several lines", "generation settings of text", "a template that computes", "BORIS of another length", "overlapping labels",
    "an adapter of a folder elsewhere", "a manifest of JSON", "a name of foreign digits", "days and months exchanged", "labels of a file in another case",
    "a type that cannot be", "a thousandth of a second", "times as minutes and seconds",
}  # fmt: skip


def tried(name: str, words: tuple[str, ...], make: Make) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="blind-data-") as temporary:
        base = Path(temporary) / "x" / "here"
        (base / "data").mkdir(parents=True)
        (base.parent / "outside").mkdir()
        (base.parent / "outside/precious").write_text("precious")
        make(base / "data")
        outside = {n for n in files_below(base.parent) if not n.startswith("here")}
        ended = attempt(mgt(*words), base, 200.0)
        found = ended.problems(name not in ODD)
        if any(base.rglob("OWNED")):
            found.append("ran code that came with the data")
        if "\x1b" in re.sub("\x1b\\[[0-9;]*m", "", ended.said):  # colours of transformers
            found.append("lets control characters through to the terminal")
        if {n for n in files_below(base.parent) if not n.startswith("here")} != outside:
            found.append("wrote outside its folder")
        return {"problems": found, "code": ended.code, "seconds": round(ended.seconds, 1), "mib": ended.grown >> 20, "said": ended.said[-3000:]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name holds one of these")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from wrong_invocations import warm_up

    warm_up()
    wanted = [word for word in given.only.split(",") if word]
    rows, begun = [], time.monotonic()
    for group in given.groups.split(","):
        words, each = GROUPS[group]
        for name, make in each():
            if wanted and not any(word in f"{group}: {name}" for word in wanted):
                continue
            row = {"name": f"{group}: {name}", **tried(name, words, make)}
            rows.append(row)
            if row["problems"] or given.verbose:
                print(row["name"], *(f"\n    {problem}" for problem in row["problems"]), flush=True)
            if given.out is not None:
                told = {"python": platform.python_version(), "rows": rows}
                given.out.write_text(json.dumps(told, indent=1))
    bad = [row for row in rows if row["problems"]]
    print(f"{len(rows)} hostile data files, {len(bad)} with problems, {time.monotonic() - begun:.0f} s")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
