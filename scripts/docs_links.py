"""A hook of MkDocs: links out of docs/ lead to the repository, and named scripts are shown.

`<!-- show examples/NAME.py -->` becomes the script. Where Markdown is read as it is, the link
beside it has to do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called by MkDocs with each page."""
    linked = re.sub(r"\]\(\.\./", f"]({config.repo_url}/blob/main/", markdown)
    return re.sub(r"^<!-- show (\S+) -->$", _shown, linked, flags=re.MULTILINE)


def _shown(found: re.Match[str]) -> str:
    return f"```python\n{(ROOT / found[1]).read_text().rstrip()}\n```"
