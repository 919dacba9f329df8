"""Public training scripts, once as their authors wrote the loop and once with this library.

    python benchmarks/ports/compare_ports.py --out benchmarks/ports/README.md

Each `*_port.py` beside this file has `original`, which follows the public script's training and
evaluation in plain torch, and `ported`. Both train in float64 from the same weights on the same
small data, without dropout; `ported` on 1, 2 and 3 ranks. The table gives the largest relative
difference of a weight tensor and of a final metric, and the lines of both functions.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SCRIPTS = {
    "mnist_port": "pytorch/examples mnist",
    "word_language_model_port": "pytorch/examples word_language_model",
    "nanogpt_port": "nanoGPT train.py",
    "nlp_port": "accelerate nlp_example.py",
    "imagenet_port": "pytorch/examples imagenet",
    "dcgan_port": "pytorch/examples dcgan",
    "vae_port": "pytorch/examples vae",
    "time_sequence_port": "pytorch/examples time_sequence_prediction",
    "actor_critic_port": "pytorch/examples reinforcement_learning/actor_critic",
    "cv_port": "accelerate cv_example.py",
    "mingpt_port": "minGPT trainer.py",
    "gat_port": "pytorch/examples gat",
    "wgan_gp_port": "PyTorch-GAN wgan_gp.py",
    "cyclegan_port": "PyTorch-GAN cyclegan.py",
    "ddpm_port": "denoising-diffusion-pytorch",
    "sac_port": "CleanRL sac_continuous_action.py",
}


def settings(folder):
    from multi_gpu_training import MultiGPUConfig

    return MultiGPUConfig(
        device="cpu", progress="off", tensorboard=False, save_dir=str(folder), shuffle=False
    )


def train_original(name):
    module = importlib.import_module(name)
    torch.set_default_dtype(torch.float64)
    model = module.build()
    with contextlib.redirect_stdout(io.StringIO()):
        metrics = module.original(model)
    torch.set_default_dtype(torch.float32)
    return {key: value.detach() for key, value in model.state_dict().items()}, metrics


def train_ported(name, folder):
    sys.path.insert(0, str(HERE))  # a rank of a test pool
    module = importlib.import_module(name)
    torch.set_default_dtype(torch.float64)
    try:
        model = module.build()
        metrics = module.ported(model, settings(folder))
    finally:
        torch.set_default_dtype(torch.float32)
    return {key: value.detach() for key, value in model.state_dict().items()}, metrics


def difference(mine, theirs):
    """The largest relative difference of a tensor or metric."""
    (weights, metrics), (other_weights, other_metrics) = mine, theirs
    apart = [
        float((weights[key] - value).norm() / value.norm().clamp(min=1e-30))
        for key, value in other_weights.items()
        # Softmax does not see a key's bias: its gradient is rounding alone, which Adam scales up.
        if value.is_floating_point() and not key.endswith("key.bias")
    ]
    for key, value in other_metrics.items():
        apart.append(abs(metrics[key] - value) / max(abs(value), 1e-30))
    return max(apart)


def lines(function):
    source = inspect.getsource(function).splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in source)


def rank_main(name, folder):
    weights, metrics = train_ported(name, folder)
    if os.environ.get("RANK", "0") == "0":
        torch.save(weights, Path(folder) / "weights.pt")
        Path(folder, "metrics.json").write_text(json.dumps(metrics))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from multi_gpu_training import launch_distributed_training

    rows = ["| script | 1 rank | 2 ranks | 3 ranks | lines before | lines after |"]
    rows.append("|---" * 6 + "|")
    for name in arguments.only:
        expected, apart = train_original(name), []
        for ranks in (1, 2, 3):
            with tempfile.TemporaryDirectory() as folder:
                launch_distributed_training(rank_main, num_gpus=ranks, args=(name, folder))
                found = torch.load(Path(folder) / "weights.pt")
                metrics = json.loads(Path(folder, "metrics.json").read_text())
                apart.append(difference((found, metrics), expected))
        module = importlib.import_module(name)
        counted = lines(module.original), lines(module.ported)
        cells = [SCRIPTS[name], *(f"{one:.1e}" for one in apart), *map(str, counted)]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    table = "\n".join(rows)
    if arguments.out:
        text = (
            "# Public scripts, ported\n\nLargest relative difference from the original in "
            "float64, over all weight tensors and final metrics, and\nthe lines of the two "
            "functions (before: one process, no log file, no resume). CPU, torch "
            f"{torch.__version__}.\n\n    python benchmarks/ports/compare_ports.py --out "
            f"benchmarks/ports/README.md\n\n{table}\n\nBERT's key biases are left out: softmax "
            "does not see them, so their gradient is rounding alone, which Adam scales up.\n"
        )
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
