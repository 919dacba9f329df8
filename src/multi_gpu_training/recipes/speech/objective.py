"""What the recogniser is trained for, how its frames are read as text, and how well."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.recipes.speech.alphabet import Alphabet
from multi_gpu_training.recipes.speech.ctc import BLANK, ctc_loss, possible
from multi_gpu_training.recipes.speech.dataset import Batch, SpeakerGroup
from multi_gpu_training.recipes.speech.lexicon import ROOT, Lexicon
from multi_gpu_training.training.metrics import MetricsCollector

MASKS = (0.2, 0.1)  # SpecAugment: the share of all bands and of the time that a mask may take
MOST_SPEAKERS = 16  # with an error rate of their own
PLAIN_NAME = re.compile(r"[\w.-]{1,40}")


@dataclass(frozen=True)
class Objective:
    """CTC as a mean over the characters of all ranks: (mean, characters).

    augment: SpecAugment. warp: the voices that `Augmentation` has drawn.
    """

    augment: bool
    warp: bool = False

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        draws = batch.draws if self.augment and model.training else None
        warps = batch.warps if self.warp and model.training else None
        logits, lengths = model(batch.sound, batch.samples, draws, MASKS, warps)
        return mean_loss(logits, lengths, batch)


def mean_loss(logits: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss a character, and the characters that it is a mean over."""
    losses, characters = losses_of(logits, lengths, batch)
    total = characters.sum()
    return losses.sum() / total.clamp(min=1), total


