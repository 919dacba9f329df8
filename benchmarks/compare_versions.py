"""Step times of two versions of the package, side by side: is the new one as fast as the old?

    git worktree add OLD COMMIT
    python benchmarks/compare_versions.py --old OLD/src --out compare_versions.json

A round starts one process per version. The two take turns: one trains a window of steps while the
other waits, old-new-new-old, so that whatever slows the machine slows both. A round's result is
the ratio of the two medians over its windows; the table shows the median over the rounds, and their
range. Only public names are used, so that both versions run the same code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
# name: model, loop, step_execution, steps of one window on a GPU (about 0.4 s)
CASES: dict[str, tuple[str, str, str, int]] = {
    "MLP, fit, recorded": ("mlp", "fit", "auto", 4_000),
    "MLP, fit, eager": ("mlp", "fit", "eager", 250),
    "MLP, own loop, recorded": ("mlp", "loop", "auto", 3_000),
    "MLP, own loop, eager": ("mlp", "loop", "eager", 250),
    "CNN, fit, recorded": ("cnn", "fit", "auto", 600),
    "CNN, fit, eager": ("cnn", "fit", "eager", 120),
    "MLP, DDP + NCCL, recorded": ("mlp", "ddp", "auto", 3_000),
    "MLP, DDP + NCCL, eager": ("mlp", "ddp", "eager", 250),
}
WARM_UP = 300
WINDOWS = 6


class Windows:
    """Times windows of steps, and waits for its turn before each."""

    def __init__(self, steps: int, count: int, warm_up: int, turn: Callable[[Any], None]) -> None:
        self.steps, self.count, self.warm_up, self.turn = steps, count, warm_up, turn
        self.skip = max(5, steps // 10)  # the first steps after a pause find cold caches
        self.total = warm_up + count * (self.skip + steps)
        self.started = 0.0

    def mark(self, step: int) -> None:
        within = (step - self.warm_up) % (self.skip + self.steps)
        if step < self.warm_up or within not in (0, self.skip):
            return
        now = self.clock()
        if within == self.skip:
            self.started = now
        else:
            first = step == self.warm_up
            self.turn(None if first else (now - self.started) / self.steps * 1e6)

    @staticmethod
    def clock() -> float:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def measure(case: str, device: str, quick: bool, turn: Callable[[Any], None]) -> str:
    """Train one case window by window, with everything on that is by default; how steps ran."""
    import torch
    from gpu_models import MODELS, QUICK, loss_fn, tensors
    from gpu_peers import Batches
    from torch.utils.data import TensorDataset

    import multi_gpu_training
    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

    which, how, execution, steps = CASES[case]
    windows = Windows(20, 4, 10, turn) if quick else Windows(steps, WINDOWS, WARM_UP, turn)
    model = (QUICK if quick else MODELS)[which]

    if hasattr(multi_gpu_training, "Callback"):
        base: Any = multi_gpu_training.Callback
        event, step_of = "callbacks", lambda given: given.step
    else:  # version 0.1
        base, event, step_of = multi_gpu_training.Hook, "hooks", lambda given: given

    class Mark(base):  # type: ignore[misc]
        def on_step_end(self, run: Any, given: Any) -> None:
            windows.mark(step_of(given))

    if how == "ddp":
        from gpu_steps import one_rank

        os.environ.update(one_rank())
    with tempfile.TemporaryDirectory(prefix="mgt-compare-") as folder:
        config = MultiGPUConfig(
            batch_size=model.batch,
            device=device,
            training_mode="distributed_data_parallel" if how == "ddp" else "single",
            step_execution=execution,
            max_steps=windows.total,
            epochs=10**6,
            progress="off",
            tensorboard=False,
            checkpoint_frequency=10**9,
            save_dir=folder,
        )
        manager = MultiGPUTrainingManager(config)
        torch.manual_seed(0)
        net, dataset = model.build(), TensorDataset(*tensors(model))
        if how == "loop":
            manager.setup_training(net, dataset, loss_fn=loss_fn)
            batches = Batches(model, str(manager.placement.device), windows.total)
            for step, batch in enumerate(batches, start=1):
                manager.trainer.train_step(batch)
                windows.mark(step)
            manager.finish()
        else:
            manager.fit(net, dataset, loss_fn=loss_fn, **{event: [Mark()]})
        return str(manager.trainer.execution.mode)


def child(options: argparse.Namespace) -> None:
    """Measure all cases, one message per turn over the two pipes that the parent opened."""
    told, heard = (int(fd) for fd in options.child.split(","))
    with os.fdopen(told, "w") as out, os.fdopen(heard) as turns:

        def turn(us: float | None) -> None:
            print(json.dumps({"us": us}), file=out, flush=True)
            turns.readline()

        for case in options.cases:
            try:
                turn(None)
                last = {"mode": measure(case, options.device, options.quick, turn)}
            except Exception as error:
                last = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(last), file=out, flush=True)
    os._exit(0)  # without the interpreter's own teardown, in which process groups may hang


class Version:
    """One version's process, and what it said in the current case."""

    def __init__(self, source: Path, options: argparse.Namespace) -> None:
        (heard, told), (turns, go) = os.pipe(), os.pipe()
        command = [sys.executable, __file__, "--child", f"{told},{turns}"]
        command += ["--device", options.device, "--cases", "|".join(options.cases)]
        command += ["--quick"] if options.quick else []
        paths = [str(source), str(HERE), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=env, pass_fds=(told, turns), stdout=self.log, stderr=self.log
        )
        os.close(told)
        os.close(turns)
        self.heard, self.go = os.fdopen(heard), os.fdopen(go, "w")
        self.windows: list[float] = []
        self.last: dict[str, Any] | None = None

    def hear(self) -> None:
        """Wait for the end of its window."""
        line = self.heard.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(self.log.read().decode(errors="replace")[-2000:])
        said = json.loads(line)
        if "us" not in said:
            self.last = said
        elif said["us"] is not None:
            self.windows.append(said["us"])

    def step(self) -> None:
        """Let it train one window."""
        if self.last is None:
            print(file=self.go, flush=True)
            self.hear()

    def result(self) -> dict[str, Any]:
        found = {**(self.last or {}), "windows": self.windows}
        self.windows, self.last = [], None
        return found


