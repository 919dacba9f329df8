"""Which characters a recogniser writes."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.user_data import listed

ENGLISH = " 'abcdefghijklmnopqrstuvwxyz"


def plain(text: str) -> str:
    """Lower case, one space between words, no punctuation but the apostrophe."""
    text = unicodedata.normalize("NFC", text).lower().replace("\u2019", "'")
    kept = (
        " " if c.isspace() or c == "-" else "" if unicodedata.category(c)[0] in "PS" else c
        for c in text.replace("'", "\0")  # an apostrophe is punctuation that stays
    )
    return " ".join("".join(kept).replace("\0", "'").split())


class Alphabet:
    """Numbers for characters; 0 is the blank of CTC."""

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.numbers = {c: i for i, c in enumerate(self.characters, 1)}

    @property
    def classes(self) -> int:
        return 1 + len(self.characters)

    def encode(self, text: str) -> list[int]:
        return [self.numbers[c] for c in text]

    def decode(self, numbers: Iterable[int]) -> str:
        # A recogniser may write several spaces; as words they are one.
        return " ".join("".join(self.characters[n - 1] for n in numbers).split())


def choose_alphabet(asked: str, texts: Sequence[tuple[str, str]]) -> Alphabet:
    """The alphabet asked for: `english`, `data`, or its characters. `texts` are (place, text)."""
    if asked == "data":
        return Alphabet(" " + "".join(sorted({c for _, text in texts for c in text})))
    alphabet = Alphabet(ENGLISH if asked == "english" else asked.lower() + " ")
    if asked != "english" and len(alphabet.characters) < 2:
        raise ConfigError(
            f"alphabet={asked!r} holds no character; use english, data (every character of the "
            "transcripts) or the characters themselves"
        )
    outside: Counter[str] = Counter()
    first: dict[str, str] = {}
    for place, text in texts:
        for c in text:
            if c not in alphabet.numbers:
                outside[c] += 1
                first.setdefault(c, place)
    if outside:
        named = [f"{c!r} ({n} times, first in {first[c]})" for c, n in outside.most_common()]
        raise DataError(
            f"{len(outside)} characters lie outside alphabet={asked}: {listed(named, 5)}; set "
            "alphabet=data to take every character of the transcripts, give the characters, or "
            "write them out in the transcripts (numbers as words)"
        )
    return alphabet
