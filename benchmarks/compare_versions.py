"""Step times of two versions of the package, side by side: is the new one as fast as the old?

    git worktree add OLD COMMIT
    python benchmarks/compare_versions.py --old OLD/src --out compare_versions.json

Each round starts one process per version, in turn, and each process measures all cases; the table
shows the median over the rounds and the ratio of the medians. Only public names are used, so that
both versions run the same code.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# name: model, loop, step_execution, measured steps on a GPU
CASES: dict[str, tuple[str, str, str, int]] = {
    "MLP, fit, recorded": ("mlp", "fit", "auto", 20_000),
    "MLP, fit, eager": ("mlp", "fit", "eager", 1_500),
    "MLP, own loop, recorded": ("mlp", "loop", "auto", 15_000),
    "MLP, own loop, eager": ("mlp", "loop", "eager", 1_500),
    "CNN, fit, recorded": ("cnn", "fit", "auto", 2_000),
    "CNN, fit, eager": ("cnn", "fit", "eager", 500),
    "MLP, DDP + NCCL, recorded": ("mlp", "ddp", "auto", 15_000),
    "MLP, DDP + NCCL, eager": ("mlp", "ddp", "eager", 1_500),
}
WARM_UP = 300


def measure(case: str, device: str, quick: bool) -> dict[str, Any]:
    """Microseconds per step of one case in this process, with everything on that is by default."""
    import torch
    from gpu_models import MODELS, QUICK, loss_fn, tensors
    from gpu_peers import Batches
    from torch.utils.data import TensorDataset

    import multi_gpu_training
    from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

    which, how, execution, steps = CASES[case]
    warm_up, steps = (10, 20) if quick else (WARM_UP, steps)
    model = (QUICK if quick else MODELS)[which]
    marks: list[float] = []

    def mark(step: int) -> None:
        if step in (warm_up, warm_up + steps):
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    if hasattr(multi_gpu_training, "Callback"):
        base: Any = multi_gpu_training.Callback
        event, step_of = "callbacks", lambda given: given.step
    else:  # version 0.1
        base, event, step_of = multi_gpu_training.Hook, "hooks", lambda given: given

    class Mark(base):  # type: ignore[misc]
        def on_step_end(self, run: Any, given: Any) -> None:
            mark(step_of(given))

    if how == "ddp":
        from gpu_steps import one_rank

        os.environ.update(one_rank())
    with tempfile.TemporaryDirectory(prefix="mgt-compare-") as folder:
        config = MultiGPUConfig(
            batch_size=model.batch,
            device=device,
            training_mode="distributed_data_parallel" if how == "ddp" else "single",
            step_execution=execution,
            max_steps=warm_up + steps,
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
            batches = Batches(model, str(manager.placement.device), warm_up + steps)
            for step, batch in enumerate(batches, start=1):
                manager.trainer.train_step(batch)
                mark(step)
            manager.finish()
        else:
            manager.fit(net, dataset, loss_fn=loss_fn, **{event: [Mark()]})
        mode = manager.trainer.execution.mode
    return {"us": (marks[1] - marks[0]) / steps * 1e6, "mode": mode}


def child(options: argparse.Namespace) -> None:
    found = {}
    for case in options.cases:
        try:
            found[case] = measure(case, options.device, options.quick)
        except Exception as error:
            found[case] = {"error": f"{type(error).__name__}: {error}"[:300]}
        Path(options.child).write_text(json.dumps(found))
    os._exit(0)  # without the interpreter's own teardown, in which process groups may hang


def run(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mgt-compare-") as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--child", str(out), "--device", options.device]
        command += ["--cases", "|".join(options.cases), *(["--quick"] if options.quick else [])]
        paths = [str(source), str(HERE), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        log = subprocess.run(command, env=env, timeout=options.limit, capture_output=True)
        if not out.exists():
            raise RuntimeError(log.stderr.decode()[-2000:])
        return dict(json.loads(out.read_text()))


def table(rounds: list[dict[str, dict[str, Any]]], options: argparse.Namespace) -> str:
    lines = ["| step | old | new | new / old |", "|---|---|---|---|"]
    for case in options.cases:
        cells = {}
        for version in ("old", "new"):
            got = [r[version].get(case, {"error": "not reached"}) for r in rounds]
            errors = [g["error"] for g in got if "error" in g]
            cells[version] = errors[0] if errors else statistics.median(g["us"] for g in got)
        if any(isinstance(cell, str) for cell in cells.values()):
            lines.append(f"| {case} | {cells['old']} | {cells['new']} | |")
            continue
        mode = rounds[0]["new"][case]["mode"]
        ratio = cells["new"] / cells["old"]
        lines.append(
            f"| {case} ({mode}) | {cells['old']:.1f} us | {cells['new']:.1f} us | {ratio:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--old", type=Path, help="src folder of the old version")
    parser.add_argument("--new", type=Path, default=HERE.parent / "src")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--cases", default="|".join(CASES), type=lambda text: text.split("|"))
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, default=Path("compare_versions.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if isinstance(options.cases, str):
        options.cases = options.cases.split("|")
    if options.child:
        child(options)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(options.rounds):
        order = ["old", "new"] if number % 2 == 0 else ["new", "old"]
        found = {version: run(getattr(options, version), options) for version in order}
        rounds.append(found)
        document = {"machine": platform.node(), "command": sys.argv, "rounds": rounds}
        options.out.write_text(json.dumps(document, indent=1))
        options.out.with_suffix(".md").write_text(table(rounds, options) + "\n")
    print(table(rounds, options))


if __name__ == "__main__":
    main()
