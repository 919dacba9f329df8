"""`mgt compress` makes folders that load, evaluate, export and predict like the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import multi_gpu_training as mgt
from multi_gpu_training.cli.app import app
from multi_gpu_training.delivery.compression_plan import MaxDrop, read_settings
from multi_gpu_training.delivery.compression_report import pareto
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.extras import installed


def test_methods_are_read_in_a_fixed_order_and_all_mistakes_at_once() -> None:
    first, second = read_settings(["quantize:int4+distil:width=10+prune", "prune:0.3"])
    assert first.name == "distil:width=10+prune:2:4+quantize:int4"
    assert (first.student, first.prune, first.quantize) == ({"width": 10}, "2:4", "int4")
    assert second.prune == 0.3 and second.folder == "prune-0.3"
    with pytest.raises(ConfigError) as error:
        read_settings(["shrink", "prune:7", "quantize:int3", "distil:2", "prune+prune"])
    assert len(error.value.problems) == 5


def test_a_tolerance_is_a_share_or_percent() -> None:
    assert MaxDrop.read("1%").most == MaxDrop.read("0.01").most == 0.01
    assert MaxDrop.read(None).holds(5.0)
    assert not MaxDrop.read("1%").holds(0.011) and not MaxDrop.read("1%").holds(None)
    for wrong in ("1", "abc", "-1%", "nan"):
        with pytest.raises(ConfigError, match="--max-drop"):
            MaxDrop.read(wrong)


def test_the_front_holds_models_that_no_other_beats_in_both() -> None:
    assert pareto([1.0, 0.3, 0.5, 0.3, 0.1], [0.0, 2.0, 1.0, 3.0, 9.0]) == [4, 1, 2, 0]


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (installed("torchao") and installed("torch_pruning")),
    reason="the extra compress is missing",
)
def test_compressed_runs_are_used_like_runs(tmp_path: Path) -> None:
    """Also: those that lose too much are not kept, and an existing result is not overwritten."""
    runner, common = CliRunner(), ["--num-gpus", "1", "--save-dir", str(tmp_path)]
    trained = ["train", "image", "--mode", "cnn", "--epochs", "3", "--run-name", "r", *common]
    assert runner.invoke(app, trained).exit_code == 0
    run, out = tmp_path / "image" / "r", tmp_path / "small"
    words = ["compress", str(run), "--out", str(out), "--device", "cpu", "--epochs", "1"]
    methods = ["quantize:int8", "prune:2:4+quantize:int4", "prune:0.9", "distil:0.1"]
    words += [word for method in methods for word in ("--method", method)]
    result = runner.invoke(app, [*words, "--max-drop", "5%"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "compression.json").read_text())["rows"]
    original, int8, both, *poor = rows
    assert original["name"] == "float32" and original["metrics"]["accuracy"] > 0.9
    assert int8["bytes"] < 0.3 * original["bytes"] and both["bytes"] < 0.2 * original["bytes"]
    for row in poor:  # after one epoch
        assert row["drop"] > 0.05 and not row["holds"]
        assert not (out / row["name"].replace(":", "-")).exists()
    images = mgt.load(run, device="cpu").example_inputs(20)
    for row in (int8, both):
        loaded = mgt.load(row["folder"], device="cpu")
        assert loaded.evaluate() == row["metrics"]
        again = loaded.save(tmp_path / f"again-{row['name'][:3]}")
        copied = mgt.load(again, device="cpu")
        for mine, other in zip(loaded.predict(images), copied.predict(images), strict=True):
            assert mine == other
    with pytest.raises(ConfigError, match="already"):
        runner.invoke(app, words, catch_exceptions=False)
    with pytest.raises(ConfigError, match="quantised already"):
        again_words = [
            "compress",
            int8["folder"],
            "--method",
            "prune",
            "--out",
            str(tmp_path / "x"),
        ]
        runner.invoke(app, again_words, catch_exceptions=False)


@pytest.mark.engines
@pytest.mark.skipif(not installed("torchao"), reason="the extra compress is missing")
def test_layers_that_int4_does_not_fit_are_named(tmp_path: Path) -> None:
    runner, common = CliRunner(), ["--num-gpus", "1", "--save-dir", str(tmp_path)]
    sizes = ["--width", "48", "--heads", "4", "--layers", "1", "--max-steps", "2"]
    trained = ["train", "transformer", *sizes, "--run-name", "r", *common]
    assert runner.invoke(app, trained).exit_code == 0
    words = ["compress", str(tmp_path / "transformer" / "r"), "--method", "quantize:int4"]
    said = runner.invoke(app, [*words, "--device", "cpu"], catch_exceptions=False).output
    assert "int8 instead of int4 for 3 layers" in said
    assert "transformer.h.0.attn.c_attn" in said


def test_a_fine_tuning_from_another_start_is_not_continued(tmp_path: Path) -> None:
    """A second compression after --epochs, or the run itself, changed: the weights on disk are of
    another start, and would pass for what was asked for."""
    runner = CliRunner()
    trained = ["train", "image", "--mode", "cnn", "--max-steps", "8", "--run-name", "r"]
    where = ["--num-gpus", "1", "--save-dir", str(tmp_path)]
    assert runner.invoke(app, [*trained, *where]).exit_code == 0
    words = ["compress", str(tmp_path / "image" / "r"), "--method", "prune:2:4", "--device", "cpu"]
    out = tmp_path / "image" / "r-compressed"

    def compress(epochs: int) -> str:
        shutil.rmtree(out / "prune-2-4", ignore_errors=True)
        return runner.invoke(app, [*words, "--epochs", str(epochs)]).output

    assert "prune:2:4: " in compress(1)
    assert "prune:2:4: " in compress(1)  # the same again is continued
    assert "trained with another epochs" in " ".join(compress(2).split())
    marker = out / "training" / "prune-2-4-prune.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "checkpoint": "another"}))
    assert "trained with another checkpoint" in " ".join(compress(1).split())
