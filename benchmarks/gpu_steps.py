"""What a training step costs on one GPU: through `fit`, in an own loop, under DDP, in the peers.

    python benchmarks/gpu_steps.py --fashion FOLDER --out gpu_steps.json

Each row runs in a process of its own with a time limit; the JSON file and the table beside it are
written anew after every row, so that a run that is cut off loses nothing. `--rows mlp,lstm`
chooses rows by name or by the part of it before the dash; `--list` names them all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GRAPH_SHARE = 0.95
Found = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """`measure(options, name)` runs in a process of its own. `target`: what the value must not
    exceed, or with `more` not fall short of. `graph`: the steps must have run as a graph."""

    title: str
    measure: Callable[[argparse.Namespace, str], Found]
    unit: str = "us"
    target: float | None = None
    more: bool = False
    graph: bool = False
    limit_s: float = 60.0


# Rows of ours


def ours(options: argparse.Namespace, name: str) -> Found:
    """The model through `fit` (or `train_step` in an own loop), measured from inside."""
    import torch

    from multi_gpu_training.measure.request import VARIABLE, MeasureRequest

    which, how = name.split("-", 1)
    steps, every, warmup = plan(options, which)
    with tempfile.TemporaryDirectory(prefix="mgt-gpu-steps-") as folder:
        where = {"warmup": warmup, "device": options.device}
        request = MeasureRequest("meter", folder, 1, steps, every=every, **where)
        os.environ[VARIABLE] = request.save()
        if how == "ddp":
            os.environ.update(one_rank())
        try:
            train_ours(options, which, how == "loop")
        except SystemExit as stop:
            if stop.code not in (0, None):
                raise
        record = json.loads((Path(folder) / "rank-0.json").read_text())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    times = record.pop("step_times_s")
    mean = statistics.fmean(times)
    return {
        **record,
        "step_mean_s": mean,
        "step_p50_s": statistics.median(times),
        "samples_per_s": record["samples_per_step"] / mean,
        "steps": len(times) * every,
    }


def train_ours(options: argparse.Namespace, which: str, own_loop: bool) -> None:
    import torch
    from gpu_models import loss_fn, tensors
    from gpu_peers import Batches
    from torch.utils.data import TensorDataset

    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

    model = models(options)[which]
    settings: dict[str, Any] = {"batch_size": model.batch, "progress": "off"}
    if model.bf16:
        settings["use_mixed_precision"] = True
    settings |= getattr(options, "settings", {})
    manager = MultiGPUTrainingManager(MultiGPUConfig(**settings))
    torch.manual_seed(0)
    net, dataset = model.build(), TensorDataset(*tensors(model))
    if not own_loop:
        manager.fit(net, dataset, loss_fn=loss_fn)
        return
    manager.setup_training(net, dataset, loss_fn=loss_fn)
    device = str(manager.placement.device)
    for step, batch in enumerate(Batches(model, device, 10**9), start=1):
        result = manager.trainer.train_step(batch)
        if step % 20 == 0:
            float(result.loss)


def one_rank() -> dict[str, str]:
    """What a launcher gives the only rank: DDP then wraps the model and NCCL is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = ("RANK", "LOCAL_RANK")
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**dict.fromkeys(names, "0"), **dict.fromkeys(sizes, "1"), **meeting}


def plan(options: argparse.Namespace, which: str) -> tuple[int, int, int]:
    """Measured steps, steps between readings of the clock, and steps to warm up."""
    if options.quick:
        return 4, 2, 2
    return {
        "mlp": (5000, 50, 200),
        "lstm": (1500, 25, 100),
        "cnn": (1500, 25, 100),
        "resnet": (60, 1, 45),
    }[which]


def models(options: argparse.Namespace) -> Any:
    from gpu_models import MODELS, QUICK

    return QUICK if options.quick else MODELS


# Rows of others


