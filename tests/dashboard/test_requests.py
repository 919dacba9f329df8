"""What is asked of a run while it trains happens at one step on all ranks, and survives a stop."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from recorder import recording
from tiny import flat, line, manager_for, points, sgd, squares

from multi_gpu_training import Callback
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.report.run_record import read_run
from multi_gpu_training.monitoring.report.wording import event_rows
from multi_gpu_training.monitoring.run_requests import FOLDER, Inbox, checked, send_request
from multi_gpu_training.training.stopping import Stopped

Asked = dict[int, tuple[str, float | None]]


class Asking(Callback):
    """On the main rank, leaves requests in the folder after these steps, and waits until each is
    noticed. Other ranks wait for it in the next exchange, or at the agreed boundary."""

    def __init__(self, manager: Any, asked: Asked) -> None:
        self.manager, self.asked = manager, asked

    def on_step_end(self, run: Any, result: Any) -> None:
        if self.manager.placement.is_main and result.step in self.asked:
            action, value = self.asked.pop(result.step)
            send_request(self.manager.folder, checked(action, value, "a test"))
            deadline = time.monotonic() + 60
            while not self.manager.control.held and time.monotonic() < deadline:
                time.sleep(0.01)


class Setting(Callback):
    """Sets the rate by hand after a step, as a user's callback may."""

    def __init__(self, manager: Any, step: int, rate: float) -> None:
        self.manager, self.step, self.rate = manager, step, rate

    def on_step_end(self, run: Any, result: Any) -> None:
        if result.step == self.step:
            self.manager.trainer.optimizer.param_groups[0]["lr"] = self.rate


def train(
    folder: Path, name: str, asked: Asked, by_hand: tuple[int, float] | None = None, **more: Any
) -> tuple[list[float], list[dict[str, Any]]]:
    """Final weights, and what the events of this rank say of requests and checkpoints."""
    settings = {"epochs": 3, "global_batch_size": 4, "enable_fault_tolerance": True}
    settings |= {"schedule": "cosine", "run_name": name, "checkpoint_frequency": 1000}
    manager = manager_for(folder, **{**settings, "resume": "auto", **more})
    hooks: list[Callback] = [Asking(manager, asked)]
    if by_hand is not None:
        hooks.append(Setting(manager, *by_hand))
    model = line()
    try:
        manager.fit(model, points(64), loss_fn=squares, optimizer=sgd, callbacks=hooks)
    except Stopped as stopped:
        assert stopped.code == 143
    rank = manager.placement.identity.rank
    return flat(model).tolist(), events(manager.folder, rank)


