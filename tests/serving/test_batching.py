"""Waiting inputs become batches, and every accepted one gets its own answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import pytest

from multi_gpu_training.serving.batching import Batcher, Closed, QueueFull


class Doubling:
    """Doubles numbers. It refuses -1, and waits until it may go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_run = threading.Event()
        self.is_called = threading.Event()

    def __call__(self, items: list[int]) -> Sequence[Any]:
        self.is_called.set()
        assert self.may_run.wait(30)
        self.batches.append(items)
        if -1 in items:
            raise ValueError("-1 is not a number to double")
        return [2 * item for item in items]


def test_what_waits_while_the_model_is_busy_becomes_one_batch_in_order() -> None:
    model = Doubling()
    batcher = Batcher(model, max_batch=4, max_delay_s=0.0)
    first = batcher.submit([0])
    assert model.is_called.wait(30)
    rest = [batcher.submit([number])[0] for number in range(1, 7)]
    model.may_run.set()
    assert [answer.result(30) for answer in first + rest] == [0, 2, 4, 6, 8, 10, 12]
    assert model.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert batcher.close(30)


def test_a_bad_input_fails_alone() -> None:
    model = Doubling()
    model.may_run.set()
    batcher = Batcher(model, max_batch=8, max_delay_s=0.2)
    good, bad, other = batcher.submit([1, -1, 3])
    assert (good.result(30), other.result(30)) == (2, 6)
    with pytest.raises(ValueError, match="-1"):
        bad.result(30)
    assert batcher.close(30)


def test_a_model_that_returns_too_few_results_gives_nobody_anothers_answer() -> None:
    batcher = Batcher(lambda items: items[:1] if len(items) > 1 else [], max_delay_s=0.1)
    for answer in batcher.submit([1, 2]):
        with pytest.raises(RuntimeError, match="0 results for 1 inputs"):
            answer.result(30)
    assert batcher.close(30)


def test_a_full_queue_takes_all_inputs_of_a_request_or_none() -> None:
    model = Doubling()
    batcher = Batcher(model, max_batch=1, max_waiting=3, max_delay_s=0.0)
    running = batcher.submit([0])
    assert model.is_called.wait(30)
    taken = batcher.submit([1, 2])
    with pytest.raises(QueueFull):
        batcher.submit([3, 4])
    assert batcher.waiting == 2
    model.may_run.set()
    assert [answer.result(30) for answer in running + taken] == [0, 2, 4]
    assert batcher.close(30)


def test_closing_answers_everything_that_was_accepted() -> None:
    model = Doubling()
    batcher = Batcher(model, max_batch=2, max_delay_s=60.0)
    accepted = [batcher.submit([number])[0] for number in range(9)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    model.may_run.set()
    closing.join(30)
    done, missing = wait(accepted, 0)
    assert len(done) == 9 and not missing
    with pytest.raises(Closed):
        batcher.submit([1])
