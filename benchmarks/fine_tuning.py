"""Fine-tuning with the recipe's defaults against training from scratch, in the same steps.

    python benchmarks/fine_tuning.py --out fine_tuning.json

A tiny GPT-2 is taught one half of Python's documentation. Its folder is then trained on the other
half as `mgt train transformer --model FOLDER` does, and again with `--from-scratch`, for each seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.recipes.transformer.text import read_corpus


def train(place: Path, options: dict[str, Any], **settings: Any) -> Any:
    recipe = find_recipe("transformer")
    quiet = {"progress": "off", "tensorboard": False, "save_dir": str(place)}
    chosen = recipe.options(sequence_length=64, **options)
    return recipe.train(recipe.config({**quiet, **settings}, chosen), chosen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--teach", type=int, default=300, help="steps of the first training")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.teach, args.steps, args.seeds = 60, [10], 1
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        found = read_corpus(None).train
        for half in range(2):
            (place / f"{half}.txt").write_text("\n".join(found[half::2]))
        size = {"layers": 1, "width": 64, "heads": 2}
        taught = train(
            place,
            {"data_dir": str(place / "0.txt"), **size},
            max_steps=args.teach,
            device=args.device,
        )
        folder = {"data_dir": str(place / "1.txt"), "model": str(taught.folder / "model")}
        for steps in args.steps:
            for seed in range(args.seeds):
                same = {"max_steps": steps, "seed": seed, "device": args.device}
                tuned = train(place, folder, **same).metrics["loss"]
                fresh = train(place, {**folder, "from_scratch": True}, **same).metrics["loss"]
                rows.append({"steps": steps, "seed": seed, "tuned": tuned, "fresh": fresh})
    print("| steps | seed | fine-tuned | from scratch |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['steps']} | {row['seed']} | {row['tuned']:.3f} | {row['fresh']:.3f} |")
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