def events(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (run / "events" / f"rank-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in found if event["event"] == kind]


def test_a_changed_rate_is_the_same_on_all_ranks_and_is_there_after_a_stop(tmp_path: Path) -> None:
    both = run_ranks(2, train, tmp_path, "asked", {5: ("set_lr", 0.02), 20: ("stop", None)})
    ours, theirs = (of_kind(found, "request") for _, found in both)
    assert [e["step"] for e in ours] == [e["step"] for e in theirs] and len(ours) == 1
    assert ours[0]["done"] and ours[0]["value"] == 0.02 and ours[0]["by"] == "a test"
    step = ours[0]["step"]
    assert 5 <= step < 20
    # The change was saved when it was made, and the stop saved again.
    saved = [e["step"] for e in of_kind(both[0][1], "checkpoint")]
    assert step in saved and saved[-1] >= 20
    assert of_kind(both[0][1], "stopped")[0]["signal"] == "a test"
    resumed = run_ranks(2, train, tmp_path, "asked", {})
    by_hand = run_ranks(2, train, tmp_path, "by-hand", {}, (step, 0.02))
    # Bit for bit: the stop, the resume and the way the rate came change nothing.
    assert resumed[0][0] == resumed[1][0] == by_hand[0][0]
    after = [e["lr"] for e in of_kind(resumed[0][1], "step") if e["step"] > step]
    assert after and max(after) <= 0.02


def test_a_run_asked_to_end_does_so_after_the_epoch_and_a_resume_goes_on(tmp_path: Path) -> None:
    asked: Asked = {3: ("set_log_every", 2), 20: ("stop_after_epoch", None), 24: ("save", None)}
    _, found = train(tmp_path, "short", asked)
    assert [e["action"] for e in of_kind(found, "request")] == [
        *("set_log_every", "stop_after_epoch", "save")
    ]
    assert of_kind(found, "run_end")[-1]["step"] == 32  # two epochs of 16 steps
    assert any(24 <= e["step"] < 32 for e in of_kind(found, "checkpoint"))
    logged = [e["step"] for e in of_kind(found, "step")]
    assert logged[-4:] == [26, 28, 30, 32]
    _, found = train(tmp_path, "short", {})
    assert of_kind(found, "run_end")[-1]["step"] == 48
    # The log interval that was asked for is part of the run.
    assert [e["step"] for e in of_kind(found, "step")][-3:] == [44, 46, 48]
    rows = event_rows(read_run(next(tmp_path.glob("*/short"))))
    assert any("set log every 2 at step" in text for _, kind, text in rows if kind == "request")


def test_recorded_steps_follow_a_rate_that_is_changed(tmp_path: Path) -> None:
    """A recording holds the Python values of its time; the rate is read from memory instead."""
    found, step = [], 0
    for name, asked in (("asked", {60: ("set_lr", 0.003)}), ("by-hand", {})):
        manager = manager_for(
            tmp_path,
            run_name=name,
            step_execution="graph",
            batch_size=8,
            epochs=5,
            schedule="cosine",
            enable_fault_tolerance=True,
        )
        model = line()
        hooks: list[Callback] = [Asking(manager, asked)]
        if name == "by-hand":
            hooks.append(Setting(manager, step, 0.003))
        with recording():
            manager.fit(model, points(200), loss_fn=squares, optimizer=sgd, callbacks=hooks)
        assert manager.trainer.execution.replayed > 60
        found.append(flat(model).tolist())
        step = max([e["step"] for e in of_kind(events(manager.folder), "request")], default=0)
    assert found[0] == found[1]


def test_what_cannot_be_done_is_refused_and_said(tmp_path: Path) -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16)

    asked: Asked = {3: ("save", None), 6: ("set_lr", 0.5), 9: ("memory_snapshot", None)}
    manager = manager_for(tmp_path, global_batch_size=4)
    manager.fit(
        line(),
        points(64),
        loss_fn=squares,
        optimizer=sgd,
        scheduler=one_cycle,
        callbacks=[Asking(manager, asked)],
    )
    said = [e["outcome"] for e in of_kind(events(manager.folder), "request")]
    assert len(said) == 3 and all(text.startswith("refused: ") for text in said)
    assert "enable_fault_tolerance is false" in said[0]
    assert "OneCycleLR sets the rate from its own numbers" in said[1]
    assert "no CUDA allocator" in said[2]
    for action, value in (("dance", None), ("set_lr", 0.0), ("set_lr", float("nan"))):
        with pytest.raises(ConfigError):
            checked(action, value, "")
    with pytest.raises(ConfigError, match="whole number"):
        checked("set_log_every", 2.5, "")


def test_requests_from_before_a_run_and_files_that_are_none_are_dropped(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, global_batch_size=4, run_name="old", recipe="r")
    folder = tmp_path / "r" / "old"
    send_request(folder, checked("stop", None, "yesterday"))
    asked: Asked = {4: ("set_log_every", 1)}
    # Read before the request, by name.
    (folder / FOLDER / "0.json").write_text('{"action": "format_disk"}')

    class Junk(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            if result.step == 2:
                (folder / FOLDER / "0.json").write_text('{"action": "format_disk"}')

    hooks = [Junk(), Asking(manager, asked)]
    manager.fit(line(), points(64), loss_fn=squares, optimizer=sgd, callbacks=hooks)
    found = events(manager.folder)
    assert [e["action"] for e in of_kind(found, "request")] == ["set_log_every"]
    assert of_kind(found, "run_end")[0]["step"] == 16
    assert not list((folder / FOLDER).glob("*.json"))


def test_a_link_in_the_place_of_requests_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.json").write_text(json.dumps({"action": "stop"}))
    run = tmp_path / "run"
    run.mkdir()
    (run / FOLDER).symlink_to(mine)
    assert Inbox(run).next() is None
    with pytest.raises(ConfigError, match="symbolic link"):
        send_request(run, checked("save", None, ""))
    assert [path.name for path in mine.iterdir()] == ["letter.json"]
