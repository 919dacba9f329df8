"""A training with trackers that is killed once: `tracked_run.py FOLDER TRACKER RANKS`.

The first start ends itself with SIGKILL at step 13, after a checkpoint at step 10; started again it
resumes and finishes 20 steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny import line, manager_for, points, sgd, squares

from multi_gpu_training import Callback


class Killed(Callback):
    def __init__(self, folder: Path) -> None:
        self.mark = folder / "killed"

    def on_step_end(self, run: Any, result: Any) -> None:
        run.log(twice=2.0 * result.step)
        time.sleep(0.15)  # so that some steps reach the tracker, and some do not
        if result.step == 13 and run.placement.is_main and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, trackers: str, ranks: int) -> None:
    manager = manager_for(
        folder,
        training_mode="ddp" if ranks > 1 else "single",
        world_size=ranks if ranks > 1 else None,
        batch_size=4 // ranks,
        epochs=5,
        log_every=1,
        loggers=trackers.split(","),
        run_name="it",
        resume="auto",
        enable_fault_tolerance=True,
        checkpoint_frequency=5,
        max_restarts=0,
        report=False,
    )
    manager.fit(
        line, points(16), points(4), loss_fn=squares, optimizer=sgd, callbacks=[Killed(folder)]
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
