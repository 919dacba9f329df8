"""`mgt evaluate`, `mgt predict` and `mgt export`: results, files, and errors with their remedy."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from image_folders import corrupt, write_images
from processes import Said, mgt_here
from trained_runs import run_of

import multi_gpu_training as mgt_package

Mgt = Callable[..., Said]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


def test_evaluate_shows_the_metrics_beside_those_of_the_training(mgt: Mgt) -> None:
    run = run_of("image")
    said = mgt("evaluate", run, "--json", "--device", "cpu")
    found = json.loads(said.out)
    assert said.code == 0 and found["step"] == 12
    assert found["metrics"]["accuracy"] == pytest.approx(found["in_training"]["accuracy"])
    assert "in training" in mgt("evaluate", run, "--device", "cpu").out


def test_predict_writes_a_table_jsonl_or_csv_in_the_order_of_the_inputs(
    mgt: Mgt, tmp_path: Path
) -> None:
    folder = write_images(tmp_path / "photos", per_class=2)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    run = run_of("image")
    assert "label" in mgt("predict", run, folder, "--device", "cpu").out
    mgt("predict", run, *reversed(files), "--out", "new/found.jsonl", "--device", "cpu")
    rows = [json.loads(text) for text in Path("new/found.jsonl").read_text().splitlines()]
    assert [row["input"] for row in rows] == [str(path) for path in reversed(files)]
    mgt("predict", run, *files, "--out", "found.csv", "--device", "cpu")
    with Path("found.csv").open() as file:
        again = list(csv.DictReader(file))
    assert [row["label"] for row in again] == [row["label"] for row in reversed(rows)]


def test_an_input_that_cannot_be_used_does_not_stop_the_others(mgt: Mgt, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", per_class=1)
    bad = corrupt(folder / "red" / "00.png", 0.3)
    said = mgt("predict", run_of("image"), folder, "--format", "jsonl", "--device", "cpu")
    rows = [json.loads(text) for text in said.out.splitlines() if text.startswith("{")]
    assert said.code == 1 and [("error" in row) for row in rows] == [False, False, True]
    assert "cannot be decoded" in rows[2]["error"]
    alone = mgt("predict", run_of("image"), bad, "--device", "cpu")
    assert alone.code == 2 and "give an image file such as a PNG or JPEG" in alone.err


def test_wrong_requests_end_with_one_sentence_and_its_remedy(mgt: Mgt, tmp_path: Path) -> None:
    run = run_of("image")
    photo = write_images(tmp_path / "photos", per_class=1) / "red" / "00.png"
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged, symlinks=True)
    weights = damaged / "checkpoints" / "step-00000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    int8 = tmp_path / "int8"
    int8.mkdir()
    (int8 / "model.onnx").touch()
    for words, wanted in (
        (("evaluate", int8), "holds an ONNX model, which onnxruntime runs; give the run"),
        (("evaluate", "nowhere"), "nowhere does not exist; give a run folder"),
        (("evaluate", run.parent), f"did you mean {run}?"),
        (("evaluate", damaged), "model.safetensors was changed; give another run"),
        (("evaluate", run, "--checkpoint", "step-7"), "has no step-7; it has step-00000012"),
        (("evaluate", run, "--part", "some"), "use val or all"),
        (("predict", run), "give at least one input"),
        (("predict", run, "nothing.png"), "nothing.png does not exist; give a file or a folder"),
        (("predict", run, run / "config.yaml"), "cannot be decoded"),
        (("predict", run, tmp_path, "--task", "sing"), "this image model can predict"),
        (("predict", run, tmp_path, "--format", "xml"), "use table, jsonl, csv"),
        (("predict", run, photo, "--every", "3"), "every: means nothing for the task"),
        (("predict", run, "x" * 300), "it is too long"),
        (("predict", run, photo, "--format", "csv", "--out", tmp_path), "it is a folder"),
        (("predict", run, photo, "--out", "all.xml"), "end it in .jsonl or .csv"),
        (("report", run, "--no-html", "--out", "x.html"), "drop one of them"),
        (("predict", run, photo, "--timeline", tmp_path / "no" / "a\0.csv"), "NUL"),
        (("compress", run, "--method", "prune:0.5", "--lr", "0"), "--lr 0: use a number above 0"),
        (("compress", run, "--method", "prune:0.5", "--epochs", "0"), "--epochs 0: use 1 to"),
        (("compress", run, "--method", "prune:0.5", "--out", photo), "is not a folder"),
        (("compress", run, "--method", "distil:depth=3"), "depth: the image model has no such"),
        (("serve", run, "--port", "99999999"), "--port 99999999: use 0 to 65535"),
        (("serve", run, "--allow-host", ""), "'' is not the name of a host"),
        (("export", run, "--to", "safetensors", "--length", "9"), "which any length fits"),
        (("export", run, "--to", "tflite"), "use one of onnx, torch-export"),
        (("export", run, "--to", "hf"), "is not one of transformers; use safetensors"),
        (
            ("export", run, "--to", "torch-export", "--length", "9"),
            "--length is for sound and text",
        ),
    ):
        said = mgt(*words, *(() if words[0] in ("export", "report") else ("--device", "cpu")))
        assert said.code in (1, 2) and wanted in " ".join((said.out + said.err).split()), words
    assert not Path("exports").exists() or not list(Path("exports").iterdir())


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    mgt: Mgt, monkeypatch: pytest.MonkeyPatch
) -> None:
    import multi_gpu_training.delivery.exports as exports

    monkeypatch.setattr(exports, "installed", lambda _: False)
    said = mgt("export", run_of("image"), "--to", "onnx")
    assert said.code == 2 and "pip install 'multi-gpu-training[export]'" in said.err


def test_an_export_to_safetensors_is_a_model_with_card_schema_and_hashes(
    mgt: Mgt, tmp_path: Path
) -> None:
    run = run_of("image")
    said = mgt("export", run, "--to", "safetensors", "--out", "kept", "--license", "mit", "--json")
    assert [check["difference"] for check in json.loads(said.out)["checks"]] == [0.0, 0.0]
    index = json.loads(Path("kept/export.json").read_text())
    assert set(index["files"]) == {"README.md", "model.json", "model.safetensors", "schema.json"}
    assert "license: mit" in Path("kept/README.md").read_text()
    raws = mgt_package.load(run, device="cpu").example_inputs(2)
    kept = mgt_package.load("kept", device="cpu")
    assert kept.predict(raws) == mgt_package.load(run, device="cpu").predict(raws)
    said = mgt("export", run, "--to", "safetensors", "--out", "kept")
    assert said.code == 2 and "kept already exists" in said.err
