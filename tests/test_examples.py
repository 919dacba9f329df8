"""The examples run, on two ranks as on one, and compute the same on both."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import Program, mgt_here, quickly
from ranks import run_ranks
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
# Arguments with which each takes a second or two, and the packages that it needs.
TINY = {
    "mnist": (["--epochs", "1", "--samples", "200"], ["sklearn"]),
    "char_gpt": (["--tiny"], []),
    "finetune_hf": (["--tiny"], ["transformers"]),
    "image_folder": (["--epochs", "1", "--batch-size", "8"], ["PIL", "sklearn"]),
    "gan": (["--tiny"], ["PIL", "sklearn"]),
    "ppo": (["--iterations", "2", "--steps", "32", "--passes", "2"], ["gymnasium"]),
    "own_loop": (["--epochs", "3"], ["sklearn"]),
    "slurm": (["--epochs", "1"], ["sklearn"]),
    "sharded_1b": (["--tiny"], ["transformers"]),
}
# The promise for float32. Adam divides by its second moment, which makes rounding larger with the
# BatchNorm of the first two, and at the large rate of the third.
CLOSE = 1e-5
CLOSE_ENOUGH = {"gan": 1e-4, "image_folder": 1e-4, "lightning": 1e-4}
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def run_example(name: str, words: list[str], folder: Path) -> str:
    """Run `python examples/NAME.py WORDS` in this rank and in `folder`; what it printed."""
    before = Path.cwd()
    output = folder / f"output-{os.environ.get('RANK', '0')}.txt"
    with (
        mock.patch.object(sys, "argv", [f"{name}.py", *words]),
        mock.patch.dict(os.environ, ON_CPU),
    ):
        try:
            os.chdir(folder)
            with output.open("w") as file, contextlib.redirect_stdout(file):
                runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            os.chdir(before)
    return output.read_text()


def on_ranks(ranks: int, name: str, words: list[str], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return run_ranks(ranks, run_example, name, words, folder)[0]


def needs(name: str) -> list[str]:
    words, packages = TINY[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:  # importing some changes the environment
            pytest.skip(f"examples/{name}.py needs {package}")
    return list(words)


def run_of(folder: Path) -> Path:
    [found] = folder.glob("runs/custom/*")
    return found


def known(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without BERT's key biases: softmax does not see them, so their gradient is rounding alone."""
    return {name: value for name, value in found.items() if not name.endswith("key.bias")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max(run_of(folder).glob("checkpoints/step-*"))
    return known(load_file(newest / "model.safetensors"))


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(
        float((value.double() - theirs[name].double()).norm() / theirs[name].double().norm())
        for name, value in ours.items()
        if value.is_floating_point() and theirs[name].any()
    )


@pytest.mark.parametrize("name", [name for name in TINY if name != "sharded_1b"])
def test_two_ranks_compute_what_one_computes(name: str, tmp_path: Path) -> None:
    words = needs(name)
    if name == "image_folder":
        from image_folders import write_images

        words += ["--data-dir", str(write_images(tmp_path / "photos"))]
    one, two = tmp_path / "one", tmp_path / "two"
    on_ranks(1, name, words, one)
    assert "2 ranks" in on_ranks(2, name, words, two)
    assert apart(weights(two), weights(one)) <= CLOSE_ENOUGH.get(name, CLOSE)


def test_two_ranks_with_parts_of_a_model_compute_what_one_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = needs("sharded_1b")
    merged = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        assert "fully_sharded" in on_ranks(ranks, "sharded_1b", words, folder)
        file = tmp_path / f"{ranks}.safetensors"
        said = mgt_here(monkeypatch, capsys, "checkpoints", "merge", run_of(folder), file)
        assert said.code == 0, said.err
        merged.append(load_file(file))
    assert apart(merged[1], merged[0]) <= CLOSE


def test_the_full_model_of_the_sharded_example_has_a_billion_parameters() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    found = runpy.run_path(str(EXAMPLES / "sharded_1b.py"))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(found["FULL"])
    assert 1.2e9 < sum(p.numel() for p in model.parameters()) < 1.3e9


def test_the_loop_continues_where_it_was_stopped(tmp_path: Path) -> None:
    needs("own_loop")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_ranks(1, "own_loop", ["--epochs", "4", "--run-name", "mine"], whole)
    on_ranks(1, "own_loop", ["--epochs", "2", "--run-name", "mine"], parts)
    words = ["--epochs", "4", "--run-name", "mine", "--resume"]
    assert "epoch 3" in on_ranks(1, "own_loop", words, parts)
    assert apart(weights(parts), weights(whole)) == 0.0


@pytest.mark.parametrize("start", [[], ["-m", "multi_gpu_training", "run", "--num-gpus", "2"]])
def test_an_example_starts_as_its_docstring_says(start: list[str], tmp_path: Path) -> None:
    words = needs("mnist")
    script = EXAMPLES / "mnist.py"
    with Program(*start, script, *words, cwd=tmp_path, env=ON_CPU) as program:
        assert program.end_of_run() == 0, program
        assert "test accuracy" in program.out
    assert run_of(tmp_path).is_dir()


def test_idx_files_are_read_plain_and_packed(tmp_path: Path) -> None:
    import gzip

    for part, count in (("train", 40), ("t10k", 20)):
        images = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        labels = bytes([0, 0, 8, 1]) + count.to_bytes(4, "big")
        images += os.urandom(count * 28 * 28)
        labels += bytes(i % 10 for i in range(count))
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    words = ["--epochs", "1", "--data-dir", str(tmp_path)]
    assert "test accuracy" in on_ranks(1, "mnist", words, tmp_path / "run")


def test_a_classifier_continues_from_a_folder_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformer_folders import tiny_bert

    texts = tmp_path / "texts.csv"
    rows = [f"text {'ab'[i % 2] * 5} {i},{('bad', 'good')[i % 2]}" for i in range(24)]
    texts.write_text("\n".join(["text,label", *rows]))
    words = ["--epochs", "1", "--length", "16", "--data", str(texts)]
    words += ["--model-dir", str(tiny_bert(tmp_path / "bert"))]
    assert "bad, good: " in on_ranks(2, "finetune_hf", words, tmp_path / "run")


# Migration: the weights that the script before the port leaves.
MIGRATION = {
    "ddp": "model.pt",
    "accelerate": "state/model.safetensors",
    "lightning": "model.ckpt",
    "hf_trainer": "model/model.safetensors",
}
# What the script before the port needs.
PEERS = {"accelerate": ["accelerate"], "lightning": ["lightning"], "hf_trainer": ["accelerate"]}


def weights_before(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run the script before the port in one process; its last weights."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [sys.executable, *(launch if kind == "ddp" else [])]
    done = subprocess.run(
        [*command, str(EXAMPLES / "migration" / f"{kind}_before.py")],
        cwd=folder,
        env={**os.environ, **ON_CPU, "OMP_NUM_THREADS": "1"},  # not quickly: others import more
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file = folder / MIGRATION[kind]
    if file.suffix == ".safetensors":
        return load_file(file)
    saved = torch.load(file, weights_only=kind == "ddp")
    return dict(saved if kind == "ddp" else saved["state_dict"])


@pytest.mark.parametrize("kind", MIGRATION)
def test_a_migrated_script_computes_the_same_on_one_and_two_ranks(
    kind: str, tmp_path: Path
) -> None:
    if kind == "hf_trainer":
        pytest.importorskip("transformers", reason="transformers is not installed")
    after = f"migration/{kind}_after"
    on_ranks(1, after, [], tmp_path / "one")
    on_ranks(2, after, [], tmp_path / "two")
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert apart(two, one) <= CLOSE_ENOUGH.get(kind, CLOSE)


@pytest.mark.parametrize("kind", MIGRATION)
def test_a_migrated_script_computes_what_it_did_before(kind: str, tmp_path: Path) -> None:
    for package in PEERS.get(kind, []):
        if importlib.util.find_spec(package) is None:  # importing Lightning changes the environment
            pytest.skip(f"{kind}_before.py needs {package}")
    before = known(weights_before(kind, tmp_path / "before"))
    on_ranks(1, f"migration/{kind}_after", [], tmp_path / "after")
    assert apart(weights(tmp_path / "after"), before) <= CLOSE_ENOUGH.get(kind, CLOSE)


def test_the_page_has_a_line_for_every_example() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    files = {path.name for path in [*EXAMPLES.glob("*.py"), *NOTEBOOKS]}
    assert set(re.findall(r"\[`([\w.]+)`\]", page)) == files
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*TINY, "search"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs(path: Path) -> None:
    code = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


# With Slurm, a kernel, several trials


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    for package in ("ipykernel", "sklearn", "matplotlib", "optuna"):
        pytest.importorskip(package, reason=f"notebooks need {package}")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    import nbformat

    book = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    # A kernel that finds itself in a test does not show what its children print.
    kept = {k: v for k, v in quickly().items() if k != "PYTEST_CURRENT_TEST"}
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=place)
    client.execute(env={**kept, **ON_CPU})
    assert list(tmp_path.glob("runs/*/*"))


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_a_search_of_trials_on_two_ranks_finds_a_best(tmp_path: Path) -> None:
    for package in ("optuna", "sklearn"):
        pytest.importorskip(package, reason=f"examples/search.py needs {package}")
    words = ["--trials", "3", "--epochs", "1", "--samples", "200", "--gpus-per-trial", "2"]
    with Program(EXAMPLES / "search.py", *words, cwd=tmp_path, env=ON_CPU) as program:
        assert program.end_of_run(within_s=400) == 0, program
        [run] = re.findall(r"its run: (.*)", program.out)
    assert (tmp_path / run / "checkpoints").is_dir()


@pytest.fixture
def slurm() -> Iterator[Any]:
    from slurm_cluster import SlurmCluster, why_not

    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm can be started here: {reason}")
    with SlurmCluster(count=2) as cluster:
        yield cluster


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_two_slurm_nodes_compute_what_one_rank_computes(slurm: Any, tmp_path: Path) -> None:
    from slurm_run import environment

    words = needs("slurm")
    one, two = tmp_path / "one", tmp_path / "two"
    on_ranks(1, "slurm", words, one)
    two.mkdir()
    mgt = [sys.executable, "-m", "multi_gpu_training", "run", "--engine", "slurm"]
    done = subprocess.run(
        [*mgt, "--nodes", "2", "--num-gpus", "1", str(EXAMPLES / "slurm.py"), *words],
        cwd=two,
        env=environment(slurm),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"n1: ranks \[\d\]\nn2: ranks \[\d\]", done.stdout)
    assert apart(weights(two), weights(one)) <= CLOSE
