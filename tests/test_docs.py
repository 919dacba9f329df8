"""What the documentation shows works: its Python, its commands, its settings, its links."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from processes import quickly
from ranks import CONTEXT
from safetensors.torch import load_file

from multi_gpu_training.cli.app import app
from multi_gpu_training.cli.train_command import extra_settings
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_file import flatten, read_config_file, ready_configs, split
from multi_gpu_training.errors import CODES
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.recipes.recipe import find_recipe

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
RUN_PAGES = ("start", "own-model", "own-loop", "validation", "reliability")
RUN = [README, *(ROOT / f"docs/{name}.md" for name in RUN_PAGES)]
NOT_RUN, BEFORE_EACH = "not run", "before each block"
# README commands that are run as they stand; of the others only the flags are checked.
FAST = ("mgt --help", "mgt recipes", "mgt info", "mgt config-schema", "mgt train image --epochs 1")
ON_CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    note: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a page; a note is the HTML comment right above one."""
    found, note, fence, body = [], None, None, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if fence is None and line.startswith("```"):
            fence, body = (number, line[3:]), []
        elif fence is not None and line == "```":
            found.append(Block(page, fence[0], fence[1], note, "\n".join(body) + "\n"))
            fence, note = None, None
        elif fence is not None:
            body.append(line)
        elif line.strip():
            comment = re.fullmatch(r"<!-- (.*) -->", line)
            note = comment[1] if comment else None
    assert fence is None, f"{page}: the block at line {fence} is never closed"
    return [block for block in found if block.language == language]


def programs() -> Iterator[Any]:
    """Every Python block that shall run, after the lines its page puts before each."""
    for page in RUN:
        before = ""
        for block in blocks(page, "python"):
            if block.note == BEFORE_EACH:
                before = block.text
            elif block.note != NOT_RUN:
                yield pytest.param(before + "\n" + block.text, id=str(block))


def readme_scripts() -> dict[str, str]:
    """The single-GPU script and the multi-GPU one that the README's diff makes of it."""
    [diff] = blocks(README, "diff")
    lines = [(line[:1] or " ", line[1:]) for line in diff.text.splitlines()]
    return {
        "before": "".join(f"{text}\n" for sign, text in lines if sign in " -"),
        "after": "".join(f"{text}\n" for sign, text in lines if sign in " +"),
    }


def commands(page: Path) -> list[str]:
    """The `mgt` commands in the bash blocks of a page."""
    text = "\n".join(block.text for block in blocks(page, "bash")).replace("\\\n", " ")
    found = (re.search(r"\bmgt [^#]*", line) for line in text.splitlines() if line[:1] != "#")
    return [match[0].strip() for match in found if match]


def run_program(text: str, folder: Path) -> str:
    """Run a program in a process of its own and in `folder`; what it printed.

    The process is forked from a server that has imported torch, which saves seconds each.
    """
    (folder / "train.py").write_text(text)
    process = CONTEXT.Process(target=_execute, args=(folder,))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
    output = (folder / "output.txt").read_text()
    assert process.exitcode == 0, f"exit code {process.exitcode}\n{output}"
    return output


