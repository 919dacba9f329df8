"""Public training scripts, ported: on 1, 2 and 3 ranks they train what the originals train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

PORTS = str(Path(__file__).parents[2] / "benchmarks" / "ports")
NAMES = sorted(path.stem for path in Path(PORTS).glob("*_port.py"))


def train(name: str, folder: Path) -> Any:
    sys.path.insert(0, PORTS)
    try:
        from compare_ports import train_ported

        return train_ported(name, folder)
    finally:
        sys.path.remove(PORTS)


@pytest.mark.engines
@pytest.mark.parametrize("name", NAMES)
def test_a_ported_script_equals_the_original(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PORTS)
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")  # gymnasium sets it when it is loaded
    from compare_ports import difference, train_original

    expected = train_original(name)
    for ranks in (1, 2, 3):
        for found in run_ranks(ranks, train, name, tmp_path / str(ranks)):
            assert difference(found, expected) <= 1e-12
