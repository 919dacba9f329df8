"""Kill a training before, during and after its steps become compiled: does it end the same?

    python benchmarks/switch_kills.py --out switch_kills.json

A small ViT trains on one GPU. Another process compiles its step meanwhile; then the training
records the compiled step and goes on with that. Per precision one run is left alone, and others
get `kill -9` and are started again with `resume="auto"`:

    before    while the other process compiles
    during    once that process has ended and the compiled step is being loaded and recorded
    after     some seconds after the first compiled step
    fixed     `deterministic=true`, where steps are never compiled on the way: killed anywhere

The last weights are compared with those of the run that was left alone, per tensor by norm. About
40 s per run on an H200; more than two at once share its time badly.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CASES = {
    "bf16 (default)": {},
    "float32": {"use_mixed_precision": False, "fast_defaults": False},
}


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset
    from whole_runs import ViT

    from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
    from multi_gpu_training.training.runner import compile_switch

    # Otherwise only runs that have 15 s left are compiled, and this is shorter.
    compile_switch.PAYS_AFTER_S = 0.0
    told: dict[str, Any] = {}

    class Tell(Callback):
        watches_only = True

        def on_step_end(self, run: Any, result: Any) -> None:
            switch, mode = execution.switch, execution.mode
            if switch.waits and "waits" not in told:
                told["waits"] = print("NOW compiling", result.step, flush=True)
            if not switch.waits and "waits" in told and "ended" not in told:
                told["ended"] = print("NOW ended", result.step, mode, flush=True)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4096, 3, 32, 32, generator=generator)
    labels = images.mean((1, 2, 3)).mul(200).long().remainder(10)
    config = MultiGPUConfig(
        batch_size=128,
        epochs=options.steps // 32,
        learning_rate=1e-4,
        checkpoint_frequency=500,
        save_dir=options.folder,
        run_name="run",
        resume="auto",
        progress="lines",
        **json.loads(options.settings),
    )
    manager = MultiGPUTrainingManager(config)
    execution = manager.trainer.execution
    manager.fit(
        ViT(96, 2),
        TensorDataset(images, labels),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        callbacks=[Tell()],
    )
    state = {name: value.cpu() for name, value in manager.model.state_dict().items()}
    torch.save(state, Path(options.folder) / "last.pt")
    facts = {"mode": execution.mode, "since": execution.switch.since, "step": manager.trainer.step}
    print("END " + json.dumps(facts), flush=True)


class Run(threading.Thread):
    """One training: started, killed at its cue, and started again until it ends."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], steps: int) -> None:
        super().__init__(name=name)
        self.cue, self.folder = name, folder
        self.arguments = ["--steps", str(steps), "--settings", json.dumps(settings)]
        self.killed_at: str | None = None
        self.lines: list[str] = []
        self.end: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        for attempt in range(3):
            command = [sys.executable, __file__, "--folder", str(self.folder), *self.arguments]
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert child.stdout is not None
            for line in child.stdout:
                self.lines.append(f"{attempt} {line.rstrip()}")
                if line.startswith("END "):
                    self.end = json.loads(line[4:])
                elif attempt == 0:
                    self.perhaps_kill(child, line)
            if child.wait() == 0:
                return

    def perhaps_kill(self, child: subprocess.Popen[str], line: str) -> None:
        word, _, rest = line.partition(" ")
        now = rest.split() if word == "NOW" else []
        if self.killed_at is not None or not now:
            return
        if self.cue == "before" and now[0] == "compiling":
            self.kill_in(3.0, child, f"while it was compiled (from step {now[1]} on)")
        elif self.cue == "during" and now[0] == "compiling":
            self.killed_at = "waits"
            threading.Thread(target=self.kill_with_compiler, args=(child,)).start()
        elif self.cue == "after" and now[0] == "ended":
            self.kill_in(3.0, child, f"3 s after step {now[1]}, {' '.join(now[2:])}")

    def kill_in(self, seconds: float, child: subprocess.Popen[str], what: str) -> None:
        self.killed_at = what
        threading.Timer(seconds, lambda: child.send_signal(signal.SIGKILL)).start()

    def kill_with_compiler(self, child: subprocess.Popen[str]) -> None:
        """Kill it as soon as it no longer has the child that compiles: it then loads the result."""
        import psutil

        training = psutil.Process(child.pid)
        while any("compile_child" in " ".join(c.cmdline()) for c in children(training)):
            time.sleep(0.02)
        time.sleep(0.5)
        child.send_signal(signal.SIGKILL)
        self.killed_at = "0.5 s after the compiling process was gone"


def children(process: Any) -> list[Any]:
    import psutil

    try:
        return [c for c in process.children() if c.status() != psutil.STATUS_ZOMBIE]
    except psutil.Error:
        return []


def apart(one: Path, other: Path) -> float:
    import torch

    ones, others = torch.load(one / "last.pt"), torch.load(other / "last.pt")
    return max(
        float((ones[n].double() - others[n].double()).norm() / ones[n].double().norm())
        for n in ones
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--cases", default="float32", help=", ".join(CASES))
    parser.add_argument("--together", type=int, default=2, help="trainings at once")
    parser.add_argument("--fixed-after-s", type=float, default=15.0, help="the kill of `fixed`")
    parser.add_argument("--out", type=Path, default=Path("switch_kills.json"))
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--settings", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        train(options)
        return
    import torch

    root = Path(tempfile.mkdtemp(prefix="mgt-switch-"))
    found: list[dict[str, Any]] = []
    for case in options.cases.split(","):
        plan = {name: CASES[case] for name in ("alone", "before", "during", "after")}
        plan |= {name: {**CASES[case], "deterministic": True} for name in ("alone fixed", "fixed")}
        runs: dict[str, Run] = {}
        for number, (name, settings) in enumerate(plan.items()):
            while sum(run.is_alive() for run in runs.values()) >= options.together:
                time.sleep(0.1)
            steps = options.steps // 4 if "fixed" in name else options.steps
            runs[name] = Run(name, root / f"{len(found)}-{number}", settings, steps)
            if name == "fixed":
                threading.Timer(options.fixed_after_s, kill_now, [runs[name]]).start()
        for name, run in runs.items():
            run.join()
            whole = runs["alone fixed" if "fixed" in name else "alone"]
            found.append(outcome(case, run, whole))
            print(json.dumps(found[-1]), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{device}; torch {torch.__version__}, "
    machine += f"Python {platform.python_version()}, {os.cpu_count()} cores"
    document = {"machine": machine, "steps": options.steps, "found": found}
    options.out.write_text(json.dumps(document, indent=1))


def outcome(case: str, run: Run, whole: Run) -> dict[str, Any]:
    ended = all((one.folder / "last.pt").exists() for one in (run, whole))
    if not ended:
        print("\n".join(run.lines[-30:]), flush=True)
    said = [line for line in run.lines if "step" in line and "compil" in line]
    off = apart(whole.folder, run.folder) if ended else None
    return {"case": case, "run": run.name, "killed": run.killed_at, "apart": off, **run.end} | {
        "said": said
    }


def kill_now(run: Run) -> None:
    run.killed_at = "by the clock"
    subprocess.run(["pkill", "-9", "-f", "--", f"--folder {run.folder} "], check=False)


if __name__ == "__main__":
    main()
