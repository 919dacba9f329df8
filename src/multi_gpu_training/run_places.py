"""Which names, paths and URLs a run may be kept under."""

from __future__ import annotations

import re

LONGEST_PATH = 4000  # bytes; Linux allows 4096
LONGEST_NAME = 200  # bytes; file systems allow 255, and temporary copies add a suffix


def name_problem(name: str) -> str | None:
    """What keeps `name` from naming one folder inside another; None if nothing does.

    Names that come from other machines go through this as well: whoever sends them must not
    choose where files are written.
    """
    if not name:
        return "a run needs a name of at least one character"
    if "/" in name or "\\" in name:
        return "a run's name is one folder, without / or \\; use save_dir for the folder above it"
    if name.startswith("."):
        return "a run's name must not start with a dot"
    if not name.isprintable():
        return "a run's name must not contain control characters"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return "a run's name must be text in UTF-8"
    if length > LONGEST_NAME:
        return f"a run's name has at most {LONGEST_NAME} bytes"
    return None


def path_problem(path: str) -> str | None:
    """What keeps `path` from being one that a file system can have; None if nothing does."""
    try:
        raw = path.encode()  # not os.fsencode: it is written into files of text
    except UnicodeEncodeError:
        return "it is not text in UTF-8; rename what it names"
    if not raw:
        return "a path needs at least one character"
    if b"\0" in raw:
        return "it holds a NUL character, which no path can have"
    if len(raw) > LONGEST_PATH or any(len(part) > 255 for part in raw.split(b"/")):
        return f"it is too long: 255 bytes per name and {LONGEST_PATH} in all at most"
    return None


def is_url(text: str) -> bool:
    """Whether a setting names a place in object storage rather than a folder."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def url_problem(text: str) -> str | None:
    """What keeps `text` from being a folder or a URL that runs can be kept at."""
    if "::" in text and "://" in text:
        return "use a plain URL like s3://bucket/runs, without ::"
    if not is_url(text):
        cut = re.match(r"(s3|gs|gcs|az|abfs|file|memory):(?!//)", text)
        return f"a URL begins with {cut[1]}://" if cut else None
    scheme, _, rest = text.partition("://")
    if "?" in text or "#" in text:
        return "use a plain URL like s3://bucket/runs, without ? or #"
    if ":" in rest.partition("/")[0].partition("@")[0] and "@" in rest.partition("/")[0]:
        return (
            "a password in a URL would be written into files; take it out, and give it through the "
            "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or a file of the provider"
        )
    if scheme == "file" and not rest.startswith("/"):
        return "file:// needs a whole path: file:///mnt/runs"
    return None if rest.strip("/") else f"name a place below {scheme}://"
