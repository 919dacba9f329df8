"""60 hostile run folders of another style: right in every file, wrong as a whole.

    python benchmarks/hostile_blind_folders.py --out blind_folders.json
    python benchmarks/hostile_blind_folders.py --only exchanged --verbose

The older campaigns damage files. Here files belong to other runs, other steps or another attempt,
are exchanged, edited by hand, half copied or synchronised, changed while they are read, or true but
absurd, with hashes that fit. report, checkpoints, resume, evaluate, predict, export, load, serve,
top, the dashboard's views, merge and upload read each. Nothing may end in a traceback, hang, take
more than 1 GiB, run code of the folder, write outside it, or show control characters; a training
that is resumed must reach the weights of an undisturbed one, or be refused in words.
"""

# ruff: noqa: E501 - one line per case reads best
from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sqlite3
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from hostile_readers import everything as read_all
from hostile_trial import attempt, files_below, mgt

Change = Callable[[Path], object]
LAST = "checkpoints/step-00000004"
FIRST = "checkpoints/step-00000002"
EVIL = "<img src=x onerror=alert(1)>\u202e\u200b"
ESC = "\x1b]0;owned\x07\x1b[2J"
OTHER = "RESUMED TO OTHER WEIGHTS"
# Forged with hashes that fit: only a signing key would tell (SECURITY.md).
FORGED = (
    "weights of another run",
    "weights of NaN",
    "weights as bfloat16",
    "steps of the optimizer negative",
)

PLACE = "kept/image/run"  # SAVE_DIR/RECIPE/NAME, so that it can be resumed
RUN = (
    ("report", PLACE, "--json"), ("checkpoints", PLACE), ("top", PLACE, "--once"), ("dashboard view", PLACE),
    ("evaluate", PLACE, "--num-gpus", "1"), ("export", PLACE, "--to", "safetensors", "--out", "exported-again"),
)  # fmt: skip
RESUME = (("resume", PLACE, "--max-steps", "6", "--num-gpus", "1", "--multi-gpu", "single"),)
COPIED = (
    RUN[0],
    RUN[1],
    RUN[5],
    ("checkpoints", "upload", PLACE, "--to", "file://{here}/copy", "--wait", "5"),
    *RESUME,
)
FITTING = (
    RUN[1],
    ("serve", PLACE, "--port", "0"),
    ("checkpoints", "merge", PLACE, "merged.safetensors"),
    *RESUME,
)
EVENTS = (("report", PLACE), *RUN[:4])
EXPORT = (("predict", "exported", "picture.png", "--num-gpus", "1"), ("evaluate", "exported", "--num-gpus", "1"),
          ("export", "exported", "--to", "safetensors", "--out", "again"), ("serve", "exported", "--port", "0"))  # fmt: skip
SEARCH = (("search", "study", "--resume"), ("top", "study", "--once"), ("report", "study"))
FEDERATION = (("federated", "simulate", "image", "--save-dir", "federation", "--resume", "--rounds", "2", "--clients", "2"),
              ("top", "federation", "--once"), ("report", "federation"))  # fmt: skip


# Changing what fits together


def facts_of(run: Path, step: str = LAST) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / step / "manifest.json").read_text())
    del found["sha256"]
    return found


def sign(run: Path, facts: dict[str, Any], step: str = LAST) -> None:
    from multi_gpu_training.safe_files import signed

    (run / step / "manifest.json").write_text(json.dumps(signed(facts), indent=1))


