"""Write sbom.cdx.json: what this package is made with, as CycloneDX, from the installed metadata.

    python scripts/make_sbom.py

Lists every package that `.[dev]` needs, also indirectly, with version, licence and package URL, and
which of them needs which. Hashes stand in requirements.lock. The same environment gives the same
file.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SBOM = ROOT / "sbom.cdx.json"
PACKAGE = "multi-gpu-training"


def main() -> int:
    SBOM.write_text(json.dumps(sbom(), indent=1) + "\n")
    print(f"{SBOM.name}: {len(sbom()['components'])} components")
    return 0


def sbom() -> dict[str, Any]:
    """The bill of materials of this environment."""
    needs = closure()
    components = [_component(name) for name in sorted(needs) if name != PACKAGE]
    refs = {name: _purl(name) for name in needs}
    dependencies = [
        {"ref": refs[name], "dependsOn": sorted(refs[other] for other in others)}
        for name, others in sorted(needs.items())
    ]
    found = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**_component(PACKAGE), "type": "application"}},
        "components": components,
        "dependencies": dependencies,
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(found, sort_keys=True))
    return {**found, "serialNumber": f"urn:uuid:{serial}"}


def closure() -> dict[str, set[str]]:
    """Package -> the packages that it needs here, from `.[dev]` on."""
    found: dict[str, set[str]] = {}
    open_: list[tuple[str, frozenset[str]]] = [(PACKAGE, frozenset(("dev",)))]
    seen = set()
    while open_:
        name, extras = open_.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        needed = found.setdefault(name, set())
        for text in importlib.metadata.requires(name) or ():
            wanted = Requirement(text)
            if wanted.marker and not any(
                wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                continue
            other = canonical(wanted.name)
            if other != name:
                needed.add(other)
            open_.append((other, frozenset(wanted.extras)))
    return found


def _component(name: str) -> dict[str, Any]:
    facts = importlib.metadata.metadata(name)
    version = importlib.metadata.version(name)
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": _purl(name),
        "name": canonical(facts["Name"]),
        "version": version,
        "purl": _purl(name),
    }
    licence = facts.get("License-Expression") or _classified(facts.get_all("Classifier") or [])
    if licence:
        kind = "expression" if facts.get("License-Expression") else None
        found["licenses"] = [{kind: licence} if kind else {"license": {"name": licence}}]
    return found


def _classified(classifiers: list[str]) -> str | None:
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License ::")]
    return ", ".join(named) or None


def _purl(name: str) -> str:
    return f"pkg:pypi/{canonical(name)}@{importlib.metadata.version(name)}"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
