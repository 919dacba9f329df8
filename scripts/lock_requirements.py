"""Write requirements.lock: every package that `.[dev]` needs, also indirectly, with its hashes.

    python scripts/lock_requirements.py

pip resolves `.[dev]` under constraints.txt; then the pages of all configured indexes give the hash
of every file of the chosen versions, so that the lock fits any platform they have files for.
Install from it with

    pip install --require-hashes -r requirements.lock && pip install --no-deps -e .

in two steps, because pip can check no hash of an editable install.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
INDEX = "https://pypi.org/simple"
_LINK = re.compile(r'<a\s[^>]*href="([^"]+)"', re.IGNORECASE)
HEAD = """\
# Every package of '.[dev]' with the hashes of its files; made by scripts/lock_requirements.py.
# pip install --require-hashes -r requirements.lock && pip install --no-deps -e .
# torch is the tested CPU build, of https://download.pytorch.org/whl/cpu; for the CUDA build, which
# needs further packages, run the script where pip finds that one.
"""


def main() -> int:
    chosen = resolve()
    pages = [INDEX, *extra_indexes()]
    lines = [HEAD]
    for name, (version, own_hash) in sorted(chosen.items()):
        hashes = {own_hash} if own_hash else set()
        for page in pages:
            hashes |= offered(page, name, version)
        if not hashes:
            sys.exit(f"no index has a hash for {name}=={version}")
        lines.append(f"{name}=={version} \\\n")
        told = [f"    --hash=sha256:{digest}" for digest in sorted(hashes)]
        lines.append(" \\\n".join(told) + "\n")
    LOCK.write_text("".join(lines))
    print(f"{LOCK.name}: {len(chosen)} packages")
    return 0


def resolve() -> dict[str, tuple[str, str | None]]:
    """Name -> (version, hash of the file that pip would install), for all but this package."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--report", "-", "-c", str(ROOT / "constraints.txt"), f"{ROOT}[dev]"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, tuple[str, str | None]] = {}
    for item in json.loads(told)["install"]:
        name = canonical(item["metadata"]["name"])
        if name != "multi-gpu-training":
            found[name] = item["metadata"]["version"], _hash(item["download_info"])
    return found


def _hash(info: dict[str, Any]) -> str | None:
    told = info.get("archive_info", {}).get("hashes", {}).get("sha256")
    if told is None and info["url"].startswith("file:"):
        path = Path(urllib.parse.unquote(urllib.parse.urlparse(info["url"]).path))
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return str(told) if told is not None else None


def extra_indexes() -> list[str]:
    """Indexes of this machine's pip beside PyPI."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = re.search(r"extra-index-url='([^']*)'", told)
    return found[1].split() if found else []


def offered(index: str, name: str, version: str) -> set[str]:
    """Hashes of the files that an index has of this version."""
    found = set()
    for link in _LINK.findall(_page(index, name)):
        url, _, fragment = html.unescape(link).partition("#")
        file = urllib.parse.unquote(url.rpartition("/")[2])
        if _version_of(file, name) == version and fragment.startswith("sha256="):
            found.add(fragment.removeprefix("sha256="))
    return found


def _page(index: str, name: str) -> str:
    if index.startswith("file:"):
        page = Path(urllib.parse.urlparse(index).path) / name / "index.html"
        return page.read_text() if page.is_file() else ""
    try:
        with urllib.request.urlopen(f"{index}/{name}/", timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError:
        return ""


def _version_of(file: str, name: str) -> str | None:
    """The version in the name of a wheel or source archive of a package."""
    stem = file.removesuffix(".tar.gz").removesuffix(".zip")
    if file.endswith(".whl"):
        parts = stem.split("-")
        return parts[1] if len(parts) >= 5 and canonical(parts[0]) == name else None
    package, _, version = stem.rpartition("-")
    return version if canonical(package) == name else None


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