def _execute(folder: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    with Path("output.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["train.py"]
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of other libraries
    warnings.filterwarnings("ignore", category=FutureWarning)
    runpy.run_path("train.py", run_name="__main__")


def run_command(command: str, folder: Path) -> str:
    words = [sys.executable, "-m", "multi_gpu_training", *shlex.split(command)[1:]]
    done = subprocess.run(
        words, cwd=folder, env=quickly(ON_CPU), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("program", list(programs()))
def test_python_block_runs(program: str, tmp_path: Path) -> None:
    run_program(program, tmp_path)


def test_the_single_gpu_script_of_the_readme_runs(tmp_path: Path) -> None:
    run_program(readme_scripts()["before"], tmp_path)


def test_the_script_to_copy_is_the_one_of_the_readme() -> None:
    copied = ROOT / "examples" / "migration" / "one_gpu_after.py"
    assert copied.read_text() == readme_scripts()["after"]


def test_two_ranks_learn_with_the_readme_script_what_one_learns(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    script = readme_scripts()["after"]
    run_program(script, one)
    (two / "train.py").write_text(script)
    [command] = [line for line in commands(README) if line.startswith("mgt run")]
    assert "2 ranks" in run_command(command, two)
    [first], [second] = (list(f.glob("runs/custom/*/checkpoints/best")) for f in (one, two))
    ours, reference = (load_file(p / "model.safetensors") for p in (second, first))
    for name, value in reference.items():
        # The limit of the promise; float32 rounds at 6e-8, over 171 steps.
        assert float((ours[name] - value).norm() / value.norm()) <= 1e-5, name


@pytest.mark.parametrize("command", [c for c in commands(README) if c.startswith(FAST)])
def test_readme_command_runs(command: str, tmp_path: Path) -> None:
    run_command(command, tmp_path)


@pytest.mark.parametrize(
    ("page", "command"), [(page.name, command) for page in PAGES for command in commands(page)]
)
def test_command_has_flags_that_exist(page: str, command: str) -> None:
    name, *arguments = shlex.split(re.sub(r"\$\{?\w+\}?", "1", command))[1:]
    group = typer.main.get_command(app)
    if name.startswith("--"):
        assert name == "--help"
        return
    found: Any = group.commands[name]  # type: ignore[attr-defined]
    while hasattr(found, "commands"):  # mgt cluster token
        name, *arguments = arguments
        found = found.commands[name]
    context = found.make_context(name, arguments)
    if name == "run" or str(context.params.get("target")).endswith(".py"):
        return  # what is left over belongs to the script
    left_over = dict(extra_settings(list(context.args)))
    split(flatten(left_over), options_of(str(context.params.get("target"))))


def options_of(target: str) -> list[str]:
    """Options of the recipe that a command names, by its name or through a ready config."""
    if target in ready_configs():
        target = read_config_file(target).get("recipe", "image")
    return list(find_recipe(target if target in RECIPES else "image").options.model_fields)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    # PyPI shows the README, so its links are absolute; they must lead to files that are here.
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    text = page.read_text().replace(f"]({home}/blob/main/", "](")
    if page == README:
        assert not re.findall(r"\]\((?!https?:|#)([^)]+)\)", page.read_text())
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, place = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        assert other.exists(), f"{page.name} links to {target}"
        if place:
            titles = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            assert place in {title.lower().replace(" ", "-") for title in titles}, target


def test_a_script_that_only_the_site_shows_is_linked_where_it_stands() -> None:
    shown = 0
    for page in PAGES:
        for before, script in re.findall(r"(.*)\n\n<!-- show (\S+) -->", page.read_text()):
            shown += 1
            assert f"[{Path(script).name}](../{script})" in before, f"{page.name}: {script}"
    assert shown == 8


def test_every_page_installs_extras_with_the_pinned_versions() -> None:
    for page in [README, *ROOT.glob("docs/*.md")]:
        for words in re.findall(r"pip install (.*\[[\w,-]+\]')", page.read_text()):
            assert re.match(r"-c constraints(-\w+)?\.txt -e '\.\[", words), page.name


def test_every_row_of_a_table_has_the_cells_of_its_head() -> None:
    for page in [*PAGES, *sorted(ROOT.glob("benchmarks/**/*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for table in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
            rows = [re.sub(r"`[^`]*`|\\\|", "", row).strip() for row in table.splitlines()]
            odd = [row for row in rows if row.count("|") != rows[0].count("|") or row[-1] != "|"]
            assert not odd, f"{page.name}: {odd[0]}"


def test_every_page_has_a_place_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w-]+\.md", json.dumps(site["nav"]) + site["not_in_nav"]))
    assert listed == {page.name for page in ROOT.glob("docs/**/*.md")}


def test_the_reference_holds_what_the_code_declares() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "write_reference.py"))["pages"]()
    for page, text in made.items():
        assert page.read_text() == text, "run python scripts/write_reference.py"


def test_every_setting_is_described() -> None:
    fields = MultiGPUConfig.model_fields
    assert [name for name, field in fields.items() if not field.description] == []


def test_no_description_speaks_of_none_where_the_shell_has_no_such_value() -> None:
    told = {name: field.description for name, field in MultiGPUConfig.model_fields.items()}
    for recipe in RECIPES:
        options = find_recipe(recipe).options.model_fields
        told |= {f"{recipe} {name}": field.description for name, field in options.items()}
    assert [name for name, text in told.items() if re.search(r"\bNone\b", text or "")] == []


def test_troubleshooting_explains_every_code_in_the_words_of_mgt_explain() -> None:
    page = " ".join((ROOT / "docs/troubleshooting.md").read_text().split())
    assert [code for code, text in CODES.items() if f"**{code}** {text}" not in page] == []
    assert set(re.findall(r"MGT\d+", page)) == set(CODES)