def peer(options: argparse.Namespace, name: str) -> Found:
    from gpu_peers import Clock, Job, measure_peer

    which, how = name.split("-", 1)
    model = models(options)[which]
    contender, _, variant = how.partition("-")
    steps, warmup = (4, 2) if options.quick else {"mlp": (1000, 50)}.get(which, (200, 20))
    if which == "resnet":
        steps, warmup = (2, 1) if options.quick else (20, 8)
    same = variant != "fp32" and which != "mlp"
    clock = Clock(options.device, warmup, steps)
    bf16 = same and (options.bf16 or model.bf16)
    found = measure_peer(
        contender,
        Job(model, options.device, clock, bf16=bf16, channels_last=same and which == "resnet"),
    )
    return {**found, "precision": "bf16 mixed precision" if bf16 else "float32"}


# Whole trainings


def fashion(options: argparse.Namespace, name: str) -> Found:
    """`mgt train image` in this process; an epoch is without its validation."""
    if options.fashion is None:
        raise FileNotFoundError("no data: give --fashion FOLDER (the IDX files of Fashion-MNIST)")
    epochs = 2 if options.quick else 10
    words = ["train", "image", "--mode", "cnn", "--data-dir", str(options.fashion)]
    words += ["--batch-size", "128", "--epochs", str(epochs), "--device", options.device]
    words += shlex.split(options.fashion_args)
    if options.device == "cpu":
        words += ["--multi-gpu", "single"]  # which would start two ranks
    with tempfile.TemporaryDirectory(prefix="mgt-gpu-steps-") as folder:
        watch = Watch(options.device)
        watch.train([*words, "--save-dir", folder])
    # The first holds warm-up and capture; it is in the JSON.
    later = watch.epochs_s[1:] or watch.epochs_s
    return {
        "value": statistics.median(later),
        "epochs_s": watch.epochs_s,
        "accuracy": watch.accuracies[-1],
        "accuracies": watch.accuracies,
        "enough": watch.accuracies[-1] >= 0.925,
        "execution": watch.execution,
    }


