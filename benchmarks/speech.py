"""The speech recipe: how long a step takes, and how well digits are read.

    python benchmarks/speech.py --parts step --out speech-step.json
    python benchmarks/speech.py --parts digits,speakers --data ../fsdd --out speech-digits.json

step      the 7.17M model on batches of 16 utterances of ten seconds, through the trainer
digits    FSDD's official split
speakers  FSDD once for each speaker, tested on and not trained on; --only names some of them

The trainings of digits and speakers run beside each other on a GPU, one process each, and one
after the other on a CPU (--jobs). What --set gives are options of the recipe:

    python benchmarks/speech.py --parts speakers --data ../fsdd --set synthetic_voices=100

A training that ends is written to --out at once. Decoded are the last epoch's weights: with the
words of the training and without, by the best path and by beam search.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.data.order import seed_everything
from multi_gpu_training.recipes.recipe import Job, find_recipe
from multi_gpu_training.recipes.speech import SpeechOptions, build
from multi_gpu_training.recipes.speech.corpora import Division, read_corpus
from multi_gpu_training.recipes.speech.dataset import Batch, Buckets, Clip, Speech
from multi_gpu_training.recipes.speech.objective import MASKS, Objective, evaluate
from multi_gpu_training.recipes.speech.speech_model import SIZES, Recogniser
from multi_gpu_training.training.metrics import MetricsCollector

RATE, CHARACTERS = 16000, 150
SPEAKER = "official split"
# How the test is read: with the recipe's list of words and without, and by beam search.
WAYS: dict[str, dict[str, Any]] = {
    "words": {"name": "greedy"},
    "words, beam": {"name": "beam", "width": 64},
    "any text": {"name": "greedy", "lexicon": None},
}


def main() -> None:
    args = arguments()
    report: dict[str, Any] = {"machine": machine(args.device), "torch": torch.__version__}
    if args.one:
        report = train_digits(args, args.one)
        Path(args.out).write_text(json.dumps(report))
        return
    if "step" in args.parts:
        report["step"] = steps(args)
    if "digits" in args.parts or "speakers" in args.parts:
        report["digits"] = digits(args)
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="step")
    parser.add_argument("--data", help="folder of FSDD")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of an utterance")
    parser.add_argument("--steps", type=int, default=60, help="measured, after --warm-up")
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=30, help="of digits")
    parser.add_argument("--lr", type=float, default=2e-3, help="of digits")
    parser.add_argument("--only", help="speakers, as in lucas,george")
    parser.add_argument("--set", action="append", default=[], help="option of the recipe, NAME=X")
    parser.add_argument("--jobs", type=int, help="trainings at a time; all of them on a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of digits")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", help="write the results there as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    unknown = set(args.parts) - {"step", "digits", "speakers"}
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: there are step, digits, speakers")
    if args.data is None and (args.one or set(args.parts) & {"digits", "speakers"}):
        parser.error("--data: digits and speakers need the folder of FSDD")
    if args.quick:
        args.seconds, args.steps, args.warm_up, args.epochs = 1.0, 3, 2, 1
    return args


def machine(device: str) -> str:
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


# The step


class Clock(Callback):
    """Seconds a step between two looks at an idle device."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.last = warm_up, warm_up + steps
        self.started = self.step_s = 0.0
        self.peak_bytes = 0

    def on_step_end(self, manager: Any, result: Any) -> None:
        step = result.step
        if step not in (self.warm_up, self.last):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if step == self.warm_up:
            self.started = now
            return
        self.step_s = (now - self.started) / (self.last - self.warm_up)
        if torch.cuda.is_available():
            self.peak_bytes = torch.cuda.max_memory_allocated()