def losses_of(logits: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss of each utterance, and the characters that it counts for."""
    losses = ctc_loss(logits, lengths, batch.targets, batch.sizes)
    fine = possible(lengths, batch.targets, batch.sizes)
    return losses, torch.where(fine, batch.sizes, 0)


@dataclass(frozen=True)
class Decoder:
    """How frames are read as text."""

    name: str = "greedy"
    width: int = 8
    lexicon: Lexicon | None = None

    def __call__(self, log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
        """The text of each utterance; (batch, time, classes)."""
        if self.name == "beam":
            return beam(log_probs, lengths, self.width, self.lexicon)
        if self.lexicon is not None:
            return self.lexicon.best_paths(log_probs, lengths)
        return greedy(log_probs, lengths)


def evaluate(
    model: nn.Module,
    batch: Batch,
    metrics: MetricsCollector,
    *,
    alphabet: Alphabet,
    decoder: Decoder,
    groups: Sequence[SpeakerGroup] = (SpeakerGroup(),),
) -> None:
    """Add the loss, and the word and character errors, of one batch.

    `wer` and the loss are those of speakers who are not trained on, where the test is by speaker;
    `wer_known` is that of the others, `wer_of_NAME` that of one of a few speakers.
    """
    logits, lengths = model(batch.sound, batch.samples)
    losses, characters = losses_of(logits, lengths, batch)
    numbers = batch.groups.tolist()
    of_rows = [groups[number] if number < len(groups) else SpeakerGroup() for number in numbers]
    counted = torch.tensor([not group.known for group in of_rows], device=losses.device)
    weight = (characters * counted).sum()
    metrics.add("loss", (losses.double() * counted).sum(), weight)
    read = decoder(logits.float().log_softmax(2), lengths)
    rows: list[Any] = batch.targets.tolist()
    wanted = [row[:size] for row, size in zip(rows, batch.sizes.tolist(), strict=True)]
    named = named_speakers(groups)
    add_error_rates(metrics, [""], [""])  # first in every table, whoever speaks first
    for group, text, labels in zip(of_rows, read, wanted, strict=True):
        found, reference = alphabet.decode(text), alphabet.decode(labels)
        add_error_rates(metrics, [found], [reference], "_known" if group.known else "")
        if group in named:
            words = reference.split()
            name = "wer_known_of_" if group.known else "wer_of_"
            metrics.add(name + group.speaker, edits(found.split(), words), len(words))


def named_speakers(groups: Sequence[SpeakerGroup]) -> Sequence[SpeakerGroup]:
    """Those with a figure of their own: all, where they are few and have plain names."""
    plain = all(PLAIN_NAME.fullmatch(group.speaker) for group in groups)
    return groups if plain and 1 < len(groups) <= MOST_SPEAKERS else ()


# From frames to text: the best path, or the best text over all its paths


def greedy(log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
    """The likeliest class of every frame, repeats and blanks taken out; (batch, time, classes)."""
    best = log_probs.argmax(2)
    paths, sizes = best.tolist(), lengths.tolist()
    return [collapse(path[:size]) for path, size in zip(paths, sizes, strict=True)]


def collapse(path: list[int]) -> list[int]:
    """A path without its repeats, then without its blanks."""
    kept = [c for i, c in enumerate(path) if i == 0 or c != path[i - 1]]
    return [c for c in kept if c != BLANK]


def beam(
    log_probs: Tensor, lengths: Tensor, width: int, lexicon: Lexicon | None = None
) -> list[list[int]]:
    """The likeliest text of every utterance, by prefix beam search; (batch, time, classes)."""
    frames, sizes = log_probs.double().cpu(), lengths.tolist()
    return [
        prefix_beam(one[:size].tolist(), width, lexicon)
        for one, size in zip(frames, sizes, strict=True)
    ]


def prefix_beam(
    log_probs: list[list[float]], width: int, lexicon: Lexicon | None = None
) -> list[int]:
    """The likeliest text, the paths that spell it added up; `width` prefixes survive a frame.

    After Hannun et al. 2014, without a language model. Each prefix carries the likelihood of the
    paths that end in a blank and of those that end in its last character: only over a blank can
    the same character follow. With a lexicon, a prefix is one of words, and the text ends with one.
    """
    never = -math.inf
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, never)}
    places: dict[tuple[int, ...], int] = {(): ROOT}  # of prefixes in the lexicon
    for frame in log_probs:
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [never, never])
        follow: dict[tuple[int, ...], int] = {}
        for prefix, (blank, label) in beams.items():
            whole = add(blank, label)
            kept = grown[prefix]
            kept[0] = add(kept[0], whole + frame[BLANK])
            if prefix:
                kept[1] = add(kept[1], label + frame[prefix[-1]])
            if lexicon is None:
                nodes = dict.fromkeys(range(1, len(frame)), ROOT)
            else:
                nodes = lexicon.grown(places[prefix])
                follow[prefix] = places[prefix]
            for c, node in nodes.items():
                longer = grown[(*prefix, c)]
                follow[(*prefix, c)] = node
                before = blank if prefix and prefix[-1] == c else whole
                longer[1] = add(longer[1], before + frame[c])
        best = sorted(grown.items(), key=lambda item: add(*item[1]), reverse=True)[:width]
        beams = {prefix: (blank, label) for prefix, (blank, label) in best}
        places = {prefix: follow.get(prefix, ROOT) for prefix in beams}
    if lexicon is not None:
        beams = {one: way for one, way in beams.items() if lexicon.word[places[one]] >= 0}
        if not any(add(*way) > never for way in beams.values()):
            # Too narrow a beam, or too few frames.
            frames = torch.tensor(log_probs, dtype=torch.float64)
            if not len(frames):
                return []
            return lexicon.best_paths(frames.unsqueeze(0), torch.tensor([len(frames)]))[0]
    best_prefix, _ = max(beams.items(), key=lambda item: add(*item[1]))
    return list(best_prefix)


def add(one: float, other: float) -> float:
    """The logarithm of the sum of two numbers given by their logarithms."""
    high, low = (one, other) if one > other else (other, one)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


# Word and character error rates, as edits and lengths that add up over batches and ranks


def edits(found: Sequence[Any], wanted: Sequence[Any]) -> int:
    """Insertions, deletions and replacements that turn one sequence into the other."""
    row = list(range(len(wanted) + 1))
    for i, item in enumerate(found, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (item != other))
    return row[-1]


def add_error_rates(
    metrics: MetricsCollector, found: Sequence[str], wanted: Sequence[str], ending: str = ""
) -> None:
    """`wer` and `cer`: summed edits over summed lengths, never a mean of rates."""
    for text, reference in zip(found, wanted, strict=True):
        words = reference.split()
        metrics.add("wer" + ending, edits(text.split(), words), len(words))
        metrics.add("cer" + ending, edits(text, reference), len(reference))


def surest_frames(log_probs: Tensor, labels: Sequence[int]) -> list[float]:
    """How likely each label is in its surest frame, on the likeliest path that spells them all;
    (time, classes). Zeros where there is none."""
    frames = log_probs.double().tolist()
    states = [BLANK]
    for label in labels:
        states += [label, BLANK]
    never = -math.inf
    scores = [never] * len(states)
    back: list[list[int]] = []
    for moment, frame in enumerate(frames):
        after, chosen = [], []
        for place, state in enumerate(states):
            ways = [place, *([place - 1] if place else [])]
            if place > 1 and state not in (BLANK, states[place - 2]):
                ways.append(place - 2)
            best = max(ways, key=lambda way: scores[way])
            before = (0.0 if place < 2 else never) if moment == 0 else scores[best]
            after.append(before + frame[state])
            chosen.append(best)
        scores = after
        back.append(chosen)
    place = len(states) - 1
    if place and frames and scores[place - 1] > scores[place]:
        place -= 1
    found = [0.0] * len(labels)
    if not frames or scores[place] == never:
        return found
    for moment in range(len(frames) - 1, -1, -1):
        if states[place] != BLANK:
            number = place // 2
            found[number] = max(found[number], math.exp(frames[moment][states[place]]))
        place = back[moment][place]
    return found
