"""Models that a script trained, from the shell: what is recorded, found, imported and exported."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Said, mgt_here
from tiny import line, points, quiet, sgd, squares
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import multi_gpu_training as mgt_package
from multi_gpu_training.errors import CheckpointError

Mgt = Callable[..., Said]
NETS = """
from pathlib import Path
from torch import nn

Path("imported").touch()

class Net(nn.Module):
    def __init__(self, width, outputs=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Linear(width, outputs))

    def forward(self, points):
        return self.layers(points)
"""


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    np.save("x.npy", points(2).tensors[0].numpy())
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The user's module, which only a script in its folder can import."""
    (tmp_path / "own_nets.py").write_text(NETS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as script:
        script.syspath_prepend(tmp_path)
        import own_nets  # type: ignore[import-not-found]
    (tmp_path / "imported").unlink()
    sys.modules.pop("own_nets")
    yield own_nets
    sys.modules.pop("own_nets", None)


def three_targets() -> TensorDataset:
    inputs = points().tensors[0]
    return TensorDataset(inputs, inputs[:, :3])


def fit(folder: Path, model: Any, data: Any = None, **more: Any) -> Path:
    settings = {"enable_fault_tolerance": True, "training_mode": "single", "run_name": "own"}
    manager = mgt_package.MultiGPUTrainingManager(quiet(folder, **settings))
    return manager.fit(model, data or points(), optimizer=sgd, **more).folder


def described(run: Path) -> dict[str, Any]:
    file = run / "checkpoints" / "best" / "model.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def test_trust_finds_the_model_in_the_folder_of_the_script(
    mgt: Mgt, nets: Any, tmp_path: Path
) -> None:
    run = fit(tmp_path, functools.partial(nets.Net, width=5), three_targets())
    refused = mgt("predict", run, "x.npy")
    assert refused.code == 2 and "--trust" in refused.err
    assert str(tmp_path) not in sys.path and not Path("imported").exists()
    said = mgt("predict", run, "x.npy", "--trust")
    assert said.code == 0 and Path("imported").exists()
    assert sys.path[-1] == str(tmp_path)  # behind what is installed
    [row] = [text for text in said.out.splitlines() if "x.npy:0" in text]
    values = nets_output(run, nets)
    assert f"[{', '.join(f'{value:.4g}' for value in values)}]" in row


def nets_output(run: Path, nets: Any) -> list[float]:
    loaded = mgt_package.load(run, device="cpu", model=nets.Net)
    found: list[float] = loaded.predict(list(points(2).tensors[0]))[0]["output"]
    return found


def test_a_model_that_cannot_be_imported_is_told_where_to_start(
    mgt: Mgt, nets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fit(tmp_path / "there", functools.partial(nets.Net, width=5), three_targets())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    said = mgt("export", run, "--to", "safetensors", "--trust")
    assert said.code == 2 and "start in the folder that holds 'own_nets'" in said.err


def test_a_long_output_is_shortened_in_the_table(mgt: Mgt, nets: Any, tmp_path: Path) -> None:
    wide = functools.partial(nets.Net, width=5, outputs=1000)
    run = fit(tmp_path, wide, TensorDataset(points().tensors[0], torch.zeros(16, 1000)))
    said = mgt("predict", run, "x.npy", "--trust")
    [row] = [text for text in said.out.splitlines() if "x.npy:0" in text]
    assert ", ... 1,000 in all]" in row and len(row) < 160


@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_model_of_the_script_itself_is_told_to_move(
    mgt: Mgt, tmp_path: Path, command: str
) -> None:
    class Net(nn.Linear):
        pass

    run = fit(tmp_path, functools.partial(Net, 4, 1))
    words = ["x.npy"] if command == "predict" else ["--to", "safetensors"]
    said = mgt(command, run, *words, "--trust")
    text = " ".join(said.err.split())
    assert said.code == 2 and "move Net into a module such as nets.py" in text
    assert "fit(partial(Net, in_features=4, out_features=1), ...)" in text


def test_evaluating_a_script_says_that_its_data_are_its_own(mgt: Mgt, tmp_path: Path) -> None:
    said = mgt("evaluate", fit(tmp_path, line()))
    assert said.code == 2 and "call manager.evaluate(data) in it" in said.err


# What is recorded


def test_a_partial_description_adds_to_what_is_recorded(tmp_path: Path) -> None:
    maker = functools.partial(small_net, width=3)
    found = described(fit(tmp_path / "a", maker, description={"labels": ["y"]}))
    assert found["model"].endswith(":small_net") and found["arguments"] == {"width": 3}
    assert found["labels"] == ["y"] and found["inputs"][0]["shape"] == ["batch", 4]
    other = {"model": "os:mkdir", "inputs": []}
    found = described(fit(tmp_path / "b", maker, description=other))
    assert found == {"format": 1, **other}  # arguments of small_net would not be those of mkdir


def small_net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))


