"""Keeps secrets out of files that outlive a run: tokens, passwords, and URLs that carry them.

A secret is known by its name (`--hf-token`, `WANDB_API_KEY=`, `password:`) or by its place
before the @ of a URL. What has a harmless name and looks like any other word cannot be found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
_WORDS = (
    "token|secret|password|passwd|passphrase|pwd|apikey|accesskey|accesstoken|authtoken|credentials?|bearer|auth|"
    "authorization|signature|key"
)
# The last word of a name decides: api_key is one, key_size and tokens are not.
_NAME = rf"(?:[A-Za-z0-9]+[_.-])*(?:{_WORDS})"
_IS_NAME = re.compile(rf"-{{0,2}}{_NAME}", re.IGNORECASE)
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@'\"]+@", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"((?<![A-Za-z0-9_.-])-{{0,2}}{_NAME}[\"']?\s?[=:]\s?[\"']?)([^\s&;,'\"]+)", re.IGNORECASE
)
_FLAG = re.compile(rf"((?<!\S)--{_NAME}\s+)(?!-)(\S+)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a setting or flag of this name holds a secret."""
    return _IS_NAME.fullmatch(name.strip()) is not None


def redact(text: str) -> str:
    """The text without values of secret names and without users and passwords in URLs."""
    if "://" in text:
        text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    if "=" in text or ":" in text:
        text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _FLAG.sub(rf"\1{HIDDEN}", text) if "--" in text else text


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line, word by word: `--token X` hides the next word."""
    shown: list[str] = []
    for word in words:
        flag = shown[-1] if shown else ""
        follows = flag.startswith("-") and "=" not in flag and is_secret(flag)
        shown.append(HIDDEN if follows and not word.startswith("-") else redact(word))
    return shown


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, also nested ones: text under a secret name is hidden, numbers are not."""
    return {name: _redacted(str(name), value) for name, value in values.items()}


def _redacted(name: str, value: Any) -> Any:
    if isinstance(value, str):
        # What is still to be looked up in the environment is not in the file.
        if value.startswith("${") and value.endswith("}"):
            return value
        return HIDDEN if value and is_secret(name) else redact(value)
    if isinstance(value, Mapping):
        return redact_values(value)
    if isinstance(value, list | tuple):
        return [_redacted(name, item) for item in value]
    return value
