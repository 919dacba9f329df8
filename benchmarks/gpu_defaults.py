"""What each default is worth on one GPU: the step as it comes, and with one of them switched off.

    python benchmarks/gpu_defaults.py --out gpu_defaults.json

Every case runs in a process of its own, cases in turns; the table is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# Larger models are compiled where a run is long; each default is weighed without that.
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "cnn": {},
    "lstm": {},
    "resnet": {"step_execution": "eager"},
}
CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "without bf16": {"use_mixed_precision": False},
    "without bf16 and TF32": {"use_mixed_precision": False, "allow_tf32": False},
    "without channels last": {"channels_last": False},
    "without the fused optimizer": {"fused_optimizer": False},
    "with cuDNN's autotuner": {"cudnn_benchmark": True},
    "without graphs": {"step_execution": "eager"},
    "data on the host": {"data_on_gpu": False},
    "all off": {"fast_defaults": False, "step_execution": "eager", "data_on_gpu": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cases", help="names, separated by semicolons; default all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--limit", type=float, default=60, help="seconds a case may take")
    parser.add_argument("--out", type=Path, default=Path("gpu_defaults.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    started = time.perf_counter()
    document: dict[str, Any] = {"machine": machine(options), "rows": {}}
    names = options.cases.split(";") if options.cases else list(CASES)
    for _ in range(options.rounds):
        for model in options.models.split(","):
            for case in names:
                if model == "resnet" and case in ("without graphs", "data on the host"):
                    continue  # it is eager here, and the same data
                rows = document["rows"].setdefault(model, {}).setdefault(case, [])
                rows.append(run(options, model, case))
                document["seconds"] = time.perf_counter() - started
                options.out.write_text(json.dumps(document, indent=1))
                options.out.with_suffix(".md").write_text(table(document))
    print(table(document))


def run(options: argparse.Namespace, model: str, case: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [sys.executable, str(HERE), "--child", f"{model};{case}", "--out", str(out)]
        words += ["--device", options.device, *(["--quick"] if options.quick else [])]
        try:
            done = subprocess.run(words, timeout=options.limit, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {options.limit:g} s"}
        if not out.exists():
            return {"error": (done.stderr or done.stdout)[-2000:]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def child(options: argparse.Namespace) -> None:
    from gpu_steps import ours

    model, case = options.child.split(";")
    options.settings = {**MODELS[model], **CASES[case]}
    found = ours(options, f"{model}-fit")
    kept = ("step_mean_s", "step_p50_s", "peak_bytes", "execution", "precision")
    options.out.write_text(json.dumps({key: found.get(key) for key in kept}))


def machine(options: argparse.Namespace) -> str:
    import torch

    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}"


def table(document: dict[str, Any]) -> str:
    lines = ["# What each default is worth", "", "    python benchmarks/gpu_defaults.py", ""]
    lines += [f"{document['machine']}; {document['seconds']:.0f} s in all", ""]
    for model, cases in document["rows"].items():
        lines += [f"## {model}", "", "| | step | against as it comes | peak memory | runs as |"]
        lines += ["|---|---|---|---|---|"]
        base = None
        for case, rows in cases.items():
            good = [row for row in rows if "error" not in row]
            if not good:
                lines.append(f"| {case} | {rows[-1]['error'].strip().splitlines()[-1]} | | | |")
                continue
            step = statistics.median(row["step_mean_s"] for row in good)
            base = base or step
            peak = max(row["peak_bytes"] or 0 for row in good) / 2**20
            execution = (good[-1]["execution"] or {}).get("mode", "-")
            how = f"{execution}, {good[-1]['precision']}"
            lines.append(
                f"| {case} | {step * 1e6:,.0f} us | {step / base:.2f} | {peak:,.0f} MB | {how} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
