"""At the edges, too, any number of ranks computes what a plain loop computes."""

from __future__ import annotations

from pathlib import Path

import corners
import pytest
from ranks import RankError, run_ranks
from recorder import recording
from training import difference

from multi_gpu_training.errors import ConfigError


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", corners.CASES, ids=lambda case: case.__name__)
def test_it_equals_the_loop_that_everyone_writes(
    tmp_path: Path, case: corners.Case, ranks: int
) -> None:
    expected = case(tmp_path / "by hand", True)
    for found in run_ranks(ranks, corners.train, tmp_path, case.__name__):
        off = difference(found, expected)
        assert max(off.values()) <= 1e-12, off  # float64, other order of additions


@pytest.mark.parametrize(
    "case",
    [
        corners.gan,
        corners.backward_in_a_callback,
        corners.unfreeze,
        corners.add_a_group,
        corners.another_head,
        corners.complex_parameters,
        corners.rates_set_by_the_user,
        corners.dice_between_steps,
        corners.criterion_that_learns,
    ],
    ids=lambda case: case.__name__,
)
def test_recorded_steps_equal_it_too(
    tmp_path: Path, case: corners.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corners, "EPOCHS", 10)
    monkeypatch.setattr(corners, "CHANGES", (21, 30))
    expected = case(tmp_path / "by hand", True)
    with recording():
        off = difference(case(tmp_path, False), expected)
    assert max(off.values()) <= 1e-12, off


def test_what_each_rank_would_compute_from_its_part_alone_is_refused(tmp_path: Path) -> None:
    assert corners.refused_on_ranks(tmp_path / "one") == []
    for said in run_ranks(2, corners.refused_on_ranks, tmp_path):
        assert len(said) == 3
        assert "max_norm=0.5" in said[0] and "scale_grad_by_freq=True" in said[1]
        assert "fully_sharded trains those of the model alone" in said[2]


def test_a_hook_that_each_micro_batch_would_call_is_refused_on_ranks(tmp_path: Path) -> None:
    for said in run_ranks(2, corners.hook_with_accumulation, tmp_path):
        assert "a hook on the gradient of a parameter of shape (8, 6)" in said


def test_a_branch_that_only_another_rank_takes_is_named_before_ranks_wait(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"from this rank's part .*: part.weight, part.bias; if"):
        run_ranks(2, corners.branch_of_one_rank, tmp_path)


def test_a_layer_recomputed_twice_by_reentrant_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"got its gradient twice .* need use_reentrant=False"):
        run_ranks(2, corners.recomputed_twice, tmp_path)


@pytest.mark.parametrize("alone", [False, True])
def test_ranks_in_different_layers_neither_mix_statistics_nor_wait(
    tmp_path: Path, alone: bool
) -> None:
    with pytest.raises(RankError, match="ranks are in different BatchNorm layers"):
        run_ranks(2, corners.norms_of_other_domains, tmp_path, alone)


@pytest.mark.parametrize(("fault_tolerance", "said"), [(True, "complex128"), (False, "")])
def test_what_no_checkpoint_can_hold_is_refused_before_training(
    tmp_path: Path, fault_tolerance: bool, said: str
) -> None:
    assert said in corners.trained_with_checkpoints(tmp_path, fault_tolerance)


def test_a_list_of_schedulers_is_refused_with_what_joins_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ChainedScheduler"):
        corners.with_schedulers(tmp_path)
