"""What the package is made with: locked by hashes, listed in an SBOM, with a threat model."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
_PACKAGE = re.compile(r"([a-z0-9-]+)==(\S+) \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    """Name -> version; every line of the file must be understood."""
    found: dict[str, str] = {}
    hashes: dict[str, int] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line.startswith("#"):
            continue
        if named := _PACKAGE.fullmatch(line):
            assert named[1] not in found
            found[named[1]] = named[2]
        else:
            assert _HASH.fullmatch(line), line
            hashes[list(found)[-1]] = hashes.get(list(found)[-1], 0) + 1
    assert set(hashes) == set(found)  # none without a hash
    return found


def test_every_package_that_is_needed_also_indirectly_is_locked(locked: dict[str, str]) -> None:
    needed = set(script("make_sbom").closure()) - {"multi-gpu-training"}
    assert needed <= set(locked), f"{needed - set(locked)}: run scripts/lock_requirements.py"


def test_the_lock_has_the_versions_that_are_pinned(locked: dict[str, str]) -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    canonical = script("lock_requirements").canonical
    for pin in pins:
        name, _, version = pin.partition("==")
        if version and canonical(name) in locked:
            found = locked[canonical(name)].partition("+")[0]
            assert found == version, f"{pin}: run scripts/lock_requirements.py"


def test_the_sbom_is_cyclonedx_and_lists_what_is_locked(locked: dict[str, str]) -> None:
    sbom: dict[str, Any] = json.loads((ROOT / "sbom.cdx.json").read_text())
    assert (sbom["bomFormat"], sbom["specVersion"], sbom["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", sbom["serialNumber"])
    listed = {part["name"]: part for part in sbom["components"]}
    for name, part in listed.items():
        assert part["type"] == "library" and part["bom-ref"] == part["purl"]
        assert part["purl"] == f"pkg:pypi/{name}@{part['version']}"
        assert locked[name] == part["version"]
    assert {"torch", "numpy", "pydantic-core"} <= set(listed)
    refs = {part["bom-ref"] for part in (*listed.values(), sbom["metadata"]["component"])}
    assert {entry["ref"] for entry in sbom["dependencies"]} == refs
    assert {on for entry in sbom["dependencies"] for on in entry["dependsOn"]} <= refs


def test_the_threat_model_names_what_is_trusted_and_what_is_not() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for heading in ("## Reporting", "## Threat model", "## What is trusted", "## What is not"):
        assert heading in text
    for path in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert path.startswith("http") or (ROOT / path).exists(), path
    for name in re.findall(r"`((?:src|tests|benchmarks|scripts)/[^`]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.engines
def test_the_index_offers_files_with_the_locked_hashes() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q"]
    command += ["--require-hashes", "-r", str(ROOT / "requirements.lock")]
    assert subprocess.run(command, check=False).returncode == 0