class Watch:
    """Stands around the manager's epochs while a command trains."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.epochs_s: list[float] = []
        self.accuracies: list[float] = []
        self.execution: Found = {}

    def now(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def train(self, words: list[str]) -> None:
        """`mgt WORDS`, in this process."""
        from multi_gpu_training.cli import main as mgt
        from multi_gpu_training.training.loop import TrainingLoop

        parts = {
            name: getattr(TrainingLoop, name) for name in ("_train", "_end_of_steps", "_validate")
        }

        def begun(loop: Any, *given: Any, **more: Any) -> Any:
            self.begun_s = self.now()
            return parts["_train"](loop, *given, **more)

        def ended(loop: Any, loader: Any, epoch: int, in_fit: bool) -> Any:
            metrics = parts["_end_of_steps"](loop, loader, epoch, in_fit)
            self.epochs_s.append(self.now() - self.begun_s)
            found = loop.trainer.execution
            share = found.replayed / max(1, found.steps)
            self.execution = {"mode": found.mode, "share": share, "reason": found.reason}
            return metrics

        def noted(loop: Any, loader: Any) -> Any:
            metrics = parts["_validate"](loop, loader)
            self.accuracies.append(metrics["accuracy"])
            return metrics

        for name, instead in zip(parts, (begun, ended, noted), strict=True):
            setattr(TrainingLoop, name, instead)
        sys.argv = ["mgt", *words]
        try:
            mgt()
        except SystemExit as stop:
            if stop.code not in (0, None):
                raise
        finally:
            for name, part in parts.items():
                setattr(TrainingLoop, name, part)


# The graph computes what the eager step computes


def graph_against_eager(options: argparse.Namespace, name: str) -> Found:
    from torch.optim import SGD, AdamW

    cases: dict[str, tuple[bool, Any]] = {
        "linear, AdamW": (False, lambda parameters: AdamW(parameters, lr=1e-3)),
        "linear, SGD": (False, lambda parameters: SGD(parameters, lr=0.05, momentum=0.9)),
        "convolution, SGD": (True, lambda parameters: SGD(parameters, lr=0.05, momentum=0.9)),
    }
    found: Found = {}
    for title, (convolutions, optimizer) in cases.items():
        eager, _ = trained(options, convolutions, optimizer, "eager")
        again, _ = trained(options, convolutions, optimizer, "eager")
        graph, execution = trained(options, convolutions, optimizer, "graph")
        found[title] = {
            "graph_from_eager": apart(graph, eager),
            "eager_from_eager": apart(again, eager),
            "bitwise": all(bool((graph[key] == eager[key]).all()) for key in eager),
            "execution": execution,
        }
    worst = max(case["graph_from_eager"] for case in found.values())
    shares = [case["execution"]["share"] for case in found.values()]
    reasons = [case["execution"]["reason"] for case in found.values()]
    modes = {case["execution"]["mode"] for case in found.values()}
    execution = {
        "mode": "/".join(sorted(modes)),
        "share": min(shares),
        "reason": "; ".join(dict.fromkeys(filter(None, reasons))),
    }
    return {"value": worst, "cases": found, "execution": execution}


def trained(options: argparse.Namespace, convolutions: bool, optimizer: Any, how: str) -> Any:
    """Parameters and buffers after 200 steps, and how many of them were replayed."""
    import torch
    from gpu_models import Model, loss_fn, normalised, tensors
    from torch.utils.data import TensorDataset

    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

    steps = 6 if options.quick else 200
    wanted: dict[str, Any] = {
        "training_mode": "single",
        "device": options.device,
        "batch_size": 32,
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "epochs": 100,
        "schedule": "cosine",
        "warmup_steps": 5,
        "max_grad_norm": 1.0,
        "use_mixed_precision": False,
        "allow_tf32": False,
        "step_execution": how,
        "enable_fault_tolerance": False,
        "tensorboard": False,
        "progress": "off",
    }
    shape = (1, 28, 28) if convolutions else (64,)
    data = tensors(Model(None, shape, 32, samples=32 * 2 * 50))
    with tempfile.TemporaryDirectory(prefix="mgt-gpu-steps-") as folder:
        manager = MultiGPUTrainingManager(MultiGPUConfig(**wanted, save_dir=folder))
        torch.manual_seed(0)
        net = normalised(convolutions)
        manager.fit(net, TensorDataset(*data), loss_fn=loss_fn, optimizer=optimizer)
        state = {key: value.detach().cpu() for key, value in manager.model.state_dict().items()}
    found = manager.trainer.execution
    share = found.replayed / max(1, found.steps)
    return state, {"mode": found.mode, "share": share, "reason": found.reason}


def apart(one: Any, other: Any) -> float:
    """Largest ||a-b|| / ||b|| over the tensors."""
    worst = 0.0
    for key, value in other.items():
        distance = float((one[key].double() - value.double()).norm())
        worst = max(worst, distance / max(float(value.double().norm()), 1e-30))
    return worst


# All rows

US = 1e6
PEER_TITLES = ("plain", "fabric", "accelerate", "lightning", "hf")
ROWS: dict[str, Row] = {
    "mlp-fit": Row("MLP step, fit", ours, target=100, graph=True),
    "mlp-loop": Row("MLP step, train_step in an own loop", ours, target=130, graph=True),
    "mlp-ddp": Row("MLP step, fit, DDP + NCCL, one rank", ours, target=120, graph=True),
    "lstm-fit": Row("LSTM step, fit, bf16", ours, target=800, graph=True),
    "cnn-fit": Row("CNN step, fit", ours, graph=True),
    "fashion": Row("Fashion-MNIST epoch, mgt train image", fashion, "s", 0.36, graph=True),
    "graph-eager": Row(
        "graph against eager, 200 steps", graph_against_eager, "relative", 1e-5, graph=True
    ),
    "resnet-fit": Row("ResNet-50, fit", ours, "img/s", 6500, more=True, graph=False, limit_s=150),
    "mlp-plain": Row("MLP step, plain loop", peer),
    "mlp-fabric": Row("MLP step, Lightning Fabric", peer),
    "mlp-accelerate": Row("MLP step, Accelerate", peer),
    "mlp-lightning": Row("MLP step, Lightning Trainer", peer),
    "mlp-hf": Row("MLP step, Hugging Face Trainer", peer),
    "lstm-plain": Row("LSTM step, plain loop, bf16", peer),
    "cnn-plain": Row("CNN step, plain loop", peer),
    "resnet-plain": Row("ResNet-50, plain loop, bf16, channels last", peer, "img/s", limit_s=90),
    "resnet-plain-fp32": Row("ResNet-50, plain loop, fp32", peer, "img/s", limit_s=90),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help="comma-separated names, or parts before the dash")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--fashion", type=Path, help="folder with the IDX files of Fashion-MNIST")
    parser.add_argument("--fashion-args", default="", help="more words for `mgt train image`")
    parser.add_argument("--out", type=Path, default=Path("gpu_steps.json"))
    parser.add_argument("--limit", type=float, help="seconds a row may take, instead of its own")
    parser.add_argument("--bf16", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.names = list(ROWS)
    if options.rows:
        asked = options.rows.split(",")
        options.names = [n for n in ROWS if n in asked or n.split("-")[0] in asked]
        unknown = [a for a in asked if not any(a in (n, n.split("-")[0]) for n in ROWS)]
        if unknown:
            parser.error(f"unknown rows {unknown}; --list names them")
    return options


def main() -> int:
    options = parse()
    if options.list:
        print("\n".join(f"{name:20} {row.title}" for name, row in ROWS.items()))
        return 0
    if options.child:
        return child(options)
    document: Found = {"machine": machine(options), "command": sys.argv, "rows": {}}
    started = time.monotonic()
    for name in options.names:
        begun = time.monotonic()
        found = run(options, name, document["rows"])
        found["wall_s"] = time.monotonic() - begun
        document["rows"][name] = judged(name, found)
        document["memory"] = memory(document["rows"])
        document["wall_s"] = time.monotonic() - started
        write(options.out, document)
        print(line(name, document["rows"][name]), flush=True)
    print(table(document))
    failed = [name for name, row in document["rows"].items() if row.get("error")]
    return 1 if failed else 0


def child(options: argparse.Namespace) -> int:
    """One row, in this process; the result goes into a file."""
    try:
        found = ROWS[options.child].measure(options, options.child)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    options.child_out.write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's own teardown, in which process groups may hang.
    os._exit(1 if "error" in found else 0)


def run(options: argparse.Namespace, name: str, rows: Found) -> Found:
    """Start the row's process, with a time limit, and read what it found."""
    limit = options.limit or ROWS[name].limit_s
    with tempfile.TemporaryDirectory(prefix="mgt-gpu-steps-") as folder:
        out, log = Path(folder) / "row.json", Path(folder) / "log.txt"
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name]
        command += ["--child-out", str(out), "--device", options.device]
        if options.quick:
            command.append("--quick")
        if options.fashion is not None:
            command += ["--fashion", str(options.fashion.resolve())]
        command += [f"--fashion-args={options.fashion_args}"]
        # The plain loop computes as ours did, so that memory is compared like with like.
        same = rows.get(f"{name.split('-')[0]}-fit", {})
        if "bf16" in str(same.get("precision", "")):
            command.append("--bf16")
        with log.open("w") as file:
            try:
                subprocess.run(
                    command, timeout=limit, stdout=file, stderr=subprocess.STDOUT, check=False
                )
            except subprocess.TimeoutExpired:
                return {"error": f"not done after {limit:g} s", "log": tail(log)}
        if not out.exists():
            return {"error": "died", "log": tail(log)}
        found: Found = json.loads(out.read_text())
        if "error" in found:
            found["log"] = tail(log)
        return found


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def judged(name: str, found: Found) -> Found:
    """With its value in the row's unit, and whether the target is met."""
    row = ROWS[name]
    if "error" in found:
        return {**found, "ok": False}
    if row.unit == "us":
        found["value"] = found["step_mean_s"] * US
    elif row.unit == "img/s":
        found["value"] = found["samples_per_s"]
    execution = found.get("execution") or {}
    active = not row.graph or (
        execution.get("mode") == "graph" and execution.get("share", 0) >= GRAPH_SHARE
    )
    met = True
    if row.target is not None:
        met = found["value"] >= row.target if row.more else found["value"] <= row.target
    return {**found, "ok": bool(active and met and found.get("enough", True))}


