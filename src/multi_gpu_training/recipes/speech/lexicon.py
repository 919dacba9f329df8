"""Reading with a list of words: what is found is made of them, at least one, and of nothing else.

The words form a tree of their beginnings. With decoder=greedy, the likeliest path through it wins
(Viterbi): exact, however many words there are. With decoder=beam, the paths that spell a text are
added up, and the likeliest beginnings survive each frame: exact where all of them do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.speech.alphabet import Alphabet, plain
from multi_gpu_training.recipes.speech.ctc import BLANK
from multi_gpu_training.recipes.user_data import read_small_text, refuse

# `auto` reads with a list where training says few words often: commands, digits.
CLOSED_WORDS, CLOSED_TIMES = 100, 10
ROOT = 0
NEVER = -math.inf


class Lexicon:
    """Words as a tree. Node 0 is the root; `label[n]` leads to node n from `parent[n]`."""

    def __init__(self, words: Iterable[str], alphabet: Alphabet) -> None:
        self.words = sorted(set(words))
        self.space = alphabet.numbers.get(" ")
        self.parent, self.label, self.word = [ROOT], [BLANK], [-1]
        self.children: list[dict[int, int]] = [{}]
        self.spelled = [alphabet.encode(word) for word in self.words]
        for number, labels in enumerate(self.spelled):
            node = ROOT
            for label in labels:
                node = self.children[node].get(label) or self._grow(node, label)
            self.word[node] = number
        self.ends = torch.tensor([n for n, word in enumerate(self.word) if word >= 0])

    def _grow(self, node: int, label: int) -> int:
        self.children[node][label] = len(self.parent)
        self.parent.append(node)
        self.label.append(label)
        self.word.append(-1)
        self.children.append({})
        return len(self.parent) - 1

    def text(self, words: Sequence[int]) -> list[int]:
        """The characters of words by their numbers, with a space between two."""
        found: list[int] = []
        for number in words:
            if found and self.space is not None:
                found.append(self.space)
            found += self.spelled[number]
        return found

    # The likeliest path

    def best_paths(self, log_probs: Tensor, lengths: Tensor) -> list[list[int]]:
        """The text of the likeliest path of each utterance; (batch, time, classes).

        Empty where the frames do not suffice for any word. In float64 on the CPU, where ties go
        to the same side every time.
        """
        frames, sizes = log_probs.double().cpu(), lengths.cpu()
        batch, time, _ = frames.shape
        search = _Search(self, batch, time)
        found: list[list[int]] = [[] for _ in range(batch)]
        for moment in range(time):
            search.step(frames[:, moment], moment)
            for row in (sizes == moment + 1).nonzero().flatten().tolist():
                found[row] = self.text(search.read(row))
        return found

    # What a beam search may grow to

    def grown(self, node: int) -> dict[int, int]:
        """Label -> node, for all that may follow."""
        if self.space is None or self.word[node] < 0:
            return self.children[node]
        return {**self.children[node], self.space: ROOT}


class _Search:
    """The best path into each state, and the words that it has behind it.

    States: in the label of a node, in the blank behind it, in the space between two words, in the
    blank behind that. A path's words are a chain of records, one for each moment in which a space
    began at its best: (last word, the record before).
    """

    def __init__(self, lexicon: Lexicon, batch: int, time: int) -> None:
        self.lexicon = lexicon
        self.ends = lexicon.ends
        self.end_words = torch.tensor([lexicon.word[n] for n in self.ends.tolist()])
        self.parent = torch.tensor(lexicon.parent)
        self.labels = torch.tensor(lexicon.label)
        # A repeat needs its blank; the root has no label that could come directly before.
        self.direct = (self.labels != self.labels[self.parent]) & (self.parent != ROOT)
        nodes = len(lexicon.parent)
        self.label = torch.full((batch, nodes), NEVER, dtype=torch.float64)
        self.blank = self.label.clone()
        self.blank[:, ROOT] = 0.0  # nothing is heard yet
        self.space = torch.full((batch, 2), NEVER, dtype=torch.float64)
        # 0: no word behind it; t + 1: the record of moment t.
        self.label_record = torch.zeros(batch, nodes, dtype=torch.int64)
        self.blank_record = self.label_record.clone()
        self.space_record = torch.zeros(batch, 2, dtype=torch.int64)
        self.last = torch.zeros(batch, time + 1, dtype=torch.int64)
        self.before = torch.zeros(batch, time + 1, dtype=torch.int64)

    def step(self, frame: Tensor, moment: int) -> None:
        """One frame of (batch, classes)."""
        silence = frame[:, BLANK, None]
        # A word begins at the start, or behind a space or its blank.
        start, start_record = better(
            self.blank[:, ROOT], self.blank_record[:, ROOT], *self._after_space()
        )
        before, before_record = self.blank[:, self.parent], self.blank_record[:, self.parent]
        fresh = self.parent == ROOT
        before = torch.where(fresh, start[:, None], before)
        before_record = torch.where(fresh, start_record[:, None], before_record)
        skipped = torch.where(self.direct, self.label[:, self.parent], NEVER)
        skipped_record = self.label_record[:, self.parent]
        label, label_record = better(self.label, self.label_record, before, before_record)
        label, label_record = better(label, label_record, skipped, skipped_record)
        blank, blank_record = better(self.blank, self.blank_record, self.label, self.label_record)
        space, space_record = self._spaces(frame, moment)
        self.label = label + frame[:, self.labels]
        self.label[:, ROOT] = NEVER
        self.blank = blank + silence
        self.space, self.space_record = space, space_record
        self.label_record, self.blank_record = label_record, blank_record

    def _after_space(self) -> tuple[Tensor, Tensor]:
        return better(
            self.space[:, 0], self.space_record[:, 0], self.space[:, 1], self.space_record[:, 1]
        )

    def _spaces(self, frame: Tensor, moment: int) -> tuple[Tensor, Tensor]:
        if self.lexicon.space is None:
            return self.space, self.space_record
        score, number, record = self._ended()
        self.last[:, moment + 1], self.before[:, moment + 1] = number, record
        here = torch.full_like(record, moment + 1)
        inside, inside_record = better(self.space[:, 0], self.space_record[:, 0], score, here)
        behind, behind_record = better(
            self.space[:, 1], self.space_record[:, 1], self.space[:, 0], self.space_record[:, 0]
        )
        heard = torch.stack([frame[:, self.lexicon.space], frame[:, BLANK]], 1)
        return (
            torch.stack([inside, behind], 1) + heard,
            torch.stack([inside_record, behind_record], 1),
        )

    def _ended(self) -> tuple[Tensor, Tensor, Tensor]:
        """Score, word and record of the best path at the end of a word."""
        score, record = better(
            self.label[:, self.ends],
            self.label_record[:, self.ends],
            self.blank[:, self.ends],
            self.blank_record[:, self.ends],
        )
        best = score.argmax(1, keepdim=True)
        word = self.end_words[best.squeeze(1)]
        return score.gather(1, best).squeeze(1), word, record.gather(1, best).squeeze(1)

    def read(self, row: int) -> list[int]:
        """The words of the best path that ends with one."""
        score, word, record = (part[row] for part in self._ended())
        if float(score) == NEVER:
            return []
        words, at = [int(word)], int(record)
        while at:
            words.append(int(self.last[row, at]))
            at = int(self.before[row, at])
        return words[::-1]


def better(one: Tensor, its: Tensor, other: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The larger score and what belongs to it; the first where they are alike."""
    chosen = other > one
    return torch.where(chosen, other, one), torch.where(chosen, others, its)


