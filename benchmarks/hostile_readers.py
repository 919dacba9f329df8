"""Hostile run folders for the commands that came after `report`: whatever reads a trained model.

    python benchmarks/hostile_readers.py --out hostile_readers.json
    python benchmarks/hostile_readers.py --only profile,search --verbose

A small trained run, an export of it, a search and a trace are copied and changed, with hashes that
fit. Then evaluate, predict, export, compress, serve, resume, checkpoints merge, profile, top, the
dashboard's views, `mgt search --resume` and `load` read them. Nothing may end in a traceback, hang,
take more than 1 GiB, run code that came with the folder, or write outside it.
"""

# ruff: noqa: E501 - one line per case reads best
from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from hostile_folders import KINDS, deep
from hostile_trial import attempt, files_below, mgt

STEP = "checkpoints/step-00000004"
Change = Callable[[Path], object]
# What a folder is read with.
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "model": (
        ("evaluate", "run", "--num-gpus", "1"),
        ("predict", "run", "picture.png", "--num-gpus", "1"),
        ("export", "run", "--to", "safetensors", "--out", "exported-again"),
        ("compress", "run", "--method", "quantize:int8", "--out", "smaller"),
        ("serve", "run", "--port", "0"),
        ("checkpoints", "merge", "run", "merged.safetensors"),
    ),
    "load": (("export", "run", "--to", "safetensors", "--out", "exported-again"), ("checkpoints", "merge", "run", "merged.safetensors")),
    "run": (("resume", "run", "--max-steps", "6", "--num-gpus", "1", "--multi-gpu", "single"), ("top", "run", "--once"), ("dashboard view",)),
    "export": (("predict", "exported", "picture.png", "--num-gpus", "1"), ("export", "exported", "--to", "safetensors", "--out", "exported-again")),
    "profile": (("profile", "run"),),
    "search": (("search", "study", "--resume"),),
}  # fmt: skip


# Checkpoints whose hashes fit


