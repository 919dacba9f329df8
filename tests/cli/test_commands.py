"""Every command of `mgt`: what it accepts, what it says and what it leaves behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import Program, Said, mgt_here
from typer.main import get_command
from typer.testing import CliRunner

from multi_gpu_training.cli.app import app
from multi_gpu_training.cli.train_command import TrainFlags, resolve
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.planning import verify
from multi_gpu_training.planning.verify.rank_server import RankServers

Mgt = Callable[..., Said]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Mgt:
    """`mgt(*words)`, run in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(*words: object) -> Said:
        return mgt_here(monkeypatch, capsys, *words)

    return call


# Words


HELP = """
import contextlib, io, resource, sys
from multi_gpu_training.cli import main

def ask(*words):
    sys.argv = ["mgt", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    return out.getvalue()

first = ask("--help")
used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
for command in ("train", "run", "verify", "bench", "launch", "recipes", "info", "config-schema"):
    assert command in first, first
    assert "Usage" in ask(command, "--help"), command
print(used, [name for name in ("torch", "numpy", "omegaconf") if name in sys.modules])
"""


def test_help_comes_at_once_and_without_torch(tmp_path: Path) -> None:
    used = []
    for _ in range(2):  # the better of two: other programs push this one out of the caches
        with Program("-c", HELP, cwd=tmp_path) as program:
            assert program.end_of_run(60) == 0, program
            seconds, _, heavy = program.out.partition(" ")
            assert heavy.strip() == "[]", heavy
            used.append(float(seconds))
        if used[-1] < 0.5:
            return
    pytest.fail(f"mgt --help took {used} s of processor time")


def options_of(command: str) -> list[tuple[str, Any]]:
    found: Any = get_command(app).commands[command]  # type: ignore[attr-defined]
    return [
        (flag, parameter)
        for parameter in found.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("--") and flag != "--help"
    ]


@pytest.mark.parametrize("command", ["train", "run"])
def test_every_flag_may_be_written_with_dashes_and_underscores(command: str) -> None:
    found: Any = get_command(app).commands[command]  # type: ignore[attr-defined]
    seen = set()
    for flag, parameter in options_of(command):
        words = flag[2:]
        expected = not words.startswith("no-") if parameter.is_flag else "3"
        for spelling in {words.replace("_", "-"), words.replace("-", "_")}:
            value = [] if parameter.is_flag else ["3"]
            context = found.make_context(command, [f"--{spelling}", *value, "image"])
            got = context.params[parameter.name]
            got = got[0] if parameter.multiple else got
            assert got == expected or float(got) == 3, spelling
            assert not context.args, f"--{spelling} was taken for something else"
            seen.add(spelling)
    assert {"num_gpus", "num-gpus", "master_port", "share-gpu"} <= seen
    assert len(seen) > 10


def test_the_schema_lists_every_field(mgt: Mgt) -> None:
    said = mgt("config-schema")
    assert said.code == 0
    assert set(json.loads(said.out)["properties"]) >= set(MultiGPUConfig.model_fields)


def test_recipes_and_info_answer(mgt: Mgt) -> None:
    assert "image" in mgt("recipes").out
    assert "No GPU" in mgt("info").out


def test_no_command_shows_the_help(mgt: Mgt) -> None:
    said = mgt()
    assert "Usage" in said.out + said.err
    assert said.code in (0, 2)


def given(*words: str) -> MultiGPUConfig:
    """The config that `mgt train WORDS` would train with."""
    found: Any = get_command(app).commands["train"]  # type: ignore[attr-defined]
    context = found.make_context("train", list(words))
    flags = TrainFlags(context.params["target"], context.params["num_gpus"], {}, {}, context.args)
    config: MultiGPUConfig = resolve(flags)[1]
    return config


@pytest.mark.parametrize(
    ("words", "heading", "says"),
    [
        (["train", "imag"], "This run cannot start:", "unknown recipe 'imag'"),
        (["run", "nowhere.py"], "This run cannot start:", "nowhere.py: no such file"),
        (["checkpoints", "nowhere"], "This cannot be done:", "a run folder like runs/RECIPE/NAME"),
        (["report", "nowhere"], "This cannot be done:", "runs/RECIPE/NAME"),
        (["estimate", "--profile", "no.json"], "This cannot be done:", "profile no.json"),
    ],
)
def test_what_is_refused_stands_under_a_heading_that_fits(
    mgt: Mgt, words: list[str], heading: str, says: str
) -> None:
    said = mgt(*words)
    assert said.code == 2 and said.err.startswith(f"{heading}\n  - ") and says in said.err


