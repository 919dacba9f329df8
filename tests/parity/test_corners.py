"""At the edges, too, any number of ranks computes what a plain loop computes."""

from __future__ import annotations

from pathlib import Path

import corners
import pytest
from ranks import run_ranks
from training import difference


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", corners.CASES, ids=lambda case: case.__name__)
def test_it_equals_the_loop_that_everyone_writes(
    tmp_path: Path, case: corners.Case, ranks: int
) -> None:
    expected = case(tmp_path / "by hand", True)
    for found in run_ranks(ranks, corners.train, tmp_path, case.__name__):
        off = difference(found, expected)
        assert max(off.values()) <= 1e-12, off  # float64, other order of additions