def run_round(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    versions = {name: Version(getattr(options, name), options) for name in ("old", "new")}
    old, new = versions["old"], versions["new"]
    found: dict[str, dict[str, Any]] = {"old": {}, "new": {}}
    for case in options.cases:
        for version in versions.values():
            version.hear()
        while old.last is None or new.last is None:
            for version in (old, new, new, old):
                version.step()
        for name, version in versions.items():
            found[name][case] = version.result()
    for version in versions.values():
        version.process.wait(60)
    return found


def table(rounds: list[dict[str, dict[str, Any]]], options: argparse.Namespace) -> str:
    lines = ["| step | old | new | new / old | rounds |", "|---|---|---|---|---|"]
    for case in options.cases:
        pairs = [(found["old"][case], found["new"][case]) for found in rounds]
        errors = [version["error"] for pair in pairs for version in pair if "error" in version]
        if errors:
            lines.append(f"| {case} | {errors[0]} | | | |")
            continue
        middle = [[statistics.median(version["windows"]) for version in pair] for pair in pairs]
        old, new = (statistics.median(each) for each in zip(*middle, strict=True))
        ratios = sorted(of_new / of_old for of_old, of_new in middle)
        lines.append(
            f"| {case} ({pairs[0][1]['mode']}) | {old:.1f} us | {new:.1f} us "
            f"| {statistics.median(ratios):.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
    return "\n".join(lines)


def machine(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return f"{name}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--old", type=Path, help="src folder of the old version")
    parser.add_argument("--new", type=Path, default=HERE.parent / "src")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--cases", default="|".join(CASES), type=lambda text: text.split("|"))
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, default=Path("compare_versions.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if isinstance(options.cases, str):
        options.cases = options.cases.split("|")
    if options.child:
        child(options)
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds):
        rounds.append(run_round(options))
        document = {"machine": machine(options.device), "rounds": rounds}
        options.out.write_text(json.dumps(document, indent=1))
        options.out.with_suffix(".md").write_text(table(rounds, options) + "\n")
    print(table(rounds, options))


if __name__ == "__main__":
    main()
