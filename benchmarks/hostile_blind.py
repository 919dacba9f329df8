"""300 wrong invocations of another style: what people really type, and programs that misuse the API.

    python benchmarks/hostile_blind.py --out blind.json
    python benchmarks/hostile_blind.py --groups api --only loss --verbose

The older campaigns put extreme values into one flag at a time. Here arguments are swapped, flags
come from other tools, settings contradict each other, the process itself is short of something
(files, memory, a working directory, an output), and scripts hand the wrong objects to the Python
API. A refusal in words before any rank starts is right; `fails=False` marks what may also work.
"""

# ruff: noqa: E501 - one line per case reads best; odd letters are on purpose
from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from hostile_trial import attempt, files_below, mgt
from invocation import ONE

RUN = "kept/image/trained"  # SAVE_DIR/RECIPE/NAME, so that it can be resumed
TWO = ("--num-gpus", "2", "device=cpu", "max_steps=2", "progress=off")
LR = ("--param", "lr=1e-4..1e-1:log", "--trials", "2")


@dataclass(frozen=True)
class Trial:
    name: str
    call: Callable[[], object]
    says: tuple[str, ...] = ()
    fails: bool = True
    # Exceptions of Python's own, or of the script, which are right here.
    raises: tuple[str, ...] = ()


def told(
    *words: str,
    says: tuple[str, ...] = (),
    fails: bool = True,
    env: dict[str, str] | None = None,
    before: Callable[[], object] | None = None,
    note: str = "",
) -> Trial:
    """`mgt WORDS`, after `before` has changed something of the process."""

    def call() -> None:
        if before is not None:
            before()
        mgt(*words, env=env)()

    shown = " ".join([*(f"{k}={v}" for k, v in (env or {}).items()), note, "mgt", *words])
    return Trial(shown.strip()[:160], call, says, fails)


