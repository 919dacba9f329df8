"""Search hyperparameters of a script from Python; every trial is an ordinary run in its own folder.

    pip install 'multi-gpu-training[search]'
    python examples/search.py                                  # one trial per GPU at a time
    python examples/search.py --gpus-per-trial 2               # every trial on two ranks
    python examples/search.py --resume                         # continue after a kill or Ctrl-C

The same from the shell:

    mgt search examples/mnist.py --epochs 3 --param learning_rate=1e-4..1e-1:log \\
        --param schedule=constant,cosine --trials 12 --metric val/accuracy

The values become fields of the script's `MultiGPUConfig`, and win over what the script sets. Do not
start this file with `mgt run`: the search starts the ranks of its trials itself.
"""

import argparse
from pathlib import Path

from multi_gpu_training.search import search


def main() -> None:
    parser = argparse.ArgumentParser(description="Search a learning rate and a schedule.")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=3, help="epochs per trial")
    parser.add_argument("--samples", type=int, default=1500, help="training samples per trial")
    parser.add_argument("--gpus-per-trial", type=int, help="without GPUs: CPU ranks")
    parser.add_argument("--folder", type=Path, default=Path("runs/search/mnist"))
    parser.add_argument("--resume", action="store_true", help="continue the search in --folder")
    args = parser.parse_args()

    ranks = {"gpus_per_trial": args.gpus_per_trial} if args.gpus_per_trial else {}
    found = search(
        str(Path(__file__).with_name("mnist.py")),
        {"learning_rate": "1e-4..1e-1:log", "schedule": ["constant", "cosine"]},
        folder=args.folder,
        metric="val/accuracy",
        words=["--epochs", str(args.epochs), "--samples", str(args.samples)],
        trials=args.trials,
        pruner="median",  # ends trials that are worse than half of the others
        seed=0,
        resume=args.resume,
        **ranks,
    )
    for trial in found.trials:
        values = ", ".join(f"{name}={value}" for name, value in trial.params.items())
        print(f"trial {trial.number}: {trial.state}, {values} -> {trial.values}")
    print(f"best: {found.best.params}, accuracy {found.best.values[0]:.2%}")
    print(f"its run: {found.folder / found.best.run}")


if __name__ == "__main__":
    main()
