"""Trains one case of a recipe or script for `mgt check`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from multi_gpu_training.config import TrainingMode
from multi_gpu_training.planning.bench.case import Case, Measurement
from multi_gpu_training.planning.bench.runner import Runner
from multi_gpu_training.training.footprint import ASKED, FILE
from multi_gpu_training.training.measurement import Request

# In the words of `mgt estimate`.
HOW = "train with manager.fit, manager.train_epoch or manager.trainer.train_step"


class FitRunner(Runner):
    """A runner that counts memory too; `gpu` trains single cases on that GPU."""

    gpu: int | None = None

    def request(self, case: Case, out: Path) -> Request:
        request = replace(super().request(case, out), footprint=True)
        if case.mode is TrainingMode.SINGLE and self.gpu is not None:
            request = replace(request, device_ids=[self.gpu])
        return request

    def read(self, case: Case, out: Path, code: int, text: str) -> Measurement:
        found = super().read(case, out, code, text)
        return replace(found, error=self._why_nothing()) if found.ended else found

    def _why_nothing(self) -> str:
        """Why a training that ended well was not measured."""
        what = " ".join(self.command)
        if not self.counted(ASKED):
            return (
                f"{what} ended without a MultiGPUTrainingManager, so that nothing was measured; "
                f"{HOW}"
            )
        return (
            f"{what} ended before enough steps were trained through the manager; {HOW}, for "
            f"{self.steps} steps and a few to warm up"
        )

    def counted(self, name: str = FILE) -> dict[str, Any]:
        """What the last case wrote beside its times; empty where it did not come so far."""
        try:
            text = (self.folder / f"{self.count:03d}" / name).read_text()
        except OSError:
            return {}
        found: dict[str, Any] = json.loads(text)
        return found