def test_inputs_are_recorded_from_the_first_batch_and_are_enough_to_export(
    mgt: Mgt, nets: Any, tmp_path: Path
) -> None:
    run = fit(tmp_path, functools.partial(nets.Net, width=5), three_targets())
    wanted = {"name": "points", "dtype": "float32", "shape": ["batch", 4]}
    assert described(run)["inputs"] == [wanted]
    said = mgt("export", run, "--to", "torch-export", "--out", "kept", "--trust")
    assert said.code == 0, said.err
    assert json.loads(Path("kept/schema.json").read_text())["inputs"][0]["shape"] == ["batch", 4]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * rest[0]
        return found


def test_several_inputs_get_their_types_and_names(tmp_path: Path) -> None:
    x, y = points().tensors
    run = fit(tmp_path, TwoInputs, TensorDataset(x, torch.ones(16, 1, dtype=torch.int32), y))
    inputs = described(run)["inputs"]
    assert [(one["name"], one["dtype"]) for one in inputs] == [
        ("x", "float32"),
        ("input1", "int32"),
    ]


def test_a_config_of_nonsense_does_not_stop_an_evaluation(mgt: Mgt, tmp_path: Path) -> None:
    run = fit(tmp_path, line())
    (run / "config.yaml").write_text("recipe: [image]\n")
    said = mgt("evaluate", run)
    assert said.code == 2 and "Traceback" not in said.err


def _collate(samples: Any) -> Any:
    return default_collate(samples)


def _as_float(batch: Any, random: Any) -> Any:
    return batch[0].float(), batch[1]


def _noise(batch: Any, random: Any) -> Any:
    return batch[0] + random.normal(4), batch[1]


@pytest.mark.parametrize(
    ("data", "more", "known"),
    [
        (points(), {}, True),
        (points(), {"augment": _noise}, True),
        # The loss function may do anything before it calls the model.
        (points(), {"loss_fn": squares}, False),
        # It may pad each batch to another length.
        (DataLoader(points(), batch_size=4, collate_fn=_collate), {}, False),
        # What changes the form may change it to another one in the next batch.
        (
            TensorDataset(points().tensors[0].double(), points().tensors[1]),
            {"augment": _as_float},
            False,
        ),
    ],
    ids=["plain", "augment", "loss_fn", "collate_fn", "other form"],
)
def test_inputs_are_recorded_only_where_they_are_known(
    tmp_path: Path, data: Any, more: dict[str, Any], known: bool
) -> None:
    assert ("inputs" in described(fit(tmp_path, line(), data, **more))) is known


def test_without_known_inputs_the_export_says_how_to_give_them(
    mgt: Mgt, nets: Any, tmp_path: Path
) -> None:
    def own_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).mean()  # type: ignore[no-any-return]

    run = fit(tmp_path, functools.partial(nets.Net, width=5), three_targets(), loss_fn=own_loss)
    said = mgt("export", run, "--to", "torch-export", "--out", "kept", "--trust")
    text = " ".join(said.err.split())
    assert said.code == 2 and 'description={"inputs":' in text and "no loss_fn was given" in text


# What they take and give