def swapped() -> Iterator[Trial]:
    """Arguments in the wrong place, or of another command."""
    for words in (
        ("train", RUN), ("train", "ok.py"), ("train", "picture.png"), ("train", "image", "image"),
        ("train", "image", "video", *ONE), ("train", "image", "ok.py", *ONE), ("train", "--epochs", "3"),
        ("train", "image", RUN, *ONE), ("train", "image,video", *ONE), ("train", "image", "train", *ONE),
        ("train", "image", "good.yaml", *ONE), ("train", "good.yaml", "image", *ONE),
        ("train", "good.yaml", "other.yaml", *ONE), ("train", f"{RUN}/environment.json"),
        ("train", f"{RUN}/checkpoints"), ("train", "schema.json"),
        ("resume", "image"), ("resume", "good.yaml"), ("resume", RUN, RUN), ("resume", f"{RUN}/events"),
        ("resume", RUN, "image"), ("resume", RUN, "--resume", "auto"), ("resume", "ok.py"),
        ("resume", RUN, "--seed"), ("resume", RUN, "--batch-size", "-4"),
        ("run", "image"), ("run", "good.yaml"), ("run", RUN), ("run", "picture.png"), ("run", "python", "ok.py"),
        ("run", "-m", "json.tool"), ("run", "gone.py"), ("run", "a_folder"), ("run", "--num-gpus", "ok.py"),
        ("run", "broken.py"), ("run", "latin.py"), ("run", "nul.py"), ("run", "ok.py.bak"), ("run", "./OK.py"),
        ("report", "image"), ("report", "good.yaml"), ("report", f"{RUN}/report.html"), ("report", RUN, "image"),
        ("report", f"{RUN}/events"), ("report", f"{RUN}/checkpoints/step-00000004"), ("report", "ok.py"),
        ("report", RUN, RUN, RUN, "gone"), ("report", RUN, "--out"), ("report", "--json"),
        ("checkpoints", "list", RUN), ("checkpoints", "delete", RUN), ("checkpoints", "merge", "x.safetensors", RUN),
        ("checkpoints", "upload", RUN, "s3://x/y"), ("checkpoints", "merge", RUN, "x.safetensors", "y"),
        ("checkpoints", "merge", RUN, RUN), ("checkpoints", "merge", RUN, f"{RUN}/checkpoints"),
        ("checkpoints", "merge", RUN, "good.yaml"), ("checkpoints", RUN, "--like", RUN), ("checkpoints", "image"),
        ("checkpoints", RUN, "--to", "elsewhere"), ("checkpoints", RUN, "--wait", "5"), ("checkpoints", "ok.py"),
        ("evaluate", "image"), ("evaluate", "picture.png"), ("evaluate", RUN, RUN), ("evaluate", "good.yaml"),
        ("predict", "picture.png", RUN), ("predict", RUN, RUN), ("predict", RUN, "good.yaml"), ("predict", RUN, "-"),
        ("predict", RUN, "picture.png", "--task", "play"), ("predict", RUN, "picture.png", "--timeline", "x.csv"),
        ("predict", RUN, "picture.png", "--new-tokens", "5"), ("predict", RUN, "picture.png", "--every", "2"),
        ("predict", RUN, "picture.png", "--record", "gifs"), ("predict", RUN, "picture.png", "--temperature", "0.5"),
        ("predict", RUN, "picture.png", "--out", "x.csv", "--format", "jsonl"), ("predict", RUN, "ok.py"),
        ("export", RUN), ("export", "onnx", RUN), ("export", RUN, "--to", "onnx", "--length", "100"),
        ("export", RUN, "safetensors"), ("export", RUN, "--to", "safetensors", "--out", RUN),
        ("export", RUN, "--to", "safetensors", "--out", "."), ("export", RUN, "--to", "pt"),
        ("compress", RUN, "prune:0.5"), ("compress", RUN, "--method", "prune=0.5"), ("compress", RUN, "--method", "int8"),
        ("compress", RUN, "--method", "prune:50%"), ("compress", RUN, "--method", "prune:0.5", "--out", RUN),
        ("compress", RUN, "--method", "prune:0,5"), ("compress", RUN, "--method", "quantize:fp8"),
        ("compress", RUN, "--method", "prune:0.5", "--max-drop", "1 %x"), ("compress", "image", "--method", "prune"),
        ("serve", RUN, "8000"), ("serve", "image"), ("serve", RUN, "--port", "http"), ("serve", RUN, "--host", "localhost:8000"),
        ("dashboard", "8765"), ("dashboard", RUN, "--port", "8765,8766"), ("dashboard", "gone-for-good"),
        ("top", "5", "--once"), ("top", "gone-for-good", "--once"), ("top", RUN, "gone-for-good", "--once"),
        ("top", "ok.py", "--once"), ("dashboard", "ok.py"), ("dashboard", RUN, "gone-for-good"),
        ("verify",), ("verify", RUN), ("verify", "picture.png"), ("verify", "image", "--ranks", "1"),
        ("verify", "image", "--ranks", "2-4"), ("verify", "image", "--ranks", "2", "--steps", "0"),
        ("verify", "image", "--num-gpus", "2"), ("verify", "ok.py", "image"),
        ("bench", RUN), ("bench", "image", "video"), ("bench", "image", "--modes", "ddp,nope"),
        ("bench", "image", "--batch-sizes", "128-512"), ("bench", "image", "--modes", ""), ("bench", "good.yaml", "good.yaml"),
        ("estimate", RUN), ("estimate", "image", "--gpus", "1-8"), ("estimate", "image", "--epochs", "3", "--samples", "5"),
        ("estimate", "image", "--profile", "good.yaml"), ("estimate", "image", "--curve", "picture.png"),
        ("estimate", "image", "--spot"), ("estimate", "image", "--region", "eu"), ("estimate", "image", "--price", "3€"),
        ("estimate", "image", "--price-date", "tomorrow", "--price", "2"), ("estimate", "image", "--catalog", "good.yaml"),
        ("estimate", "image", "--accelerator", "H100"), ("estimate", "image", "--electricity", "-0.3"),
        ("profile", RUN, "--steps"), ("profile", "picture.png"), ("profile", "image", "--steps", "60..64"),
        ("profile", RUN, "--steps", "5-6"), ("profile", f"{RUN}/config.yaml", "--ranks", "first"),
        ("check", RUN), ("check", "picture.png"), ("check", "image", "--save-curve", "a_folder", "--timeout", "1"),
        ("check", "gone.py"), ("check", "--device", "tpu"), ("check", "image", "video"),
        ("search", "image", *LR, "--resume"), ("search", RUN, *LR), ("search", "ok.py", *LR, "--metric", "loss:low"),
        ("search", "image", "--param", "lr", "1e-3..1e-1"), ("search", "image", *LR, "--sampler", "pbt", "--pruner", "asha"),
        ("search", "image", *LR, "--generation-epochs", "2"), ("search", "image", *LR, "--population", "4"),
        ("search", "image", *LR, "--seeds", "3"), ("search", "image", *LR, "--study", ""), ("search", "image", *LR, "--storage", ""),
        ("search", "image", *LR, "--metric", "val/loss,val/accuracy"), ("search", "image", *LR, "--gpus-per-trial", "2", "--trials-per-gpu", "2"),
        ("search", "image", *LR, "resume=auto"), ("search", "image", *LR, "run_name=x"), ("search", "image", *LR, "--repeat-best", "5", "--seeds", "0"),
        ("search", "good.yaml", "image", *LR), ("search", "image", "--param", "batch_size=16:64", "--trials", "2"),
        ("search", "image", "--param", "lr=1e-1..1e-4", "--trials", "2"), ("search", "image", "--param", "lr=[1e-4,1e-1]", "--trials", "2"),
        ("search", "image", "--param", "lr=loguniform(1e-4,1e-1)", "--trials", "2"), ("search", "image", "--param", "epochs=1..3:log2", "--trials", "2"),
        ("info", "--json"), ("recipes", "image"), ("config-schema", "--out", "x"), ("jobs", "list"), ("jobs", "1234"), ("cancel", "all"),
        ("cancel",), ("cluster", "token", "a", "b"), ("cluster", "witness", "9000"), ("cluster", "join", "x:1"), ("explain", "report"),
        ("explain", "201"), ("explain", "MGT201", "MGT202"), ("launch", "image", "lr=1"), ("launch", "--num-gpus", "2"),
        ("federated", "image"), ("federated", "simulate"), ("federated", "simulate", RUN), ("federated", "simulate", "good.yaml"),
        ("federated", "client", "image"), ("federated", "client", "image", "--server", "127.0.0.1"),
        ("federated", "keys"), ("federated", "server", "--ca-file", "a_file"), ("federated", "server", "image"),
        ("evaluate", RUN, "--part", ""), ("evaluate", RUN, "--part", "validation"), ("evaluate", RUN, "--checkpoint", "4"),
        ("evaluate", RUN, "--checkpoint", "latest"), ("help",), ("--help", "train", "image", "nope=1"), ("version",), ("-v",),
    ):  # fmt: skip
        may = (
            words[0] == "jobs" or words in (("explain", "201"), ("run", "ok.py.bak"), ("federated", "simulate", "good.yaml"), ("--help", "train", "image", "nope=1"), ("verify", "ok.py", "image"))
            or words in (("evaluate", RUN, "--checkpoint", "4"), ("checkpoints", RUN, "--wait", "5"), ("resume", RUN, "--resume", "auto"))
        )  # fmt: skip
        yield told(*words, fails=not may)