def put(run: Path, name: str, raw: bytes, step: str = LAST) -> None:
    """A file of a checkpoint, with its hash in the manifest."""
    (run / step / name).write_bytes(raw)
    facts = facts_of(run, step)
    facts["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    sign(run, facts, step)


def tensors(run: Path, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from safetensors.torch import load, save

    found = load((run / LAST / name).read_bytes())
    put(run, name, save(change(found)))


def state(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads((run / LAST / "state.json").read_text())
    change(found)
    put(run, "state.json", json.dumps(found).encode())


def everywhere(found: Any, key: str, value: Any) -> None:
    """Set `key` wherever it occurs."""
    if isinstance(found, dict):
        for name in found:
            if name == key:
                found[name] = value
            else:
                everywhere(found[name], key, value)
    elif isinstance(found, list):
        for item in found:
            everywhere(item, key, value)


def edit(name: str, change: Callable[[str], str]) -> Change:
    return lambda run: (run / name).write_text(change((run / name).read_text()))


def each_file(run: Path, change: Callable[[Path], object]) -> None:
    for path in sorted(run.rglob("*")):
        if path.is_file() and not path.is_symlink():
            change(path)


def exchange(run: Path, one: str, other: str) -> None:
    (run / one).rename(run / "between")
    (run / other).rename(run / one)
    (run / "between").rename(run / other)


def only(run: Path, name: str) -> None:
    for path in run.iterdir():
        if path.name != name:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def while_read(change: Callable[[Path, int], object], every_s: float = 0.01) -> Change:
    """Go on changing it from a thread of the reading process, until that ends."""

    def start(run: Path) -> Callable[[], None]:
        def work() -> None:
            number = 0
            while True:
                number += 1
                try:
                    change(run, number)
                except OSError:
                    time.sleep(0.1)
                time.sleep(every_s)

        return threading.Thread(target=work, daemon=True).start

    return start


def told(run: Path, *events: dict[str, Any], name: str = "rank-0.jsonl") -> None:
    from multi_gpu_training.monitoring.event_crc import with_crc

    head = {"v": 2, "run": "run", "attempt": 0, "rank": 0, "world_size": 1, "host": "h"}
    lines = [with_crc(json.dumps({**head, "time": time.time() + i, **e})) for i, e in enumerate(events)]  # fmt: skip
    with (run / "events" / name).open("ab") as file:
        file.write(b"\n".join(lines) + b"\n")


def belonging() -> Iterator[tuple[str, Change]]:
    """Files of another run, step or machine."""
    yield "nothing changed", lambda run: None
    yield "checkpoints of two steps exchanged", lambda run: exchange(run, FIRST, LAST)
    yield "manifests of two steps exchanged", lambda run: exchange(run, f"{FIRST}/manifest.json", f"{LAST}/manifest.json")  # fmt: skip
    yield "an old checkpoint under a later name", lambda run: shutil.copytree(run / FIRST, run / "checkpoints/step-00000099")  # fmt: skip
    yield "weights of another run", lambda run: put(run, "model.safetensors", (run.parent / "run2" / LAST / "model.safetensors").read_bytes())  # fmt: skip
    yield "optimizer state of another model", lambda run: put(run, "optimizer.safetensors", (run / LAST / "model.safetensors").read_bytes())  # fmt: skip
    yield "a whole checkpoint of another run", lambda run: (shutil.rmtree(run / LAST), shutil.copytree(run.parent / "run2" / LAST, run / LAST))  # fmt: skip
    for name in ("environment.json", "config.yaml", ".lock", "events/rank-0.jsonl"):  # fmt: skip
        yield f"{name} of another run", lambda run, name=name: shutil.copy(run.parent / "run2" / name, run / name)  # fmt: skip
    yield "a run inside a run", lambda run: shutil.copytree(run.parent / "run2", run / "checkpoints" / "run", symlinks=True)  # fmt: skip
    yield "only its checkpoints", lambda run: only(run, "checkpoints")  # fmt: skip
    yield "rank 7's events alone", lambda run: (run / "events/rank-0.jsonl").rename(run / "events/rank-7.jsonl")  # fmt: skip


def copied() -> Iterator[tuple[str, Change]]:
    """What copying, synchronising, editing and version control leave."""
    yield "every file empty", lambda run: each_file(run, lambda path: path.write_bytes(b""))
    yield "every file cut at 4096", lambda run: each_file(run, lambda path: os.truncate(path, min(4096, path.stat().st_size)))  # fmt: skip
    yield "a tail of NUL after a crash", lambda run: each_file(run, lambda path: path.open("ab").write(bytes(4096)))  # fmt: skip
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1534\n"  # fmt: skip
    yield "pointers of git LFS", lambda run: [p.write_bytes(pointer) for p in run.rglob("*.safetensors")]  # fmt: skip
    yield "lines end as on Windows", lambda run: [p.write_bytes(p.read_bytes().replace(b"\n", b"\r\n")) for e in ("json", "yaml", "jsonl") for p in run.rglob(f"*.{e}")]  # fmt: skip
    yield "UTF-8 with a mark", lambda run: [p.write_bytes(b"\xef\xbb\xbf" + p.read_bytes()) for e in ("json", "yaml", "jsonl") for p in run.rglob(f"*.{e}")]  # fmt: skip
    yield "UTF-16", lambda run: [p.write_text(p.read_text(), encoding="utf-16") for e in ("json", "yaml", "jsonl") for p in run.rglob(f"*.{e}")]  # fmt: skip
    yield "a merge conflict in config.yaml", edit("config.yaml", lambda t: f"<<<<<<< HEAD\n{t}=======\n{t}>>>>>>> other\n")  # fmt: skip
    yield "config.yaml twice", edit("config.yaml", lambda t: t + t)
    yield "conflict copies beside all", lambda run: each_file(run, lambda p: shutil.copy(p, p.with_name(f"{p.stem}.sync-conflict-20260101-000000-AAAAAAA{p.suffix}")))  # fmt: skip
    yield "Apple's doubles beside all", lambda run: each_file(run, lambda p: p.with_name("._" + p.name).write_bytes(b"\0\x05\x16\x07" + bytes(100)))  # fmt: skip
    yield "best a text file", lambda run: ((run / "checkpoints/best").unlink(), (run / "checkpoints/best").write_text("step-00000004"))  # fmt: skip
    yield "best a whole folder", lambda run: ((run / "checkpoints/best").unlink(), shutil.copytree(run / FIRST, run / "checkpoints/best"))  # fmt: skip
    yield "every file a link to its copy", lambda run: each_file(run, linked_away)
    yield "hard links of one file", lambda run: [(p.unlink(), os.link(run / "config.yaml", p)) for p in (run / "environment.json", run / LAST / "state.json")]  # fmt: skip


def linked_away(path: Path) -> None:
    store = Path(f"{path}.real")
    path.rename(store)
    path.symlink_to(store.name)


def fitting() -> Iterator[tuple[str, Change]]:
    """True hashes over values that cannot be."""
    yield "weights as bfloat16", lambda run: tensors(run, "model.safetensors", lambda t: {k: v.bfloat16() for k, v in t.items()})  # fmt: skip
    yield "weights named module.", lambda run: tensors(run, "model.safetensors", lambda t: {"module." + k: v for k, v in t.items()})  # fmt: skip
    yield "one weight missing", lambda run: tensors(run, "model.safetensors", lambda t: dict(list(t.items())[1:]))  # fmt: skip
    yield "optimizer state of NaN", lambda run: tensors(run, "optimizer.safetensors", lambda t: {k: v * float("nan") if v.is_floating_point() else v for k, v in t.items()})  # fmt: skip
    yield (
        "steps of the optimizer negative",
        lambda run: state(run, lambda s: everywhere(s, "step", -5)),
    )
    yield "a learning rate of text", lambda run: state(run, lambda s: everywhere(s, "lr", "fast"))
    yield "the manifest says step 3", lambda run: sign(run, {**facts_of(run), "step": 3})
    yield "markup in its names", lambda run: sign(run, {**facts_of(run), "metrics": {EVIL: 1.0, "=cmd|'/c calc'!A1": 2.0}})  # fmt: skip
    yield "a header of safetensors with spaces", lambda run: put(run, "model.safetensors", spaced((run / LAST / "model.safetensors").read_bytes()))  # fmt: skip
    for key, value in {"world_size": 64, "data_dir": "gone/for/good", "save_dir": "../../outside", "run_name": EVIL}.items():  # fmt: skip
        yield f"config.yaml: {key}", edit("config.yaml", lambda t, key=key, value=value: "\n".join(line for line in t.splitlines() if not line.startswith(key)) + f"\n{key}: {json.dumps(value)}\n")  # fmt: skip


def spaced(raw: bytes) -> bytes:
    size = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + size] + b" " * 5_000_000
    return struct.pack("<Q", len(header)) + header + raw[8 + size :]


def recorded() -> Iterator[tuple[str, Change]]:
    """Events that are true one by one."""
    yield "each line twice", edit("events/rank-0.jsonl", lambda t: "".join(2 * (line + "\n") for line in t.splitlines()))  # fmt: skip
    yield "two runs in one file", lambda run: (run / "events/rank-0.jsonl").open("ab").write((run.parent / "run2/events/rank-0.jsonl").read_bytes())  # fmt: skip
    yield "ranks that disagree on their number", lambda run: [told(run, {"event": "rank", "step": 0, "rank": r, "world_size": 2 + r}, name=f"rank-{r}.jsonl") for r in range(1, 4)]  # fmt: skip
    yield "all in the year 2100", lambda run: told(run, *({"event": "step", "step": 5 + i, "loss": 1.0, "time": 4.1e9 + i} for i in range(50)))  # fmt: skip
    yield "markup in every text", lambda run: told(run, {"event": "rank", "step": 0, "host": EVIL, "device_name": EVIL}, {"event": "log", "level": "error", "message": EVIL + ESC}, {"event": "fault", "step": 3, "kind": EVIL, "message": ESC}, {"event": "epoch", "epoch": 1, "step": 4, "train": {EVIL + "</script>": 1.0}})  # fmt: skip
    yield "metrics.csv of formulas", lambda run: (run / "metrics.csv").write_text("step,loss\n1,=1+1\n" + "9" * 100_000 + ",x\n")  # fmt: skip


def moving() -> Iterator[tuple[str, Change]]:
    """A folder that changes while it is read. Returns what starts the change, in the reader."""
    yield "events grow all the time", while_read(lambda run, n: told(run, *({"event": "step", "step": 4 + n * 20 + i, "loss": 1.0} for i in range(20))))  # fmt: skip
    yield "the manifest flickers", while_read(lambda run, n: exchange(run, f"{LAST}/manifest.json", f"{FIRST}/manifest.json"), 0.001)  # fmt: skip
    yield "the weights are cut and grow", while_read(lambda run, n: os.truncate(run / LAST / "model.safetensors", 1000 * (n % 7)), 0.002)  # fmt: skip
    yield "the run is gone half-way", while_read(lambda run, n: n == 40 and run.rename(run.parent / "run-away"), 0.01)  # fmt: skip
    yield "config.yaml becomes a FIFO", while_read(lambda run, n: ((run / "config.yaml").unlink(), os.mkfifo(run / "config.yaml")), 0.3)  # fmt: skip


def exports() -> Iterator[tuple[str, Change]]:
    def index(change: Callable[[dict[str, Any]], Any]) -> Change:
        def make(folder: Path) -> None:
            from multi_gpu_training.safe_files import signed

            facts = json.loads((folder / "export.json").read_text())
            del facts["sha256"]
            change(facts)
            (folder / "export.json").write_text(json.dumps(signed(facts)))

        return make

    def huge(folder: Path) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(64 << 30)
        index(lambda f: f["files"].update({"model.safetensors": {**f["files"]["model.safetensors"], "bytes": 64 << 30}}))(folder)  # fmt: skip

    yield "a sparse file of 64 GiB", huge
    yield "a sparse file of 64 GiB beside it", lambda folder: ((folder / "README.md").touch(), os.truncate(folder / "README.md", 64 << 30))  # fmt: skip
    yield "weights of another run", lambda folder: shutil.copy(folder.parent / "kept/image/run2" / LAST / "model.safetensors", folder / "model.safetensors")  # fmt: skip
    yield "index without weights", lambda folder: ((folder / "model.safetensors").unlink(), index(lambda f: f["files"].pop("model.safetensors"))(folder))  # fmt: skip
    yield "model.json of another hash", edit("model.json", lambda t: t + " ")
    yield "options of another data set", index(lambda f: f.update(options={"data_dir": "/etc", "mode": "cnn"}))  # fmt: skip
    yield "a link to another export", lambda folder: (shutil.move(folder, folder.parent / "far"), folder.symlink_to("far"))  # fmt: skip
    yield "checkpoints inside", lambda folder: shutil.copytree(folder.parent / PLACE / "checkpoints", folder / "checkpoints", symlinks=True)  # fmt: skip


def sql(*statements: str) -> Change:
    def make(study: Path) -> None:
        for file in study.glob("*.db"):
            with sqlite3.connect(file) as base:
                for statement in statements:
                    base.execute(statement)

    return make


def studies() -> Iterator[tuple[str, Change]]:
    yield "a metric of text", sql("UPDATE trial_values SET value='best', value_type='FINITE'")
    yield (
        "attributes of a list",
        sql("UPDATE trial_user_attributes SET value_json='[1, {\"a\": [2]}]'"),
    )
    yield (
        "attributes that lead outside",
        sql("UPDATE trial_user_attributes SET value_json='\"../../../outside/precious\"'"),
    )
    yield "a parameter out of its range", sql("UPDATE trial_params SET param_value=1e300")
    yield (
        "another distribution",
        sql(
            'UPDATE trial_params SET distribution_json=\'{"name": "CategoricalDistribution", "attributes": {"choices": [[1]]}}\''
        ),
    )
    yield "tables gone", sql("DROP TABLE trial_params", "DROP TABLE trial_values")
    yield (
        "a newer version of Optuna",
        sql(
            "UPDATE version_info SET schema_version=99",
            "UPDATE alembic_version SET version_num='v99.0.0.a'",
        ),
    )
    yield "a locked database", lambda study: [lock(f) for f in study.glob("*.db")]
    yield (
        "a log of garbage beside it",
        lambda study: [Path(f"{f}-wal").write_bytes(os.urandom(4096)) for f in study.glob("*.db")],
    )
    yield (
        "trials where files should be",
        lambda study: [
            shutil.rmtree(p) or p.write_text("x") for p in study.iterdir() if p.is_dir()
        ],
    )


_LOCKS: list[sqlite3.Connection] = []


def lock(file: Path) -> None:
    base = sqlite3.connect(file, check_same_thread=False)
    base.execute("BEGIN EXCLUSIVE")
    _LOCKS.append(base)


def federations() -> Iterator[tuple[str, Change]]:
    """Folders of a federation that is continued. Flower need not be installed for what is read first."""
    whole = {"recipe": "image", "clients": 2, "rounds": 1, "strategy": "fedavg", "seed": 0}
    for name, text in {
        "a list": "[1]", "of another recipe": json.dumps({**whole, "recipe": "video"}), "half": '{"recipe": "im',
        "of a million clients": json.dumps({**whole, "clients": 10**6}), "deep": "[" * 100_000, "with NaN": '{"seed": NaN}',
    }.items():  # fmt: skip
        yield f"federation.json {name}", lambda folder, text=text: (folder / "federation.json").write_text(text)  # fmt: skip
    yield "rounds that contradict each other", lambda folder: (folder / "rounds.jsonl").write_text('{"round": 5}\n{"round": 1}\n[]\nx\n')  # fmt: skip
    yield "a link to another folder", lambda folder: (folder.rmdir(), folder.symlink_to(PLACE))


def servers() -> Iterator[tuple[str, Change]]:
    """A folder of runs, for the dashboard and top."""

    def many(run: Path) -> None:
        for number in range(1500):
            shutil.copytree(run, run.parents[2] / "many" / f"r{number}", ignore=lambda f, n: [x for x in n if x in ("checkpoints", "report.html")])  # fmt: skip

    yield "1,500 runs beside it", many
    yield "a name of markup", lambda run: shutil.copytree(run, run.parents[2] / "many" / (EVIL.replace("/", "") + "\n" + ESC), symlinks=True)  # fmt: skip
    yield "runs that link to each other", lambda run: ((run.parents[2] / "many/a").mkdir(parents=True), (run.parents[2] / "many/a/b").symlink_to(".."), (run.parents[2] / "many/a/c").symlink_to("../.."))  # fmt: skip


MANY = (("top", "many", "--once"), ("top", "many", PLACE, "--once"))
GROUPS: dict[str, tuple[tuple[tuple[str, ...], ...], str, Callable[[], Iterator[tuple[str, Change]]]]] = {
    "belonging": (RUN + RESUME, PLACE, belonging),
    "copied": (COPIED, PLACE, copied),
    "fitting": (FITTING, PLACE, fitting),
    "recorded": (EVENTS, PLACE, recorded),
    "moving": (RUN, PLACE, moving),
    "exports": (EXPORT, "exported", exports),
    "studies": (SEARCH, "study", studies),
    "federations": (FEDERATION, "federation", federations),
    "servers": (MANY, PLACE, servers),
}  # fmt: skip


def make_all(base: Path) -> None:
    from PIL import Image

    from multi_gpu_training.delivery.loaded_model import load
    from multi_gpu_training.recipes.recipe import find_recipe

    recipe = find_recipe("image")
    options = recipe.options(mode="cnn")
    quiet = {"device": "cpu", "progress": "off", "tensorboard": False, "training_mode": "single", "loggers": ["csv"]}  # fmt: skip
    quiet |= {"save_dir": str(base / "made"), "max_steps": 4, "batch_size": 16, "checkpoint_frequency": 2, "keep_last": 9, "schedule": "constant", "warmup_epochs": 0}  # fmt: skip
    (base / "kept/image").mkdir(parents=True)
    for name, seed in (("run", 0), ("run2", 1)):
        recipe.train(recipe.config({**quiet, "run_name": name, "seed": seed}, options), options)
        (base / "made/image" / name).rename(base / "kept/image" / name)
    recipe.train(recipe.config({**quiet, "run_name": "whole", "max_steps": 6}, options), options)
    (base / "made/image/whole").rename(base / "whole")
    shutil.rmtree(base / "made")
    load(base / PLACE).save(base / "exported")
    Image.new("L", (8, 8)).save(base / "picture.png")
    (base / "federation").mkdir()
    searched(base)


def searched(base: Path) -> None:
    """A study of two trials, by the real command."""
    import subprocess

    words = ("search", "image", "--param", "lr=1e-3..1e-1:log", "--trials", "2", "--study", "study", "--save-dir", ".", "mode=cnn", "max_steps=2", "batch_size=16", "device=cpu")  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "multi_gpu_training", *words], cwd=base, capture_output=True, text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


def weights(run: Path, step: int) -> str:
    file = run / f"checkpoints/step-{step:08d}/model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def tried(change: Change, words: tuple[tuple[str, ...], ...], folder: str, made: Path, moves: bool) -> dict[str, Any]:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="blind-folders-") as temporary:
        here = Path(temporary) / "x" / "here"
        shutil.copytree(made, here, symlinks=True)
        (Path(temporary) / "x/outside").mkdir()
        (Path(temporary) / "x/outside/precious").write_text("precious")
        (here / "evil.py").write_text("open('OWNED', 'w').close()\n")
        try:
            starts = change(here / folder)
        except Exception as error:
            return {"problems": [f"could not be made: {error!r}"], "said": "", "resumed": "no"}
        outside = {
            k: v for k, v in files_below(Path(temporary)).items() if not k.startswith("x/here")
        }
        given = tuple(tuple(w.replace("{here}", str(here)) for w in each) for each in words)

        def call() -> None:
            if moves and callable(starts):
                starts()
            read_all(given)

        ended = attempt(call, here, 300.0)
        found = ended.problems(must_fail=False)
        if "\x1b" in ended.said:
            found.append("lets control characters through to the terminal")
        if any(here.glob("**/OWNED")):
            found.append("ran code that came with the folder")
        now = {k: v for k, v in files_below(Path(temporary)).items() if not k.startswith("x/here")}
        if now.keys() != outside.keys() or (Path(temporary) / "x/outside/precious").read_text() != "precious":  # fmt: skip
            found.append(f"wrote outside the run: {sorted(set(now) ^ set(outside))}")
        if folder == PLACE and (got := weights(here / PLACE, 6)):
            found.append("resumed to the undisturbed weights" if got == weights(made / "whole", 6) else OTHER)  # fmt: skip
        return {"problems": [f for f in found if f != "resumed to the undisturbed weights"], "code": ended.code,
                "resumed": next((f for f in found if "resumed" in f.lower()), "no"), "seconds": round(ended.seconds, 1),
                "mib": ended.grown >> 20, "said": ended.said[-6000:]}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--only", default="", help="only folders whose name holds one of these")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from wrong_invocations import warm_up

    wanted = [word for word in given.only.split(",") if word]
    rows, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="blind-made-") as temporary:
        warm_up()
        made = Path(temporary)
        ended = attempt(lambda: make_all(made), made, 600.0)
        assert ended.code == 0, ended.said
        for group in given.groups.split(","):
            words, folder, each = GROUPS[group]
            for name, change in each():
                if wanted and not any(word in name for word in wanted):
                    continue
                row = {"name": f"{group}: {name}", **tried(change, words, folder, made, group == "moving")}  # fmt: skip
                if name in FORGED and OTHER in row["problems"]:
                    row["problems"].remove(OTHER)
                rows.append(row)
                if row["problems"] or given.verbose:
                    print(row["name"], *(f"\n    {problem}" for problem in row["problems"]), flush=True)  # fmt: skip
                if given.out is not None:
                    given.out.write_text(json.dumps({"python": platform.python_version(), "rows": rows}, indent=1))  # fmt: skip
    bad = [row for row in rows if row["problems"]]
    print(
        f"{len(rows)} hostile folders, {len(bad)} with problems, {time.monotonic() - begun:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    assert mgt
    sys.exit(main())