def utterances(args: argparse.Namespace) -> Speech:
    """Noise of one length with random text: what it costs does not depend on what is said."""
    generator = torch.Generator().manual_seed(0)
    samples = round(args.seconds * RATE)
    labels = max(2, round(CHARACTERS * args.seconds / 10))
    clips = []
    for _ in range(4 * args.batch_size):
        text = torch.randint(1, 29, (labels,), generator=generator).tolist()
        sound = 3000 * torch.randn(samples, generator=generator)
        clips.append(Clip(tuple(text), samples, 0, sound=sound.to(torch.int16)))
    buckets = Buckets([samples], [labels], 1, 1600)
    # The same ones again and again, so that no epoch ends between two looks at the clock.
    clips *= -(-(args.warm_up + args.steps + 1) // 4)
    return Speech(clips, RATE, buckets)


def torchs_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same loss by torch's own function, which reads the lengths on the host."""
    logits, lengths = model(batch.sound, batch.samples, batch.draws, MASKS)
    with torch.autocast(logits.device.type, enabled=False):
        log_probs = logits.float().log_softmax(2).transpose(0, 1)
        loss = F.ctc_loss(
            log_probs, batch.targets, lengths, batch.sizes, reduction="sum", zero_infinity=True
        )
    weight = batch.sizes.sum()
    return loss / weight, weight


def variants() -> dict[str, tuple[dict[str, Any], Any]]:
    """Name -> (settings, loss). Only settings that this version knows."""
    mixed = {"use_mixed_precision": True, "allow_tf32": True}
    found: dict[str, tuple[dict[str, Any], Any]] = {
        "defaults": ({}, Objective(augment=True)),
        "float32": ({"use_mixed_precision": False, "allow_tf32": False}, Objective(augment=True)),
        "bf16 and TF32": (mixed, Objective(augment=True)),
        "bf16 and TF32, 4 workers": ({**mixed, "num_workers": 4}, Objective(augment=True)),
    }
    if "step_execution" in MultiGPUConfig.model_fields:
        eager = {**mixed, "num_workers": 4, "step_execution": "eager"}
        found["bf16 and TF32, 4 workers, eager"] = (eager, Objective(augment=True))
        found["the same with torch's ctc_loss"] = (eager, torchs_loss)
    else:
        found["the same with torch's ctc_loss"] = ({**mixed, "num_workers": 4}, torchs_loss)
    return found


def steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    dataset = utterances(args)
    rows = []
    print(f"{args.batch_size} utterances of {args.seconds:g} s, {machine(args.device)}\n")
    print("| variant | ms a step | utterances/s | peak GB | parameters |")
    print("|---|---|---|---|---|")
    for name, (settings, loss) in variants().items():
        row: dict[str, Any] = {"variant": name}
        try:
            row |= measure(args, dataset, settings, loss)
            print(
                f"| {name} | {row['step_ms']:.2f} | {row['utterances_per_s']:,.0f} | "
                f"{row['peak_bytes'] / 1e9:.2f} | {row['parameters']:,} |",
                flush=True,
            )
        except Exception as error:  # one variant that fails must not lose the others
            traceback.print_exc()
            row["error"] = repr(error)
        rows.append(row)
    return rows


def measure(
    args: argparse.Namespace, dataset: Speech, settings: dict[str, Any], loss: Any
) -> dict[str, Any]:
    clock = Clock(args.warm_up, args.steps)
    torch.manual_seed(0)
    model = Recogniser(SIZES["base"], 29, RATE)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        config = MultiGPUConfig(
            device=args.device,
            training_mode="single",
            batch_size=args.batch_size,
            epochs=1000,
            max_steps=clock.last,
            max_grad_norm=1.0,
            enable_fault_tolerance=False,
            tensorboard=False,
            progress="off",
            log_every=1000,
            save_dir=folder,
            **settings,
        )
        MultiGPUTrainingManager(config).fit(model, dataset, loss_fn=loss, callbacks=[clock])
    return {
        "step_ms": 1000 * clock.step_s,
        "utterances_per_s": args.batch_size / clock.step_s,
        "peak_bytes": clock.peak_bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


# The digits


def digits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each training in a process of its own; they share the device."""
    names = [SPEAKER] if "digits" in args.parts else []
    if "speakers" in args.parts:
        corpus = read_corpus(Path(args.data), "fsdd", Division())
        wanted = args.only.split(",") if args.only else None
        found = sorted({entry.speaker for entry in corpus.train})
        names += [name for name in found if wanted is None or name in wanted]
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    jobs = args.jobs or (len(names) if on_gpu else 1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        outs = [(name, Path(folder) / f"{i}.json") for i, name in enumerate(names)]
        for row in pool.map(lambda job: trained(args, *job), outs):
            rows.append(row)
            if args.out:
                Path(args.out).write_text(json.dumps({"digits": rows}, indent=2) + "\n")
    print(f"\nFSDD, {args.epochs} epochs, seed {args.seed}, {machine(args.device)}\n")
    print(
        f"| tested on | {' | '.join(f'WER {way}' for way in WAYS)} | CER | parameters | seconds |"
    )
    print("|---" * (len(WAYS) + 4) + "|")
    for row in rows:
        if "error" in row:
            print(f"| {row['test']} | {row['error']} |")
            continue
        rates = " | ".join(f"{row['ways'][way]:.2%}" for way in WAYS)
        print(
            f"| {row['test']} | {rates} | {row['cer']:.2%} | {row['parameters']:,} | "
            f"{row['seconds']:.0f} |"
        )
    unseen = [row for row in rows if "error" not in row and row["test"] != SPEAKER]
    if unseen:
        worst = {way: max(row["ways"][way] for row in unseen) for way in WAYS}
        mean = {way: sum(row["ways"][way] for row in unseen) / len(unseen) for way in WAYS}
        for told, figures in (("mean", mean), ("worst", worst)):
            rates = " | ".join(f"{figures[way]:.2%}" for way in WAYS)
            print(f"| {told} of {len(unseen)} unseen speakers | {rates} | | | |")
    return rows


def trained(args: argparse.Namespace, name: str, out: Path) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", name, "--data", args.data, "--out", str(out)]
    words += ["--device", args.device, "--epochs", str(args.epochs), "--lr", str(args.lr)]
    words += ["--seed", str(args.seed), *(f"--set={given}" for given in args.set)]
    subprocess.run(words + (["--quick"] if args.quick else []))
    if out.exists():
        row: dict[str, Any] = json.loads(out.read_text())
        return row
    return {"test": name, "error": "see above"}


def train_digits(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The recipe as it stands, and its test read in other ways as well."""
    recipe = find_recipe("speech")
    which = {"split": "official"} if name == SPEAKER else {"held_out_speaker": name}
    given = dict(setting.split("=", 1) for setting in args.set)
    options = SpeechOptions(data_dir=args.data, **{**which, **given})
    with tempfile.TemporaryDirectory() as folder:
        config = recipe.config(
            {
                "device": args.device,
                "training_mode": "single",
                "seed": args.seed,
                "epochs": args.epochs,
                "learning_rate": args.lr,
                # The test is read whole once, behind the last epoch.
                "limit_val_batches": 1,
                "enable_fault_tolerance": False,
                "tensorboard": False,
                "progress": "off",
                "save_dir": folder,
            }
        )
        manager = MultiGPUTrainingManager(config)
        seed_everything(config.seed)
        torch.manual_seed(config.seed)
        job = build(config, options)
        started = time.perf_counter()
        used = time.process_time()
        result = manager.fit(**vars(job))
        seconds, used = time.perf_counter() - started, time.process_time() - used
        found = {way: read_again(job, change) for way, change in WAYS.items()}
    return {
        "test": name,
        **found["words"],
        "ways": {way: metrics["wer"] for way, metrics in found.items()},
        "train_loss": result.history[-1]["train"]["loss"],
        "utterances": len(job.val_dataset),
        "trained_on": len(job.dataset),
        "parameters": sum(p.numel() for p in job.model.parameters()),
        "seconds": seconds,
        "process_seconds": used,
        "options": options.model_dump(),
    }


def read_again(job: Job, change: dict[str, Any]) -> dict[str, float]:
    """Loss and error rates of the whole test, read by another decoder."""
    given = job.eval_fn.keywords
    decoder = replace(given["decoder"], **change)
    metrics, test = MetricsCollector(), job.val_dataset
    device = next(job.model.parameters()).device
    job.model.eval()
    with torch.no_grad():
        for start in range(0, len(test), 64):
            clips = range(start, min(start + 64, len(test)))
            batch = Batch(*(part.to(device) for part in test.collate([test[i] for i in clips])))
            evaluate(job.model, batch, metrics, **{**given, "decoder": decoder})
    return metrics.compute()


if __name__ == "__main__":
    main()
