"""Wrong invocations of the commands that came last, and of what surrounds a command.

Groups for wrong_invocations.py: commands that read a trained run (serve, evaluate, predict, export,
compress, profile, top, dashboard), searches, federations, engines, config files, and the
environment that a scheduler sets.
"""

# ruff: noqa: E501, RUF001 - one line per case reads best; odd letters are on purpose
from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hostile_trial import attempt
from invocation import HUGE, ONE, SURROGATE, Invocation

KEPT = "trained"  # a small trained run of image
LONG = "x" * 5000


def delivering() -> Iterator[Invocation]:
    """Commands that read a trained run, with flags that cannot be."""
    for command in ("evaluate", "predict", "export", "compress", "serve"):
        more = {"export": ("--to", "safetensors"), "compress": ("--method", "prune:0.5")}
        rest = more.get(command, ())
        runs = ("gone", "a_file", "a_folder", "run", "empty", "fifo", "device", "a\0b", SURROGATE)
        for place in (
            *runs,
            LONG,
            "",
            "/",
            "/proc/self",
            "s3://",
            "file:///etc",
            "ftp://x/y",
            "s3:///x",
        ):
            yield Invocation((command, place, *rest))
        for device in ("gpu", "", "cuda:99", "CPU ", "meta"):
            if command != "export":
                yield Invocation((command, KEPT, *rest, "--device", device), ("device",))
        for name in ("step-99", "step--1", "worst", "", "../x", "a\0b", "step-1e3", "9" * 400):
            if command != "compress":
                yield Invocation((command, KEPT, *rest, "--checkpoint", name))
    for command in ("evaluate", "predict"):
        for count in ("0", "-2", "1.5", "x", str(2**40), HUGE):
            yield Invocation((command, KEPT, "--num-gpus", count), ("num-gpus",))
        for size in ("0", "-1", "x", str(2**63), str(2**70)):
            yield Invocation((command, KEPT, "--batch-size", size), ("batch-size",))
    for part in ("train", "", "VAL", "test"):
        yield Invocation(("evaluate", KEPT, "--part", part), ("part",))
    for data in ("gone", "a_file", "empty", "fifo", "device", "a\0b", LONG, "a_folder"):
        yield Invocation(("evaluate", KEPT, "--data", data), ())
        yield Invocation(("predict", KEPT, data), ())
    yield Invocation(("predict", KEPT), ())
    for out in (
        "a_folder",
        "a_file/x",
        "/proc/x.csv",
        "/dev/null",
        "a\0b.csv",
        LONG + ".csv",
        "x.xml",
        "",
    ):
        yield Invocation(("predict", KEPT, "picture.png", "--out", out), ())
    for flag, value in (
        ("--task", "generate"), ("--task", ""), ("--format", "xml"), ("--format", ""), ("--every", "0"),
        ("--every", "-1"), ("--new-tokens", "0"), ("--new-tokens", HUGE), ("--temperature", "nan"),
        ("--temperature", "-1"), ("--temperature", "inf"), ("--seed", str(2**65)), ("--record", "a_file"),
        ("--timeline", "x.txt"), ("--timeline", "a\0b.csv"), ("--seed", "-1"), ("--every", "9" * 30),
    ):  # fmt: skip
        yield Invocation(("predict", KEPT, "picture.png", flag, value), (flag[2:],))
    for to in ("", "ONNX", "tflite", "hf", "onnx,aoti", "\0", "executorch"):
        yield Invocation(("export", KEPT, "--to", to), ())
    for flag, value in (
        ("--max-batch", "1"), ("--max-batch", "0"), ("--max-batch", HUGE), ("--length", "1"),
        ("--length", "100"), ("--length", "x"), ("--out", "a_file"), ("--out", "a_file/x"),
        ("--out", "/proc/x"), ("--out", "a\0b"), ("--out", LONG), ("--out", "a_folder_full"),
        ("--out", ""), ("--out", "fifo"), ("--out", "dangling"), ("--out", KEPT),
    ):  # fmt: skip
        yield Invocation(("export", KEPT, "--to", "safetensors", flag, value), (flag[2:],))
    for text in ("a\nb: c", "\x1b[2J", LONG):
        yield Invocation(
            ("export", KEPT, "--to", "safetensors", "--license", text), ("license",), fails=False
        )
    for method in (
        "", "quantise", "quantize:int3", "quantize:", "prune", "prune:2", "prune:-0.1", "prune:nan", "prune:0",
        "prune:1", "prune:2:4:8", "distil:nope=1", "distil:0", "distil:width=-1", "distil:width=x", "+",
        "prune:0.5+", "prune:0.5+prune:0.5", "distil:0.5+distil:0.5", "quantize:int8+prune:0.5+nope", "\0",
        "prune:0.5+" * 50, "prune:" + HUGE, "distil:" + SURROGATE, "prune:1e-400", "distil:=", "distil:a=b=c",
    ):  # fmt: skip
        # What only a built model can tell stands in the table, not beside the flag.
        says = () if method.startswith("distil:") else ("method",)
        yield Invocation(("compress", KEPT, "--method", method), says)
    yield Invocation(("compress", KEPT), ("method",))
    yield Invocation(("compress", KEPT, "--method", "prune:0.5", "--method", "prune:0.5"), ())
    for flag, value in (
        ("--max-drop", ""), ("--max-drop", "x"), ("--max-drop", "-1%"), ("--max-drop", "nan"),
        ("--max-drop", "101%"), ("--max-drop", "inf"), ("--max-drop", "1%%"), ("--max-drop", "%"),
        ("--epochs", "0"), ("--epochs", "-1"), ("--epochs", HUGE), ("--lr", "nan"), ("--lr", "0"),
        ("--lr", "-1"), ("--lr", "inf"), ("--lr", "x"), ("--out", "a_file"), ("--out", "a_file/x"),
        ("--out", "/proc/x"), ("--out", "a\0b"), ("--out", LONG), ("--out", "fifo"),
    ):  # fmt: skip
        yield Invocation(("compress", KEPT, "--method", "prune:0.5", flag, value), (flag[2:],))
    for flag, values in {
        "--port": ("-1", "65536", "x", HUGE, "1.5", "1"),
        "--max-batch": ("0", "-1", "nan", HUGE, str(2**62)),
        "--max-delay-ms": ("nan", "inf", "-1", "1e400", "x"),
        "--max-waiting": ("0", "-1", "x", str(2**62)),
        "--max-body-mib": ("nan", "0", "-1", "inf", "1e9"),
        "--rate": ("nan", "-1", "inf", "x"),
        "--host": ("256.0.0.1", "a b", "\0", "x" * 300, "http://127.0.0.1", "127.0.0.1:80", "²"),
        "--task": ("generate", "", "\0"),
    }.items():
        for value in values:
            if (flag, value) != ("--port", "1"):  # which root may take
                yield Invocation(("serve", KEPT, flag, value), (flag[2:],))
            if flag in ("--port", "--host") and (flag, value) != ("--port", "1"):
                yield Invocation(("dashboard", ".", flag, value), (flag[2:],))
    for host in ("", "a/b", "\0", "a b"):
        yield Invocation(("serve", KEPT, "--allow-host", host), ("allow-host",))
        yield Invocation(("dashboard", ".", "--allow-host", host), ("allow-host",))
    for token in ("", "short", "ünïcode-token-long", "\0" * 20, " " * 20, "a b c d e f g h"):
        yield Invocation(("dashboard", ".", "--token", token), ("token",))
    yield Invocation(("dashboard", ".", "--host", "0.0.0.0"), ("token",))
    yield Invocation(("dashboard", "."), ("token",), {"MGT_DASHBOARD_TOKEN": "short"})
    for command in ("dashboard", "top"):
        once = ("--once",) if command == "top" else ()
        for place in (
            "gone",
            "a_file",
            "fifo",
            "device",
            "a\0b",
            LONG,
            "",
            "s3://",
            "ftp://x/y",
            SURROGATE,
        ):
            # What is not there yet is waited for, and said to be missing.
            waits = place in ("gone", "a_file", "fifo", "device", "s3://", "ftp://x/y")
            yield Invocation(
                (command, place, *once),
                ("is not",) if waits and once and "://" not in place else (),
                fails=not waits,
            )
        yield Invocation((command, "/proc", *once), fails=False)
    for interval in ("0", "-1", "nan", "inf", "x", "1e400"):
        yield Invocation(("top", ".", "--interval", interval), ("interval",))


