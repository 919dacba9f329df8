"""GPT-2 (124M) trained by the Hugging Face Trainer, by Lightning and by us, side by side.

    python benchmarks/transformer.py --out transformer.json

Each contender is a process of its own that trains the same model on the same batches in the same
order with the same optimizer. They start and compile together, wave by wave, and then take turns:
while one is timed the others wait. So compiling costs the run its time once, and no contender is
measured beside another. After the timed steps each computes the same validation loss.
`--quick` is a tiny model on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformer_contenders import CONTENDERS, Task

HERE = Path(__file__).resolve().parent
WAVES = "ours,hf-compile,lightning-compile;hf,lightning"
VALIDATION = 64  # sequences


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waves", default=WAVES, help="who starts together; waves end with ;")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--warm", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a round")
    parser.add_argument("--limit-s", type=float, default=180, help="for starting and compiling")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for ours")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--out", type=Path, help="write the results there, and a table as .md")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.sequence, options.warm, options.steps = 2, 64, 6, 2
    options.names = [wave.split(",") for wave in options.waves.split(";") if wave]
    unknown = [n for wave in options.names for n in wave if n not in CONTENDERS]
    if unknown:
        parser.error(f"unknown contenders {unknown}; there are {', '.join(CONTENDERS)}")
    return options


def main() -> int:
    options = parse()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mgt-transformer-") as name:
        folder = Path(name)
        task = Task(
            folder=name,
            device=options.device,
            batch=options.batch,
            sequence=options.sequence,
            warm=options.warm,
            rounds=options.rounds,
            steps=options.steps,
            quick=options.quick,
            settings=options.set,
        )
        text = prepare(task, folder)
        (folder / "task.json").write_text(json.dumps(asdict(task)))
        results: dict[str, dict[str, Any]] = {}
        for wave in options.names:
            results |= run_wave(wave, task, folder, options.limit_s)
    facts = {
        "command": shlex.join(["python", "benchmarks/transformer.py", *sys.argv[1:]]),
        "machine": machine(options.device),
        "text": text,
        "task": {key: value for key, value in asdict(task).items() if key != "folder"},
        "duration_s": time.perf_counter() - started,
        "results": results,
    }
    table = document(facts)
    print(table)
    if options.out is not None:
        options.out.write_text(json.dumps(facts, indent=1))
        options.out.with_suffix(".md").write_text(table)
    return 0 if all("error" not in result for result in results.values()) else 1


# The text


def prepare(task: Task, folder: Path) -> str:
    """Write the batches that everyone trains on; one line that says what they are."""
    wanted = (task.total * task.batch + VALIDATION) * task.sequence
    numbers, text = tokenize(standard_library(8 * wanted), wanted, task.quick)
    rows = numbers[:wanted].view(-1, task.sequence)
    # Shuffled here, once: the contenders then take them as they come, all in this order.
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    torch.save({"train": rows[:-VALIDATION], "val": rows[-VALIDATION:]}, folder / "tokens.pt")
    return text


def tokenize(text: str, wanted: int, quick: bool) -> tuple[torch.Tensor, str]:
    """At least `wanted` token numbers: byte pairs learnt from the text itself, or plain bytes."""
    if not quick:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=16384, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(text[: 4 << 20].split("\n\n"), trainer)
        pieces = tokenizer.encode_batch(text.split("\n\n"))
        numbers = torch.tensor([n for piece in pieces for n in piece.ids], dtype=torch.int32)
        kind = f"{tokenizer.get_vocab_size():,} byte pairs learnt from it"
    else:
        numbers = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(torch.int32)
        kind = "bytes"
    if len(numbers) < wanted:  # a small Python: go round
        numbers = numbers.repeat(-(-wanted // len(numbers)))
    return numbers, f"source of Python's standard library as {kind}"


def standard_library(characters: int) -> str:
    """Source files of the standard library, in the order of their names, without its tests."""

    def sources() -> Iterator[str]:
        length = 0
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            yield text
            length += len(text)
            if length > characters:
                return

    return "\n\n".join(sources())


# Running the contenders


def run_wave(
    names: list[str], task: Task, folder: Path, limit_s: float
) -> dict[str, dict[str, Any]]:
    """Start all of them, wait until they are warm, then let them take turns."""
    running = {name: start(name, folder) for name in names}
    say(f"started {', '.join(names)}")
    deadline = time.perf_counter() + limit_s
    for name, process in running.items():
        wait(folder / f"{name}.ready.0", process, deadline)
    for stage in range(task.rounds + 1):  # the last stage is the validation
        for name, process in running.items():
            if not (folder / f"{name}.ready.{stage}").exists():
                continue
            (folder / f"{name}.go.{stage}").touch()
            after = f"{name}.ready.{stage + 1}" if stage < task.rounds else f"{name}.json"
            wait(folder / after, process, time.perf_counter() + 60)
    results = {}
    for name, process in running.items():
        end(process)
        results[name] = result(name, folder)
        found = results[name]
        say(f"{name}: {found.get('error') or rate(found)} {found.get('note', '')}")
        for line in results[name].get("log", [])[-15:]:
            print(f"    {line}")
    return results


def start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    paths = [str(HERE.parent / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(HERE / "transformer_contenders.py"), name, str(folder)]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def wait(file: Path, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Until the file is there, the process has ended, or it is too late: then it is ended."""
    while not file.exists() and process.poll() is None:
        if time.perf_counter() > deadline:
            say(f"{file.name} came not in time")
            end(process)
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def result(name: str, folder: Path) -> dict[str, Any]:
    file = folder / f"{name}.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    log = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
    return {"error": log[-1] if log else "ended without a word", "log": log[-40:]}


