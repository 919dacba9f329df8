"""What a run writes while it trains: its folder, its events, its loggers, its uploads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.events import EventFile, StructuredLogger
from multi_gpu_training.monitoring.loggers import LoggerList
from multi_gpu_training.monitoring.run_folder import RunFolder, open_run
from multi_gpu_training.storage.uploader import Uploader, UploadPlan


@dataclass
class Records:
    """The folder of a run and what is written into it while it trains."""

    folder: RunFolder
    events: EventFile
    logger: StructuredLogger
    loggers: LoggerList
    uploader: Uploader | None = None
    upload_wait_s: float = 0.0

    def close(self) -> None:
        self.loggers.close()
        self.events.close()
        if self.uploader is not None:  # after everything is written
            self.uploader.close(self.upload_wait_s, self.logger.info)
        self.folder.close()

    def checkpoints_changed(self) -> None:
        if self.uploader is not None:
            self.uploader.wake()


def open_records(
    config: MultiGPUConfig,
    placement: Placement,
    console: Console,
    recipe_options: Mapping[str, Any],
) -> Records:
    """Choose, make and lock the run's folder, and open its events. Collective."""
    folder = open_run(config, placement, recipe_options, console.warn)
    identity = placement.identity
    events = EventFile(
        folder.events(identity.rank),
        folder.make_again,
        run=folder.path.name,
        attempt=identity.attempt,
        rank=identity.rank,
        world_size=identity.world_size,
    )
    records = Records(folder, events, StructuredLogger(console, events), LoggerList())
    if folder.url is not None and folder.hosts is not None and folder.hosts.writes:
        plan = UploadPlan(
            folder.path,
            folder.url,
            identity,
            config.keep_last,
            config.keep_best,
            config.upload_every,
            whole=placement.is_main,
        )
        records.uploader = Uploader(plan, folder.lease, records.logger)
        records.uploader.start()
        console.line(f"uploading to {folder.url}")
    return records