def tracing() -> Iterator[Invocation]:
    for steps in (
        "",
        "0-2",
        "5-1",
        "x",
        "1-",
        "-5",
        "1-999999999999",
        HUGE,
        "1-2,,3",
        "nan",
        "1-2;3",
        "²-³",
        "1-100000",
    ):
        yield Invocation(("profile", "image", "--steps", steps), ("steps",))
    for ranks in ("", "-1", "x", "0,,1", HUGE, "0,0", "99999999999", "all,0", "²"):
        yield Invocation(("profile", "image", "--ranks", ranks), ("ranks",))
    for count in ("0", "-2", "x", HUGE, "1099511627776"):
        yield Invocation(("profile", "image", "--num-gpus", count), ("num-gpus",))
    for target in (
        "gone",
        "a_file",
        "a_folder",
        "run",
        "gone.py",
        "",
        "a\0b",
        LONG,
        "fifo",
        "device",
        SURROGATE,
    ):
        yield Invocation(("profile", target), ())
    for device in ("gpu", "", "cuda:7"):
        yield Invocation(("profile", "image", "--device", device), ("device",))


def studies() -> Iterator[Invocation]:
    """mgt search: no trial may begin before these are refused."""
    lr = ("--param", "lr=1e-4..1e-1:log")
    bad = (
        "", "=", "lr", "lr=", "=1..2", "lr=1", "lr=1,1", "lr=2..1", "lr=1..1", "lr=..", "lr=1..", "lr=x..y",
        "lr=nan..1", "lr=0..inf", "lr=1e400..2e400", "lr=-1..1:log", "lr=0..1:log", "lr=0..1:step=0",
        "lr=0..1:step=nan", "lr=0..1:step=2", "lr=0..1:step=-1", "lr=0..1:log:step=0.1", "lr=0..1:nope",
        "lr=0..1:step=inf", "lr=0..1:step=", "lr=0..1:step=x", "batch_size=1..1e3:step=0.5", "lr=0..1..2",
        f"batch_size=1..{2**70}", f"batch_size=1..{HUGE}", "batch_size=-5..5", "frobnicate=1,2", "seed=1,2",
        "world_size=1,2", "save_dir=a,b", "run_name=a,b", "device=cpu,cuda", "schedule=a,b", "lr=[1],[2]",
        "lr={a: 1},2", "lr=${x},1", "lr=" + ",".join(map(str, range(2000))), "lr=\0,1", f"lr={SURROGATE},1",
        "training_mode=single,tdp", "epochs=0,1", "lr=1e-5..1e-1:log:log:log:x", "a.b.c=1,2", "lr=*a,*b",
        "lr=!!python/object:x,1", "lr=" + "[" * 5000 + ",1", "mode=cnn,nope", "lr=0x10..0x20", "lr=1_0..2_0",
    )  # fmt: skip
    odd = {"lr=1_0..2_0", "lr=0..1..2"}
    for text in bad:
        yield Invocation(
            ("search", "image", "--param", text, "--trials", "2"), (), fails=text not in odd
        )
    yield Invocation(("search", "image", *lr, *lr), ("lr",))
    yield Invocation(("search", "image", *lr, "--param", "learning_rate=1,2"), ("learning_rate",))
    yield Invocation(("search", "image"), ("param",))
    yield Invocation(("search", "image", *lr, "lr=1"), ("learning_rate",))
    for flag, values in {
        "--trials": ("0", "-1", "x", "1.5", HUGE, str(2**64)),
        "--metric": ("", ":max", "val/loss:up", "val/loss:min:max", "\0", "a b:", LONG),
        "--sampler": ("", "bayes", "TPE", "grid", "cmaes,tpe", "\0"),
        "--pruner": ("", "nope", "ASHA "),
        "--seed": ("-1", str(2**31), HUGE, "x", "1.5"),
        "--value": ("", "first", "LAST"),
        "--population": ("0", "1", "-1", "x", "5000"),
        "--generation-epochs": ("0", "-1", "x", HUGE),
        "--study": ("a/b", "..", "a\0b", LONG, SURROGATE, "-x", "\x1b[2J"),
        "--save-dir": (
            "a_file",
            "a_file/x",
            "/proc/x",
            "a\0b",
            LONG,
            "s3://x/y",
            "fifo",
            "dangling/x",
        ),
        "--storage": (
            "x",
            "memory",
            "sqlite:///gone/x/y.db",
            "mysql://nowhere.invalid/x",
            "\0",
            "sqlite:///a_folder",
        ),
        "--trial-timeout": ("0", "-1", "nan", "x"),
        "--hang-timeout": ("0", "-1", "nan", "x"),
        "--repeat-best": ("-1", "1", "x", HUGE),
        "--seeds": ("-1", "3", "x", HUGE),
        "--parallel": ("0", "-1", "x", "5000", HUGE),
        "--gpus-per-trial": ("0", "-1", "x", "5000", HUGE),
        "--trials-per-gpu": ("0", "-1", "x", "5000"),
        "--engine": ("", "slurm", "nope", "kubernetes", "ray"),
        "--ray-address": ("x", "127.0.0.1:1"),
        "--price": ("nan", "0", "-1", "inf", "x"),
    }.items():
        for value in values:
            words = ("search", "image", *lr, "--trials", "2", flag, value)
            yield Invocation(words, (flag[2:],) if value else ())
    for target in (
        "gone",
        "gone.py",
        "gone.yaml",
        "a_file",
        "a_folder",
        "fifo",
        "device",
        "",
        "a\0b",
        LONG,
        "imagge",
        SURROGATE,
    ):
        yield Invocation(("search", target, *lr), ())
        yield Invocation(("search", target, "--resume"), ())
    yield Invocation(("search", "image", "--resume", "--study", "a\0b"), ())
    yield Invocation(("search", "image", "--resume", "--study", "../../../etc"), ())
    whole = "target: image\nparams: {lr: [0.1, 0.2]}\n"
    for text in (
        "params: 5\ntarget: image", "params: []\ntarget: image", "params: {}\ntarget: image", "params: {lr: 5}\ntarget: image",
        "params: {lr: {a: 1}}\ntarget: image", "params: {lr: [[1], [2]]}\ntarget: image", "params: {5: [1, 2]}\ntarget: image",
        "params: {null: [1, 2]}\ntarget: image", "params: {lr: [.nan, .inf]}\ntarget: image", "params: {lr: null}\ntarget: image",
        "params: {lr: [0.1, 0.2]}", "params: {lr: [0.1, 0.2]}\ntarget: 5", "params: {lr: [0.1, 0.2]}\ntarget: [image]",
        "params: {lr: [0.1, 0.2]}\ntarget: nope", "params: {lr: [0.1, 0.2]}\ntarget: nope.py", whole + "settings: 5",
        whole + "settings: [1]", whole + "settings: {nope: 1}", whole + "settings: {epochs: {a: {b: 1}}}", whole + "words: 5",
        whole + "words: {a: 1}", whole + "words: [1, 2]", whole + "metric: 5", whole + "metric: {a: 1}", whole + "metric: [1]",
        whole + "trials: x", whole + "trials: .nan", whole + "trials: [1]", whole + "nope: 1", 
        whole + "study: ../x", whole + "study: [x]", whole + "sampler: 5", whole + "seed: 1.5", whole + "save_dir: 5",
        whole + "storage: {a: 1}", whole + "price: '-1'", whole + "settings: {world_size: 2}", whole + "resume: true",
        whole + "hang_timeout: .inf\nnope: 1",  whole + "working_dir: /proc/1/root\nnope: 1",
    ):  # fmt: skip
        yield Invocation(("search", f"text:{text}"))


