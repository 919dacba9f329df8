"""One process on the CPU leaves busy cores alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import mgt_here

from multi_gpu_training.launch.cpu_threads import choose_threads
from multi_gpu_training.portability import usable_cores


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core is always one thread")
def test_one_cpu_process_computes_with_the_cores_that_are_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores, before = len(usable_cores()), torch.get_num_threads()
    quick = ("--multi-gpu", "single", "--run-name", "a", "tensorboard=false", "report=false")

    def machine(used: float) -> None:
        """All threads for torch, on a machine whose cores but one are used to `used` percent."""
        torch.set_num_threads(cores)
        busy = [0.0] + [used] * max(usable_cores())
        monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: busy)

    def threads(*words: str) -> int:
        said = mgt_here(monkeypatch, capsys, "train", "image", *quick, *words)
        assert said.code == 0 and "threads: 1" in said.out, said
        lines = (tmp_path / "runs/image/a/events/rank-0.jsonl").read_text().splitlines()
        starts: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return int([event["threads"] for event in starts if event["event"] == "rank"][-1])

    try:
        machine(100.0)
        assert threads("--max-steps", "1") == 1
        # The last bits depend on it: a resumed run keeps the number, a deterministic one is fixed.
        machine(0.0)
        assert threads("--resume", "auto", "--max-steps", "2") == 1
        machine(0.0)
        assert choose_threads(None, deterministic=False) is None
        machine(100.0)
        assert choose_threads(None, deterministic=True) is None
        monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
        assert choose_threads(None, deterministic=False) is None
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)
