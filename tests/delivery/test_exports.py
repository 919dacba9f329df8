"""Exports of the five recipes give what PyTorch gives, in processes without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from trained_runs import SMALL, run_of, train

import multi_gpu_training as mgt
from multi_gpu_training.delivery.exports import export
from multi_gpu_training.recipes.speech.convolution_program import without_fourier
from multi_gpu_training.recipes.speech.speech_model import SIZES, Recogniser


@pytest.fixture(autouse=True)
def gymnasium_hides_pygames_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium sets this variable when it is imported; set here, it is taken back."""
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_recogniser_without_fourier_transforms_gives_the_same_scores(streaming: bool) -> None:
    torch.manual_seed(0)
    model = Recogniser(SIZES["small"], 29, 8000, streaming=streaming).eval()
    sound = torch.randint(-8000, 8000, (3, 5000), dtype=torch.int16)
    samples = torch.tensor([5000, 3111, 400])
    made = without_fourier(model, 9000)  # longer than what it is given
    with torch.no_grad():
        ours, lengths = model(sound, samples)
        theirs, theirs_lengths = made(sound, samples)
    assert torch.equal(lengths, theirs_lengths)
    # FFT and convolution round differently, in float32.
    assert float((ours - theirs).abs().max()) < 1e-5


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_every_recipe_trains_evaluates_predicts_loads_and_exports_alike(
    name: str, tmp_path: Path
) -> None:
    loaded = mgt.load(run_of(name), device="cpu")
    metrics = loaded.evaluate()
    if name != "ppo":  # which evaluates new episodes at its end
        for metric, value in metrics.items():
            assert value == pytest.approx(loaded.metrics[metric], rel=1e-5, abs=1e-5)
    raws = loaded.example_inputs(7)
    task = "score" if "score" in loaded.tasks else None
    results = loaded.predict(raws, task=task)
    rows = loaded.read(loaded.outputs(loaded.preprocess(raws)), raws)
    assert [row.get("label") for row in rows] == [row.get("label") for row in results]
    for to in ("safetensors", "torch-export"):
        checks = export(loaded, to, tmp_path / to, tolerance=1e-5).checks
        assert [check.batch for check in checks] == [1, 7]


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SMALL)
def test_onnxruntime_runs_every_recipe_in_batches_of_1_and_7(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    loaded = mgt.load(run_of(name), device="cpu")
    done = export(loaded, "onnx", tmp_path / "onnx", max_batch=16, tolerance=1e-4)
    assert [check.batch for check in done.checks] == [1, 7]
    schema = json.loads((tmp_path / "onnx" / "schema.json").read_text())
    assert schema["max_batch"] == 16 and len(schema["inputs"]) == len(loaded.inputs)


@pytest.mark.engines
@pytest.mark.timeout(1800)  # compiling takes a minute on a machine that does nothing else
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_package_refuses_a_batch_above_its_maximum(tmp_path: Path) -> None:
    loaded = mgt.load(run_of("image"), device="cpu")
    folder = tmp_path / "aoti"
    done = export(loaded, "aoti", folder, max_batch=8, tolerance=1e-5)
    assert done.checks[0].difference < 1e-5
    np.savez(tmp_path / "in.npz", images=np.zeros((9, 8, 8), np.uint8))
    words = [str(folder / "run.py"), str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    ended = subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True)
    assert ended.returncode == 1 and "batch is 9; this export takes 1 to 8" in ended.stderr


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_language_model_from_its_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = mgt.load(run_of("transformer"), device="cpu")
    export(loaded, "hf", tmp_path / "hf", tolerance=1e-6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = words("a file object", return_tensors="pt").input_ids
    ours = loaded.outputs((ids, torch.ones_like(ids)))[0]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours, atol=1e-6)


@pytest.mark.engines
@pytest.mark.filterwarnings("ignore")
def test_adapters_are_merged_into_the_weights_of_an_export(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    options = {"width": 32, "sequence_length": 32, "lora_rank": 4}
    loaded = mgt.load(train("transformer", tmp_path, {"max_steps": 2}, options), device="cpu")
    export(loaded, "hf", tmp_path / "hf", tolerance=1e-5)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert not any("lora" in name for name, _ in theirs.named_parameters())
    ids = torch.randint(0, 200, (3, 20))
    ours = loaded.outputs((ids, torch.ones_like(ids)))[0]
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours, atol=1e-5)


@pytest.mark.engines
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["image", "speech"])
def test_executorch_runs_cnn_and_lmu(name: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch.runtime")
    loaded = mgt.load(run_of(name), device="cpu")
    done = export(loaded, "executorch", tmp_path / "et", max_batch=8, length=None)
    assert [check.batch for check in done.checks] == [1, 7]
