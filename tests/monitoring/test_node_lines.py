"""Several machines: each of them says where the run stands."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from pathlib import Path

import torch.distributed as dist
from ranks import run_ranks
from tiny import line, manager_for, points, sgd, squares


def train_on_two_machines(folder: str) -> str:
    """What this rank prints, where each is the only one of its machine."""
    before, said = dict(os.environ), io.StringIO()
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    try:
        with contextlib.redirect_stdout(said):
            disk = Path(folder, f"disk-{dist.get_rank()}")
            manager = manager_for(disk, training_mode="ddp", epochs=2, progress="lines")
            manager.fit(line(), points(), points(), loss_fn=squares, optimizer=sgd)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return said.getvalue()


def test_every_machine_says_where_the_run_stands_and_who_logs_the_rest(tmp_path: Path) -> None:
    main, other = run_ranks(2, train_on_two_machines, str(tmp_path))
    host = socket.gethostname()
    assert other.splitlines() == [
        f"{host}: rank 1 trains here from the start; rank 0 on {host} logs the rest",
        f"{host}: epoch 1/2 is done, step 1",
        f"{host}: epoch 2/2 is done, step 2",
        f"{host}: ended at step 2; summary and errors are in the log of rank 0",
    ]
    assert "data: 1 step per epoch\n" in main and "Val batches: 1\n" in main
    assert "trains here" not in main
