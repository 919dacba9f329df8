"""One pass of somebody's loop over a loader: where it begins, and whose share a batch is.

A loop may break off, unpack its batches, move them or change them. The next `for` still begins
another epoch, and `train_step` still finds out which part of which step it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from multi_gpu_training.data.batch import share_of, tensors_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.data.sample_count import fits
from multi_gpu_training.errors import DataError


class EpochLoader(ABC):
    """A loader that knows its place: (epoch, start) is where the next pass begins.

    trained: the share of the newest micro-batch of this pass that was trained on; the trainer
        sets it. A pass that only looked at batches does not use up an epoch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.start = 0
        self.trained: Share | None = None
        self._pass: object = None
        self._has_given = False  # whether any batch was ever handed out
        self._newest: Share | None = None  # of the batch that was handed out last
        self._given: Any = None  # that batch
        self._claimed: Share | None = None  # the one that `recognise` last found in a batch
        self._left: int | None = None  # the epoch that a loop broke off
        self._given_up: int | None = None  # one that it left before training on anything of it

    @abstractmethod
    def one_pass(self) -> Iterator[Any]:
        """The micro-batches of the epoch; after the last one the loader stands at the next
        epoch. Whoever breaks off must `seek` before the next pass."""

    @property
    @abstractmethod
    def evaluating(self) -> bool:
        """Whether every pass is the same, whatever the epoch."""

    def seek(self, epoch: int, start: int = 0) -> None:
        """Begin the next pass there."""
        self.epoch, self.start = epoch, start
        self.trained = self._newest = self._given = self._left = self._given_up = None
        self._pass = None

    def __iter__(self) -> Iterator[Any]:
        if self.evaluating:
            yield from self.one_pass()
            return
        if self._given_up == self.epoch and self.trained is not None:
            self._break_off(self.epoch)  # next(iter(loader)): it trained after it had left
        self._given_up = None
        epoch, this = self.epoch, object()
        self._pass = this
        try:
            for batch in self.one_pass():
                self._newest, self._given, self._has_given = share_of(batch), batch, True
                yield batch
        except GeneratorExit:
            # A loop broke off. What ends the wait for a batch, an error or a signal, is another
            # matter: the run goes on from this very place.
            # Not where somebody has sought another place since: a rollback, or a stop.
            if self._pass is this and self.trained is not None:
                self._break_off(epoch)
            elif self._pass is this:
                self._given_up = epoch
            raise

    def _break_off(self, epoch: int) -> None:
        self.seek(epoch + 1)
        self._left = epoch

    def place_after(self, epoch: int, position: int) -> tuple[int, int]:
        """Where a run goes on that has trained up to `position` of `epoch`: there, or in the next
        epoch if its loop broke this one off."""
        if self._given_up == epoch and self.trained is not None:
            return epoch + 1, 0
        return (self.epoch, 0) if self._left == epoch else (epoch, position)

    def recognise(
        self, batch: Any, place: tuple[int, int], count: Callable[[Any], int]
    ) -> Share | None:
        """The share of a batch that was unpacked or changed since this loader gave it; None for
        one that has nothing to do with it. `place`: (epoch, position) of the next step."""
        if not self._has_given:  # a loop over batches of its own asks in every step
            return None
        share, all_ours = self._marked(batch)
        if share is None:
            # Not our tensors. A loop that transforms its batches trains on what it was given last.
            if self._newest is None or any(
                self._newest is used for used in (self.trained, self._claimed)
            ):
                return None
            share = self._newest
        marked = self._claimed = share
        # The weight of the step is learned with the gradients, on every rank alike: what a loop
        # leaves out, adds or keeps from earlier steps may differ from rank to rank.
        share = replace(share, changed=True, window_count=0)
        known = all_ours or self._holds_newest(batch, marked) or fits(batch, share.count)
        if not known and count(batch) != share.count:
            share = replace(share, count=count(batch), indices=(), sample_seed=0)
        if (share.epoch, share.position) < (place[0], place[1] - 1):
            # Kept from earlier steps: the place in the data stays.
            share = replace(share, epoch=place[0], position=max(0, place[1] - 1))
        return share

    def _holds_newest(self, batch: Any, share: Share) -> bool:
        """Whether every tensor of the newest batch is in this one, beside others of the user."""
        if share is not self._newest:
            return False
        given = sum(1 for _ in tensors_of(self._given))
        return 0 < given == sum(share_of(tensor) is share for tensor in tensors_of(batch))

    def _marked(self, batch: Any) -> tuple[Share | None, bool]:
        """The share that the batch's tensors carry, and whether all of them carry it."""
        tensors = list(tensors_of(batch))
        marks = [share for share in map(share_of, tensors) if share is not None]
        if not marks:
            return None, False
        share = self._newest if any(mark is self._newest for mark in marks) else marks[0]
        ours = sum(mark is share for mark in marks)
        if ours < len(marks) and share is not self._newest:
            raise DataError(
                "this batch has tensors of several batches of the loader, and none of the newest: "
                f"steps {sorted({mark.position + 1 for mark in marks})} of an epoch; clone the "
                "tensors that you keep for later"
            )
        return share, ours == len(tensors)
