"""Whoever ends a run is named: the rank, its step and how it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Program
from ranks import run_ranks
from torch import nn

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from multi_gpu_training.errors import NonFiniteLossError

LEAVES = """
import os, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

class Leave(Callback):
    def on_step_end(self, manager, result):
        if result.step == 2 and manager.placement.dp_rank == 1:
            how = sys.argv[1]
            os._exit(0) if how == "unsaid" else sys.exit(int(how))

manager = MultiGPUTrainingManager(MultiGPUConfig(
    device="cpu", batch_size=2, epochs=5, progress="off", tensorboard=False, max_restarts=0))
manager.fit(nn.Linear(4, 1), TensorDataset(torch.ones(32, 4), torch.ones(32, 1)),
            loss_fn=lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]), callbacks=[Leave()])
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["0", "unsaid", "3"])
def test_a_rank_that_exits_in_mid_training_is_named_with_its_step(tmp_path: Path, how: str) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    words = ("-m", "multi_gpu_training", "run", "--num-gpus", 2, "leaves.py", how)
    with Program(*words, cwd=tmp_path) as program:
        code = program.end_of_run(240)
        last = program.err.rstrip().splitlines()[-1]
        assert code == (3 if how == "3" else 1), program.err
        assert "rank 1 on" in last and "step 2" in last, program.err
        assert ("exited with 3" if how == "3" else "exited with code 0") in last, program.err


def nan_on_the_last_rank(folder: Path) -> list[str]:
    config = MultiGPUConfig(
        device="cpu", batch_size=2, save_dir=str(folder), progress="off", tensorboard=False
    )
    manager = MultiGPUTrainingManager(config)
    last = manager.placement.dp_rank == manager.placement.dp_size - 1

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).mean() * (float("nan") if last else 1.0)

    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    try:
        manager.fit(nn.Linear(4, 1), data, loss_fn=loss)
    except NonFiniteLossError as error:
        return [*str(error).splitlines(), *error.__notes__]
    return ["no error"]


def test_the_last_line_of_a_nan_report_names_the_rank_with_the_nan(tmp_path: Path) -> None:
    for lines in run_ranks(2, nan_on_the_last_rank, tmp_path):
        (where,) = [line for line in lines if "step 1, run" in line]
        assert where.startswith("(rank 1"), lines
