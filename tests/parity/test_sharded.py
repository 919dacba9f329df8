"""Ranks that each hold a part of the parameters compute what a plain loop computes."""

from __future__ import annotations

from pathlib import Path

import corners
import pytest
import sharded
import torch
from ranks import RankError, run_ranks
from training import difference

# Float64; what adding in another order leaves.
LIMIT = 1e-12


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.engines) for ranks in (1, 2, 4))]
)
def test_sharded_ranks_compute_what_a_plain_loop_computes(tmp_path: Path, ranks: int) -> None:
    cases = [*sharded.CASES, corners.idle_experts]
    expected = {case.__name__: case(tmp_path / "by hand", True) for case in cases}
    for found in run_ranks(ranks, sharded.run, tmp_path, list(expected)):
        for name, weights in expected.items():
            off = difference(found[name], weights)
            assert all(value <= LIMIT for value in off.values()), (name, off)


def test_a_model_built_in_parts_starts_and_is_judged_as_on_one_rank(tmp_path: Path) -> None:
    pretrained = sharded.save_pretrained(tmp_path / "gpt2")
    assert len(list((tmp_path / "gpt2").glob("*.safetensors"))) > 1
    alone = sharded.built_in_parts(tmp_path)
    for found in run_ranks(3, sharded.built_in_parts, tmp_path):
        assert all(torch.equal(found["streamed"][n], weight) for n, weight in pretrained.items())
        for name, weight in alone["before"].items():
            assert torch.equal(found["before"][name], weight), name
        assert all(value <= LIMIT for value in difference(found["after"], alone["after"]).values())
        assert (found["outputs"] - alone["outputs"]).abs().max() <= LIMIT
        for when in ("loss before", "loss after"):
            assert abs(found[when] - alone[when]) <= LIMIT
        # One block at a time.
        assert 0 < found["most whole"] < len(alone["before"])


def test_blocks_are_compiled_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    expected = sharded.deep(True, tmp_path)
    well = run_ranks(2, sharded.compiled_blocks, tmp_path / "well", -1)
    badly = run_ranks(2, sharded.compiled_blocks, tmp_path / "badly", 1)
    # The comparison and six steps, each with a forward of three blocks.
    assert [(mode, calls) for _, mode, _, calls in well] == [("compile", 21), ("compile", 21)]
    assert [mode for _, mode, *_ in badly] == ["eager", "eager"]
    assert badly[1][2] == "it does not compile: no compiler here"
    assert [calls for *_, calls in badly] == [3, 0]
    # With noise there is nothing to compare, but still all ranks compile or none.
    noisy = run_ranks(2, sharded.compiled_blocks, tmp_path / "noisy", 1, 0.5)
    assert [mode for _, mode, *_ in noisy] == ["eager", "eager"]
    for found, *_ in (*well, *badly):
        assert all(value <= LIMIT for value in difference(found, expected).values())


def test_steps_that_cannot_be_compiled_block_by_block_say_why(tmp_path: Path) -> None:
    for reasons in run_ranks(2, sharded.compiled_otherwise, tmp_path):
        assert reasons == [
            "torch cannot compile how this model recomputes its blocks",
            "no block was found to compile; name some in fsdp_blocks",
            "sync_bn exchanges statistics inside the blocks",
        ]


def test_what_needs_whole_weights_says_so(tmp_path: Path) -> None:
    for penalty, inner_backward, adafactor, own in run_ranks(2, sharded.refusals, tmp_path):
        assert "uses the weights of a block outside that block's forward" in penalty
        assert "fsdp_blocks=[]" in penalty and "weight_decay" in penalty
        assert "runs a backward of its own" in inner_backward
        assert "Adafactor needs whole parameters" in adafactor
        assert "OwnNoise cannot step where each rank holds only some rows" in own


@pytest.mark.engines  # real compilers take half a minute
@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "recomputed"])
def test_compiled_blocks_compute_what_a_plain_loop_computes(
    tmp_path: Path, recomputes: bool
) -> None:
    expected = sharded.deep(True, tmp_path)
    for found, mode, reason in run_ranks(
        2, sharded.really_compiled, tmp_path, recomputes, timeout_s=400
    ):
        assert mode == "compile", reason
        assert all(value <= LIMIT for value in difference(found, expected).values())


@pytest.mark.engines
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_float32_differs_by_rounding_only(tmp_path: Path, ranks: int) -> None:
    expected = {case.__name__: case(tmp_path / "by hand", True) for case in sharded.FLOAT32}
    for found in run_ranks(ranks, sharded.run, tmp_path, list(expected)):
        for name, weights in expected.items():
            off = difference(found[name], weights)
            assert all(value <= 1e-5 for value in off.values()), (name, off)


@pytest.mark.engines
def test_teams_of_ranks_compute_what_a_plain_loop_computes(tmp_path: Path) -> None:
    """Tensor parallel inside sharded: 2 x 2 ranks, by the models' own plans."""
    expected = {case.__name__: case(tmp_path / "by hand", True) for case in sharded.PLANNED}
    for found in run_ranks(4, sharded.in_teams, tmp_path, list(expected)):
        for name, weights in expected.items():
            off = difference(found[name], weights)
            assert all(value <= LIMIT for value in off.values()), (name, off)


@pytest.mark.engines
def test_teams_and_copies_save_what_any_other_layout_resumes(tmp_path: Path) -> None:
    expected, means = sharded.by_hand_steps(len(sharded.LAYOUTS))
    for found, written, losses in run_ranks(4, sharded.changing_layouts, tmp_path, timeout_s=400):
        assert max(abs(a - b) for a, b in zip(losses, means, strict=True)) <= LIMIT
        off = difference(found, expected)
        assert all(value <= LIMIT for value in off.values()), off
        # Teams write whole tensors; of two copies, one is written.
        assert [len(files) for files in written] == [0, 2, 0, 4, 2, 2, 0]


@pytest.mark.engines
def test_a_model_without_a_plan_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="GPT2LMHeadModel brings no plan"):
        run_ranks(4, sharded.refused_team, tmp_path)


@pytest.mark.engines
def test_copies_of_a_sharded_model_compute_what_a_plain_loop_computes(tmp_path: Path) -> None:
    data, loss = sharded.texts(), sharded.token_loss
    expected = sharded.train(tmp_path, True, sharded.gpt2(), data, loss, corners.adamw, 0.5)
    for found in run_ranks(4, sharded.in_copies, tmp_path):
        off = difference(found, expected)
        assert all(value <= LIMIT for value in off.values()), off


SUPPORTED = [case for case in corners.CASES if case not in sharded.REFUSED]


@pytest.mark.engines
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sharded_ranks_do_so_at_the_edges_too(tmp_path: Path, ranks: int) -> None:
    expected = {case.__name__: case(tmp_path / "by hand", True) for case in SUPPORTED}
    for found in run_ranks(ranks, sharded.run, tmp_path, list(expected)):
        for name, weights in expected.items():
            off = difference(found[name], weights)
            assert all(value <= LIMIT for value in off.values()), (name, off)


@pytest.mark.engines
@pytest.mark.parametrize("case", sharded.REFUSED, ids=lambda case: case.__name__)
def test_what_sharding_cannot_train_is_an_error(tmp_path: Path, case: corners.Case) -> None:
    with pytest.raises(RankError, match=sharded.REFUSED[case]):
        run_ranks(3, sharded.run, tmp_path, [case.__name__])
