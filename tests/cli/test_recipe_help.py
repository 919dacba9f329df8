"""Help and shell completion that know the recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Program, mgt_here

from multi_gpu_training.recipes.option_schemas import option_schemas

Help = Callable[..., str]


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Help:
    """What `mgt WORDS --help` prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str) -> str:
        said = mgt_here(monkeypatch, capsys, *words, "--help")
        assert said.code == 0, said.err
        return said.out

    return call


@pytest.mark.parametrize("recipe", list(option_schemas()))
def test_help_after_a_recipe_shows_its_options_and_defaults(shown: Help, recipe: str) -> None:
    out = shown("train", recipe)
    for option in option_schemas()[recipe]:
        assert f"--{option.replace('_', '-')}" in out, option
    for group in ("Where it runs", "Training", f"Options of {recipe}", "Several machines"):
        assert out.count(f"─ {group} ─") == 1
    assert "--run-name" in out and "--max-steps" in out


def test_help_shows_the_recipes_own_defaults_and_the_options_of_a_configs_recipe(
    shown: Help, tmp_path: Path
) -> None:
    epochs = next(line for line in shown("train", "image").splitlines() if "--epochs" in line)
    assert "[default: 20]" in epochs
    (tmp_path / "my.yaml").write_text("recipe: speech\n")
    assert "--held-out-speaker" in shown("train", "my.yaml")
    assert "--held-out-speaker" not in shown("train") and "--run-name" in shown("train")
    assert "--held-out-speaker" in shown("bench", "speech")


COMPLETE = """
import os, sys
from multi_gpu_training.cli import main

for line in {lines!r}:
    words = line.split(" ")
    os.environ.update(_MGT_COMPLETE="complete_bash", COMP_WORDS=line)
    os.environ["COMP_CWORD"] = str(len(words) - 1)
    sys.argv = ["mgt"]
    print("?", line)
    try:
        main()
    except SystemExit:
        pass
print("? torch" if "torch" in sys.modules else "? light")
"""


def test_tab_completes_commands_recipes_options_and_values_without_torch(tmp_path: Path) -> None:
    wanted = {
        "mgt tra": {"train"},
        "mgt train sp": {"speech"},
        "mgt train multi": {"multi_gpu"},
        "mgt train speech --held": {"--held-out-speaker"},
        "mgt train speech --epochs 3 --deco": {"--decoder"},
        "mgt train speech --decoder ": {"greedy", "beam"},
        "mgt train speech --augment f": {"false"},
        "mgt bench image --image-s": {"--image-size"},
        "mgt train image --early-st": {"--early-stopping-patience"},
        "mgt launch vi": {"video"},
    }
    with Program("-c", COMPLETE.format(lines=list(wanted)), cwd=tmp_path) as program:
        assert program.end_of_run(60) == 0, program
        *answers, last = program.out.removeprefix("? ").split("\n? ")
    assert last.strip() == "light"
    got = {line: set(found) for line, *found in (answer.splitlines() for answer in answers)}
    assert got == wanted


def test_the_script_for_completion_can_be_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The shell is found by looking at the processes above, of which a test runner has none.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    said = mgt_here(monkeypatch, capsys, "--show-completion", "bash")
    assert said.code == 0 and "_MGT_COMPLETE=complete_bash" in said.out
