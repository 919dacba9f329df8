"""The process that compiles a step for a running training: `python -m ... STEP.pickle PARENT`.

It runs one forward and backward of the compiled step on a batch of zeros, so that torch's cache on
disk holds the code, and writes the outcome to outcome.json.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.distributed.replicas import replicate_alone
from multi_gpu_training.training.loss import read_loss
from multi_gpu_training.training.runner.compile_ahead import set_switches
from multi_gpu_training.training.runner.compiled import in_a_line


def main(path: Path, parent: int) -> None:
    die_with_parent(parent)
    os.nice(5)  # training comes first
    problem = None
    try:
        # Written by the parent into a folder that no other user can reach.
        step = pickle.loads(path.read_bytes())
        compile_step(step)
    except torch.OutOfMemoryError:
        problem = "there is not enough memory to compile beside the training"
    except Exception as error:  # whatever the compiler raises, training continues without it
        problem = in_a_line(error)
    (path.parent / "outcome.json").write_text(json.dumps({"problem": problem}))


def compile_step(step: dict[str, Any]) -> None:
    kind, index = step["device"]
    if kind == "cuda":
        torch.cuda.set_device(index or 0)
    set_switches(step["switches"])
    compiled = torch.compile(step["loss_fn"], dynamic=False)  # as `Strategy.compile` does
    module = _Step(step["model"], compiled, kind, step["autocast"])
    module.trained = step["trained"]  # DDP also sends the gradients of the loss's own parameters
    run = module if step["ddp"] is None else replicate_alone(module, step["ddp"])
    run(step["batch"]).backward()


class _Step(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, compiled: Any, kind: str, dtype: Any) -> None:
        super().__init__()
        self.model = model
        self.compiled = compiled
        self.kind = kind
        self.dtype = dtype

    def forward(self, batch: Any) -> torch.Tensor:
        device = next(self.model.parameters()).device
        with torch.autocast(self.kind, dtype=self.dtype, enabled=self.dtype is not None):
            return read_loss(self.compiled(self.model, batch), device).mean


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
