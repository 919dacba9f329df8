"""`mgt explain`: what an error code means."""

from __future__ import annotations

import difflib
import textwrap

from multi_gpu_training.errors import CODES, ConfigError
from multi_gpu_training.safe_output import brief


def explain(code: str | None) -> int:
    """Print the text of one code, or all of them."""
    if code is not None and code.upper() not in CODES:
        near = difflib.get_close_matches(code.upper(), CODES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{brief(code)} is not an error code; {hint}`mgt explain` lists them")
    for name in CODES if code is None else [code.upper()]:
        print(
            textwrap.fill(CODES[name], 100, initial_indent=f"{name}  ", subsequent_indent=" " * 8)
        )
    return 0
