"""A hook of MkDocs: links that lead out of docs/ become links to the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    return re.sub(r"\]\(\.\./", f"]({config.repo_url}/blob/main/", markdown)
