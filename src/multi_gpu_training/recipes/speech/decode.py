"""From frames to text: the best path, or the best text over all its paths."""

from __future__ import annotations

import math
from collections import defaultdict

from torch import Tensor

from multi_gpu_training.recipes.speech.ctc import BLANK


def greedy(log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
    """The likeliest class of every frame, repeats and blanks taken out; (batch, time, classes)."""
    best = log_probs.argmax(2)
    paths, sizes = best.tolist(), lengths.tolist()
    return [collapse(path[:size]) for path, size in zip(paths, sizes, strict=True)]


def collapse(path: list[int]) -> list[int]:
    """A path without its repeats, then without its blanks."""
    kept = [c for i, c in enumerate(path) if i == 0 or c != path[i - 1]]
    return [c for c in kept if c != BLANK]


def beam(log_probs: Tensor, lengths: Tensor, width: int) -> list[list[int]]:
    """The likeliest text of every utterance, by prefix beam search; (batch, time, classes)."""
    frames, sizes = log_probs.double().cpu(), lengths.tolist()
    return [
        prefix_beam(one[:size].tolist(), width) for one, size in zip(frames, sizes, strict=True)
    ]


def prefix_beam(log_probs: list[list[float]], width: int) -> list[int]:
    """The likeliest text, the paths that spell it added up; `width` prefixes survive a frame.

    After Hannun et al. 2014, without a language model. Each prefix carries the likelihood of the
    paths that end in a blank and of those that end in its last character: only over a blank can
    the same character follow.
    """
    never = -math.inf
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, never)}
    for frame in log_probs:
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [never, never])
        for prefix, (blank, label) in beams.items():
            whole = add(blank, label)
            kept = grown[prefix]
            kept[0] = add(kept[0], whole + frame[BLANK])
            if prefix:
                kept[1] = add(kept[1], label + frame[prefix[-1]])
            for c, likelihood in enumerate(frame):
                if c == BLANK:
                    continue
                longer = grown[(*prefix, c)]
                before = blank if prefix and prefix[-1] == c else whole
                longer[1] = add(longer[1], before + likelihood)
        best = sorted(grown.items(), key=lambda item: add(*item[1]), reverse=True)[:width]
        beams = {prefix: (blank, label) for prefix, (blank, label) in best}
    best_prefix, _ = max(beams.items(), key=lambda item: add(*item[1]))
    return list(best_prefix)


def add(one: float, other: float) -> float:
    """The logarithm of the sum of two numbers given by their logarithms."""
    high, low = (one, other) if one > other else (other, one)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
