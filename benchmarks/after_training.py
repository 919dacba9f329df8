"""Do evaluate, predict, load and the exports of the five recipes agree?

python benchmarks/after_training.py --out benchmarks/after_training.md
python benchmarks/after_training.py --recipes image,ppo --formats onnx,torch-export
python benchmarks/after_training.py --others --data DATA   other models, sizes and data
python benchmarks/after_training.py --bf16 RUN...   trained runs in bfloat16 against float32

Trains a small run of each recipe on the CPU, and then compares, on samples of the validation data:
the metrics of `evaluate` with those of the training, `predict` with the outputs of the loaded
model, and every export, run in a fresh process, with PyTorch in batches of 1 and 7. Last, 10,000
items are predicted by `mgt predict` on one rank and on two.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import multi_gpu_training as mgt
from multi_gpu_training.delivery.exports import WRITERS, export

SMALL = {
    "image": ["mode=cnn", "max_steps=60"],
    "video": ["max_steps=3", "batch_size=16", "videos=10", "width=8", "num_workers=0"],
    "speech": ["max_steps=3", "batch_size=4"],
    "transformer": ["max_steps=20", "width=64"],
    "ppo": [
        *("env=CartPole-v1", "num_envs=4", "rollout_steps=16", "total_steps=128"),
        *("hidden=32", "features=16", "eval_episodes=2"),
    ],
}
# Other models of the recipes: name, recipe, settings. {data}: folder with mnist/ and fsdd/;
# {made}: folder for what is written here.
OTHERS = [
    ("vit, colour photos", "image", [
        *("model=vit", "data_dir={made}/photos", "batch_size=16", "max_steps=10"),
    ]),
    ("resnet, colour photos", "image", ["model=resnet", "data_dir={made}/photos", "epochs=3"]),
    ("convnext, colour photos", "image", [
        *("model=convnext", "data_dir={made}/photos", "batch_size=16", "max_steps=10"),
    ]),
    ("guide, 16 frames of 48", "video", [
        *("architecture=guide", "frame_size=48", "frames=16", "width=6"),
        *("max_steps=4", "batch_size=12", "videos=12", "num_workers=0"),
    ]),
    ("streaming, batch norm, FSDD", "speech", [
        *("data_dir={data}/fsdd", "streaming=true", "norm=batch", "alphabet=data"),
        *("max_steps=20", "batch_size=8"),
    ]),
    ("bert, 3 layers", "transformer", ["task=masked", "layers=3", "width=48", "max_steps=20"]),
    ("topics, padded", "transformer", [
        *("task=classification", "layers=1", "width=96", "sequence_length=64", "max_steps=20"),
    ]),
    ("llama, grouped heads", "transformer", [
        *("model={made}/llama.json", "from_scratch=true", "tokenizer=bytes"),
        *("sequence_length=96", "max_steps=20"),
    ]),
    ("Pendulum", "ppo", [
        *("env=Pendulum-v1", "num_envs=3", "rollout_steps=20", "total_steps=240", "hidden=24"),
        *("features=12", "eval_episodes=1"),
    ]),
    ("trading, 4 assets", "ppo", [
        *("num_envs=4", "num_episodes=8", "assets=4", "episode_days=30", "market_days=400"),
        *("window=5", "features=16", "hidden=24", "batch_size=2"),
    ]),
]  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 259,
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
QUIET = ["--multi-gpu", "single", "device=cpu", "progress=off", "tensorboard=false"]
ITEMS = 10_000


def mgt_command(*words: str) -> float:
    """Run `mgt`; the seconds it took."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "multi_gpu_training", *words], check=True)
    return time.perf_counter() - started


def agreement(run: Path) -> dict[str, Any]:
    """Largest differences of metrics and predictions."""
    loaded = mgt.load(run, device="cpu")
    metrics = loaded.evaluate()
    apart = [
        abs(metrics[n] - v) / max(1, abs(v)) for n, v in loaded.metrics.items() if n in metrics
    ]
    raws = loaded.example_inputs(7)
    task = "score" if "score" in loaded.tasks else None
    results = loaded.predict(raws, task=task)
    read = loaded.read(loaded.outputs(loaded.preprocess(raws)), raws)
    return {
        "evaluate": max(apart) if apart else None,
        "predict": max(_apart(one, other) for one, other in zip(results, read, strict=True)),
    }