@pytest.mark.parametrize("command", ["train", "run", "verify", "check", "bench", "estimate"])
def test_an_unknown_flag_is_no_recipe(mgt: Mgt, command: str) -> None:
    said = mgt(command, "--frob=3", "image")
    assert said.code == 2 and f"unknown flag --frob; `mgt {command} --help`" in said.err


def test_settings_can_be_flags_or_words_and_dashes_do_not_matter() -> None:
    for words in (
        ["image", "early_stopping_patience=3", "lr=2e-3"],
        ["image", "--early-stopping-patience", "3", "--learning-rate=2e-3"],
        ["image", "--early_stopping_patience=3", "training.lr=2e-3"],
    ):
        config = given(*words)
        assert (config.early_stopping_patience, config.learning_rate) == (3, 2e-3), words
    assert given("image", "--shuffle", "false", "--sync-bn").sync_bn is True
    assert given("image", "--shuffle", "false", "--sync-bn").shuffle is False


def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collects the commands that would be run once a rank, instead of running them."""
    found: list[list[str]] = []

    def note(command: list[str], plan: object) -> int:
        found.append(list(command))
        return 0

    monkeypatch.setattr("multi_gpu_training.launch.launcher.supervise", note)
    return found


def test_words_after_the_script_are_the_scripts(
    mgt: Mgt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands = launched(monkeypatch)
    (tmp_path / "train.py").touch()
    assert (
        mgt("run", "--num-gpus", 2, "train.py", "--num-gpus", 7, "--debug", "-h", "a_b").code == 0
    )
    assert mgt("run", "--num_gpus=2", "train.py", "--", "--x").code == 0
    assert commands == [
        ["train.py", "--num-gpus", "7", "--debug", "-h", "a_b"],
        ["train.py", "--x"],
    ]


@pytest.mark.parametrize("place", [0, 2, 5])
def test_debug_may_stand_anywhere(mgt: Mgt, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setenv("MGT_DEBUG", "1")  # so that it is gone after the test
    commands = launched(monkeypatch)
    words = ["train", "image", "--num-gpus", "2", "seed=5"]
    assert mgt(*words[:place], "--debug", *words[place:]).code == 0
    assert [word for word in commands[0] if word != "--debug"][-5:] == words


# A training and what is left of it

SMALL = ("--num-gpus", "1", "--save-dir", "runs", "log_every=1")


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs" / "image").iterdir()
    return found


def epochs_recorded(run: Path) -> list[int]:
    lines = (run / "events" / "rank-0.jsonl").read_text().splitlines()
    return [event["epoch"] for event in map(json.loads, lines) if event["event"] == "epoch"]


def history(run: Path) -> list[Any]:
    """The metrics of all epochs, as the newest checkpoint holds them."""
    newest = max((run / "checkpoints").glob("step-*"))
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "history" in value and "best_epoch" in value:
                found.append(value["history"])
            for item in value.values():
                look(item)
        elif isinstance(value, list):
            for item in value:
                look(item)

    look(json.loads((newest / "state.json").read_text()))
    return list(found[0])


def test_a_recipe_says_what_it_does_and_can_be_gone_on_with(mgt: Mgt, tmp_path: Path) -> None:
    said = mgt("train", "image", *SMALL, "--batch_size", 64, "epochs=2", "--mode", "cnn", "lr=2e-3")
    assert said.code == 0 and said.err == "", said.err
    for line in (
        r"^mode: distributed_data_parallel, 1 rank, device cpu, float32$",
        r"^model: \w+, [\d,]+ parameters, [\d.]+ [KM]B$",
        r"^batch: 64 per rank x 1 accumulation x 1 rank = 64 samples per step$",
        r"^learning rate: 0\.002 \(lr_scaling=none\)$",
        r"^schedule: cosine to 0 at step \d+, warm-up over \d+ steps instead of \d+ \(at most 0\.1",
        r"^Epoch 1/2 - train loss [\d.]+, acc [\d.]+% \| val loss [\d.]+, acc [\d.]+%",
        r"^Epoch 2/2 - ",
        r"^  saved best model: /.*/runs/image/[\w-]+/checkpoints/step-\d+ \(accuracy \d+\.\d\d%\)$",
        r"^curves: tensorboard --logdir /.*/runs/image/[\w-]+/tensorboard$",
    ):
        assert re.search(line, said.out, re.MULTILINE), f"{line}\n{said.out}"
    assert "\r" not in said.out and "\x1b" not in said.out, "plain lines without a terminal"

    run = only_run(tmp_path)
    assert epochs_recorded(run) == [0, 1]
    assert list((run / "tensorboard").iterdir())
    written = yaml.safe_load((run / "config.yaml").read_text())
    config = given("image", *SMALL, "batch_size=64", "epochs=2", "lr=2e-3").plain()
    assert {key: written[key] for key in config} == config
    assert written["recipe"] == "image"
    # What belongs to the recipe is part of the run as well.
    recipe, again, options = resolve(TrainFlags(str(run / "config.yaml"), None, {}, {}, []))
    assert recipe.name == "image" and again.plain() == config
    assert options.mode == "cnn"

    first = history(run)
    said = mgt("train", run / "config.yaml", "--resume", "auto", "--epochs", 3)
    assert said.code == 0 and said.err == "", said.err
    assert only_run(tmp_path) == run, "it goes on in the same folder"
    assert re.search(r"^resumed after epoch 2 of 3, step \d+, ", said.out, re.MULTILINE)
    assert re.findall(r"^Epoch (\S+) - ", said.out, re.MULTILINE) == ["3/3"]
    assert epochs_recorded(run) == [0, 1, 2]
    assert len(history(run)) == 3 and history(run)[:2] == first


def test_a_finished_run_is_not_trained_again(mgt: Mgt, tmp_path: Path) -> None:
    words = ["train", "image", *SMALL, "--epochs", "1", "--batch-size", "512", "tensorboard=false"]
    assert mgt(*words).code == 0
    said = mgt(*words, "--resume", "auto")
    assert said.code == 0, said.err
    assert epochs_recorded(only_run(tmp_path)) == [0]
    assert "tensorboard --logdir" not in said.out


def test_a_config_file_names_its_recipe_and_words_win_over_it(mgt: Mgt, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "recipe: image\nepochs: 1\nmax_steps: 9\ntraining:\n  lr: 5e-4\n  batch_size: 24\n"
        "mode: cnn\nenable_fault_tolerance: false\ntensorboard: false\n"
    )
    said = mgt("train", "mine.yaml", *SMALL, "max_steps=2")
    assert said.code == 0, said.err
    written = yaml.safe_load((only_run(tmp_path) / "config.yaml").read_text())
    assert (written["learning_rate"], written["global_batch_size"]) == (5e-4, 24)
    assert written["max_steps"] == 2
    assert "= 24 samples per step" in said.out


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Any]:
    """Starts `mgt` on a terminal of its own and gives (exit code, all that it showed)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150, 0, 0))
    shown = bytearray()

    def listen() -> None:
        # Linux answers with an error once nobody holds the other side.
        try:
            while piece := os.read(ours, 65536):
                shown.extend(piece)
        except OSError:
            pass

    def call(*words: object) -> tuple[int, str]:
        nonlocal theirs
        env = {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}
        program = Program(
            *("-m", "multi_gpu_training", *words),
            cwd=tmp_path,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        listener = threading.Thread(target=listen)
        listener.start()
        with program:
            code = program.end_of_run()
        listener.join(10)
        return code, shown.decode(errors="replace")

    yield call
    os.close(ours)


def test_on_a_terminal_two_ranks_show_one_bar_and_their_scaled_rate(terminal: Any) -> None:
    code, shown = terminal(
        *("train", "image", "--num-gpus", 2, "--batch-size", 64, "--lr-scaling", "linear"),
        *("epochs=1", "log_every=1", "base_batch_size=64", "--save-dir", "runs"),
    )
    assert code == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "2 ranks (gloo)" in plain
    assert "batch: 64 per rank x 1 accumulation x 2 ranks = 128 samples per step" in plain
    assert "learning rate: 0.001 x 2 = 0.002 (linear: 128 / 64 samples per step)" in plain
    assert re.search(r"Epoch 1/1 [━╸╺ ]+ \d+/\d+ ", plain), plain
    assert plain.count("Epoch 1/1 - train loss") == 1


# Verify

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager

generator = torch.Generator().manual_seed(3)
x = torch.randn(48, 6, generator=generator)
labels = torch.randint(0, 4, (48, 5), generator=generator)
labels[torch.rand(48, 5, generator=generator) < 0.6] = -100  # padding, unevenly spread
labels[:, 0] = 1
torch.manual_seed(0)
settings = {"batch_size": 12, "device": "cpu", "learning_rate": 0.01}
"""
GOOD = """
def loss_fn(model, batch):
    logits = model(batch[0]).view(-1, 5, 4)
    counted = (batch[1] != -100).sum()
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), counted

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 20))
"""
BATCHNORM = GOOD.replace("nn.Tanh()", "nn.BatchNorm1d(16)")
SYNCED = BATCHNORM + "settings['sync_bn'] = True\n"
NO_WEIGHT = GOOD.replace(", counted\n", "\n")
FIT = """
if __name__ == "__main__":
    MultiGPUTrainingManager(MultiGPUConfig(**settings)).fit(
        model, TensorDataset(x, labels), TensorDataset(x, labels), loss_fn=loss_fn, epochs=3)