def federations() -> Iterator[Invocation]:
    """mgt federated: as far as it goes without Flower."""
    simulate = ("federated", "simulate", "image")
    for flag, values in {
        "--clients": ("0", "-1", "x", "1.5", HUGE, str(2**40)),
        "--rounds": ("0", "-1", "x", HUGE),
        "--strategy": ("", "fedsgd", "FedAvg"),
        "--save-dir": ("a_file", "a_file/x", "/proc/x", "a\0b", LONG, "s3://x/y"),
        "--partition": ("", "dirichlet", "dirichlet:", "dirichlet:0", "dirichlet:nan", "dirichlet:-1", "dirichlet:inf", "iid:1", "dirichlet:" + HUGE),
        "--num-gpus": ("0", "-2", "x", "1099511627776"),
        "--parallel": ("0", "-1", "x", HUGE),
        "--gpus-per-client": ("nan", "-1", "inf", "x"),
        "--device": ("", "gpu"),
        "--local-epochs": ("0", "-1", "x", "nan", HUGE),
        "--local-steps": ("0", "-1", "x", HUGE),
        "--mu": ("nan", "-1", "inf", "x"),
        "--server-lr": ("nan", "0", "-1", "inf"),
        "--server-momentum": ("nan", "-1", "1", "2"),
        "--fraction": ("0", "-1", "1.5", "nan", "x"),
        "--min-replies": ("-1", "1.5", "nan", "x"),
        "--retries": ("-1", "x", HUGE),
        "--round-timeout-s": ("0", "-1", "nan", "x"),
        "--max-update-ratio": ("0", "-1", "nan", "x"),
        "--max-update-norm": ("0", "-1", "nan", "x"),
        "--evaluate-every": ("-1", "x", HUGE),
        "--secure": ("maybe", "2"),
        "--secure-threshold": ("0", "2", "nan", "x"),
        "--secure-range": ("0", "-1", "nan", "x"),
        "--max-samples": ("0", "-1", "x", HUGE),
        "--dp": ("", "nope", "true"),
        "--dp-clip": ("0", "-1", "nan"),
        "--dp-noise": ("-1", "nan", "x"),
        "--dp-delta": ("0", "1", "2", "nan"),
        "--dp-max-epsilon": ("0", "-1", "nan"),
        "--seed": ("-1", str(2**64), "x"),
        "--frobnicate": ("1",),
    }.items():  # fmt: skip
        for value in values:
            yield Invocation((*simulate, flag, value), (flag[2:],) if value else ())
    for target in ("gone", "gone.py", "a_file", "a_folder", "fifo", "", "a\0b", LONG, SURROGATE):
        yield Invocation(("federated", "simulate", target), ())
        yield Invocation(("federated", "client", target, "--server", "127.0.0.1:1"), ())
    plain = ("federated", "server", "--insecure-network")
    for address in (
        "",
        "x",
        "x:",
        ":",
        "x:0",
        "x:70000",
        "x:-1",
        "x:²",
        "\0:90",
        "0.0.0.0",
        "x:" + HUGE,
    ):
        yield Invocation((*plain, "--address", address), ("address",))
        yield Invocation(
            ("federated", "client", "image", "--insecure-network", "--server", address), ("server",)
        )
    for flag in ("--ca-file", "--certificate", "--key", "--client-keys"):
        for value in ("gone", "a_folder", "a\0b", LONG, "", "fifo", "binary"):
            yield Invocation(("federated", "server", flag, value), ())
        yield Invocation((*plain, flag, "a_file"), ("insecure-network",))
    for name in ("a\0b", LONG, SURROGATE, "\x1b[2J"):
        words = (
            "federated",
            "client",
            "image",
            "--server",
            "127.0.0.1:1",
            "--insecure-network",
            "--name",
            name,
        )
        yield Invocation(words, ("name",))
    for host, client in (
        ("", "a"), ("a b", "a"), ("\0", "a"), (LONG, "a"), ("h", ""), ("h", "a/b"), ("h", ".."), ("h", "a\0b"),
        ("h", LONG), ("*", "a"), ("h", SURROGATE), ("ünï", "a"), ("h", "\x1b[2J"), ("h", "-x"),
    ):  # fmt: skip
        yield Invocation(("federated", "keys", "keys", "--host", host, "--client", client))
    yield Invocation(("federated", "keys", "keys", "--host", "h", "--client", "a", "--client", "a"))
    for folder in (
        "a_file",
        "a_file/x",
        "/proc/x",
        "a\0b",
        LONG,
        "",
        "a_folder_full",
        "fifo",
        "dangling",
    ):
        yield Invocation(("federated", "keys", folder, "--host", "h", "--client", "a"))


