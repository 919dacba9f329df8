"""Check the spelling of the README, the documentation and the package's docstrings and messages.

    python scripts/check_spelling.py [--codespell PROGRAM]

codespell finds known misspellings, offline. This script adds words written twice, and American
spellings in the prose of the pages, which is British. `make spelling` installs codespell.
Prints one line per finding and exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Words that codespell takes for misspellings of others. Lower case.
RIGHT_HERE: tuple[str, ...] = ()
# Its lists that fit texts about code: clear misspellings, and rare words that mostly are some.
LISTS = "clear,rare"
# They quote output, names and results as they were printed, sometimes cut.
QUOTED = ("benchmarks/seeded_bugs.md",)
AMERICAN = {
    r"behavior": "behaviour",
    r"colors?\b": "colour",
    r"favor": "favour",
    r"honor(?!ary)": "honour",
    r"neighbor": "neighbour",
    r"labeled\b": "labelled",
    r"labeling\b": "labelling",
    r"modeling\b": "modelling",
    r"canceled\b": "cancelled",
    r"gray\b": "grey",
    # Not minimize, maximize, optimizer: those are the names of settings and classes, too.
    r"(?:normal|initial|synchron|util|organ|recogn|summar|serial|real)iz": "-is-",
}
# "that that" and "had had" can be right.
_TWICE = re.compile(
    r"\b(the|a|an|of|is|are|to|and|in|on|it|its|for|with|as|by|or|not|be) \1\b", re.I
)
_AMERICAN = {re.compile(rf"\b{word}", re.I): british for word, british in AMERICAN.items()}
# Code, links and HTML: only what they say to the reader is prose.
_NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|https?://\S+")


def pages() -> list[Path]:
    """What people read: pages of the repository, the documentation, the results."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    return sorted(page for page in found if str(page.relative_to(ROOT)) not in QUOTED)


def sources() -> list[Path]:
    """Docstrings, comments, help texts and messages."""
    found = [*ROOT.glob("src/**/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("src/**/*.html")]
    return sorted(path for path in found if path != Path(__file__))


def misspelt(codespell: str, paths: list[Path]) -> list[str]:
    """What codespell finds, as `file:line: wrong ==> right`."""
    ignored = ["-L", ",".join(RIGHT_HERE)] if RIGHT_HERE else []
    command = [codespell, "--builtin", LISTS, *ignored, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 65):  # 65: it found something
        raise RuntimeError(f"codespell ended with {done.returncode}: {done.stderr.strip()}")
    return [line.replace(f"{ROOT}/", "") for line in done.stdout.splitlines()]


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a Markdown page that are not code, with their numbers."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, _NOT_PROSE.sub(" ; ", line)


def careless(name: str, text: str) -> list[str]:
    """Words written twice and American spellings in the prose of a page."""
    found = []
    for number, line in prose(text):
        found += [f"{name}:{number}: twice: {match[0]}" for match in _TWICE.finditer(line)]
        for word, british in _AMERICAN.items():
            found += [
                f"{name}:{number}: American: {match[0]} ==> {british}"
                for match in word.finditer(line)
            ]
    return found


def findings(codespell: str) -> list[str]:
    found = misspelt(codespell, [*pages(), *sources()])
    for page in pages():
        if page.parent.name != "benchmarks":  # tables that scripts write
            found += careless(str(page.relative_to(ROOT)), page.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codespell", default="codespell", metavar="PROGRAM")
    codespell = shutil.which(parser.parse_args().codespell)
    if codespell is None:
        sys.exit("codespell is not installed: run make spelling, or give --codespell PROGRAM")
    found = findings(codespell)
    print("\n".join(found) or f"spelling: {len(pages())} pages and {len(sources())} files, ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
