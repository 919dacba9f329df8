"""`mgt launch`: what the answers become, and the whole dialogue on a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.main import get_command

from multi_gpu_training.cli import launch_command as cli
from multi_gpu_training.cli.app import app
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.feeding import BatchSizes
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.training.learning_rate import scale_rate

ENTER, DOWN, CTRL_C = "\r", "\x1b[B", "\x03"

FOUR_GPUS = """
from multi_gpu_training import gpus
gpus.get_gpu_info = lambda: [
    dict(index=i, name="Pretended GPU", total_memory_gb=80, free_memory_gb=79,
         compute_capability="9.0", bf16=True, uuid=f"GPU-{i}") for i in range(4)]
"""
TWO_RECIPES = """
from multi_gpu_training.recipes import RECIPES
RECIPES.clear()
RECIPES.update(image="small pictures", zebra="stripes")
"""
LAUNCH = """
import sys
from multi_gpu_training.cli.launch_command import launch
sys.exit(launch({arguments}))
"""


class Terminal:
    """A Python process on a pty. Everything waits with a deadline and shows the screen."""

    def __init__(self, code: str) -> None:
        self.fd, process_end = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=process_end,
            stdout=process_end,
            stderr=process_end,
            start_new_session=True,
            env={
                **os.environ,
                "TERM": "xterm",
                "CUDA_VISIBLE_DEVICES": "",
                "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
            },
        )
        os.close(process_end)
        self.raw = b""
        self.seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)

    @property
    def screen(self) -> str:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw.decode(errors="replace"))
        return text.replace("\r", "")

    def see(self, text: str, within_s: float = 30) -> None:
        """Wait until `text` stands after what was seen before."""
        deadline = time.monotonic() + within_s
        while (found := self.screen.find(text, self.seen)) < 0:
            if not self._read(deadline):
                pytest.fail(f"never saw {text!r}; the screen is\n{self.screen}")
        self.seen = found + len(text)

    def answer(self, question: str, keys: str = ENTER) -> None:
        self.see(f"? {question}")
        os.write(self.fd, keys.encode())

    def end(self, within_s: float = 30) -> int:
        deadline = time.monotonic() + within_s
        while self._read(deadline):
            pass
        return self.process.wait(timeout=max(1.0, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        """Read on; False at the end or the deadline."""
        ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
        try:
            piece = os.read(self.fd, 65536) if ready else b""
        except OSError:  # what Linux says once the other side is closed
            return False
        self.raw += piece
        return bool(piece)


def dialogue(arguments: str, *preparations: str) -> Terminal:
    return Terminal("".join(preparations) + LAUNCH.format(arguments=arguments))


def test_enter_all_the_way_proposes_two_cpu_ranks_and_a_scaled_rate() -> None:
    recipe = find_recipe("image").config({})
    expected = cli.Answers(
        "image", cli.DDP, 2, recipe.batch_size, recipe.epochs, recipe.learning_rate, "linear"
    )
    with dialogue("'image', dry_run=True") as terminal:
        terminal.see("No GPU")
        terminal.see("Recipe: image")
        terminal.answer("Mode")
        terminal.answer("How many CPU ranks")
        terminal.answer("Batch size per CPU rank")
        terminal.answer("Epochs")
        terminal.see(f"2 CPU ranks = {2 * recipe.batch_size}")
        terminal.answer("Learning rate for a batch of")
        terminal.answer("Learning-rate scaling")
        terminal.see("0.001 x 2 = 0.002")
        terminal.see(expected.command())
        terminal.see("nothing was started")
        assert terminal.end() == 0


def test_other_answers_and_no_print_the_command_and_start_nothing() -> None:
    with dialogue("'image'", FOUR_GPUS) as terminal:
        terminal.see("Pretended GPU")
        terminal.answer("Mode", DOWN + ENTER)
        terminal.answer("How many GPUs (2 to 4)", "9" + ENTER)
        terminal.see("9 is not a whole number from 2 to 4")
        os.write(terminal.fd, b"\x7f3\r")
        terminal.answer("Batch size per GPU", "64" + ENTER)
        terminal.answer("Epochs", "7" + ENTER)
        terminal.see("Effective batch: 64 per GPU x 3 GPUs = 192")
        terminal.answer("Learning rate for a batch of", "4e-3" + ENTER)
        terminal.answer("Learning-rate scaling", DOWN + DOWN + ENTER)
        terminal.see("Learning rate: 0.004")
        terminal.answer("Start it now?", "n")
        terminal.see("To start it later")
        terminal.see(
            "mgt train image --multi-gpu dp --num-gpus 3 --batch-size 64 --epochs 7 --lr 0.004 "
            "--lr-scaling none"
        )
        assert terminal.end() == 0


def test_yes_becomes_the_run_that_was_shown() -> None:
    # The interpreter is exchanged for echo, which says what would have been run.
    echo = "import sys, shutil\nsys.executable = shutil.which('echo')\n"
    with dialogue("", FOUR_GPUS, TWO_RECIPES, echo) as terminal:
        terminal.answer("Recipe")
        terminal.answer("Mode")
        terminal.answer("How many GPUs (1 to 4)", "2" + ENTER)
        terminal.answer("Batch size per GPU", "32" + ENTER)
        terminal.answer("Epochs", "10" + ENTER)
        terminal.answer("Learning rate", "1e-3" + ENTER)
        terminal.answer("Learning-rate scaling")
        arguments = (
            "train image --multi-gpu ddp --num-gpus 2 --batch-size 32 --epochs 10 --lr 0.001 "
            "--lr-scaling linear"
        )
        terminal.see(f"mgt {arguments}")
        terminal.answer("Start it now?", "y")
        terminal.see(f"-m multi_gpu_training {arguments}")
        assert terminal.end() == 0


def test_ctrl_c_leaves_with_130_and_starts_nothing() -> None:
    with dialogue("'image'") as terminal:
        terminal.answer("Mode", DOWN + ENTER)  # past DP, which needs GPUs
        terminal.answer("Batch size per CPU rank", "12" + CTRL_C)
        terminal.see("Cancelled; nothing was started.")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.screen


def test_without_a_terminal_it_says_what_to_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH.format(arguments="")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
    assert "mgt train image --multi-gpu ddp --num-gpus 2" in done.stderr
    assert done.stdout == ""


def test_an_unknown_recipe_is_named_before_any_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_is_terminal", lambda stream: True)
    assert cli.launch("imagge") == 2
    assert "did you mean 'image'?" in capsys.readouterr().err


def test_answers_become_the_command() -> None:
    assert cli.Answers().command() == (
        "mgt train image --multi-gpu ddp --num-gpus 2 --batch-size 32 --epochs 10 --lr 0.001 "
        "--lr-scaling linear"
    )


def test_a_single_device_needs_no_count() -> None:
    arguments = cli.Answers(mode=cli.SINGLE, ranks=1).arguments()
    assert arguments[:4] == ["train", "image", "--multi-gpu", "single"]
    assert "--num-gpus" not in arguments


def test_every_mode_is_understood_by_the_config() -> None:
    """The launcher asks for all but `auto`, which is for those who do not want to be asked."""
    assert {TrainingMode(name): mode for mode, name in cli.SHORT_NAMES.items()} == {
        mode: mode for mode in TrainingMode if mode is not TrainingMode.AUTO
    }


def test_no_digit_of_the_rate_is_lost() -> None:
    assert "0.00012345678" in cli.Answers(learning_rate=1.2345678e-4).arguments()


@pytest.mark.parametrize("rule", ["linear", "sqrt", "none"])
def test_the_rate_shown_is_the_rate_trained_with(rule: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    config = MultiGPUConfig(batch_size=32, lr_scaling=rule)
    trained = scale_rate(optimizer, config, 128)
    shown = cli.scaling(rule, 32, 128, 0.01)
    assert shown == trained
    assert shown.rate == optimizer.param_groups[0]["lr"]
    choices = {choice.value: str(choice.title) for choice in cli.scaling_choices(32, 128, 0.01)}
    assert f"{shown.rate:.4g}" in choices[rule]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (BatchSizes(32, 1, 2, 64), "32 per GPU x 2 GPUs = 64"),
        (BatchSizes(32, 1, 1, 32), "32 per GPU x 1 GPU = 32"),
        (BatchSizes(16, 2, 8, 256), "16 per GPU x 8 GPUs x 2 accumulated = 256"),
        (BatchSizes(34, 1, 3, 100), "34 per GPU x 3 GPUs -> 100"),
    ],
)
def test_the_effective_batch_is_spelled_out(sizes: BatchSizes, text: str) -> None:
    assert cli.batch_text(sizes, "GPU") == f"Effective batch: {text}"


def pretended_recipe(**defaults: Any) -> Any:
    return SimpleNamespace(config=lambda given: MultiGPUConfig(**{**defaults, **given}))


@pytest.mark.parametrize(
    ("gpus", "refused"),
    [(0, {cli.DP: "found 0"}), (1, {cli.DP: "found 1", cli.FSDP: "found 1"}), (4, {})],
)
def test_modes_that_the_machine_cannot_do_say_why(gpus: int, refused: dict[Any, str]) -> None:
    choices = cli.mode_choices(pretended_recipe(), gpus)
    assert [choice.value for choice in choices] == [cli.DDP, cli.DP, cli.SINGLE, cli.FSDP]
    disabled = {choice.value: choice.disabled for choice in choices if choice.disabled}
    assert disabled.keys() == refused.keys()
    assert all(why in str(disabled[mode]) for mode, why in refused.items())
    recommended = [choice.value for choice in choices if "(recommended" in str(choice.title)]
    assert recommended == [cli.proposed_mode(gpus)]


def test_a_mode_that_the_recipe_cannot_do_says_why() -> None:
    assert "sync_bn" in str(cli.why_not(pretended_recipe(sync_bn=True), cli.DP, 4))
    assert cli.why_not(pretended_recipe(sync_bn=True), cli.DDP, 4) is None


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "9", "1.5"])
def test_wrong_counts_are_refused_with_the_range(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number from 1 to 8"):
        cli.whole_number(1, 8)(text)


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf", ""])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        cli.rate_number(text)


def test_good_numbers_are_read() -> None:
    assert cli.whole_number()("123") == 123
    assert cli.whole_number(2, 4)(" 4 ") == 4
    assert cli.rate_number("4e-3") == 0.004


def test_every_flag_shown_is_a_flag_of_mgt_train() -> None:
    train: Any = get_command(app).commands["train"]  # type: ignore[attr-defined]
    known = {flag for parameter in train.params for flag in parameter.opts}
    assert {word for word in cli.Answers().arguments() if word.startswith("--")} <= known