def habits() -> Iterator[Trial]:
    """Flags and spellings of other tools, units and number formats of people."""
    for words in (
        ("--gpus", "2"), ("--nproc_per_node", "2"), ("--nproc-per-node=2",), ("--config", "good.yaml"), ("--fp16",), ("--bf16",),
        ("--gradient-accumulation", "4"), ("--local_rank=0",), ("--devices", "2"), ("--accelerator", "gpu"), ("--strategy", "ddp"),
        ("trainer.max_epochs=3",), ("+trainer=x",), ("--output_dir", "x"), ("--deepspeed", "ds.json"), ("--no_cuda",), ("--use_cpu",),
        ("-n", "2"), ("--multi_gpu",), ("hydra.run.dir=x",), ("--ckpt_path", "last"), ("--precision", "16-mixed"), ("-b", "32"),
        ("--workers", "4"), ("--dist-url", "env://"), ("--per_device_train_batch_size", "8"), ("--sync-batchnorm",), ("--amp",),
        ("lr=1e-3,",), ("lr=0,001",), ("lr=.1.",), ("lr=10%",), ("epochs=10k",), ("batch_size=32.5",), ("batch_size=2^5",),
        ("epochs=yes",), ("epochs=on",), ("epochs=true",), ("max_steps=false",), ("batch_size=True",), ("seed=no",), ("num_workers=off",),
        ("lr=true",), ("deterministic=3",), ("tensorboard=0.5",), ("tensorboard='no way'",),
        ("timeout=30x",), ("checkpoint_interval_s=5min",), ("hang_timeout_s=1h",), ("grace_s=∞",), ("device=gpu",), ("device=cuda:0",),
        ("device=[cpu]",), ("gpu_ids=[0,0]",), ("gpu_ids=0-3",), ("world_size=auto",), ("world_size=two",), ("backend=mpi",),
        ("use_mixed_precision=fp16",), ("mixed_precision_dtype=float16",), ("mixed_precision_dtype=bf8",), ("seed=None",), ("seed=random",),
        ("resume=latest",), ("resume=last",), ("resume=True",), ("loggers=wandbb",), ("loggers=tensorboardx,csv",), ("schedule=cosine_with_warmup",),
        ("schedule=Cosine",), ("progress=tqdm",), ("save_dir=None",), ("on_nonfinite=ignore",), ("keep_last=all",), ("best_metric_mode=maximum",),
        ("balance=on",), ("step_execution=cuda_graph",), ("step_execution=torch.compile",), ("f1_average=weighted",), ("lr_scaling=on",),
        ("model=resnet50",), ("model=torchvision.models:resnet18",), ("model=ok.py:Nope",), ("model=os:system",), ("model=json:loads",),
        ("model_args=hidden_size:96",), ("model_args={hidden_size: 96}",), ("model_args.hidden_size=96",), ("data_dir=mnist",), ("dataset=cifar10",),
        ("flip=sometimes",), ("image_size=64x64",), ("image_size=[64,64]",), ("val_share=10",), ("val_share=10%",), ("mode=CNN",),
    ):  # fmt: skip
        given = (words,) if isinstance(words, str) else words
        right = (("save_dir=None",), ("--local_rank=0",), ("--sync-batchnorm",))
        yield told("train", "image", *ONE, *given, fails=given not in right)


