"""The package: small at its core, complete as a source distribution, pinned for its tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def needed(extra: str) -> set[str]:
    """Every package that the extra installs here, found through what is installed."""
    found: set[tuple[str, str]] = set()
    waiting = [*map(Requirement, PROJECT["dependencies"] + EXTRAS[extra])]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for asked in {"", *wanted.extras}:
            if (name, asked) in found:
                continue
            found.add((name, asked))
            if name == "multi-gpu-training":
                waiting += map(Requirement, EXTRAS[asked] if asked else ())
                continue
            try:
                listed = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:  # of another extra's tests
                continue
            waiting += [
                other
                for other in listed
                if not other.marker or other.marker.evaluate({"extra": asked})
            ]
    return {name for name, _ in found} - {"multi-gpu-training"}


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}


@pytest.mark.parametrize("extra", ["dev", "engines"])
def test_everything_that_make_installs_is_pinned(extra: str) -> None:
    # torch pins the packages that only its CUDA builds need.
    of_torch = re.compile(r"nvidia-(?!ml-py)|triton|cuda-")
    assert {name for name in needed(extra) - pinned() if not of_torch.match(name)} == set()


def test_the_core_does_without_tensorboard_and_matplotlib_and_the_recipes_bring_them() -> None:
    core = {Requirement(text).name for text in PROJECT["dependencies"]}
    assert not core & {"tensorboard", "matplotlib", "wandb", "mlflow-skinny", "trackio"}
    assert {"tensorboard", "matplotlib"} <= needed("recipes")


def test_the_source_distribution_holds_tests_docs_and_benchmarks(tmp_path: Path) -> None:
    build = "from setuptools.build_meta import build_sdist; import sys; build_sdist(sys.argv[1])"
    copy = tmp_path / "project"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if not files:
        pytest.skip("this is not a git checkout")
    for name in files:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
    left_out = {name for name in files if not name.startswith((".ci", ".git"))} - held
    assert left_out == set()


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("train", ["recipes"]),
        ("lint", ["recipes", "dev"]),
        ("{venv}/docs", ["recipes", "dev", "dev,docs"]),
    ],
)
def test_make_installs_only_what_the_target_needs(
    target: str, extras: list[str], tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    words = ["make", "--dry-run", f"VENV={venv}", target.format(venv=venv)]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"-e '\.\[([\w,]+)\]'", said) == extras
