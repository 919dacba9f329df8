"""Error codes: shown below a message, explained by `mgt explain`, and kept out of a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Said, mgt_here

from multi_gpu_training import MultiGPUConfig, errors
from multi_gpu_training.errors import CODES, ConfigError, MultiGPUError, RankFailure


def kinds(base: type[MultiGPUError] = MultiGPUError) -> list[type[MultiGPUError]]:
    return [base, *(kind for one in base.__subclasses__() for kind in kinds(one))]


@pytest.fixture
def mgt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_kind_of_error_has_a_code_that_is_explained(kind: type[MultiGPUError]) -> None:
    assert kind.code in CODES


@pytest.mark.parametrize("code", ["MGT601", "mgt601"])
def test_a_code_is_explained_in_either_case(code: str, mgt: Callable[..., Said]) -> None:
    said = mgt("explain", code)
    assert said.code == 0 and " ".join(said.out.split()) == f"MGT601 {CODES['MGT601']}"


def test_without_a_code_all_of_them_are_explained(mgt: Callable[..., Said]) -> None:
    said = " ".join(mgt("explain").out.split())
    assert all(f"{code} {text}" in said for code, text in CODES.items())


def test_an_unknown_code_is_refused_with_the_nearest(mgt: Callable[..., Said]) -> None:
    said = mgt("explain", "MGT6O1")
    assert said.code == 2 and "'MGT6O1' is not an error code; did you mean MGT601?" in said.err


def test_a_refused_command_ends_with_its_code(mgt: Callable[..., Said]) -> None:
    said = mgt("train", "image", "--batch-size", "0")
    assert said.code == 2
    assert said.err.rstrip().splitlines()[-1] == "(MGT100: run `mgt explain MGT100` for help)"


def test_the_code_of_a_quoted_message_stays() -> None:
    quoted = ConfigError("no GPU", code="MGT201").shown()
    assert RankFailure(quoted, code="MGT601").shown() == quoted


def test_a_failure_of_the_users_own_code_gets_no_code() -> None:
    assert RankFailure("ValueError: mine").shown() == "ValueError: mine"


def test_an_uncaught_error_of_a_script_ends_with_its_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from multi_gpu_training import MultiGPUConfig\nMultiGPUConfig(epochs=-1)\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.rstrip().endswith("(MGT100: run `mgt explain MGT100` for help)")


def test_the_message_itself_stays_without_a_code() -> None:
    with pytest.raises(errors.ConfigError) as found:
        MultiGPUConfig(epochs=-1)
    assert "MGT" not in str(found.value) and found.value.code == "MGT100"