class Pair(nn.Module):
    """Two inputs, of which the second has the type of pixels; a layer called `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.Linear(4, 2)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        found: Tensor = self.meta(x) + shift
        return found


def pairs() -> TensorDataset:
    x, _ = points().tensors
    return TensorDataset(x, torch.ones(16, 2, dtype=torch.int32), x[:, :2])


def test_two_inputs_are_given_as_a_tuple_by_name_or_in_an_npz_file(
    mgt: Mgt, tmp_path: Path
) -> None:
    run = fit(tmp_path, Pair, pairs())
    x, shift, _ = pairs().tensors
    np.savez("both.npz", shift=shift[:2].numpy(), x=x[:2].double().numpy())
    said = mgt("predict", run, "both.npz", "--format", "jsonl", "--trust")
    loaded = mgt_package.load(run, device="cpu", model=Pair)
    ways: list[Any] = [(x[0], shift[0]), {"shift": shift[0], "x": x[0]}]
    first, second = loaded.predict(ways)
    assert first == second == {"output": loaded.model(x[:1], shift[:1]).tolist()[0]}
    assert json.loads(said.out.splitlines()[0])["output"] == pytest.approx(first["output"])


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.ones((3, 4), "f4")}, "dict with x; the model takes x: float32 (4,), shift"),
        ({"x": np.ones((3, 4), "f4"), "shift": np.ones((2, 2), "i4")}, "same number of rows"),
        ({"x": np.ones((0, 4), "f4"), "shift": np.ones((0, 2), "i4")}, "has no rows; give at"),
        (
            {"x": np.ones((3, 4), "u1"), "shift": np.ones((3, 2), "i4")},
            "x holds uint8, and the model was trained on float32",
        ),
        (
            {"x": np.ones((3, 5), "f4"), "shift": np.ones((3, 2), "i4")},
            "Pair failed for samples of float32 (5,), int32 (2,)",
        ),
    ],
    ids=["missing", "rows", "none", "type", "shape"],
)
def test_inputs_that_do_not_fit_are_refused_in_one_sentence(
    mgt: Mgt, tmp_path: Path, arrays: dict[str, Any], says: str
) -> None:
    run = fit(tmp_path, Pair, pairs())
    np.savez("some.npz", **arrays)
    said = mgt("predict", run, "some.npz", "--trust")
    assert said.code == 2 and says in said.err
    assert said.err.count("\n  - ") == 1  # three samples, one reason


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None
    hidden: tuple[Tensor, ...]


class Keywords(nn.Module):
    """As models of Hugging Face: called by keyword, with an object as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.meta = nn.Linear(4, 2)

    def forward(
        self, x: Tensor, unused: Tensor | None = None, scale: Any = 1, labels: Any = None
    ) -> Output:
        hidden = x * scale
        logits = self.meta(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(logits, loss, (hidden,))


class Dicts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = points().tensors[0][index]
        return {"scale": torch.tensor([2.0]), "x": x, "labels": torch.tensor(index % 2)}


def test_a_model_called_by_keyword_is_fed_and_exported_by_the_names_of_its_inputs(
    mgt: Mgt, tmp_path: Path
) -> None:
    run = fit(tmp_path, Keywords, Dicts())
    loaded = mgt_package.load(run, device="cpu", model=Keywords)
    raw = {name: value for name, value in Dicts()[0].items() if name != "labels"}
    logits, hidden = loaded.predict([raw])[0]["output"]
    with torch.no_grad():
        assert logits == loaded.model(**{n: v[None] for n, v in raw.items()}).logits[0].tolist()
    assert hidden == (2 * raw["x"]).tolist()
    said = mgt("export", run, "--to", "torch-export", "--out", "kept", "--trust")
    assert said.code == 0, said.err
    named = json.loads(Path("kept/schema.json").read_text())["inputs"]
    assert [one["name"] for one in named] == ["scale", "x"]


class OfConfig(nn.Linear):
    def __init__(self, config: Output) -> None:
        super().__init__(4, 1)


def test_arguments_that_cannot_be_recorded_are_named(mgt: Mgt, tmp_path: Path) -> None:
    config = Output(torch.zeros(1), None, ())
    run = fit(tmp_path, functools.partial(OfConfig, config))
    said = mgt("predict", run, "x.npy", "--trust")
    assert said.code == 2 and "from config (a Output), which a checkpoint does not" in said.err


class Sized(nn.Linear):
    def __init__(self, width: int = 4) -> None:
        super().__init__(width, 1)


def test_a_model_built_with_other_arguments_is_told_how_to_load_it(
    mgt: Mgt, tmp_path: Path
) -> None:
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    run = fit(tmp_path, Sized(3), data)
    said = mgt("predict", run, "x.npy", "--trust")
    assert "fit got a built Sized; load it in Python, load(run, model=Sized(...))" in said.err
    with pytest.raises(CheckpointError, match="Give load the model that was trained"):
        mgt_package.load(run, device="cpu", model=Sized)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([{"name": "x"}], 'inputs[0] needs a shape such as ["batch", 8]'),
        ([{"name": "x", "shape": ["batch"], "dtype": "real"}], "not 'real'"),
    ],
)
def test_a_description_that_could_not_be_read_is_refused_before_training(
    tmp_path: Path, inputs: Any, says: str
) -> None:
    with pytest.raises(mgt_package.ConfigError) as refused:
        fit(tmp_path, line(), description={"inputs": inputs})
    assert says in str(refused.value)


def test_a_scripts_model_is_quantised_and_compared_on_made_up_inputs(
    mgt: Mgt, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    run = fit(tmp_path, small_net_of(3))
    words = ("compress", run, "--method", "quantize", "--trust", "--out", "small")
    refused = mgt(*words, "--max-drop", "1%")
    assert refused.code == 2 and "only the script knows the data" in refused.err
    said = mgt(*words)
    assert said.code == 0, said.err
    rows = json.loads(Path("small/compression.json").read_text())["rows"]
    assert 0 < rows[1]["metrics"]["distance"] < 0.1 and rows[1]["drop"] is None


def small_net_of(width: int) -> Callable[[], nn.Module]:
    return functools.partial(small_net, width=width)
