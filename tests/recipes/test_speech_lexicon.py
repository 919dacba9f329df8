"""Reading with a list of words: the likeliest path, or the likeliest text, that they can spell."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.speech.alphabet import Alphabet
from multi_gpu_training.recipes.speech.lexicon import Lexicon, choose_lexicon
from multi_gpu_training.recipes.speech.objective import (
    Decoder,
    collapse,
    prefix_beam,
    surest_frames,
)

ALPHABET = Alphabet("ab ")  # space 1, a 2, b 3
WORDS = ["a", "ab", "bb"]


def frames(seed: int, time: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(time, ALPHABET.classes, generator=generator, dtype=torch.float64)


def is_spelled(text: str, words: list[str]) -> bool:
    """Words of the list with one space between two; not what `decode` would tidy up."""
    return bool(text) and all(part in words for part in text.split(" "))


def by_every_path(log_probs: Tensor, words: list[str]) -> tuple[str, str]:
    """The text of the likeliest path, and the text whose paths add up to most."""
    total: dict[str, float] = defaultdict(float)
    best: tuple[float, str] = (-math.inf, "")
    for path in itertools.product(range(ALPHABET.classes), repeat=len(log_probs)):
        text = "".join(ALPHABET.characters[c - 1] for c in collapse(list(path)))
        if not is_spelled(text, words):
            continue
        score = sum(float(log_probs[t, c]) for t, c in enumerate(path))
        best = max(best, (score, text))
        total[text] += math.exp(score)
    return best[1], max(total, key=total.__getitem__)


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_going_through_every_path_finds(seed: int) -> None:
    lexicon = Lexicon(WORDS, ALPHABET)
    log_probs = frames(seed).log_softmax(1)
    path, text = by_every_path(log_probs, WORDS)
    [found] = lexicon.best_paths(log_probs[None], torch.tensor([len(log_probs)]))
    assert ALPHABET.decode(found) == path
    assert ALPHABET.decode(prefix_beam(log_probs.tolist(), 1000, lexicon)) == text


def test_several_words_are_read_in_the_order_they_are_said() -> None:
    lexicon = Lexicon(["one", "two", "on"], Alphabet("abcdefghijklmnopqrstuvwxyz "))
    alphabet = Alphabet("abcdefghijklmnopqrstuvwxyz ")
    path = alphabet.encode("two one on one")
    spelled = [c for label in path for c in (label, 0)]
    log_probs = torch.full((len(spelled), alphabet.classes), -9.0, dtype=torch.float64)
    log_probs[torch.arange(len(spelled)), torch.tensor(spelled)] = -0.1
    for decoder in (Decoder("greedy", lexicon=lexicon), Decoder("beam", 50, lexicon)):
        [found] = decoder(log_probs[None], torch.tensor([len(spelled)]))
        assert alphabet.decode(found) == "two one on one"


def test_rows_of_a_batch_are_read_as_alone_and_padding_says_nothing() -> None:
    lexicon = Lexicon(WORDS, ALPHABET)
    lengths = [3, 6, 5, 1]
    rows = [frames(20 + n, size).log_softmax(1) for n, size in enumerate(lengths)]
    batch = torch.full((4, 9, ALPHABET.classes), 5.0, dtype=torch.float64)
    for row, log_probs in zip(batch, rows, strict=True):
        row[: len(log_probs)] = log_probs
    alone = [
        lexicon.best_paths(log_probs[None], torch.tensor([len(log_probs)]))[0] for log_probs in rows
    ]
    assert lexicon.best_paths(batch, torch.tensor(lengths)) == alone


def test_a_word_is_read_even_where_silence_is_likeliest_unless_no_word_fits() -> None:
    lexicon = Lexicon(["ab", "bb"], ALPHABET)
    silence = torch.full((1, 4, ALPHABET.classes), -5.0)
    silence[..., 0] = -0.01
    silence[0, 1, 2] = -4.0  # a little of an "a"
    for decoder in (Decoder("greedy", lexicon=lexicon), Decoder("beam", 2, lexicon)):
        assert [ALPHABET.decode(t) for t in decoder(silence, torch.tensor([4]))] == ["ab"]
        assert decoder(silence, torch.tensor([1])) == [[]]  # one frame spells no two letters
        # "bb" needs a blank between its letters, and so three frames.
        assert [ALPHABET.decode(t) for t in decoder(silence, torch.tensor([2]))] == ["ab"]


def test_a_narrow_beam_that_loses_every_word_falls_back_to_the_best_path() -> None:
    lexicon = Lexicon(["aaaa", "b"], ALPHABET)
    log_probs = torch.full((4, ALPHABET.classes), -3.0, dtype=torch.float64)
    log_probs[:, 2] = -0.5  # only ever the beginning of "aaaa", for which there is no time
    [best] = lexicon.best_paths(log_probs[None], torch.tensor([4]))
    assert ALPHABET.decode(best) == "b"
    assert prefix_beam(log_probs.tolist(), 1, lexicon) == best


def test_how_sure_each_character_is_comes_from_the_path_that_spells_the_text() -> None:
    # a at 0.6 in frame 0 and 0.9 in frame 1, a blank, b at 0.3 where another class is likelier.
    log_probs = torch.tensor(
        [[0.2, 0.1, 0.6, 0.1], [0.05, 0.0, 0.9, 0.05], [1.0, 0, 0, 0], [0.1, 0.6, 0.0, 0.3]]
    ).log()
    assert surest_frames(log_probs, ALPHABET.encode("ab")) == pytest.approx([0.9, 0.3])
    assert surest_frames(log_probs, ALPHABET.encode("aaaaa")) == [0.0] * 5  # no room
    assert surest_frames(log_probs[:0], []) == []


# Which words


def test_words_come_from_training_transcripts_where_they_are_few_and_often_said() -> None:
    digits = ["one", "two"] * 10
    assert choose_lexicon("auto", ALPHABET, digits, closed=True) == ["one", "two"]
    assert choose_lexicon("auto", ALPHABET, digits, closed=False) is None
    assert choose_lexicon("auto", ALPHABET, ["one", "two"] * 9, closed=True) is None
    many = [f"w{n}" for n in range(101)] * 20
    assert choose_lexicon("auto", ALPHABET, many, closed=True) is None
    assert choose_lexicon("data", ALPHABET, ["b a", "a"], closed=True) == ["a", "b"]
    assert choose_lexicon("none", ALPHABET, digits, closed=True) is None


def test_words_come_from_a_file_and_everything_wrong_with_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("AB\n\nbb.\nab\n")
    assert choose_lexicon(str(path), ALPHABET, [], closed=True) == ["ab", "bb"]
    path.write_text("ab\na b\ncab\n...\n")
    with pytest.raises(DataError) as caught:
        choose_lexicon(str(path), ALPHABET, [], closed=True)
    first, second, third = caught.value.problems
    assert "line 2: 'a b' is not one word" in first
    assert "line 3: 'cab' has 'c', which the alphabet has not" in second
    assert "line 4: '...' is not one word" in third
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no word"):
        choose_lexicon(str(path), ALPHABET, [], closed=True)
    with pytest.raises(ConfigError, match="nowhere' is not a file; give a list with one word"):
        choose_lexicon(str(tmp_path / "nowhere"), ALPHABET, [], closed=True)