def forged(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the manifest, and sign it."""

    def make(run: Path) -> None:
        from multi_gpu_training.safe_files import signed

        path = run / STEP / "manifest.json"
        facts = json.loads(path.read_text())
        del facts["sha256"]
        change(facts)
        path.write_text(json.dumps(signed(facts), indent=1))

    return make


def with_file(name: str, content: Callable[[bytes], bytes]) -> Change:
    """Change a file of the checkpoint, and the manifest with it."""

    def make(run: Path) -> None:
        path = run / STEP / name
        raw = content(path.read_bytes())
        path.write_bytes(raw)
        told = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        forged(lambda facts: facts["files"].update({name: told}))(run)

    return make


def with_json(name: str, change: Callable[[Any], Any]) -> Change:
    def content(raw: bytes) -> bytes:
        found = json.loads(raw)
        return json.dumps(found if (new := change(found)) is None else new).encode()

    return with_file(name, content)


def set_in(*keys: str, value: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = value

    return change


def models() -> Iterator[tuple[str, Change]]:
    """What describes the model."""
    for name, value in {
        "list": [1], "empty": {}, "number": 5, "deep": deep(900), "format 99": {"format": 99, "recipe": "image"},
    }.items():  # fmt: skip
        yield f"model.json: {name}", with_json("model.json", lambda _, value=value: value)
    for keys, values in {
        ("recipe",): ("video", "nope", 5, "../image", "os:system", None, "x" * 100_000),
        ("labels",): (5, [], ["x"] * 10**6, [1, 2], {"a": 1}, ["\x1b[2J"] * 10, [["a"]] * 10, None),
        ("model",): (5, [], {}, "os:system", {"kind": 5}, {"kind": "__import__"}, None),
        ("model", "kind"): ("resnet18", "vit", "timm:resnet50", "nope", [1]),
        ("model", "size"): ([10**6, 10**6], [0, 0], [-8, 8], [8], "x", [8.5, 8.5], [2**62, 2**62], 8),
        ("model", "channels"): (10**9, 0, -1, "x", 1.5),
        ("model", "width"): (10**6, 2**31, 0, -1, "x", 1e400, [1], True),
        ("preprocessing",): (None, 5, {}, []),
        ("preprocessing", "colour"): ("x", 5, "rgb"),
        ("preprocessing", "height"): (10**6, 0, -1, "x", 2**62),
        ("preprocessing", "levels"): (0, -1, "x", 1e308, 10**400),
        ("preprocessing", "fit"): ("x", 5),
        ("compression",): (
            5, [5], [{}], [{"method": "nope"}], [{"method": "quantize"}], [{"method": "quantize", "scheme": "int99"}],
            [{"method": "quantize", "scheme": "int8", "group": "x"}], [{"method": "quantize", "scheme": "int4", "group": 0}],
            [{"method": "quantize", "scheme": "int4", "group": 10**400}], [{"method": "prune"}], [{"method": "prune", "kind": "structured"}],
            [{"method": "prune", "kind": "structured", "shapes": {"1": [10**6, 10**6, 3, 3]}}], [{"method": "prune", "kind": "structured", "shapes": {"1": [-1, 0]}}],
            [{"method": "prune", "kind": "structured", "shapes": {"nope": [1]}}], [{"method": "prune", "kind": "2:4", "weights": 5}], [{"method": "distil"}] * 100_000,
        ),
    }.items():  # fmt: skip
        for value in values:
            shown = json.dumps(value)[:60]
            yield (
                f"model.json: {'.'.join(keys)}={shown}",
                with_json("model.json", set_in(*keys, value=value)),
            )
    for keys, values in {
        ("options",): ([1], "x", {"mode": "nope"}, {"nope": 1}, {"data_dir": "/dev/zero"}, {"data_dir": "fifo"}, {"model": "hf:../../x", "mode": "finetune"}, {"trust_remote_code": True, "model": "./evil"}),
        ("metrics",): ({"loss": 10**300}, {"": 1.0}),
        ("aliases",): ({"a": "b"}, {"1.weight": "4.weight"}, {"x": "1.weight"}),
        ("step",): (2**53, 0),
    }.items():  # fmt: skip
        for value in values:
            yield (
                f"manifest: {'.'.join(keys)}={json.dumps(value)[:60]}",
                forged(set_in(*keys, value=value)),
            )


def contents() -> Iterator[tuple[str, Change]]:
    """State and tensors of a checkpoint."""
    for name, change in {
        "list": lambda _: [1],
        "no state": lambda found: found.pop("state") and None,
        "state list": set_in("state", value=[1]),
        "state text": set_in("state", value="x"),
        "config list": set_in("state", "replicated", value=[1]),
        "deep": lambda _: {"state": deep(900), "optimizer": {}},
        "tensor nowhere": set_in("state", value={"$": "tensor", "key": "nowhere"}),
        "tensor key": set_in("state", value={"$": "tensor", "key": [1]}),
        "unknown mark": set_in("state", value={"$": "pickle", "raw": "x"}),
        "tuple": set_in("state", value={"$": "tuple", "items": 5}),
    }.items():
        yield f"state.json: {name}", with_json("state.json", change)

    def header(text: dict[str, Any] | bytes, data: bytes = bytes(4)) -> Callable[[bytes], bytes]:
        raw = text if isinstance(text, bytes) else json.dumps(text).encode()
        return lambda _: len(raw).to_bytes(8, "little") + raw + data

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for name, change in {
        "empty": lambda _: b"",
        "no tensors": header({}, b""),
        "another tensor": header({"nope": one}),
        "wrong shapes": header({"1.weight": one}),
        "NaN": lambda raw: raw[:-400_000] + b"\xff" * 400_000,
        "dtype": header({"1.weight": {**one, "dtype": "U8", "data_offsets": [0, 1]}}, b"x"),
        "dtype BOOL": header({"1.weight": {**one, "dtype": "BOOL", "data_offsets": [0, 1]}}, b"x"),
        "zero sides": header({"1.weight": {**one, "shape": [0, 2**60], "data_offsets": [0, 0]}}, b""),
        "long shape": header({"1.weight": {**one, "shape": [1] * 100_000}}),
        "names": header({"\x1b[2J": one, "": {**one, "data_offsets": [4, 8]}}, bytes(8)),
        "metadata": header({"__metadata__": {"a": [1]}, "1.weight": one}),
        "50,000 tensors": header({f"t{i}": {**one, "data_offsets": [4 * i, 4 * i + 4]} for i in range(50_000)}, bytes(200_000)),
    }.items():  # fmt: skip
        yield f"model.safetensors: {name}", with_file("model.safetensors", change)


def kinds(run: Path, name: str, kind: str) -> None:
    KINDS[kind](run, name)


def links() -> Iterator[tuple[str, Change]]:
    """Links, devices and FIFOs where files and folders belong."""
    for name in (
        f"{STEP}/model.json",
        f"{STEP}/model.safetensors",
        f"{STEP}/state.json",
        "config.yaml",
    ):
        for kind in ("fifo", "device", "folder", "link outside", "8 GiB", "deep", "loop"):
            yield f"{name}: {kind}", lambda run, name=name, kind=kind: kinds(run, name, kind)

    def best(target: str) -> Change:
        def make(run: Path) -> None:
            (run / "checkpoints/best").unlink(missing_ok=True)
            (run / "checkpoints/best").symlink_to(target)

        return make

    for target in (
        "../../../..",
        "/",
        "best",
        "step-99999999",
        "step-00000004/../..",
        "/proc/self/root",
    ):
        yield f"best -> {target}", best(target)
    yield (
        "checkpoints: a FIFO",
        lambda run: (shutil.rmtree(run / "checkpoints"), os.mkfifo(run / "checkpoints")),
    )
    yield (
        "checkpoints: 5,000 empty",
        lambda run: [(run / "checkpoints" / f"step-{n:08d}").mkdir() for n in range(100, 5100)],
    )


def runs() -> Iterator[tuple[str, Change]]:
    """What resume, top and the dashboard read beside checkpoints."""
    for name, text in {
        "recipe": "recipe: video\n", "no recipe": "batch_size: 5\n", "types": "recipe: image\nmode: [cnn]\nlr: x\nworld_size: {}\n",
        "save_dir": "recipe: image\nsave_dir: ../../outside\nrun_name: precious\n", "run_name": "recipe: image\nrun_name: ../../outside\n",
        "resume": "recipe: image\nresume: /dev/zero\n", "data": "recipe: image\nmode: cnn\ndata_dir: /dev\n", "unknown": "recipe: image\nmode: cnn\nfrobnicate: 1\n",
        "old": "recipe: image\nmode: cnn\nepochs: 99999999999999999999\n", "interpolation": "recipe: image\nmode: ${oc.env:HOME}\n",
        "world": "recipe: image\nmode: cnn\nworld_size: 1000000\ntraining_mode: ddp\n", "loggers": "recipe: image\nmode: cnn\nloggers: ['../../evil']\n", "tag": "recipe: !!python/name:os.system\n",
        "template": "recipe: image\nmode: cnn\nmodel: evil.py:Model\n", "keys": "recipe: image\nmode: cnn\nsign_key: /dev/zero\n", "verify": "recipe: image\nmode: cnn\nverify_key: fifo\n", "secret": "recipe: image\nmode: cnn\nstorage_options: {key: '***'}\n",
    }.items():  # fmt: skip
        yield f"config.yaml: {name}", lambda run, text=text: (run / "config.yaml").write_text(text)
    for name, value in {
        "pid": {"pid": 1},
        "pid text": {"pid": "x"},
        "list": [1],
        "host": {"pid": 1, "host": 5, "boot": []},
        "deep": deep(900),
    }.items():
        yield (
            f".lock: {name}",
            lambda run, value=value: (run / ".lock").write_text(json.dumps(value)),
        )
    for name, value in {
        "threads": {"threads": "x"},
        "threads huge": {"threads": 10**9},
        "list": [1],
        "run_id": {"run_id": "../../x"},
        "argv": {"command": [[1]], "git": 5},
    }.items():
        yield (
            f"environment.json: {name}",
            lambda run, value=value: (run / "environment.json").write_text(json.dumps(value)),
        )

    def requested(run: Path) -> None:
        from multi_gpu_training.monitoring.run_requests import FOLDER

        (run / FOLDER).mkdir(exist_ok=True)
        for number, text in enumerate(
            (
                "[",
                '{"action": "nope"}',
                '{"action": "rate", "value": NaN}',
                '{"action": ["x"], "by": {}}',
                "x" * 10**6,
            )
        ):
            (run / FOLDER / f"{number:020d}-x.json").write_text(text)
        os.mkfifo(run / FOLDER / "00000000000000000009-x.json")

    yield "requests: nonsense", requested

    def requests_link(run: Path) -> None:
        from multi_gpu_training.monitoring.run_requests import FOLDER

        (run / FOLDER).symlink_to(run.parent / "outside")

    yield "requests: link outside", requests_link


def exports() -> Iterator[tuple[str, Change]]:
    """Folders that `mgt export --to safetensors` wrote."""

    def index(change: Callable[[dict[str, Any]], Any]) -> Change:
        def make(folder: Path) -> None:
            from multi_gpu_training.safe_files import signed

            facts = json.loads((folder / "export.json").read_text())
            del facts["sha256"]
            change(facts)
            (folder / "export.json").write_text(json.dumps(signed(facts)))

        return make

    for keys, values in {
        ("step",): ([1], "x", None, -1, 10**400, 1e400),
        ("seed",): ([1], "x", -1, 2**70, 10**400),
        ("options",): ([1], "x", {"mode": 5}, None),
        ("metrics",): ([1], "x", {"loss": "x"}),
        ("recipe",): (5, "nope", "../x", None, ["image"]),
        ("to",): (5, {"a": 1}, "\x1b[2J"),
        ("files",): (5, [], {}, {"../x": {}}, {"model.safetensors": 5}, {"/dev/zero": {"bytes": 1}}, {"": {}}, {"a\0b": {}}),
        ("format",): ("1", 99, True),
    }.items():  # fmt: skip
        for value in values:
            yield (
                f"export.json: {keys[0]}={json.dumps(value)[:60]}",
                index(set_in(*keys, value=value)),
            )
    for name in ("export.json", "model.json", "model.safetensors"):
        for kind in (
            "fifo",
            "device",
            "folder",
            "link outside",
            "8 GiB",
            "deep",
            "empty",
            "half",
            "NUL",
            "huge integer",
        ):
            yield f"{name}: {kind}", lambda run, name=name, kind=kind: kinds(run, name, kind)

    def huge(folder: Path) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(64 << 30)
        index(
            lambda facts: facts["files"].update(
                {"model.safetensors": {"bytes": 64 << 30, "sha256": "0" * 64}}
            )
        )(folder)

    yield "model.safetensors: 64 GiB that the index names", huge


def traces() -> Iterator[tuple[str, Change]]:
    """What `mgt profile RUN` and the report read."""
    step = {
        "ph": "X",
        "name": "ProfilerStep#5",
        "cat": "user_annotation",
        "ts": 0,
        "dur": 10,
        "tid": 1,
    }

    def trace(content: Any, packed: bool = True) -> Change:
        def make(run: Path) -> None:
            (run / "profile").mkdir()
            raw = (
                content
                if isinstance(content, bytes)
                else json.dumps({"traceEvents": content}).encode()
            )
            (run / "profile/rank-0.json.gz").write_bytes(gzip.compress(raw) if packed else raw)

        return make

    def bomb(unit: bytes, times: int) -> bytes:
        """gzip of a list so long, packed in pieces."""
        piece = gzip.compress(unit * 10_000)
        return (
            gzip.compress(b'{"traceEvents":[') + piece * (times // 10_000) + gzip.compress(b"1]}")
        )

    for name, found in {
        "no steps": [], "step number": [{**step, "name": "ProfilerStep#x"}], "step 10**400": [{**step, "name": "ProfilerStep#" + "9" * 400}],
        "step digits": [{**step, "name": "ProfilerStep#" + "9" * 5000}], "step -1": [{**step, "name": "ProfilerStep#-1"}], "no thread": [{k: v for k, v in step.items() if k != "tid"}],
        "thread list": [{**step, "tid": [1]}], "dur NaN": [{**step, "dur": float("nan")}], "dur -1": [{**step, "dur": -1}], "dur 0": [{**step, "dur": 0}], "dur 1e308": [{**step, "dur": 1e308, "ts": 1e308}],
        "dur 10**400": [{**step, "dur": 10**400}], "cat list": [step, {**step, "cat": [1]}], "cat object": [step, {**step, "name": "x", "cat": {"a": 1}}], "args": [step, {**step, "name": "x", "cat": "kernel", "args": {"correlation": [1], "External id": {}}}],
        "memory": [step, {"ph": "i", "name": "[memory]", "ts": 1, "args": {"Total Allocated": "x", "Bytes": [], "Device Type": {}}}], "names": [step, {**step, "name": "\x1b[2J<script>[bold]", "cat": "kernel"}], "kernel name": [step, {**step, "cat": "kernel", "name": "void " + "a<" * 200_000}],
        "ts true": [{**step, "ts": True}], "numbers": [1, "x", None, [1]], "thread None": [{**step, "tid": None}],
    }.items():  # fmt: skip
        yield f"trace: {name}", trace(found)
    yield "trace: deep", trace(b"[" * 300_000)
    yield "trace: list", trace(b"[1]")
    yield "trace: not gzip", trace(b"hello", packed=False)
    yield (
        "trace: gzip damaged",
        trace(gzip.compress(os.urandom(3000))[:20] + bytes(500), packed=False),
    )
    yield "trace: gzip cut", trace(gzip.compress(b"x" * 10**6)[:-9], packed=False)
    yield "trace: binary", trace(bytes(range(256)) * 10)
    yield "trace: bomb of text", trace(gzip.compress(bytes(2**24)) * 64, packed=False)
    yield "trace: bomb of lists", trace(bomb(b"[],", 60_000_000), packed=False)
    yield "trace: bomb of objects", trace(bomb(b'{"a":1},', 25_000_000), packed=False)
    for kind in ("fifo", "device", "folder", "loop", "link outside", "8 GiB"):
        for name in ("profile/rank-0.json.gz", "profile/rank-0.summary.json"):

            def make(run: Path, kind: str = kind, name: str = name) -> None:
                (run / "profile").mkdir()
                KINDS[kind](run, name)

            yield f"{name}: {kind}", make
    yield (
        "profile: link outside",
        lambda run: (
            trace([step])(run),
            shutil.rmtree(run.parent / "outside"),
            (run / "profile").rename(run.parent / "outside"),
            (run / "profile").symlink_to(run.parent / "outside"),
        ),
    )  # type: ignore[func-returns-value]
    yield "profile: a file", lambda run: (run / "profile").write_text("x")
    whole = {
        "first": 1,
        "last": 2,
        "on": "cpu",
        "step_s": 1.0,
        "busy_s": 1.0,
        "exchange_s": 0.0,
        "exposed_s": 0.0,
        "copy_s": 0.0,
        "idle_s": 0.0,
        "top": [],
        "gaps": [],
        "gains": [],
    }
    for name, change in {"types": {"top": 5}, "step 0": {"step_s": 0}, "names": {"top": [{"name": "\x1b[2J[bold]", "seconds": 1.0, "calls": 1.0}]}, "tiny step": {"step_s": 5e-324, "busy_s": 1e6}, "memory": {"memory": {"peak_bytes": 10**400}}}.items():  # fmt: skip

        def summary(run: Path, change: dict[str, Any] = change) -> None:
            (run / "profile").mkdir()
            (run / "profile/rank-0.summary.json").write_text(json.dumps({**whole, **change}))

        yield f"summary: {name}", summary


def searches() -> Iterator[tuple[str, Change]]:
    """What `mgt search STUDY --resume` reads."""
    good = (
        "target: image\nparams:\n  learning_rate: 0.1..0.2\ntrials: 2\nparallel: 1\nstudy: study\n"
    )
    for name, text in {
        "empty": "", "list": "- 1", "types": "params: 5\ntarget: 5\n", "target": good.replace("image", "../x"), "script": good.replace("image", "gone.py"),
        "trials": good.replace("trials: 2", "trials: 99999999999"), "trials NaN": good.replace("trials: 2", "trials: .nan"), "unknown": good + "frobnicate: 1\n", "storage": good + "storage: sqlite:////proc/x.db\n",
        "storage outside": good + "storage: mysql://root@127.0.0.1:1/x\n", "storage code": good + "storage: nope+evil://x\n", "params": good.replace("0.1..0.2", "{a: 1}"), "alias": "a: &a [1]\n" + good + "words: *a\n",
        "working_dir": good + "working_dir: /proc/1/root\n", "settings": good + "settings: {world_size: 5}\n", "deep": "params: " + "[" * 5000, "metric": good + "metric: []\n", "study": good.replace("study: study", "study: ../../x"), "parallel": good.replace("parallel: 1", "parallel: 1000000"),
        "10 MB": good + "# " + "x" * 10**7,
    }.items():  # fmt: skip
        yield (
            f"search.yaml: {name}",
            lambda study, text=text: (study / "search.yaml").write_text(text),
        )
    for kind in ("fifo", "device", "folder", "loop", "8 GiB"):
        yield f"search.yaml: {kind}", lambda study, kind=kind: kinds(study, "search.yaml", kind)
    for kind in ("fifo", "folder", "device", "binary", "empty", "half", "loop"):

        def make(study: Path, kind: str = kind) -> None:
            (study / "search.yaml").write_text(good)
            for name in ("study.db", "optuna.db", "search.db"):
                (study / name).write_bytes(b"SQLite format 3\0" + bytes(5000))
                KINDS[kind](study, name)

        yield f"study.db: {kind}", make


GROUPS: dict[str, tuple[str, str, Callable[[], Iterator[tuple[str, Change]]]]] = {
    # name -> what reads it, which folder is changed, the changes
    "models": ("load", "run", models),
    "contents": ("load", "run", contents),
    "links": ("model", "run", links),
    "runs": ("run", "run", runs),
    "exports": ("export", "exported", exports),
    "traces": ("profile", "run", traces),
    "searches": ("search", "study", searches),
}


def make_all(base: Path) -> None:
    from PIL import Image

    from multi_gpu_training.delivery.loaded_model import load
    from multi_gpu_training.recipes.recipe import find_recipe

    recipe = find_recipe("image")
    options = recipe.options(mode="cnn")
    quiet = {"device": "cpu", "progress": "off", "tensorboard": False, "training_mode": "single"}
    quiet |= {"save_dir": str(base / "made"), "run_name": "run", "max_steps": 4, "batch_size": 16}
    recipe.train(recipe.config(quiet, options), options)
    (base / "made/image/run").rename(base / "run")
    shutil.rmtree(base / "made")
    load(base / "run").save(base / "exported")
    Image.new("L", (8, 8)).save(base / "picture.png")
    (base / "study").mkdir()


def dashboard_view(run_folder: str = "run") -> None:
    """What a browser would be sent."""
    from multi_gpu_training.dashboard import run_view
    from multi_gpu_training.dashboard.live_runs import LiveRuns

    found = LiveRuns([run_folder])
    found.poll()
    for run in found.runs.values():
        json.dumps([run_view.summary(run, 1.0), run_view.detail(run, 1.0)], allow_nan=False)
    found.close()


def everything(words: tuple[tuple[str, ...], ...]) -> None:
    """Each command in turn; only an error in words may end it."""
    from multi_gpu_training.search import run_search
    from multi_gpu_training.serving import http_server

    def served(*_: object, **__: object) -> None:
        sys.exit(0)

    for each in words:
        print("$", *each, flush=True)
        try:
            if each[0] == "dashboard view":
                dashboard_view(*each[1:])
                continue
            command = mgt(*each, servers=True)
            http_server.serve_until_signal = served  # type: ignore[assignment]
            run_search.Searcher.run = served  # type: ignore[method-assign,assignment]
            command()
        except SystemExit as end:
            print("exit", end.code)


def tried(change: Change, words: tuple[tuple[str, ...], ...], folder: str, made: Path) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="readers-") as temporary:
        base = Path(temporary)
        here = base / "x" / "image"  # a run is resumed only from SAVE_DIR/RECIPE
        shutil.copytree(made, here, symlinks=True)
        # KINDS link to what lies three folders up, the changes above to what lies beside the run.
        for place in (base / "outside", here / "outside"):
            place.mkdir()
            (place / "precious").write_text("precious")
        (here / "evil.py").write_text("open('OWNED', 'w').close()\n")
        os.mkfifo(here / "fifo")
        change(here / folder)
        outside = here / "outside"
        before = files_below(outside)
        ended = attempt(lambda: everything(words), here, 300.0)
        found = ended.problems(must_fail=False)
        if "\x1b" in ended.said:
            found.append("lets control characters through to the terminal")
        if any(here.glob("**/OWNED")):
            found.append("ran code that came with the folder")
        if files_below(outside) != before or files_below(base / "outside").keys() != {"precious"}:
            found.append("wrote outside the run")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--only", default="", help="only folders whose name holds one of these")
    parser.add_argument("--part", default="", help="2/5: every fifth, from the second on")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from wrong_invocations import warm_up

    wanted = [word for word in given.only.split(",") if word]
    part, parts = map(int, (given.part or "1/1").split("/"))
    bad: dict[str, list[str]] = {}
    count, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="readers-made-") as temporary:
        warm_up()
        made = Path(temporary)
        ended = attempt(lambda: make_all(made), made, 600.0)
        assert ended.code == 0, ended.said
        for group in given.groups.split(","):
            readers, folder, each = GROUPS[group]
            for name, change in list(each())[part - 1 :: parts]:
                if wanted and not any(word in name for word in wanted):
                    continue
                count += 1
                problems = tried(change, READERS[readers], folder, made)
                if problems:
                    bad[name] = problems
                if problems or given.verbose:
                    print(name, *(f"\n    {problem}" for problem in problems), flush=True)
    print(f"{count} hostile folders, {len(bad)} with problems, {time.monotonic() - begun:.0f} s")
    if given.out is not None:
        told = {"python": platform.python_version(), "folders": count, "bad": bad}
        given.out.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