def memory(rows: Found) -> Found:
    """Peak of ours over the plain loop's, for every model of which both are there."""
    found = {}
    for name in ("mlp", "lstm", "cnn", "resnet"):
        mine, theirs = rows.get(f"{name}-fit", {}), rows.get(f"{name}-plain", {})
        if mine.get("peak_bytes") and theirs.get("peak_bytes"):
            found[name] = {
                "ours_bytes": mine["peak_bytes"],
                "plain_bytes": theirs["peak_bytes"],
                "ratio": mine["peak_bytes"] / theirs["peak_bytes"],
            }
    return found


def write(path: Path, document: Found) -> None:
    """All that is known so far, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in (
        (path, json.dumps(document, indent=1)),
        (path.with_suffix(".md"), table(document)),
    ):
        fresh = file.with_name(file.name + ".new")
        fresh.write_text(text + "\n")
        fresh.replace(file)


def line(name: str, found: Found) -> str:
    if "error" in found:
        return f"{name}: {found['error']} ({found['wall_s']:.0f} s)\n{found.get('log', '')}"
    return f"{name}: {value(name, found)}  {how(found)}  ({found['wall_s']:.0f} s)"


def value(name: str, found: Found) -> str:
    unit = ROWS[name].unit
    if unit == "relative":
        bitwise = [title for title, case in found["cases"].items() if case["bitwise"]]
        return f"{found['value']:.1e}" + (f" (bitwise: {', '.join(bitwise)})" if bitwise else "")
    if unit == "s":
        return f"{found['value']:.3f} s, accuracy {found['accuracy']:.2%}"
    return f"{found['value']:,.0f} {unit}"


def how(found: Found) -> str:
    execution = found.get("execution")
    if not execution:
        return "-"
    text = f"{execution['mode']}, {execution['share']:.0%} replayed"
    return text + (f" ({execution['reason']})" if execution.get("reason") else "")


def table(document: Found) -> str:
    facts = document["machine"]
    lines = [
        "# Steps on one GPU",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['device']}; torch {facts['torch']}, Python {facts['python']}, "
        f"{facts['cpus']} cores; {document.get('wall_s', 0):.0f} s in all",
        "",
        "| row | measured | target | | execution | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in document["rows"].items():
        row = ROWS[name]
        target = "-"
        if row.target is not None:
            target = f"{'>=' if row.more else '<='} {row.target:g} {row.unit}"
        verdict = "-" if row.target is None and not row.graph else "yes" if found["ok"] else "NO"
        shown = found["error"] if "error" in found else value(name, found)
        peak = f"{found['peak_bytes'] / 2**20:,.0f} MB" if found.get("peak_bytes") else "-"
        cells = [row.title, shown, target, verdict, how(found), peak]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    if document.get("memory"):
        lines += ["", "Peak memory against the plain loop in the same precision (target 1.1x):", ""]
        for name, ratio in document["memory"].items():
            lines.append(f"- {name}: {ratio['ratio']:.2f}x")
    return "\n".join(lines)


def machine(options: argparse.Namespace) -> Found:
    import torch

    cuda = options.device == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "command": shlex.join(["python", "benchmarks/gpu_steps.py", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