# Telling


def rate(result: dict[str, Any]) -> str:
    return f"{median(result['tokens_per_s']):,.0f} tokens/s"


def document(facts: dict[str, Any]) -> str:
    task, results = facts["task"], facts["results"]
    size = next((r["parameters"] for r in results.values() if "parameters" in r), 0)
    lines = [
        "# GPT-2 training speed",
        "",
        f"    {facts['command']}",
        "",
        *(f"- {fact}" for fact in facts["machine"]),
        f"- GPT-2 of {size:,} parameters, {task['batch']} sequences of {task['sequence']} tokens a "
        "step, bf16 mixed precision on a GPU, fused AdamW, gradients clipped to 1, dropout 0",
        f"- {facts['text']}; the same batches in the same order for everyone",
        f"- {task['rounds']} rounds of {task['steps']} steps after {task['warm']} to warm up; the "
        f"whole run took {facts['duration_s']:.0f} s",
        "",
        "| trainer | tokens/s | times HF Trainer | min - max | step, ms | peak memory, GB "
        "| validation loss | warm after, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = results.get("hf", {}).get("tokens_per_s")
    for name, found in results.items():
        title = CONTENDERS[name].title
        if "error" in found:
            lines.append(f"| {title} | failed: {found['error']} | | | | | | |")
            continue
        rates = found["tokens_per_s"]
        ratio = f"{median(rates) / median(plain):.2f}" if plain else "-"
        lines.append(
            f"| {title} | {median(rates):,.0f} | {ratio} | {min(rates):,.0f} - {max(rates):,.0f} "
            f"| {task['batch'] * task['sequence'] / median(rates) * 1e3:.1f} "
            f"| {found['peak_bytes'] / 1e9:.1f} | {found['val_loss']:.4f} | {found['warm_s']:.0f} |"
        )
    tokens = task["total"] * task["batch"] * task["sequence"]
    lines += ["", f"Validation loss: after {tokens:,} tokens, on {VALIDATION} sequences.", ""]
    return "\n".join(lines)


def machine(device: str) -> list[str]:
    import importlib.metadata as metadata

    found = []
    for package in ("transformers", "accelerate", "lightning"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return [
        name,
        f"Python {platform.python_version()}, torch {torch.__version__}, " + ", ".join(found),
    ]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
