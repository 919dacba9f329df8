"""CTC is torch's own, in value and gradient; decoding finds the likeliest text."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import jiwer
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.distributed.placement import place
from multi_gpu_training.recipes.speech.ctc import ctc_loss, frames_needed, possible
from multi_gpu_training.recipes.speech.objective import (
    add_error_rates,
    beam,
    collapse,
    edits,
    greedy,
    prefix_beam,
)
from multi_gpu_training.training.metrics import MetricsCollector

BATCH, TIME, CLASSES, LABELS = 6, 30, 5, 8


def case(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, lengths, targets and their sizes; texts may be empty and hold repeats."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(BATCH, TIME, CLASSES, generator=generator, dtype=torch.float64)
    lengths = torch.randint(16, TIME + 1, (BATCH,), generator=generator)
    targets = torch.randint(1, CLASSES, (BATCH, LABELS), generator=generator)
    sizes = torch.randint(0, LABELS + 1, (BATCH,), generator=generator)
    return logits.to(dtype).requires_grad_(), lengths, targets, sizes


def torchs(logits: Tensor, lengths: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
    log_probs = logits.log_softmax(2).transpose(0, 1)
    return F.ctc_loss(log_probs, targets, lengths, sizes, reduction="none", zero_infinity=True)


# In float64 1e-14 was seen. In float32 both ways round by themselves, at losses of about 60.
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_torchs(seed: int, dtype: torch.dtype, limit: float) -> None:
    logits, lengths, targets, sizes = case(seed, dtype)
    weights = torch.rand(BATCH, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    ours, reference = (way(logits, lengths, targets, sizes) for way in (ctc_loss, torchs))
    assert torch.allclose(ours, reference, rtol=limit, atol=limit)
    mine, theirs = (
        torch.autograd.grad((loss * weights).sum(), logits)[0] for loss in (ours, reference)
    )
    assert torch.allclose(mine, theirs, atol=limit)


def test_an_utterance_without_enough_frames_counts_for_nothing() -> None:
    targets = torch.tensor([[1, 2, 3, 0], [1, 1, 1, 0], [1, 2, 3, 0], [2, 2, 0, 0]])
    sizes = torch.tensor([3, 3, 3, 1])
    assert frames_needed(targets, sizes).tolist() == [3, 5, 3, 1]
    lengths = torch.tensor([3, 4, 2, 1])
    assert possible(lengths, targets, sizes).tolist() == [True, False, False, True]
    logits = torch.randn(4, 6, 5, requires_grad=True)
    losses = ctc_loss(logits, lengths, targets, sizes)
    assert losses[1] == losses[2] == 0
    losses.sum().backward()
    assert logits.grad is not None
    used = logits.grad.abs().sum(2) > 0
    assert used.sum(1).tolist() == [3, 0, 0, 1]


def test_what_is_behind_the_end_changes_nothing() -> None:
    logits, lengths, targets, sizes = case(11)
    longer = torch.cat([logits.detach(), torch.full((BATCH, 9, CLASSES), 50.0)], 1)
    more = torch.cat([targets, torch.ones(BATCH, 4, dtype=torch.int64)], 1)
    same = ctc_loss(longer, lengths, more, sizes)
    assert torch.allclose(same, ctc_loss(logits, lengths, targets, sizes), atol=1e-12)


def test_it_is_float32_under_mixed_precision() -> None:
    logits, *rest = case(12, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ctc_loss(logits, *rest)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, ctc_loss(logits, *rest))


def test_confident_logits_give_no_nan() -> None:
    logits, lengths, targets, sizes = case(13, torch.float32)
    large = (1e4 * logits.detach()).requires_grad_()
    ctc_loss(large, lengths, targets, sizes).sum().backward()
    assert large.grad is not None and large.grad.isfinite().all()


def test_no_value_is_read_on_the_host() -> None:
    """A fake tensor has a shape but no values: reading one raises."""
    with FakeTensorMode() as fake:
        logits, lengths, targets, sizes = (
            fake.from_tensor(t.detach()) for t in case(14, torch.float32)
        )
        logits.requires_grad_()
        ctc_loss(logits, lengths, targets, sizes).sum().backward()
        with pytest.raises(Exception, match="local_scalar_dense"):
            float(lengths[0])


# Decoding


def test_best_path_without_repeats_and_blanks() -> None:
    assert collapse([0, 1, 1, 0, 1, 2, 2, 0]) == [1, 1, 2]
    frames = F.one_hot(torch.tensor([[1, 1, 0, 1, 2], [2, 0, 2, 3, 3]]), 4).double().log()
    assert greedy(frames, torch.tensor([5, 3])) == [[1, 1, 2], [2, 2]]


def likelihoods(log_probs: Tensor) -> dict[tuple[int, ...], float]:
    """How likely each text is, by going through every path."""
    time, classes = log_probs.shape
    total: dict[tuple[int, ...], float] = defaultdict(float)
    for path in itertools.product(range(classes), repeat=time):
        likely = math.exp(sum(float(log_probs[t, c]) for t, c in enumerate(path)))
        total[tuple(collapse(list(path)))] += likely
    return total


@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_finds_the_likeliest_of_all_texts(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(5, 3, generator=generator, dtype=torch.float64).log_softmax(1)
    total = likelihoods(log_probs)
    assert sum(total.values()) == pytest.approx(1.0)
    best = max(total, key=total.__getitem__)
    assert tuple(prefix_beam(log_probs.tolist(), width=100)) == best


def test_beam_adds_up_what_the_best_path_does_not_see() -> None:
    # The likeliest path is two blanks (0.36); the text "1" has three paths (0.64 together).
    log_probs = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log()
    lengths = torch.tensor([2])
    assert greedy(log_probs, lengths) == [[]]
    assert beam(log_probs, lengths, width=4) == [[1]]


# Error rates

TEXTS = [
    ("one two three", "one two three"),
    ("one too", "one two three"),
    ("", "four"),
    ("five six seven", "five seven"),
    ("eight nine eight", "nine eight nine"),
]


def test_rates_are_those_of_jiwer() -> None:
    found, wanted = (list(texts) for texts in zip(*TEXTS, strict=True))
    metrics = MetricsCollector()
    add_error_rates(metrics, found, wanted)
    rates = metrics.compute()
    assert rates["wer"] == pytest.approx(jiwer.wer(wanted, found))
    assert rates["cer"] == pytest.approx(jiwer.cer(wanted, found))
    assert edits("kitten", "sitting") == 3


def rates_of_a_rank() -> dict[str, float]:
    placement = place(MultiGPUConfig(device="cpu"))
    metrics = MetricsCollector()
    for found, wanted in TEXTS[placement.dp_rank :: placement.dp_size]:
        add_error_rates(metrics, [found], [wanted])
    return metrics.compute(placement)


def test_rates_over_ranks_are_summed_edits_over_summed_lengths() -> None:
    found, wanted = (list(texts) for texts in zip(*TEXTS, strict=True))
    for rates in run_ranks(3, rates_of_a_rank):
        assert rates["wer"] == pytest.approx(jiwer.wer(wanted, found))
        assert rates["cer"] == pytest.approx(jiwer.cer(wanted, found))