def engines() -> Iterator[Invocation]:
    """Flags of engines, and what a scheduler may have left in the environment."""
    two = ("train", "image", "device=cpu", "max_steps=2")
    for name in ("", "Slurm", "pbs", "local,ray", "\0"):
        for command in (two, ("run", "ok.py"), ("check",)):
            words = (command[0], "--engine", name, *command[1:])
            yield Invocation(words, ("engine",))
    slurm = (*two, "--engine", "slurm", "--dry-run", "--nnodes", "2", "--num-gpus", "2")
    for flag, values in {
        "--gpus-per-node": (
            "",
            "x",
            "0",
            "-1",
            "a100:",
            ":4",
            "a100:x",
            "a:b:c",
            HUGE,
            "4;rm -rf /",
            "1\n#SBATCH --x",
        ),
        "--gpus-per-task": ("0", "-1", "x", HUGE),
        "--time": (
            "",
            "x",
            "-1",
            "0",
            "1:2:3:4:5",
            "99999999999",
            "1:00\n#SBATCH --x",
            "nan",
            "4h",
        ),
        "--partition": ("", "a b", "a\nb", "$(touch OWNED)", "\0", "-x"),
        "--sbatch": (
            "",
            "x",
            "=",
            "a=b\n#SBATCH --x",
            "=y",
            "nodes=5",
            "wrap=x",
            "\0",
        ),
        "--het": (
            "",
            "x",
            "nodes=0",
            "nodes=x",
            "nodes=1,nope=2",
            "nodes=",
            "=1",
            "nodes=1,nodes=2",
        ),
        "--setup-file": ("gone", "a_folder", "a\0b", "fifo", "device", "binary", ""),
        "--max-requeues": ("-1", "x", "1.5", HUGE),
        "--nnodes": ("0", "-1", "x", "3:1", "1:2:3", HUGE),
    }.items():
        for value in values:
            yield Invocation((*slurm, flag, value), (flag[2:],) if value else ())
    pods = (
        *two,
        "--engine",
        "kubernetes",
        "--dry-run",
        "--nnodes",
        "2",
        "--image",
        "i",
        "--claim",
        "c",
        "--num-gpus",
        "2",
    )
    for flag, values in {
        "--image": ("", "a b", "a\nb: c", "\0", "$(x)", "UPPER CASE"),
        "--kind": ("pod", "JobSet "),
        "--namespace": ("", "A_B", "x" * 300, "a\nb", "\0"),
        "--claim": ("", ":", ":/x", "A_B", "c:relative", "a\nb", "c:/x:y"),
        "--toleration": ("", "=", "=v", "k=v:Nope", "a b", "k\n: v"),
        "--pod": ("", "x", "cpu=", "cpu=x", "cpu=-1", "memory=lots", "memory=-1Gi", "shm=0x", "gpu=", "nope=1", "node-selector=x", "node-selector=a b:c", "cpu=1\nx: y"),
    }.items():  # fmt: skip
        for value in values:
            yield Invocation((*pods, flag, value), (flag[2:],) if value else ())
    yield Invocation((*two, "--partition", "x"), ("partition",))
    yield Invocation((*two, "--image", "x"), ("image",))
    yield Invocation((*two, "--dry-run"), ("dry-run",))
    for value in (
        "x",
        "cpus_per_rank=0",
        "cpus_per_rank=nan",
        "gpus_per_rank=2",
        "nope=1",
        "working_dir=gone",
        "=",
        "cpus_per_rank=" + HUGE,
    ):
        yield Invocation((*two, "--engine", "ray", "--ray-options", value), ("ray-options",))
    yield Invocation((*two, "--ray-options", "cpus_per_rank=1"), ("ray",))
    for witness in ("x", ":1", "h:0", "h:99999", "a\0b:1", "h:²", "/proc/x/y"):
        words = (
            "run",
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--master-addr",
            "127.0.0.1",
            "--insecure-network",
            "--recovery-timeout",
            "1",
            "--witness",
            witness,
            "ok.py",
        )
        yield Invocation(words, ())
    yield Invocation(("run", "--witness", "h:1", "ok.py"), ("witness",))
    yield Invocation(("run", "--allow-minority", "ok.py"), ("allow-minority",))
    for address in (
        "",
        "x",
        "x:",
        "x:0",
        "x:99999",
        "nowhere.invalid:80",
        "\0:9",
        "127.0.0.1:²",
        "a b:9",
        LONG + ":9",
    ):
        yield Invocation(("cluster", "witness", address), ())
    for file in (
        "a_folder",
        "a_file/x",
        "fifo",
        "loop",
        "dangling/x",
        "",
        "run/events/rank-0.jsonl",
    ):
        yield Invocation(("cluster", "token", file), ())
    for folder in ("gone", "a_file", "a\0b", "", "fifo", LONG):
        yield Invocation(("jobs", folder), fails=folder not in ("gone", "a_folder"))
    for job in ("", "x", "-1", "1;rm", "0", "$(touch OWNED)", "\0", HUGE, "1_x", "--all"):
        yield Invocation(("cancel", job), ())
    for code in ("MGT", "MGT999", "mgt", "0", "", "\0", "MGT1000000", SURROGATE, "-1", "MGT٣٠١"):
        yield Invocation(("explain", code), ())
    for recipe in ("nope", "", "\0", "image/../x"):
        yield Invocation(("launch", recipe), ())
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    words = ("train", "image", "device=cpu", "max_steps=2", "progress=off")
    for name, values in {
        "RANK": ("abc", "5", "²", "0x0", " ", "1e3", "-0x1", "+"),
        "WORLD_SIZE": ("-1", "1.0", "٣", "2,3", "0"),
        "LOCAL_RANK": ("abc", "7", "1.0"),
        "MASTER_PORT": ("99999", "0", "port", "-29500", "29500.5"),
        "MASTER_ADDR": ("no such host", "999.1.1.1", "http://x", "x" * 300),
    }.items():
        for value in values:
            changed = {**rank, name: value}
            if name.startswith("MASTER"):  # one rank alone asks nobody
                changed |= {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
                says = ("master",) if name == "MASTER_ADDR" else (name,)
                yield Invocation((*words, "hang_timeout_s=5"), says, changed)
            else:
                yield Invocation(words, (name,), changed)
    slurmed = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_JOB_NODELIST": "n1",
    }
    for name, values in {
        "SLURM_PROCID": ("abc", "-1", "9", "²", HUGE),
        "SLURM_NTASKS": ("abc", "-1", "0", HUGE),
        "SLURM_STEP_NUM_TASKS": ("abc", "-1", "0", "1.5", HUGE),
        "SLURM_LOCALID": ("abc", "-1", "9"),
        "SLURM_STEP_NODELIST": ("", "n[1-999999999]", "n[", "n[2-1]", "[" * 1000, "n[a-b]", "n\0"[:1] + "]"),
        "SLURM_JOB_ID": ("abc", "-1", HUGE),
        "SLURM_RESTART_COUNT": ("x", "-1", HUGE),
    }.items():  # fmt: skip
        for value in values:
            yield Invocation(words, (), {**slurmed, name: value}, fails=False)
    for name, values in {
        "CUDA_VISIBLE_DEVICES": ("x", "-1", "0,0", "99", ","),
        "OMP_NUM_THREADS": ("x", "-1", "0", HUGE),
        "MGT_DASHBOARD_TOKEN": ("x",),
        "COLUMNS": ("x", "-1", "0", "99999999999"),
        "TERM": ("", "nope", "dumb"),
        "LANG": ("nope", "C"),
        "HOME": ("/nowhere", "", "a_file"),
        "TMPDIR": ("/nowhere", "a_file"),
        "PYTHONHASHSEED": ("x",),
        "NO_COLOR": ("1",),
        "TZ": ("nope/nope", "x" * 10_000),
    }.items():
        for value in values:
            yield Invocation(("report", "run", "--no-html"), (), {name: value}, fails=False)
            yield Invocation((*words, "nope=1"), (), {name: value})


