"""Train with the wheel alone, in an empty environment: no TensorBoard, no matplotlib, no recipe's
packages.

    python benchmarks/small_core.py [--python python3.12]

Builds the wheel, installs it with its dependencies, trains a small model of its own in the new
environment and runs `mgt train image`, which must say what to install. Exits with 1 if it does not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPTIONAL = ("tensorboard", "matplotlib", "sklearn", "PIL", "wandb", "mlflow", "transformers")
SCRIPT = """
import importlib.util, sys, time
from torch import nn, randn
from torch.utils.data import TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
assert not found, f"not an empty environment: {found}"


class Slow(Callback):  # a run of ten seconds writes a report, too
    def on_step_end(self, run, result):
        time.sleep(0.2)


manager = MultiGPUTrainingManager(
    MultiGPUConfig(device="cpu", training_mode="single", epochs=4, batch_size=8, run_name="it")
)
data = TensorDataset(randn(128, 4), randn(128, 1))
print(manager.fit(nn.Linear(4, 1), data, callbacks=[Slow()]).metrics)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable)
    python = parser.parse_args().python
    pins = str(ROOT / "constraints.txt")
    pinned = {**os.environ, "PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins}
    pinned.pop("PYTHONPATH", None)
    problems = []
    with tempfile.TemporaryDirectory(prefix="mgt-core-") as folder:
        work = Path(folder)
        subprocess.run([python, "-m", "venv", work / "venv"], check=True)
        run = [str(work / "venv" / "bin" / "python"), "-m"]
        wheel = [*run, "pip", "wheel", "--quiet", "--no-deps", "-w", str(work), str(ROOT)]
        subprocess.run(wheel, check=True, env=pinned, cwd=work)
        (built,) = work.glob("*.whl")
        subprocess.run([*run, "pip", "install", "--quiet", built], check=True, env=pinned, cwd=work)
        (work / "train.py").write_text(SCRIPT)

        def said(*command: str) -> tuple[int, str]:
            ended = subprocess.run(command, cwd=work, env=pinned, capture_output=True, text=True)
            print(f"$ {' '.join(command[1:])}\n{ended.stdout}{ended.stderr}", flush=True)
            return ended.returncode, ended.stdout + ended.stderr

        code, text = said(run[0], "train.py", *OPTIONAL)
        if code:
            problems.append("a training of one's own fails")
        for line in (
            "TensorBoard is not installed, so no curves are written; run pip install "
            "'multi-gpu-training[tensorboard]'",
            "metrics.png is not written: matplotlib is not installed; run pip install "
            "'multi-gpu-training[plots]'",
        ):
            if text.count(line) != 1:
                problems.append(f"said {text.count(line)} times: {line}")
        code, text = said(str(work / "venv" / "bin" / "mgt"), "train", "image", "--epochs", "1")
        if code == 0 or "pip install 'multi-gpu-training[image]'" not in text:
            problems.append("mgt train image does not say what to install")
        if "Traceback" in text:
            problems.append("mgt train image ends with a traceback")
    print("\n".join(problems) or "passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