"""


@pytest.fixture
def served_ranks(rank_servers: RankServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `mgt verify` fork its ranks from the servers of all tests."""
    monkeypatch.setattr(verify, "RankServers", lambda ranks: nullcontext(rank_servers))


@pytest.mark.parametrize(
    ("script", "code", "named"),
    [
        (GOOD, 0, "PASS"),
        (SYNCED, 0, "PASS"),
        (BATCHNORM, 1, "cause: BatchNorm (1) normalises each rank's part alone; set sync_bn=true"),
        (NO_WEIGHT, 1, "cause: the loss is not weighted"),
    ],
    ids=["correct", "synchronised", "batchnorm", "no weight"],
)
def test_verify_passes_what_is_right_and_names_what_is_not(
    mgt: Mgt, served_ranks: None, tmp_path: Path, script: str, code: int, named: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(MODEL + script + FIT)
    said = mgt("verify", path, "--ranks", "2", "--steps", 6)
    assert said.code == code, said.out + said.err
    assert named in said.out, said.out
    assert ("FAIL" in said.out) == (code == 1)
    causes = [word for word in ("BatchNorm", "not weighted") if word in said.out]
    assert causes == [word for word in ("BatchNorm", "not weighted") if word in named], said.out


def test_verify_starts_ranks_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MODEL + GOOD + FIT)
    words = ("verify", "script.py", "--ranks", 2, "--steps", 4)
    with Program("-m", "multi_gpu_training", *words, cwd=tmp_path) as program:
        assert program.end_of_run() == 0, program
        assert "PASS" in program.out
        assert "training 4 steps on 2 ranks" in program.out
        assert "one rank against a plain PyTorch loop" in program.out
        assert program.nothing_left()
    assert not (tmp_path / "runs").exists()