def contradicting() -> Iterator[Trial]:
    """Each setting is right; together they cannot be."""
    for words in (
        ("--multi-gpu", "single", "--num-gpus", "4"), ("global_batch_size=7", "--num-gpus", "4", "batch_size=4"),
        ("global_batch_size=2", "--num-gpus", "4"), ("step_execution=graph", *ONE), ("warmup_epochs=50", "epochs=2", "warmup_max_share=0.1", *ONE),
        ("early_stopping_patience=2", "best_metric=nope", *ONE), ("share_weights=[1]", *TWO), ("share_weights=[1,2,3]", *TWO),
        ("share_weights=[1,2]", "balance=equal", *TWO), ("tensor_parallel=2", *TWO), ("tensor_parallel=3", "--multi-gpu", "fsdp", *TWO),
        ("fsdp_blocks=[Nope]", "--multi-gpu", "fsdp", *TWO), ("prefetch_factor=2", *ONE), ("persistent_workers=true", *ONE),
        ("data_on_gpu=true", *ONE), ("signing_key_file=gone", *ONE), ("enable_fault_tolerance=false", "resume=auto", *ONE),
        ("on_nonfinite=rollback", "enable_fault_tolerance=false", *ONE), ("on_loss_spike=rollback", "enable_fault_tolerance=false", *ONE),
        ("profile_steps=5-6", *ONE), ("ema_decay=0.9", "swa_start=1", *ONE), ("swa_every=2", *ONE), ("swa_start=100", *ONE),
        ("data_dir=a_folder", "dataset=mnist", *ONE), ("label_column=x", *ONE), ("image_size=64", "mode=flatten", *ONE), ("flip=true", "augment=false", *ONE),
        ("local_dir=x", *ONE), ("gpu_data_gb=1", *ONE), ("backend=nccl", *TWO), ("--gpu-ids", "0,1", *ONE), ("--master-port", "80", *ONE),
        ("--nnodes", "2", *ONE), ("--node-rank", "1", *ONE), ("--node-rank", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", *TWO),
        ("--partition", "gpu", "--image", "x", *ONE), ("--engine", "torchrun", "--nnodes", "1:2", *TWO), ("--witness", "h:1", *ONE),
        ("--engine", "ray", "--ray-options", ",", *TWO), ("--engine", "ray", "--ray-options", ",,", *TWO), ("--engine", "ray", "--ray-options", "", *TWO),
        ("--engine", "slurm", "--detach", "--dry-run", "--num-gpus", "2", "--nnodes", "3:2"), ("--engine", "kubernetes", "--dry-run", "--num-gpus", "2"),
        ("logger_options={wandb: {project: x}}", *ONE), ("logger_options={csv: {nope: 1}}", "loggers=csv", *ONE), ("validate_every=0", *ONE),
        ("limit_val_batches=0", *ONE), ("keep_last=0", *ONE), ("max_steps=5", "--max-steps", "6", "device=cpu"), ("lr=1", "learning_rate=2", *ONE),
        ("resume=auto", "run_name=gone-for-good", *ONE), ("resume=kept/image/trained", "seed=9", *ONE), ("resume=kept/image/trained", "mode=flatten", *ONE),
        ("resume=kept/image/trained/checkpoints/step-00000004", "batch_size=8", "seed=3", *ONE), ("forecast=gone.json", *ONE), ("forecast=good.yaml", *ONE),
        ("recipe=video", *ONE), ("rank=1", "world_size=2", "device=cpu"), ("local_rank=3", *ONE), ("steps_per_epoch=10", *ONE), ("deterministic=true", "cudnn_benchmark=true", *ONE),
    ):  # fmt: skip
        may = {"warmup_epochs=50", "step_execution=graph", "fsdp_blocks=[Nope]", "tensor_parallel=3", "--master-port", "steps_per_epoch=10", "flip=true", "enable_fault_tolerance=false",
               "persistent_workers=true", "prefetch_factor=2", "gpu_data_gb=1", "global_batch_size=7", "local_rank=3", "resume=auto", "label_column=x"}  # fmt: skip
        yield told("train", "image", *words, fails=words[0] not in may)


def short_of(what: int, limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (limit, limit))


def output(target: str, *fds: int) -> Callable[[], None]:
    def change() -> None:
        where = os.open(target, os.O_WRONLY)
        for fd in fds:
            os.dup2(where, fd)

    return change


def closed(*fds: int) -> Callable[[], None]:
    return lambda: [os.close(fd) for fd in fds] and None  # type: ignore[func-returns-value]


def nowhere() -> None:
    """A working directory that somebody has removed."""
    gone = Path("going").absolute()
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()


def taken(port: int) -> Callable[[], None]:
    def take() -> None:
        global _held
        _held = socket.socket()
        _held.bind(("127.0.0.1", port))
        _held.listen()

    return take


def shadowed(name: str, text: str = "raise SystemExit('shadowed')\n") -> Callable[[], None]:
    """A file of the user's with the name of a module, in the working directory."""
    return lambda: Path(name).write_text(text) and None  # type: ignore[func-returns-value]


def processes() -> Iterator[Trial]:
    """What surrounds a command: limits, outputs, environment, leftovers of a scheduler."""
    train = ("train", "image", *ONE)
    for name, before in {
        "cwd gone": nowhere, "stdout closed": closed(1), "stdin closed": closed(0), "all closed": closed(0, 1, 2),
        "stdout full": output("/dev/full", 1), "both full": output("/dev/full", 1, 2), "umask 777": lambda: os.umask(0o777),
        "8 open files": short_of(resource.RLIMIT_NOFILE, 8), "no file may grow": short_of(resource.RLIMIT_FSIZE, 0),
        "SIGPIPE default": lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL), "alarm ignored": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        "no more memory": short_of(resource.RLIMIT_DATA, 1 << 28), "stack of 256 KB": short_of(resource.RLIMIT_STACK, 1 << 18),
    }.items():  # fmt: skip
        for words in (
            (("report", RUN, "--no-html"), train)
            if name not in ("umask 777", "alarm ignored")
            else (train,)
        ):
            yield told(*words, before=before, note=f"[{name}]", fails=False)
    for name, value in {
        "HOME": "/dev/null", "TMPDIR": "/dev/full", "XDG_CACHE_HOME": "a_file", "HF_HOME": "a_file", "TORCHINDUCTOR_CACHE_DIR": "a_file",
        "MPLCONFIGDIR": "a_file", "PYTHONIOENCODING": "ascii:strict", "LC_ALL": "xx_XX.UTF-9", "TERM": "\x1b[31m", "COLUMNS": "1", "LINES": "0",
        "FORCE_COLOR": "maybe", "TZ": ":/etc/passwd", "https_proxy": "::::", "AWS_PROFILE": "gone", "FSSPEC_CONFIG_DIR": "a_file", "RAY_ADDRESS": "???",
        "CUDA_VISIBLE_DEVICES": "GPU-deadbeef", "CUBLAS_WORKSPACE_CONFIG": "x", "OMP_NUM_THREADS": "two", "OMP_PROC_BIND": "spread,spread", "MKL_NUM_THREADS": "-3",
        "TORCH_LOGS": "+nonsense", "TORCH_DISTRIBUTED_DEBUG": "VERBOSE", "PYTORCH_CUDA_ALLOC_CONF": "x:y", "GLOO_SOCKET_IFNAME": "eth99", "PYTHONSTARTUP": "gone",
        "MGT_DEBUG": "maybe", "NO_COLOR": "", "WANDB_MODE": "broken",
    }.items():  # fmt: skip
        yield told(*train, env={name: value}, fails=False)
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}  # fmt: skip
    # One of two ranks alone waits for the other: 5 seconds.
    waiting = (*train, "timeout=20", "hang_timeout_s=5")
    for name, env in {
        "WORLD_SIZE without RANK": {"WORLD_SIZE": "3"}, "WORLD_SIZE 4 and an address": {"WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        "RANK without WORLD_SIZE": {"RANK": "0"}, "LOCAL_RANK without RANK": {"LOCAL_RANK": "1", "WORLD_SIZE": "3"},
        "rank beyond the world": {**ranks, "RANK": "2"}, "local rank beyond": {**ranks, "LOCAL_RANK": "2"}, "no address": {**ranks, "MASTER_ADDR": ""},
        "no port": {k: v for k, v in ranks.items() if k != "MASTER_PORT"}, "local world larger": {**ranks, "LOCAL_WORLD_SIZE": "4"},
        "two ranks, single": ranks, "RANK empty": {**ranks, "RANK": ""}, "WORLD_SIZE empty": {**ranks, "WORLD_SIZE": ""},
        "RANK with a space": {**ranks, "RANK": "0 "},
    }.items():  # fmt: skip
        words = waiting if "single" in name else tuple(w for w in waiting if w not in ("--multi-gpu", "single", "--num-gpus", "1"))  # fmt: skip
        yield told(*words, env=env, note=f"[{name}]", fails=True)
    yield told(
        "serve", RUN, "--port", "29588", before=taken(29588), note="[port taken]", fails=False
    )
    yield told(
        "dashboard", ".", "--port", "29589", before=taken(29589), note="[port taken]", fails=True
    )
    yield told("cluster", "witness", "127.0.0.1:29590", "--insecure-network", before=taken(29590), note="[port taken]", fails=False)  # fmt: skip
    for name in ("image", "image.yaml", "runs"):
        yield told(*train, before=shadowed(name, "recipe: video\n"), note=f"[a file {name}]", fails=name == "runs")  # fmt: skip
    for name in ("yaml.py", "random.py", "multi_gpu_training.py", "sitecustomize.py"):
        yield told("run", "--num-gpus", "1", "ok.py", before=shadowed(name), note=f"[{name} here]", fails=False)  # fmt: skip


PRELUDE = """
import os, sys, math, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
import multi_gpu_training as mgt
from multi_gpu_training import *
from tiny import line, points, sgd, squares

def manager(**more):
    usual = dict(device="cpu", training_mode="single", progress="off", tensorboard=False, epochs=1, report=False, batch_size=4, save_dir="runs", run_name="it")
    return MultiGPUTrainingManager(MultiGPUConfig(**{**usual, **more}))

def fit(model=None, data=None, *more, **given):
    settings = given.pop("settings", {})
    given.setdefault("loss_fn", squares); given.setdefault("optimizer", sgd)
    return manager(**settings).fit(line() if model is None else model, points() if data is None else data, *more, **given)

class Items(Dataset):
    def __init__(self, get, length=16): self.get, self.length = get, length
    def __len__(self): return self.length
    def __getitem__(self, i): return self.get(i)
"""


def script(name: str, code: str, fails: bool = True, raises: tuple[str, ...] = (), says: tuple[str, ...] = ()) -> Trial:  # fmt: skip
    def call() -> None:
        from multi_gpu_training.errors import MultiGPUError
        from multi_gpu_training.launch.local import LocalEngine

        def started(*_: object) -> None:
            print("RANKS WOULD HAVE BEEN STARTED", file=sys.stderr, flush=True)
            os._exit(0)

        LocalEngine.start = started  # type: ignore[method-assign]
        sys.argv = ["script.py"]
        Path("script.py").write_text(PRELUDE + textwrap.dedent(code))
        scope: dict[str, Any] = {"__name__": "__main__", "__file__": "script.py"}
        try:
            exec(compile(Path("script.py").read_text(), "script.py", "exec"), scope)
        except MultiGPUError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            sys.exit(2)
        except Exception as error:
            print(f"RAISED {type(error).__name__}: {str(error)[:600]}", file=sys.stderr)
            own = _raised_here(error)
            sys.exit(3 if type(error).__name__ in raises or own else 4)

    return Trial(f"api: {name}", call, says, fails, raises)


def _raised_here(error: BaseException) -> bool:
    """Whether the user's own script raised it: its last frame is the script's."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename == "script.py"


def api() -> Iterator[Trial]:
    """Programs that hand over the wrong thing."""
    bad: dict[str, str] = {
        "no model": "manager().fit(None, points(), loss_fn=squares)",
        "model class": "fit(nn.Linear)",
        "model name": "fit('resnet18')",
        "state dict as model": "fit(line().state_dict())",
        "model without parameters": "fit(nn.ReLU())",
        "frozen model": "m = line(); m.requires_grad_(False); fit(m)",
        "integer parameters": "m = line(); m.weight.requires_grad_(False); m.weight.data = m.weight.data.int(); fit(m)",
        "model on meta": "fit(nn.Linear(4, 1, device='meta'))",
        "data None": "manager().fit(line(), None, loss_fn=squares)",
        "data empty list": "fit(data=[])",
        "data empty dataset": "fit(data=TensorDataset(torch.zeros(0, 4), torch.zeros(0, 1)))",
        "data a tensor": "fit(data=torch.zeros(16, 4))",
        "data a number": "fit(data=5)",
        "data a path": "fit(data='a_folder')",
        "data a dict": "fit(data={'train': points()})",
        "data a generator": "fit(data=(x for x in points()))",
        "data a set": "fit(data={1, 2})",
        "length negative": "fit(data=Items(lambda i: points()[0], -1))",
        "length huge": "fit(data=Items(lambda i: points()[0], 2**62), settings=dict(max_steps=2))",
        "length float": "fit(data=Items(lambda i: points()[0], 16.0))",
        "length too long": "d = points(); fit(data=Items(lambda i: d[i], 40))",
        "items None": "fit(data=Items(lambda i: None))",
        "items objects": "fit(data=Items(lambda i: object()))",
        "items of unlike shapes": "fit(data=Items(lambda i: (torch.zeros(i + 1), torch.zeros(1))))",
        "items of unlike dtypes": "fit(data=Items(lambda i: (torch.zeros(4, dtype=torch.long if i % 2 else torch.float), torch.zeros(1))), optimizer=sgd)",
        "dataset raises": "fit(data=Items(lambda i: 1 / 0))",
        "dataset stops": "def stop(i): raise StopIteration\nfit(data=Items(stop))",
        "dataset exits": "def leave(i): raise SystemExit('bye')\nfit(data=Items(leave))",
        "no loss": "manager().fit(line(), points(), optimizer=sgd)",
        "loss None": "fit(loss_fn=lambda m, b: None)",
        "loss text": "fit(loss_fn=lambda m, b: 'low')",
        "loss float": "fit(loss_fn=lambda m, b: 0.5)",
        "loss vector": "fit(loss_fn=lambda m, b: (m(b[0]) - b[1]).squeeze(1))",
        "loss detached": "fit(loss_fn=lambda m, b: squares(m, b).detach())",
        "loss integer": "fit(loss_fn=lambda m, b: torch.tensor(1))",
        "loss complex": "fit(loss_fn=lambda m, b: squares(m, b) * 1j)",
        "loss weight text": "fit(loss_fn=lambda m, b: (squares(m, b), 'four'))",
        "loss weight negative": "fit(loss_fn=lambda m, b: (squares(m, b), -4))",
        "loss weight NaN": "fit(loss_fn=lambda m, b: (squares(m, b), math.nan))",
        "loss weight zero": "fit(loss_fn=lambda m, b: (squares(m, b), 0))",
        "loss triple": "fit(loss_fn=lambda m, b: (squares(m, b), 4, 4, 4))",
        "loss dict": "fit(loss_fn=lambda m, b: {'error': squares(m, b)})",
        "loss of one argument": "fit(loss_fn=lambda b: b)",
        "loss a class": "fit(loss_fn=nn.CrossEntropyLoss)",
        "loss not callable": "fit(loss_fn=5)",
        "loss NaN": "fit(loss_fn=lambda m, b: squares(m, b) * math.nan)",
        "loss without the model": "w = torch.zeros(1, requires_grad=True); fit(loss_fn=lambda m, b: w.sum())",
        "loss that trains itself": "def loss(m, b):\n    l = squares(m, b); l.backward(); return l\nfit(loss_fn=loss)",
        "loss generator": "def loss(m, b): yield squares(m, b)\nfit(loss_fn=loss)",
        "loss coroutine": "async def loss(m, b): return squares(m, b)\nfit(loss_fn=loss)",
        "optimizer text": "fit(optimizer='adam')",
        "optimizer class": "fit(optimizer=torch.optim.SGD)",
        "optimizer None made": "fit(optimizer=lambda p: None)",
        "optimizer of another model": "other = line(); fit(optimizer=torch.optim.SGD(other.parameters(), 0.1))",
        "optimizer factory of another model": "other = line(); fit(optimizer=lambda p: torch.optim.SGD(other.parameters(), 0.1))",
        "optimizer without parameters": "fit(optimizer=lambda p: torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))",
        "optimizer rate NaN": "fit(optimizer=lambda p: torch.optim.SGD(p, lr=math.nan))",
        "optimizer list": "fit(optimizer=[sgd])",
        "optimizer of a spent generator": "def make(p):\n    list(p); return torch.optim.SGD(p, 0.1)\nfit(optimizer=make)",
        "scheduler text": "fit(scheduler='cosine')",
        "scheduler of another optimizer": "o = sgd(line().parameters()); fit(scheduler=torch.optim.lr_scheduler.StepLR(o, 1))",
        "scheduler plateau": "fit(scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o))",
        "scheduler and schedule": "fit(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1), settings=dict(schedule='cosine'))",
        "callback object": "fit(callbacks=[object()])",
        "callback class": "class C(Callback): pass\nfit(callbacks=[C])",
        "callback alone": "class C(Callback): pass\nfit(callbacks=C())",
        "callback text": "fit(callbacks='log')",
        "callback misspelled": "class C(Callback):\n    def on_step_ends(self, *a): pass\nfit(callbacks=[C()])",
        "callback of other arguments": "class C(Callback):\n    def on_step_end(self): pass\nfit(callbacks=[C()])",
        "logger object": "fit(loggers=[object()])",
        "states text": "fit(states={'x': 'y'})",
        "states list": "fit(states=[1])",
        "states number key": "fit(states={5: line()})",
        "eval_fn text": "fit(None, None, points(), eval_fn='accuracy')",
        "eval_fn None": "fit(None, None, points(), eval_fn=lambda m, b: None)",
        "val data text": "fit(None, None, 'val')",
        "val data empty": "fit(None, None, [])",
        "val data dict of text": "fit(None, None, {'a': 'b'})",
        "val data empty dict": "fit(None, None, {})",
        "augment text": "fit(augment='flip')",
        "augment None": "fit(augment=lambda b, **k: None)",
        "epochs text": "fit(epochs='3')",
        "epochs negative": "fit(epochs=-1)",
        "epochs float": "fit(epochs=1.5)",
        "epochs true": "fit(epochs=True)",
        "config dict": "MultiGPUTrainingManager({'epochs': 1})",
        "config path": "MultiGPUTrainingManager('good.yaml')",
        "config class": "MultiGPUTrainingManager(MultiGPUConfig)",
        "config unknown": "MultiGPUConfig(epoch=3)",
        "config positional": "MultiGPUConfig('ddp')",
        "config changed later": "c = MultiGPUConfig(device='cpu'); c.epochs = 'many'",
        "config typo later": "c = MultiGPUConfig(device='cpu'); c.epoch = 3",
        "config booleans": "MultiGPUConfig(epochs=True)",
        "config boolean rate": "MultiGPUConfig(learning_rate=True)",
        "config numpy text": "import numpy; MultiGPUConfig(batch_size=numpy.array([4, 4]))",
        "config tensor": "MultiGPUConfig(learning_rate=torch.tensor([0.1, 0.2]))",
        "config of a path": "from pathlib import Path\nMultiGPUTrainingManager(Path('good.yaml'))",
        "config seconds true": "MultiGPUConfig(timeout=True)",
        "fit twice": "m = manager(); m.fit(line(), points(), loss_fn=squares); m.fit(line(), points(), loss_fn=squares)",
        "setup twice": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.setup_training(line(), points(), loss_fn=squares)",
        "fit after prepare": "m = manager(); l = line(); m.prepare(l, sgd(l.parameters()), dataset=points()); m.fit(l, points(), loss_fn=squares)",
        "prepare nothing": "manager().prepare()",
        "prepare two optimizers without a model": "manager().prepare(sgd(line().parameters()))",
        "prepare text": "manager().prepare('model', 'optimizer')",
        "save before setup": "manager().save_checkpoint()",
        "evaluate before setup": "manager().evaluate(points())",
        "predict before setup": "manager().predict(points())",
        "finish before setup": "manager().finish()",
        "train_epoch before setup": "manager().train_epoch([], 0)",
        "step before setup": "print(manager().step)",
        "folder before setup": "print(manager().folder)",
        "trainer before setup": "manager().trainer",
        "evaluate text": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.evaluate('val')",
        "predict nothing": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.predict()",
        "predict_fn None": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.predict(points(), lambda mo, b: None)",
        "predict_fn too few rows": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.predict(points(), lambda mo, b: torch.zeros(1))",
        "train_epoch of a list": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.train_epoch([1, 2], 0)",
        "train_epoch -1": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.train_epoch(m.train_loader, -1)",
        "train_step of text": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.trainer.train_step('batch')",
        "log text": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.log(loss='low')",
        "log list": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.log(loss=[1, 2])",
        "log nothing": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.log()",
        "log 4096 names": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.log(**{'\\n' * i: 1.0 for i in range(100)})",
        "rates backwards": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.find_learning_rate(1.0, 1e-3)",
        "rates of no steps": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.find_learning_rate(steps=0)",
        "shard of text": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.shard('batch')",
        "score text": "m = manager(); m.setup_training(line(), points(), loss_fn=squares); m.save_checkpoint(score='good')",
        "load gone": "load('gone-for-good')",
        "load None": "load(None)",
        "load a file": "load('picture.png')",
        "load number": "load(5)",
        "load checkpoint name": "load('kept/image/trained', checkpoint='latest')",
        "load device": "load('kept/image/trained', device='gpu')",
        "predict of a number": "load('kept/image/trained').predict([5])",
        "predict of nothing": "load('kept/image/trained').predict([])",
        "predict of a gone file": "load('kept/image/trained').predict(['gone.png'])",
        "predict of a tensor": "load('kept/image/trained').predict(torch.zeros(2, 3, 4))",
        "predict text file": "load('kept/image/trained').predict(['ok.py'])",
        "predict task": "load('kept/image/trained').predict(['picture.png'], task='generate')",
        "save into a file": "load('kept/image/trained').save('a_file')",
        "save over the run": "load('kept/image/trained').save('kept/image/trained')",
        "evaluate on nothing": "load('kept/image/trained').evaluate('gone-for-good')",
        "speedup of -1": "estimate_training_speedup(-1)",
        "speedup of text": "estimate_training_speedup('eight')",
        "speedup printed": "print_training_speedup_estimates(None)",
        "notebook of text": "notebook_launch('train')",
        "notebook of ranks": "notebook_launch(print, num_ranks=0)",
        "notebook of half a rank": "notebook_launch(print, num_ranks=1.5)",
        "notebook of a lambda": "notebook_launch(lambda: 1, num_ranks=2)",
        "notebook options": "notebook_launch(print, num_ranks=1, nope=1)",
        "launch of a lambda": "launch_distributed_training(lambda: 1)",
        "launch of text": "launch_distributed_training('train.py')",
        "comparison of nothing": "comparison_report([])",
        "comparison of text": "comparison_report('runs')",
        "monitor of a gone run": "print(PerformanceMonitor('gone-for-good').get_summary())",
        "monitor without a start": "PerformanceMonitor().stop_monitoring()",
        "monitor of a text": "p = PerformanceMonitor(); p.start_monitoring(); p.record_metrics('low', 4)",
        "monitor batch -1": "p = PerformanceMonitor(); p.start_monitoring(); p.record_metrics(0.5, -1)",
        "monitor interval": "PerformanceMonitor(interval_s=0)",
        "monitor plot nowhere": "p = PerformanceMonitor(); p.plot_metrics('gone/x/y.png')",
        "metrics average": "MetricsCollector('median')",
        "metrics of text": "MetricsCollector().add('x', 'y', 1)",
        "metrics of shapes": "MetricsCollector().add_predictions(torch.zeros(3), torch.zeros(4), 2)",
        "metrics beyond classes": "m = MetricsCollector(); m.add_predictions(torch.tensor([7]), torch.tensor([1]), 2); print(m.compute())",
        "metrics of no weight": "m = MetricsCollector(); m.add('x', 1.0, 0); print(m.compute())",
        "metrics update text": "MetricsCollector().update('x', 'accuracy', 1)",
        "stream of nothing": "ShardedStream([])",
        "stream of a text": "ShardedStream('a_folder/*')",
        "stream of gone tars": "ShardedStream.from_webdataset('gone-{000..010}.tar')",
        "stream of no parquet": "ShardedStream.from_parquet('gone/*.parquet')",
        "stream of no dataset": "ShardedStream.from_datasets(points())",
        "gpu info": "get_gpu_info(5)",
        "callback changes the batch size": "class C(Callback):\n    def on_step_begin(self, m, *a): m.config.batch_size = 0\nfit(callbacks=[C()])",
        "callback ends the process": "class C(Callback):\n    def on_step_end(self, *a): sys.exit('enough')\nfit(callbacks=[C()])",
        "callback removes the run": "import shutil\nclass C(Callback):\n    def on_step_end(self, *a): shutil.rmtree('runs')\nfit(callbacks=[C()])",
        "callback closes the output": "class C(Callback):\n    def on_step_end(self, *a): os.close(1)\nfit(callbacks=[C()], settings=dict(progress='lines'))",
        "callback changes directory": "class C(Callback):\n    def on_step_end(self, *a): os.chdir('/')\nfit(callbacks=[C()])",
        "model swaps its weights": "m = line()\ndef loss(mo, b):\n    mo.weight = nn.Parameter(mo.weight.detach().clone()); return squares(mo, b)\nfit(m, loss_fn=loss)",
        "model grows": "m = line()\ndef loss(mo, b):\n    mo.register_parameter('x', nn.Parameter(torch.zeros(1))); return squares(mo, b) + mo.x.sum()\nfit(m, loss_fn=loss)",
        "loader of loaders": "fit(data=DataLoader(DataLoader(points())))",
        "loader of another batch size": "fit(data=DataLoader(points(), batch_size=7))",
        "loader without batches": "fit(data=DataLoader(points(), batch_size=None))",
        "loader dropping all": "fit(data=DataLoader(points(), batch_size=32, drop_last=True))",
        "loader of an empty stream": "class S(IterableDataset):\n    def __iter__(self): return iter(())\nfit(data=DataLoader(S(), batch_size=4))",
        "iterable of None": "class S(IterableDataset):\n    def __iter__(self): return None\nfit(data=S(), settings=dict(max_steps=2, steps_per_epoch=2))",
        "collate None": "fit(data=DataLoader(points(), batch_size=4, collate_fn=lambda s: None))",
        "sampler of text": "fit(data=DataLoader(points(), batch_size=4, sampler=['a', 'b']))",
        "sampler beyond": "fit(data=DataLoader(points(), batch_size=4, sampler=[99, 100, 101, 102]))",
        "batch sampler empty": "fit(data=DataLoader(points(), batch_sampler=[[]]))",
        "worker that dies": "class S(Dataset):\n    def __len__(self): return 8\n    def __getitem__(self, i): os._exit(9)\nfit(data=S(), settings=dict(num_workers=1))",
        "a signal in a step": "import signal\nclass C(Callback):\n    def on_step_end(self, *a): os.kill(os.getpid(), signal.SIGTERM)\nfit(callbacks=[C()])",
        "recursion": "def deep(m, b): return deep(m, b)\nfit(loss_fn=deep)",
        "resume of a number": "fit(settings=dict(resume=5))",
        "save_dir a Path list": "from pathlib import Path\nfit(settings=dict(save_dir=[Path('runs')]))",
        "run_name bytes": "fit(settings=dict(run_name=b'it'))",
        "logger_options of objects": "fit(settings=dict(loggers=['csv'], logger_options={'csv': {'x': object()}}))",
    }
    may = {
        "length huge", "items of unlike dtypes", "loss vector", "loss weight zero", "loss weight negative", "log nothing", "callback changes directory",
        "callback closes the output", "metrics of no weight", "monitor without a start", "gpu info", "callback misspelled", "epochs true",
        "optimizer class", "scheduler and schedule", "a signal in a step", "loader of another batch size", "log 4096 names", "score text",
        "frozen model", "callback alone", "predict of nothing", "finish before setup", "monitor of a gone run", "speedup of -1",
        "optimizer of a spent generator", "callback removes the run", "step before setup", "folder before setup", "data a set",
        "data a tensor", "no loss", "scheduler plateau", "epochs text", "trainer before setup", "notebook of a lambda", "launch of a lambda",
        "model grows", "loader without batches", "loader dropping all", "run_name bytes", "callback changes the batch size", "model swaps its weights", "loss dict", "model class", "val data empty dict", "iterable of None",
    }  # fmt: skip
    # What torch or Python says well itself, about an object that the script made.
    fine: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("config class", "config positional", "gpu info", "load None", "load number", "speedup printed", "notebook options",
         "items None", "items objects", "train_epoch of a list", "train_step of text", "loader of loaders", "iterable of None", "collate None"), ("TypeError",)
    )  # fmt: skip
    fine |= dict.fromkeys(("integer parameters", "length huge", "items of unlike shapes", "loss complex", "loss that trains itself", "worker that dies"), ("RuntimeError",))  # fmt: skip
    fine |= dict.fromkeys(("length negative", "sampler of text"), ("ValueError",))
    fine |= dict.fromkeys(("length too long", "sampler beyond"), ("IndexError",))
    fine["callback removes the run"] = ("FileNotFoundError",)
    for name, code in bad.items():
        yield script(name, code, fails=name not in may, raises=fine.get(name, ()))


GROUPS: dict[str, Callable[[], Iterator[Trial]]] = {
    "swapped": swapped,
    "habits": habits,
    "contradicting": contradicting,
    "processes": processes,
    "api": api,
}


def prepare_more(folder: Path) -> None:
    (folder / RUN).parent.mkdir(parents=True)
    (folder / "trained").rename(folder / RUN)
    (folder / "good.yaml").write_text("recipe: image\nmode: cnn\ndevice: cpu\nmax_steps: 2\n")
    (folder / "other.yaml").write_text("recipe: video\n")
    (folder / "schema.json").write_text('{"type": "object"}')
    (folder / "broken.py").write_text("def x(:\n")
    (folder / "latin.py").write_bytes(b"# caf\xe9\nprint('x')\n")
    (folder / "nul.py").write_bytes(b"print('x')\0\n")
    (folder / "ok.py.bak").write_text("print('ok')\n")


def tried(trial: Trial, made: Path, base: Path) -> dict[str, Any]:
    """Run it in a fresh copy of the prepared folder; say what is wrong with how it ended."""
    here = base / "here"
    shutil.copytree(made, here, symlinks=True, ignore=_odd)
    for name in ("precious", "folder"):
        (base / name).mkdir(exist_ok=True)
    outside = {k: v for k, v in files_below(base).items() if not k.startswith("here")}
    ended = attempt(trial.call, here, 120.0)
    found = ended.problems(trial.fails, trial.says)
    if ended.code == 4:
        found.append("raised what is no error of ours")
    now = {k: v for k, v in files_below(base).items() if not k.startswith("here")}
    if outside.keys() != now.keys():
        found.append(f"wrote outside its folder: {sorted(set(now) ^ set(outside))}")
    subprocesses_left(base)
    shutil.rmtree(here, ignore_errors=True)
    return {
        "name": trial.name, "problems": found, "code": ended.code, "seconds": round(ended.seconds, 1),
        "mib": ended.grown >> 20, "said": ended.said[-3000:],
    }  # fmt: skip


def _odd(folder: str, names: list[str]) -> list[str]:
    """What need not be copied: large files, FIFOs and devices that other campaigns use."""
    found = []
    for name in names:
        path = Path(folder) / name
        with contextlib.suppress(OSError):
            if not path.is_symlink() and (
                (path.is_file() and path.stat().st_size > 2e6) or path.is_fifo()
            ):
                found.append(name)
    return found


def subprocesses_left(base: Path) -> None:
    """End what a trial has left running in its folder."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--only", default="", help="only those whose name holds one of these words")
    parser.add_argument("--part", default="", help="2/5: every fifth, from the second on")
    parser.add_argument("--count", action="store_true", help="only say how many there are")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = [trial for group in given.groups.split(",") for trial in GROUPS[group]()]
    wanted = [word for word in given.only.split(",") if word]
    chosen = [t for t in chosen if not wanted or any(word in t.name for word in wanted)]
    part, parts = map(int, (given.part or "1/1").split("/"))
    chosen = chosen[part - 1 :: parts]
    if given.count:
        print(len(chosen))
        return 0
    from wrong_invocations import prepare, warm_up
    from wrong_invocations_newer import prepare_newer

    warm_up()
    rows, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="blind-") as temporary:
        made, base = Path(temporary) / "made", Path(temporary) / "base"
        made.mkdir()
        prepare(made)
        for name in ("huge_line.csv", "sparse", "long.yaml"):
            (made / name).unlink()
        prepare_newer(made)
        prepare_more(made)
        for trial in chosen:
            base.mkdir(exist_ok=True)
            row = tried(trial, made, base)
            rows.append(row)
            if row["problems"] or given.verbose:
                print(f"{row['name']}\n    {row['problems']} {row['seconds']} s", flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps({"python": platform.python_version(), "rows": rows}, indent=1))  # fmt: skip
    bad = [row for row in rows if row["problems"]]
    print(f"{len(rows)} wrong invocations, {len(bad)} with problems, slowest {max((r['seconds'] for r in rows), default=0)} s, "
          f"{time.monotonic() - begun:.0f} s in all")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
