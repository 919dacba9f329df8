"""The kit of the tests itself: silent ranks say where they are, quick programs can compile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Program
from ranks import RankError, run_ranks
from torch.utils.data import DataLoader, Dataset


class Endless(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(600)
        return index


def wait_in_vain() -> Any:
    if dist.get_rank() == 0:
        return dist.all_reduce(torch.ones(1))
    return list(DataLoader(Endless(), num_workers=1, multiprocessing_context="fork"))


def test_ranks_that_fall_silent_show_their_stacks_and_those_of_loader_workers() -> None:
    run_ranks(2, dist.get_rank)  # they are there
    with pytest.raises(RankError) as caught:
        run_ranks(2, wait_in_vain, timeout_s=5)
    said = str(caught.value)
    assert "ranks [0, 1] of 2 fell silent in wait_in_vain" in said
    first, second = said.split("--- rank 1", 1)
    assert "in all_reduce" in first and "in wait_in_vain" in first, said
    assert "in wait_in_vain" in second and "in __getitem__" in second, said


COMPILES = """
import sys, torch
layer = torch.nn.Linear(2, 1)
torch.optim.SGD(layer.parameters(), lr=0.1).zero_grad()
assert "torch._dynamo.eval_frame" not in sys.modules, "the compiler is left out at first"
import torch._dynamo.utils as utils
assert torch._dynamo.utils is utils is sys.modules["torch._dynamo.utils"]
compiled = torch.compile(layer, backend="eager")
assert torch.equal(compiled(torch.ones(1, 2)), layer(torch.ones(1, 2)))
assert utils.counters["frames"]["ok"] == 1, utils.counters
"""


def test_a_program_that_starts_quickly_gets_the_compiler_when_it_compiles(tmp_path: Path) -> None:
    with Program("-c", COMPILES, cwd=tmp_path) as program:
        assert program.end_of_run() == 0, program
