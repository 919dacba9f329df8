"""A training that is to be disturbed: started, watched from outside, ended, looked at afterwards.

Two CPU ranks with two loader workers each train an MLP with AdamW, with shuffling, augmentation and
dropout, and write a checkpoint every five steps. Everything that is known of it comes from its
processes, its events and its checkpoints, as a user would look at them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from multi_gpu_training.checkpoint.store import load

MARK = "MGT_SUBJECT"
EVERY = 5  # steps between checkpoints

TRAIN = """
import json, random, sys
import numpy as np
import torch
from torch import nn
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

given = json.loads(sys.argv[1])
hooks = []
if given["faults"]:
    from multi_gpu_training.faults.injection import fail_at
    hooks = [fail_at(**fault) for fault in given["faults"]]


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.inputs = torch.randn(400, 64, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(64) + random.random() + float(np.random.rand())
        return self.inputs[index] + 0.1 * noise, index % 7


usual = dict(device="cpu", world_size=2, batch_size=4, num_workers=2, epochs=given["steps"] // 50,
             checkpoint_frequency=5, log_every=1, progress="off", tensorboard=False,
             save_dir="runs", run_name="it", resume=given["resume"])
manager = MultiGPUTrainingManager(MultiGPUConfig(**{**usual, **given["settings"]}))
torch.manual_seed(2)
wide, noise = given["width"], given["dropout"]
model = nn.Sequential(nn.Linear(64, wide), nn.ReLU(), nn.Dropout(noise), nn.Linear(wide, wide),
                      nn.ReLU(), nn.Dropout(noise), nn.Linear(wide, 7))
manager.fit(model, Noisy(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), callbacks=hooks)
"""


class Subject:
    """`python train.py` in `folder`, again and again, until it is done.

    Its temporary files go into a folder of its own, so that what it leaves there can be counted.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        width: int,
        dropout: float = 0.2,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.steps = steps
        self.faults: list[dict[str, Any]] = []  # from inside: arguments of fail_at
        self.port: int | None = None  # where the ranks meet; None: a free one
        self.launch: list[str] = []  # what starts its ranks; [] is our own launcher
        self.variables: dict[str, str] = {}  # of its environment, beside the usual ones
        self.given = {"steps": steps, "width": width, "dropout": dropout, "settings": settings}
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        (folder / "train.py").write_text(TRAIN)
        self.checkpoints = folder / "runs/custom/it/checkpoints"
        self.pids: set[int] = set()  # of all its processes that were ever seen

    # Running it

    def start(self, resume: bool = False) -> None:
        """Start it; `resume` is what a user adds after its end: --resume auto."""
        given = {**self.given, "faults": self.faults, "resume": "auto" if resume else None}
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "MASTER_PORT")}
        env = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            MARK: str(self.folder),
            **({} if self.port is None else {"MASTER_PORT": str(self.port)}),
            **self.variables,
        }
        with (self.folder / "out.txt").open("a") as out:
            self.launcher = subprocess.Popen(
                [sys.executable, *self.launch, "train.py", json.dumps(given)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,
            )

    @property
    def ended(self) -> int | None:
        """Its exit code as a shell shows it, once the launcher has ended."""
        code = self.launcher.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, for_what: Callable[[], Any], within_s: float, every_s: float = 0.01) -> bool:
        """Until it happens, or the launcher ends or time is up: then False."""
        deadline = time.monotonic() + within_s
        while not for_what():
            if self.ended is not None or time.monotonic() > deadline:
                return bool(for_what())
            time.sleep(every_s)
        return True

    def tree(self) -> list[psutil.Process]:
        """The launcher and all that came of it, as long as it lives."""
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self.launcher.pid)
            found = [top, *top.children(recursive=True)]
            self.pids |= {process.pid for process in found}
            return found
        return []

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self.tree()[1:]:
            with contextlib.suppress(psutil.Error, OSError, KeyError):
                if process.ppid() == self.launcher.pid:
                    found[int(process.environ()["RANK"])] = process
        return found

    def kill_tree(self) -> None:
        """SIGKILL for every process at once."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait()
        for process in self.left():  # one that was born meanwhile
            with contextlib.suppress(psutil.Error):
                process.kill()

    def left(self, within_s: float = 0.0) -> list[psutil.Process]:
        """Its processes that still run, if they do so after `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            found = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.environ().get(MARK) == str(self.folder)
        except (psutil.Error, OSError):
            return False

    # Looking at it

    def events(self) -> list[dict[str, Any]]:
        """What rank 0 has recorded, in order."""
        file = self.folder / "runs/custom/it/events/rank-0.jsonl"
        found = []
        for line in file.read_text().splitlines() if file.exists() else []:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def steps_recorded(self) -> int:
        """How many steps its events tell of; does not depend on its clock."""
        return sum(e.get("event") == "step" for e in self.events())

    def steps_since(self, when: float) -> int:
        """How many steps were recorded since then."""
        return sum(e["event"] == "step" and e["time"] > when for e in self.events())

    def newest(self) -> int:
        """The step of the newest complete checkpoint; 0 for none."""
        found = self.checkpoints.glob("step-*/manifest.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)

    def saving(self) -> bool:
        """Whether a checkpoint is being written, or was when it was killed."""
        return any(self.checkpoints.glob(".staged-*"))

    def result(self) -> str:
        """Every bit of the final weights and of the optimizer's state, and the history, hashed."""
        last = self.checkpoints / f"step-{self.steps:08d}"
        if not last.exists():
            return f"no checkpoint of step {self.steps}"
        state = json.loads((last / "state.json").read_text())["state"]
        parts = [json.dumps(state["replicated"]["progress"]).encode()]
        named = [path for path in last.glob("*.safetensors") if path.name != "state.safetensors"]
        parts += [path.read_bytes() for path in sorted(named)]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def weights(self) -> dict[str, Any]:
        return load(self.checkpoints / f"step-{self.steps:08d}").model

    def state_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._last().iterdir())

    def _last(self) -> Path:
        return self.checkpoints / f"step-{self.newest():08d}"

    def litter(self) -> list[str]:
        """Temporary files and folders it left, in its folder for them and among its checkpoints."""
        found = [path.name for path in self.temporary.iterdir()]
        return found + [path.name for path in self.checkpoints.glob(".*")]

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@contextlib.contextmanager
def ended_at_last(subject: Subject) -> Iterator[Subject]:
    """Whatever happens in the block, no process of it is left afterwards."""
    try:
        yield subject
    finally:
        for process in subject.left():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(AttributeError):
            subject.launcher.wait()


@dataclass(frozen=True)
class Reference:
    """What a run gives that nothing happens to."""

    result: str
    state_bytes: int
    start_s: float  # until its first step
    weights: dict[str, Any]


def undisturbed(
    folder: Path,
    steps: int,
    width: int,
    patience_s: float,
    dropout: float = 0.2,
    **settings: Any,
) -> Reference:
    subject = Subject(folder, steps, width, dropout, **settings)
    with ended_at_last(subject):
        began = time.time()
        subject.start()
        subject.wait(lambda: False, patience_s)
        if subject.ended != 0:
            sys.exit((folder / "out.txt").read_text())
        if subject.litter():
            sys.exit(f"an undisturbed run leaves {subject.litter()}")
        first = next(event["time"] for event in subject.events() if event["event"] == "step")
        weights = subject.weights()
        found = Reference(subject.result(), subject.state_bytes(), first - began, weights)
    subject.remove()
    return found