REPORT = """
import sys
from pathlib import Path
from multi_gpu_training.cli import main
Path("run/events").mkdir(parents=True)
Path("run/events/rank-0.jsonl").write_text(
    '{"v": 1, "run": "x", "rank": 0, "world_size": 1, "time": 1.7e9, "event": "rank", "step": 0}'
)
sys.argv = ["mgt", "report", "run"]
try:
    main()
except SystemExit as end:
    print("ended with", end.code, "torch" in sys.modules)
"""


def test_a_report_is_made_without_torch(tmp_path: Path) -> None:
    with Program("-c", REPORT, cwd=tmp_path) as program:
        assert program.end_of_run(60) == 0, program
        assert "ended with 0 False" in program.out, program


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--num-gpus", "0"), "--num-gpus 0"),
        (("--num-gpus", "1099511627776"), "--num-gpus 1099511627776"),
        (("--device", "gpu"), "--device 'gpu'"),
        (("--parallel", "0"), "--parallel 0"),
        (("--gpus-per-client", "nan"), "--gpus-per-client nan"),
    ],
    ids=str,
)
def test_a_federation_that_cannot_be_is_refused_without_flower(
    words: tuple[str, ...], named: str
) -> None:
    said = CliRunner().invoke(app, ["federated", "simulate", "image", *words])
    assert isinstance(said.exception, ConfigError) and named in str(said.exception)