def configs() -> Iterator[Invocation]:
    """Config files and words that no YAML of a user would hold, or just might."""
    for text in (
        "recipe: image\nlr: 0x10g", "recipe: image\nlr: 1__0", "recipe: image\nbatch_size: 1e1", "recipe: image\nepochs: yes",
        "recipe: image\nseed: 0o17x", "recipe: image\n<<: {lr: 1}\nlr: x", "recipe: image\nlr: !!float x", "recipe: image\nlr: !!int '1.5'",
        "recipe: image\nlr: !!timestamp x", "recipe: image\nlr: !!set {a, b}", "recipe: image\nlr: !!omap [a: 1]", "%YAML 9.9\n---\nrecipe: image",
        "recipe: image\n---\nrecipe: video", "recipe: image\n...\ngarbage: [", "recipe: image\nlr: |\n  x\n  y", "recipe: image\nlr: >-\n", "recipe: image\nlr:\n  - 1\n - 2",
        "recipe: image\n\tlr: 1", "recipe: image\nlr: \"\\x00\"", "recipe: image\nrun_name: \"\\u0000\"", "recipe: image\nrun_name: \"a\\u202eb\\n\"",
        "recipe: image\nlr: 1\nlr: 2", "recipe: image\nlearning_rate: 1\nlr: 2", "recipe: image\ntraining: {lr: 1}\nlr: 2", "recipe: Image", "recipe: image \nrecipes: video",
        "recipe: image\nworld_size: 1099511627776\ntraining_mode: ddp", "recipe: image\ndata_dir: {a: 1}",
        "recipe: image\nsave_dir: []", "recipe: image\nrun_name: 5.5e400", "recipe: image\nloggers: csv,nope", "recipe: image\nloggers: [csv, csv, 5]", "recipe: image\nloggers: {a: 1}",
        "recipe: image\nmetrics: x", "recipe: image\nresume: [auto]", "recipe: image\nresume: true", "recipe: image\ndefaults: [gone]", "recipe: image\ndefaults: [../../../etc/passwd]",
        "recipe: image\ndefaults: [/dev/zero]", "recipe: image\ndefaults: [fifo]", "defaults: [self]", "recipe: image\ndefaults: [[[[x]]]]", "recipe: image\ndefaults: {a: b}", "recipe: image\ndefaults: 'a\\0b'",
        "\ufeffrecipe: image\nnope: 1", "recipe: image\r\nnope: 1\r\n", "recipe: image\nlr: \ud7ff\nnope: 1", "recipe: image # " + "x" * 3_000_000 + "\nnope: 1", "{" * 3000, "a: " * 3000, "- " * 3000, "? " * 3000, "&a " * 3000, "*a", "!", "!!", "!<", "|", ">", "%", "@", "`",
        "recipe: {image: {lr: 1}}", "recipe: [image, video]", "image: {lr: 1}", "42", "null", "~", "true", "''", "recipe: null", "[recipe, image]", "recipe image",
    ):  # fmt: skip
        yield Invocation(("train", f"text:{text}", *ONE))
    for words in (
        ("lr", "1"), ("--lr=1", "--lr=2", "--lr=x"), ("lr==1",), ("lr=1=2",), ("=lr",), ("lr= ",), ("lr=\t",), ("--no-lr",), ("--lr",),
        ("--no-deterministic=1",), ("--deterministic=2",), ("--epochs",), ("--max-steps=",), ("--", "lr=x"), ("-lr", "1"), ("-l",), ("—lr", "1"), ("lr＝1",), ("--lr", "１x"),
        ("model_args.a.b.c=[",), ("+lr=1",), ("~lr",), ("++lr=x",), ("lr=@x",), ("@config",), ("lr=`id`",), ("lr=$(id)",), ("epochs=١x",), ("epochs=1 2",), ("epochs=1,2",), ("epochs='1'x",), ("epochs=1e3.5",),
         ("run_name={{x}}",), ("run_name=%(x)s%d",), ("run_name=con/aux",), ("save_dir=~nobodyatall/x",), ("save_dir=http://x",), ("save_dir=s3://",), ("save_dir=file://",), ("save_dir=memory://x",), ("save_dir=://x",), ("save_dir=nope://x",),
        ("resume=http://x/y",), ("resume=s3://",), ("resume=nope://x",), ("resume=auto/../x",), ("resume=..",), ("resume=.",), ("resume=/",),
        ("profile_steps=5",), ("profile_steps=x-y",), ("profile_ranks=-1", "profile_steps=1-2"), ("verify_key=gone",), ("sign_key=gone",), ("signing_key=a_folder",),
    ):  # fmt: skip
        fine = words in (
            ("--", "lr=x"),
            ("run_name={{x}}",),
            ("run_name=%(x)s%d",),
            ("profile_steps=5",),
            ("resume=.",),
        )
        yield Invocation(("train", "image", *ONE, *words), (), fails=not fine)
    for command in ("resume", "checkpoints", "report"):
        for run in (
            "gone",
            "a_file",
            "fifo",
            "device",
            "empty",
            "loop",
            "dangling",
            "a\0b",
            LONG,
            "",
            "/",
            "s3://",
            "nope://x",
            KEPT + "/config.yaml",
            SURROGATE,
        ):
            yield Invocation((command, run), ())
    for words in (
        ("resume", KEPT, "--epochs", "0"), ("resume", KEPT, "--lr", "nan"), ("resume", KEPT, "nope=1"), ("resume", KEPT, "recipe=video"), ("resume", KEPT, "--data-dir", "gone"),
        ("resume", KEPT, "--multi-gpu", "tdp"), ("resume", KEPT, "--num-gpus", "1099511627776"), ("resume", KEPT, "seed=5"), ("resume", KEPT, "save_dir=elsewhere"), ("resume", KEPT, "run_name=x"), ("resume", KEPT, "width=77"),
        ("checkpoints", "upload", KEPT), ("checkpoints", "upload"), ("checkpoints", "upload", KEPT, "--to", "x"), ("checkpoints", "upload", KEPT, "--to", "nope://x"), ("checkpoints", "upload", KEPT, "--wait", "nan"),
        ("checkpoints", "upload", KEPT, "--to", "s3://x", "--wait", "-1"), ("checkpoints", "merge", KEPT), ("checkpoints", "merge", KEPT, "a_file/x"), ("checkpoints", "merge", KEPT, "a_folder_full"), ("checkpoints", "merge", KEPT, "/proc/x.safetensors"),
        ("checkpoints", "merge", "gone", "x"), ("checkpoints", "merge", KEPT, "x.safetensors", "--like", "gone"), ("checkpoints", "merge", KEPT, "a\0b"), ("checkpoints", KEPT, "--verify-key", "gone"), ("checkpoints", KEPT, "--verify-key", "a_folder"),
        ("checkpoints", KEPT, "--verify-key", "fifo"), ("checkpoints", KEPT, "--verify-key", "device"), ("checkpoints", KEPT, "--verify-key", "binary"), ("checkpoints", KEPT, "--verify-key", "empty"), ("checkpoints", KEPT, KEPT), ("checkpoints", "merge", "run", "x"), ("checkpoints", KEPT, "--to", "s3://x"),
        ("report", KEPT, KEPT, "--out", "a_folder"), ("report", KEPT, "--out", "fifo"), ("report", KEPT, "--out", "dangling/x"), ("report", KEPT, "--out", "."), ("report", KEPT, "--no-html", "--out", "x.html"), ("verify", KEPT), ("bench", KEPT), ("estimate", KEPT), ("check", KEPT), ("train", KEPT),
        ("verify", "image", "--ranks", "2", "lr=x"), ("verify", "text:recipe: image\nnope: 1"), ("bench", "text:recipe: image\nnope: 1"), ("check", "text:recipe: image\nnope: 1"), ("estimate", "text:recipe: image\nnope: 1"), ("check", "gone.py"), ("check", "image", "nope=1"), ("recipes", "--nope"), ("info", "--json", "x"),
    ):  # fmt: skip
        fine = words in (("report", KEPT, KEPT, "--out", "fifo"),)
        yield Invocation(words, (), fails=not fine)


NEWER: dict[str, Callable[[], Iterator[Invocation]]] = {
    "delivering": delivering,
    "tracing": tracing,
    "studies": studies,
    "federations": federations,
    "engines": engines,
    "configs": configs,
}


def prepare_newer(folder: Path) -> None:
    """A small trained run, a picture, and a folder that is not empty."""

    def make() -> None:
        from multi_gpu_training.recipes.recipe import find_recipe

        recipe = find_recipe("image")
        options = recipe.options(mode="cnn")
        quiet = {
            "device": "cpu",
            "progress": "off",
            "tensorboard": False,
            "training_mode": "single",
        }
        quiet |= {"save_dir": "made", "run_name": "small", "max_steps": 4, "batch_size": 16}
        recipe.train(recipe.config(quiet, options), options)

    ended = attempt(make, folder, 300.0)
    assert ended.code == 0, ended.said
    (made,) = (folder / "made").glob("*/small")
    shutil.move(made, folder / KEPT)
    shutil.rmtree(folder / "made")
    (folder / "a_folder_full").mkdir()
    (folder / "a_folder_full" / "x").write_text(json.dumps({"x": 1}))
    from PIL import Image

    Image.new("RGB", (28, 28)).save(folder / "picture.png")
