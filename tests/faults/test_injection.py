"""An injected fault strikes at its rank, step and phase, once in a run, and is survived."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import torch
from faults.kit import PATIENCE_S, Forked
from ranks import run_ranks
from tiny import line, manager_for, points, sgd, squares, watching, weights

from multi_gpu_training.checkpoint import durable
from multi_gpu_training.errors import ConfigError, NonFiniteLossError
from multi_gpu_training.faults.injection import (
    EXIT_CODE,
    InjectedFault,
    Injection,
    Phase,
    fail_at,
    injected,
)

# Sixteen points in batches of four: four steps an epoch, a checkpoint every two.
STEPS = 12
PHASES = get_args(Phase)


def train(folder: Path, *faults: Injection, loss_fn: Any = squares, **more: Any) -> Any:
    settings = {
        "training_mode": "single",
        "batch_size": 4,
        "epochs": STEPS // 4,
        "checkpoint_frequency": 2,
        "enable_fault_tolerance": True,
        "log_every": 1,
        "run_name": "it",
        "recipe": "custom",
    }
    manager = manager_for(folder, **{**settings, **more})
    model = line()
    manager.fit(model, points(), points(), loss_fn=loss_fn, optimizer=sgd, callbacks=faults)
    return weights(model)


def events(folder: Path) -> list[dict[str, Any]]:
    file = folder / "custom/it/events/rank-0.jsonl"
    return [json.loads(text) for text in file.read_text().splitlines()]


@pytest.mark.parametrize("phase", PHASES)
def test_it_strikes_once_where_it_should_and_the_run_goes_on_to_the_bit(
    tmp_path: Path, phase: Phase
) -> None:
    whole = train(tmp_path / "whole")
    fault = fail_at(rank=0, step=7, phase=phase, kind="exception")
    if phase == "saving":  # beside training, which goes on
        ours = train(tmp_path, fault)
    else:
        with pytest.raises(InjectedFault, match=f"exception in {phase} of step 7 on rank 0"):
            train(tmp_path, fault)
        done = max(e["step"] for e in events(tmp_path) if e["event"] == "step")
        # Validation comes with the end of an epoch; a step is recorded after the hooks.
        assert done == {"validation": 8}.get(phase, 6)
        again = fail_at(rank=0, step=7, phase=phase, kind="exception")
        ours = train(tmp_path, again, resume="auto")
        assert again.strikes == 0
    assert fault.strikes == 1
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


@pytest.mark.parametrize("phase", [p for p in PHASES if p not in ("validation", "saving")])
def test_numbers_that_are_made_nan_do_not_pass(tmp_path: Path, phase: Phase) -> None:
    seen: list[bool] = []
    watched = watching(lambda model, batch: bool(batch[0].isnan().any()), seen)
    fault = fail_at(rank=0, step=7, phase=phase, kind="nan")
    with pytest.raises(NonFiniteLossError):
        train(tmp_path, fault, loss_fn=watched)
    assert fault.strikes == 1
    assert seen.index(True) == 7 + 4 - 1 if phase == "input" else not any(seen)


def test_memory_that_runs_out_is_torchs_own_error(tmp_path: Path) -> None:
    fault = fail_at(rank=0, step=3, phase="backward", kind="oom")
    with contextlib.suppress(torch.OutOfMemoryError):  # a policy may deal with it
        train(tmp_path, fault)
    assert fault.strikes == 1


def test_a_full_disk_costs_one_checkpoint(tmp_path: Path) -> None:
    fault = fail_at(rank=0, step=5, phase="saving", kind="disk_full")
    train(tmp_path, fault, keep_last=10)
    lost = [e["step"] for e in events(tmp_path) if e["event"] == "checkpoint_failed"]
    kept = sorted(int(p.name[5:]) for p in (tmp_path / "custom/it/checkpoints").glob("step-*"))
    assert fault.strikes == 1 and len(lost) == 1 and lost[0] >= 5
    # Step 4 and 8 are saved twice: in their place, and at the end of the epoch.
    assert {2, 4, 10, 12} <= set(kept) <= {2, 4, 6, 8, 10, 12}


def test_a_slow_rank_is_slow_from_then_on(tmp_path: Path) -> None:
    fault = fail_at(rank=0, step=5, phase="input", kind="slow", seconds=0.001)
    train(tmp_path, fault)
    assert fault.strikes == STEPS - 4


def test_in_a_loop_of_ones_own_it_is_armed_in_its_block_alone(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, training_mode="single", batch_size=4)
    _, loader, _ = manager.setup_training(line(), points(), loss_fn=squares, optimizer=sgd)
    batch = next(iter(loader))
    fault = fail_at(rank=0, step=2, phase="input", kind="exception", times=5)
    before = list(manager.callbacks.members)
    for phase in PHASES:
        with injected(manager, fail_at(rank=0, step=9, phase=phase, kind="exception")):
            assert bool(durable.observers) == (phase == "saving")
        assert manager.callbacks.members == before and not durable.observers
    with injected(manager, fault):
        manager.trainer.train_step(batch)
        with pytest.raises(InjectedFault):
            manager.trainer.train_step(batch)
    manager.trainer.train_step(batch)
    assert fault.strikes == 1 and fault not in manager.callbacks.members
    manager.finish()


def test_plain_calls_drive_it_without_a_manager(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    record = lambda event, **fields: events.append({"event": event, **fields})  # noqa: E731
    fault = fail_at(rank=0, step=3, phase="input", kind="nan")
    assert not fault.batch_arrives(3)  # not armed yet
    fault.arm(tmp_path, record)
    assert not fault.batch_arrives(2) and not fault.forward_begins(3)
    assert fault.batch_arrives(3)
    assert not fault.batch_arrives(3)  # once
    assert events == [{"event": "injected", "fault": fault.name, "at_step": 3}]
    full = fail_at(rank=0, step=3, phase="saving", kind="disk_full")
    full.arm(tmp_path, record)
    folder = tmp_path / "checkpoints" / ".staged-step-00000004-0-x"
    full.disk_write(folder / "model.safetensors")
    full.disk_write(Path("/another/run/.staged-step-00000004-0-x/state.safetensors"))
    with pytest.raises(OSError, match="No space left"):
        full.disk_write(folder / "state.safetensors")
    full.disarm()


def count_strikes(folder: Path) -> int:
    fault = fail_at(rank=1, step=2, phase="forward", kind="slow", seconds=0)
    manager = manager_for(folder, batch_size=2, run_name="ranks")
    manager.fit(line(), points(), loss_fn=squares, optimizer=sgd, callbacks=[fault])
    return fault.strikes


def test_the_other_ranks_are_left_alone(tmp_path: Path) -> None:
    assert run_ranks(2, count_strikes, tmp_path) == [0, 3]


def test_everything_wrong_with_a_fault_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        fail_at(rank=-1, step=0, phase="lunch", kind="flood", seconds=2)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="nan means nothing in phase=saving"):
        fail_at(rank=0, step=1, phase="saving", kind="nan")


def train_with(folder: str, faults: list[dict[str, Any]], resume: str | None = None) -> None:
    ours = train(Path(folder), *(fail_at(**fault) for fault in faults), resume=resume)
    torch.save(ours, Path(folder) / "weights.pt")


@pytest.mark.parametrize(("kind", "code"), [("sigkill", 128 + signal.SIGKILL), ("exit", EXIT_CODE)])
def test_a_process_that_ends_itself(tmp_path: Path, kind: str, code: int) -> None:
    fault = {"rank": 0, "step": 3, "phase": "optimizer", "kind": kind}
    assert Forked(train_with, str(tmp_path), [fault], cwd=tmp_path).end_of_run() == code


@pytest.mark.parametrize("kind", ["sigstop", "sleep"])
def test_a_process_that_stands_still(tmp_path: Path, kind: str) -> None:
    fault = {"rank": 0, "step": 3, "phase": "forward", "kind": kind}
    run = Forked(train_with, str(tmp_path), [fault], cwd=tmp_path)
    struck = tmp_path / "custom/it/injected" / f"{kind}-in-forward-of-step-3-on-rank-0"
    process = psutil.Process(run.pid)
    wanted = psutil.STATUS_STOPPED if kind == "sigstop" else psutil.STATUS_SLEEPING
    deadline = PATIENCE_S / 0.02
    while not (struck.exists() and process.status() == wanted):
        deadline -= 1
        assert deadline and not run.ended, run
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.02)
    os.kill(run.pid, signal.SIGKILL)
    assert run.end_of_run() == 128 + signal.SIGKILL
    done = [e["step"] for e in events(tmp_path) if e["event"] == "step"]
    assert done == [1, 2]


def test_killed_in_its_first_save_and_again_and_again_it_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    def kill(step: int, phase: str) -> dict[str, Any]:
        return {"rank": 0, "step": step, "phase": phase, "kind": "sigkill"}

    faults = [kill(1, "saving"), kill(1, "input"), kill(4, "validation"), kill(5, "saving")]
    faults += [kill(7, "backward"), kill(7, "input"), kill(12, "step_end"), kill(12, "saving")]
    folder = str(tmp_path / "killed")
    codes = []
    while 0 not in codes and len(codes) <= len(faults):
        run = Forked(train_with, folder, faults, "auto", cwd=tmp_path)
        codes.append(run.end_of_run())
    # Checkpoints are written beside training: two faults may meet in one death.
    assert codes[-1] == 0 and set(codes[:-1]) == {128 + signal.SIGKILL}, run
    assert len(faults) - 2 <= len(codes) - 1 <= len(faults)
    ours, whole = torch.load(f"{folder}/weights.pt"), train(tmp_path / "whole")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
    left = [p.name for p in Path(folder, "custom/it/checkpoints").glob(".*")]
    assert left == [], "of crashed saves"