# Which words


def choose_lexicon(
    asked: str, alphabet: Alphabet, trained: Sequence[str], closed: bool
) -> list[str] | None:
    """The words to read with; `trained` are the transcripts of the training, never of a test.

    closed: whether `auto` may choose a list at all.
    """
    if asked == "none":
        return None
    if asked not in ("auto", "data"):
        return read_words(Path(asked).expanduser(), alphabet)
    said = Counter(word for text in trained for word in text.split())
    if asked == "auto":
        few = 2 <= len(said) <= CLOSED_WORDS and said.total() >= CLOSED_TIMES * len(said)
        if not (closed and few):
            return None
    return sorted(said)


def read_words(path: Path, alphabet: Alphabet) -> list[str]:
    """The words of a file, one in each line; everything wrong with it at once."""
    if not path.is_file():
        raise ConfigError(
            f"lexicon={str(path)!r} is not a file; give a list with one word in each line, data "
            "(the words of the training transcripts), none or auto"
        )
    words, problems = [], []
    for number, line in enumerate(read_small_text(path).splitlines(), 1):
        if not line.strip():
            continue
        text = plain(line)
        outside = sorted(set(text) - set(alphabet.characters) - {" "})
        if not text or " " in text:
            problems.append(
                f"{path}, line {number}: {line.strip()!r:.60} is not one word; write one in each "
                "line"
            )
        elif outside:
            problems.append(
                f"{path}, line {number}: {text!r:.60} has {', '.join(map(repr, outside))}, which "
                "the alphabet has not; see the option alphabet"
            )
        words.append(text)
    refuse(problems)
    if not words:
        raise DataError(f"{path} holds no word; write one in each line")
    return sorted(set(words))
