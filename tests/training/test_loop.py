"""What the loop does when validation, saving or ending goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import line, manager_for, points, sgd, squares, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from multi_gpu_training import MultiGPUTrainingManager
from multi_gpu_training.errors import CheckpointError, ConfigError, NonFiniteLossError

KEPT = {"enable_fault_tolerance": True, "run_name": "run", "epochs": 2, "batch_size": 4}


def events(manager: MultiGPUTrainingManager, kind: str) -> list[dict[str, Any]]:
    lines = manager.run.events(0).read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


class Failing:
    """An eval_fn that raises `error` the `nth` time that it is called, and measures otherwise."""

    def __init__(self, error: Exception | None, nth: int = 1) -> None:
        self.error = error
        self.calls, self.nth = 0, nth

    def __call__(self, model: nn.Module, batch: Any, metrics: Any) -> None:
        self.calls += 1
        if self.error is not None and self.calls == self.nth:
            raise self.error
        metrics.add_mean(squares(model, batch), len(batch[0]), {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a mistake"), "user_code"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
    ],
)
def test_an_error_in_the_validation_of_an_epoch_follows_the_fault_policies(
    tmp_path: Path, error: Exception, kind: str
) -> None:
    for own_loop in (False, True):
        manager = manager_for(tmp_path, **{**KEPT, "run_name": f"own-{own_loop}"})
        given = (line(), points(), points())
        with pytest.raises(type(error), match=str(error)) as raised:
            if own_loop:
                _, loader, _ = manager.setup_training(*given, optimizer=sgd, eval_fn=Failing(error))
                try:
                    manager.train_epoch(loader, 0)
                    manager.validate_epoch()
                finally:
                    manager.finish()
            else:
                manager.fit(*given, optimizer=sgd, eval_fn=Failing(error))
        assert [fault["kind"] for fault in events(manager, "fault")] == [kind]
        assert "step 4" in raised.value.__notes__[-1] or "step 5" in raised.value.__notes__[-1]
        if kind == "out_of_memory":
            assert "lower batch_size" in raised.value.__notes__[0]
        del error.__notes__


def trained(folder: Path, eval_fn: Failing) -> tuple[dict[str, Tensor], list[Any]]:
    settings = {**KEPT, "epochs": 3, "on_nonfinite": "rollback"}
    manager = manager_for(folder, **settings)
    model = line()
    result = manager.fit(model, points(), points(), optimizer=sgd, eval_fn=eval_fn)
    assert result.steps == 12
    return weights(model), result.history


def test_a_rollback_in_a_validation_trains_the_epoch_again_to_the_same_end(tmp_path: Path) -> None:
    expected, history = trained(tmp_path / "a", Failing(None))
    found, again = trained(tmp_path / "b", Failing(NonFiniteLossError(8, text="NaN"), nth=6))
    assert again == history
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_your_own_loop_learns_that_it_cannot_follow_a_rollback_in_a_validation(
    tmp_path: Path,
) -> None:
    manager = manager_for(tmp_path, **KEPT, on_nonfinite="rollback", checkpoint_frequency=2)
    failing = Failing(NonFiniteLossError(4, text="NaN"))
    _, loader, _ = manager.setup_training(
        line(), points(), points(), optimizer=sgd, eval_fn=failing
    )
    manager.train_epoch(loader, 0)
    with pytest.raises(CheckpointError, match="--resume auto"):
        manager.validate_epoch()
    manager.finish()


def test_a_run_inside_somebodys_except_block_ends_well(tmp_path: Path) -> None:
    try:
        raise ValueError("long ago")
    except ValueError:
        manager = manager_for(tmp_path, **KEPT)
        manager.fit(line(), points(), optimizer=sgd)
    (end,) = events(manager, "run_end")
    assert "error" not in end and end["step"] == 8


def test_a_run_that_fails_inside_somebodys_except_block_is_recorded_as_failed(
    tmp_path: Path,
) -> None:
    manager = manager_for(tmp_path, **KEPT)
    try:
        raise ValueError("long ago")
    except ValueError:
        with pytest.raises(KeyError):
            manager.fit(line(), points(), points(), eval_fn=Failing(KeyError("now")))
    (end,) = events(manager, "run_end")
    assert "now" in end["error"]


class NoRoom:
    """A state that cannot be copied to the host for the first `failures` saves."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def state_dict(self) -> dict[str, Any]:
        self.failures -= 1
        return {"value": torch.ones(2, device="meta" if self.failures >= 0 else "cpu")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_state_that_cannot_be_copied_follows_on_save_failure(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **KEPT, checkpoint_frequency=2)
    result = manager.fit(line(), points(), optimizer=sgd, states={"large": NoRoom(1)})
    assert result.steps == 8
    assert [failed["step"] for failed in events(manager, "checkpoint_failed")] == [2]
    assert events(manager, "checkpoint")[0]["step"] == 4

    stopping = manager_for(tmp_path, **{**KEPT, "run_name": "stop"}, on_save_failure="stop")
    with pytest.raises(CheckpointError, match="could not copy"):
        stopping.fit(line(), points(), optimizer=sgd, states={"large": NoRoom(1)})


def test_the_last_state_is_copied_once_more_and_then_lost_aloud(tmp_path: Path) -> None:
    settings = {**KEPT, "epochs": 1}
    manager = manager_for(tmp_path, **settings)
    manager.fit(line(), points(), optimizer=sgd, states={"large": NoRoom(1)})
    assert (manager.run.checkpoints / "step-00000004" / "manifest.json").exists()

    lost = manager_for(tmp_path, **{**settings, "run_name": "lost"})
    with pytest.raises(CheckpointError, match="could not copy step 4"):
        lost.fit(line(), points(), optimizer=sgd, states={"large": NoRoom(100)})


def test_a_save_that_is_waited_for_says_that_the_state_could_not_be_copied(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **KEPT)
    manager.setup_training(line(), points(), optimizer=sgd, states={"large": NoRoom(1)})
    with pytest.raises(CheckpointError, match="could not copy"):
        manager.save_checkpoint()
    assert manager.save_checkpoint().exists()
    manager.finish()


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_an_empty_validation_is_refused_and_not_replaced_by_the_training(tmp_path: Path) -> None:
    manager = manager_for(tmp_path, **KEPT)
    with pytest.raises(ConfigError, match="the validation gave no metric"):
        manager.fit(line(), points(), Nothing(), optimizer=sgd)
    assert not events(manager, "epoch")


def test_reduce_on_plateau_says_what_to_do_without_a_loss(tmp_path: Path) -> None:
    def named(model: nn.Module, batch: Any, metrics: Any) -> None:
        metrics.add("distance", 1.0, 1)

    manager = manager_for(tmp_path, **KEPT)
    with pytest.raises(ConfigError, match=r"gave only distance; let eval_fn add a `loss`"):
        manager.fit(
            line(), points(), points(), optimizer=sgd, scheduler=ReduceLROnPlateau, eval_fn=named
        )


def test_what_was_learned_about_memory_leaves_with_a_run_that_ends_well(tmp_path: Path) -> None:
    settings = {**KEPT, "epochs": 1}
    manager = manager_for(tmp_path, **settings)
    manager.setup_training(line(), points(), optimizer=sgd)
    hint = manager.folder / "memory.json"
    with pytest.raises(torch.OutOfMemoryError):
        try:
            manager.fault_tolerance.handle_error(torch.OutOfMemoryError("too much"))
        finally:
            manager.finish()
    assert hint.exists()  # for the ranks that are started again
    again = manager_for(tmp_path, **settings, resume="auto")
    again.fit(line(), points(), optimizer=sgd)
    assert again.trainer.oom.parts == 2 and not hint.exists()


def together(folder: Path) -> tuple[int, list[float], list[str]]:
    """Two ranks: the first save is missed, and the third validation goes back once."""
    settings = {**KEPT, "epochs": 3, "on_nonfinite": "rollback", "training_mode": "ddp"}
    manager = manager_for(folder, **settings)
    model = line()
    failing = Failing(NonFiniteLossError(6, text="NaN"), nth=5)
    states = {"large": NoRoom(1)}
    manager.fit(model, points(), points(), optimizer=sgd, eval_fn=failing, states=states)
    said = [fault["action"] for fault in events(manager, "fault")]
    return manager.step, weights(model)["weight"].flatten().tolist(), said


def test_ranks_agree_on_a_missed_save_and_on_a_rollback_in_a_validation(tmp_path: Path) -> None:
    (step, one, said), (other_step, other, _) = run_ranks(2, together, tmp_path)
    assert step == other_step == 6 and one == other
    assert said == ["rollback"]
