"""Test every combination of torch and Python that this machine can install: `make test-matrix`.

    make test-matrix                                     # torch 2.11.0, 2.13.0, newest; 3.11-3.13
    make test-matrix TORCH=newest PYTHONS=3.13 MATRIX=--allow-cuda
    python benchmarks/versions.py --torch 2.11.0 --python 3.12 --tests tests/parity

Each combination gets its own environment under .matrix/ with the other versions of constraints.txt,
and runs `--tests` (the whole suite by default). PyPI's torch for Linux brings several GB of CUDA
packages: without --allow-cuda a combination that has no CPU build is refused with that reason.
`--index https://download.pytorch.org/whl/cpu` names where CPU builds are. Interpreters are found as
pythonX.Y, in pyenv and with uv. Exits with 1 if a combination fails; a refused one is listed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def interpreter(version: str) -> str | None:
    """A Python of this version that runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [*sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    places += [Path(found) for found in [shutil.which(f"python{version}")] if found]
    if shutil.which("uv"):
        told = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True)
        places += [Path(told.stdout.strip())] if told.returncode == 0 else []
    for place in places:
        check = "import sys; print('%d.%d' % sys.version_info[:2])"
        told = subprocess.run([place, "-c", check], capture_output=True, text=True)
        if told.stdout.strip() == version:
            return str(place)
    return None


def found_torch(pip: list[str], torch: str, index: list[str]) -> tuple[str, bool]:
    """The version that `torch` stands for, and whether pip finds a CPU build of it."""
    told = subprocess.run(
        [*pip, "index", "versions", "torch", "--pre", *index], capture_output=True, text=True
    )
    listed = re.search(r"Available versions: (.*)", told.stdout)
    versions = listed[1].split(", ") if listed else []
    # An older CPU build is not the newest torch: tested under that name, it would mislead.
    version = versions[0].partition("+")[0] if torch == "newest" and versions else torch
    return version, f"{version}+cpu" in versions


def attempt(version: str, torch: str, given: argparse.Namespace) -> str:
    """What became of one combination, in a few words."""
    python = interpreter(version)
    if python is None:
        return f"refused: no Python {version} here; install one (pyenv install {version})"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    index = ["--extra-index-url", given.index] if given.index else []
    release, for_cpu = found_torch(pip, torch, index)
    if not for_cpu and not given.allow_cuda:
        return (
            f"refused: pip finds no CPU build of torch {release} for Python {version}, and other "
            "builds bring GBs of CUDA packages; give --index with CPU builds, or --allow-cuda"
        )
    wanted = "torch" if release == "newest" else f"torch=={release}{'+cpu' * for_cpu}"
    folder = ROOT / ".matrix" / f"py{version}-torch{torch}"
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip[0] = str(folder / "bin" / "python")
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines()]
    others = folder / "constraints.txt"
    others.write_text("\n".join(line for line in pins if not line.startswith("torch==")) + "\n")
    install = [*pip, "install", "--quiet", "-c", str(others), *index, wanted, "-e", f"{ROOT}[dev]"]
    installed = subprocess.run(install, stderr=subprocess.PIPE, text=True)
    if installed.returncode:
        reason = [line for line in installed.stderr.splitlines() if line.startswith("ERROR")]
        return f"refused: pip cannot install it: {(reason or ['no reason given'])[-1]}"
    tell = "import torch; print(torch.__version__)"
    found = subprocess.run([folder / "bin" / "python", "-c", tell], capture_output=True, text=True)
    tests = [str(folder / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run([*tests, *given.tests], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(ended.stdout, flush=True)
    last = ended.stdout.strip().splitlines()[-1] if ended.stdout.strip() else "no output"
    outcome = "passed" if ended.returncode == 0 else "FAILED"
    return f"{outcome}: torch {found.stdout.strip()}, {last.strip('= ')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "2.13.0", "newest"])
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--index", help="a further index, with CPU builds of torch")
    parser.add_argument("--allow-cuda", action="store_true", help="take PyPI's builds")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest runs")
    given = parser.parse_args()
    rows = [(v, t, attempt(v, t, given)) for v in given.python for t in given.torch]
    print("| Python | torch | result |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return any(result.startswith("FAILED") for _, _, result in rows)


if __name__ == "__main__":
    sys.exit(main())