def _apart(one: Any, other: Any) -> float:
    """The largest difference of two results; infinite where they are not of one form."""
    if isinstance(one, dict) and one.keys() == getattr(other, "keys", set)():
        return max((_apart(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list) and len(one) == len(other):
        return max((_apart(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - other)
    return 0.0 if one == other else float("inf")


def in_bf16(run: Path, count: int) -> dict[str, Any]:
    """The loaded model in bfloat16 against float32: distance of outputs, agreement of first class.

    Of speech and text every counted frame or token is a choice, of PPO every observation.
    `rounded`: how often the first class stays where the float32 outputs are merely rounded to
    bfloat16, which is what scores in bfloat16 cannot do better than.
    """
    import torch

    loaded = mgt.load(run, device="cpu")
    half = mgt.load(run, device="cpu", dtype="bf16")
    off = norm = same = rounded = total = 0.0
    samples, _ = loaded.example_samples(count)
    for first in range(0, len(samples), 8):
        tensors = loaded.pipeline.collate(samples[first : first + 8])
        wanted = loaded.outputs(tensors)
        found = half.outputs(tensors)
        ours, theirs = wanted[0].double(), found[0].double()
        keep = torch.ones(ours.shape[:-1], dtype=torch.bool)
        if loaded.recipe == "speech":  # frames behind the end of an utterance say nothing
            keep = torch.arange(ours.shape[1]) < wanted[1][:, None]
        if loaded.recipe == "transformer" and keep.ndim > 1:  # not a score per text
            keep = tensors[1].bool()
        off += float((ours - theirs)[keep].square().sum())
        norm += float(ours[keep].square().sum())
        agree = (ours.argmax(-1) == theirs.argmax(-1))[keep]
        same, total = same + float(agree.sum()), total + agree.numel()
        close = wanted[0].bfloat16().argmax(-1) == ours.argmax(-1)
        rounded += float(close[keep].sum())
    shares = {"same": same / total, "rounded": rounded / total}
    return {"distance": (off / norm) ** 0.5, **shares, "choices": int(total)}


def many_items(run: Path, folder: Path) -> dict[str, Any]:
    """10,000 images on one rank and on two: order, outputs, duplicates."""
    from PIL import Image

    noise = np.random.default_rng(0)
    images = folder / "images"
    images.mkdir()
    for number in range(ITEMS):
        pixels = noise.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{number:05d}.png")
    found = {}
    for ranks in (1, 2):
        out = folder / f"found-{ranks}.jsonl"
        seconds = mgt_command(
            "predict", str(run), str(images), "--out", str(out), "--num-gpus", str(ranks),
            "--device", "cpu",
        )  # fmt: skip
        found[ranks] = (out.read_text(), seconds)
    names = [json.loads(line)["input"] for line in found[1][0].splitlines()]
    return {
        "items": len(names),
        "in order": names == sorted(str(path) for path in images.iterdir()),
        "duplicates": len(names) - len(set(names)),
        "equal to the last bit": found[1][0] == found[2][0],
        "seconds": {ranks: round(seconds, 1) for ranks, (_, seconds) in found.items()},
    }


def make_things(folder: Path) -> None:
    """Photos of three classes in many sizes, and the config of a Llama."""
    from PIL import Image

    noise = np.random.default_rng(0)
    for label, colour in {"red": 0, "green": 1, "blue": 2}.items():
        (folder / "photos" / label).mkdir(parents=True, exist_ok=True)
        for number in range(40):
            pixels = noise.integers(0, 120, (*noise.integers(30, 90, 2), 3), dtype=np.uint8)
            pixels[..., colour] += 100
            Image.fromarray(pixels).save(folder / "photos" / label / f"{number}.png")
    (folder / "llama.json").write_text(json.dumps(LLAMA))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(SMALL))
    parser.add_argument("--formats", default="safetensors,torch-export,onnx,aoti,hf")
    parser.add_argument("--others", action="store_true", help="other models, sizes and data")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--data", default="data", help="folder with mnist/ and fsdd/, of --others")
    parser.add_argument("--items", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--bf16", nargs="*", type=Path, help="runs to compare in bfloat16, alone")
    parser.add_argument("--samples", type=int, default=400, help="of --bf16")
    parser.add_argument("--runs", help="folder with runs RECIPE/small that are there already")
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.bf16:
        for run in given.bf16:
            found = in_bf16(run, given.samples)
            well = found["distance"] <= 2e-2 and found["same"] >= 0.995
            print(f"{run}: {found} {'holds' if well else 'MISSED'}", flush=True)
        return
    unknown = set(given.formats.split(",")) - set(WRITERS)
    assert not unknown, unknown
    formats = given.formats.split(",")
    lines = ["| recipe | model | evaluate | predict | " + " | ".join(formats) + " |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    models = [("small", name, words) for name, words in SMALL.items()]
    with tempfile.TemporaryDirectory() as place:
        base = Path(given.runs or place)
        if given.others:
            make_things(base / "made")
            models = OTHERS
        for title, name, words in models:
            if name not in given.recipes.split(",") or given.only not in title:
                continue
            run_name = re.sub("[^a-z0-9]+", "-", title.lower())
            run = base / name / run_name
            if not run.exists():
                words = [word.format(data=given.data, made=base / "made") for word in words]
                words = ["--run-name", run_name, "--save-dir", str(base), *QUIET, *words]
                mgt_command("train", name, *words)
            agreed = agreement(run)
            cells = [_figure(agreed["evaluate"]), _figure(agreed["predict"])]
            print(name, title, cells, flush=True)
            for to in formats:
                loaded = mgt.load(run, device="cpu")
                try:
                    done = export(loaded, to, Path(place) / f"{name}-{run_name}-{to}")
                    cells.append(", ".join(_figure(check.difference) for check in done.checks))
                    cells[-1] += "".join(f" ({note})" for note in done.notes if "samples" in note)
                except mgt.MultiGPUError as error:
                    cells.append(str(error).splitlines()[-1].strip(" -")[:300])
                print(name, title, to, cells[-1], flush=True)
            lines.append(f"| {name} | {title} | {' | '.join(cells)} |")
        if given.items and not given.others and "image" in given.recipes:
            lines += ["", f"mgt predict, image: {many_items(base / 'image/small', Path(place))}"]
    text = "\n".join(lines)
    print(text)
    if given.out:
        Path(given.out).write_text(text + "\n")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


if __name__ == "__main__":
    main()
