"""Wrong invocations of `mgt`: is each refused in words, quickly, and without leaving anything?

    python benchmarks/wrong_invocations.py --out wrong_invocations.json
    python benchmarks/wrong_invocations.py --only estimate,curve --verbose

Every command, flag, setting, environment variable and kind of file meets values that cannot work.
An invocation fails this benchmark if it ends in a traceback, hangs, takes more than 1 GiB, is
accepted, ends without a word, names neither the flag nor the file at fault, or writes anything
outside its own folder. Ranks are never started: where they would be, the invocation was accepted.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import itertools

from hostile_trial import attempt, files_below, mgt
from invocation import DEEP, HUGE, ONE, SURROGATE, Invocation
from wrong_invocations_newer import NEWER, prepare_newer


def train(*words: str, says: tuple[str, ...] = (), fails: bool = True) -> Invocation:
    return Invocation(("train", "image", *ONE, *words), says, fails=fails)


# Settings


BAD_NUMBERS = ("nan", "-1", ".nan", "1e400", "-.inf", HUGE, "x", "[1, 2]", "{a: 1}", '"5"x', "''")
BAD_WHOLE = (*BAD_NUMBERS, "1.5", str(2**64), "-9223372036854775809")


def settings() -> Iterator[Invocation]:
    """Every field of the config with values of the wrong kind, sign and size."""
    from multi_gpu_training.config import MultiGPUConfig

    for name, info in MultiGPUConfig.model_fields.items():
        kinds = str(info.annotation)
        if "bool" in kinds:
            bad: tuple[str, ...] = ("maybe", "2", "[true]", "nan", HUGE)
        elif "int" in kinds and "float" not in kinds and "list" not in kinds:
            bad = BAD_WHOLE
        elif "float" in kinds or "timedelta" in kinds:
            bad = ("nan", "-1", ".inf", "1e400", "x", HUGE, "[1]")
        elif "list" in kinds:
            bad = ("x", "[-1]", "[nan]", "{a: 1}", "[[[[1]]]]", "[]" if "ids" in name else "[1.5]")
        elif "Literal" in kinds or name in ("training_mode", "schedule"):
            bad = ("x", "1", "[]", "nan", HUGE)
        elif name == "recipe":
            bad = ("nowhere", "../image")
        else:
            bad = ("[1]", "{a: b}", "a\0b")
        endless = name in ("hang_timeout_s", "restart_window_s")  # may be infinite
        for value in bad:
            fails = not (endless and value in (".inf", "1e400"))
            yield train(f"{name}={value}", says=(name,) if fails else (), fails=fails)
    for name in ("a\0b", SURROGATE, "a/b", "..", ".", "", "x" * 300, "a\nb", "\x1b[2J", "-" * 201):
        unset = name in ("", "a\nb")  # YAML: nothing, and a line that is folded
        yield train(f"--run-name={name}", says=() if unset else ("name",), fails=not unset)
        yield train(f'run_name="{name}"', says=() if unset else ("name",), fails=name != "a\nb")
    for name in ("a\0b", SURROGATE, "/dev/null", "/proc/x", "x" * 5000, "/dev/null/x"):
        yield train(f"--save-dir={name}", says=("save",))
        yield train(f"--resume={name}", says=("resume",))
        yield train(f"forecast={name}", says=("forecast",))
        yield train(f"--data-dir={name}")


def flags() -> Iterator[Invocation]:
    for value in ("nan", "inf", "-inf", "0", "-1", "x", "", "1e400", HUGE):
        yield train("--lr", value, says=("lr",) if value in ("x", "") else ("learning_rate",))
        yield train("--warmup-epochs", value if value != "0" else "-0.5")
    for value in (str(2**64), str(2**63), "-1", "1.5", "nan", "x", "", HUGE, "0x10", "1_0"):
        yield train("--seed", value, says=("seed",) if value != "1_0" else (), fails=value != "1_0")
        yield train("--batch-size", value, fails=value != "1_0")
        yield train("--epochs", value, fails=value not in ("1_0", str(2**63)))
        yield train("--grad-accum-steps", value, fails=value != "1_0")
    counts = ("1099511627776", "0", "-2", "x", "1.5", HUGE, "nan", "", "100000", "4294967297")
    for count in counts:
        yield Invocation(("train", "image", "--num-gpus", count), ("num-gpus",))
        yield Invocation(("run", "--num-gpus", count, "ok.py"), ("num-gpus",))
        yield Invocation(("check", "--num-gpus", count), ("num-gpus",))
        yield Invocation(("bench", "--ranks", count, "--steps", "2"), ("ranks",))
        yield Invocation(("verify", "image", "--ranks", count), ("ranks",))
    for ids in ("", ",", "0,0", "x", "-1", "99999999999999999999", "0;1", "0,", HUGE, "nan"):
        yield train("--gpu-ids", ids, says=("gpu-ids",))
    for value in ("tdp", "", "DDP ", "0", "\0"):
        yield Invocation(("train", "image", "--multi-gpu", value))
        yield train("--lr-scaling", value)
        yield train("--mode", value)
    for words in (("=",), ("=5",), ("a.=1",), (".a=1",), ("--",), ("---",), ("--=1",), ("--x",)):
        yield train(*words)
    for words in (("lr=${lr}",), ("lr=${oc.env:NOT_THERE}",), ("lr=${", "epochs=1"), ("lr=*a",)):
        yield train(*words)
    for words in ((f"lr={DEEP}",), (f"model_args={DEEP}",), ("lr=!!python/object:x {}",)):
        yield train(*words)
    for words in (("training=1",), ("training.lr.x=1",), ("lr=1", "training.lr=2"), ("x.y.z=1",)):
        yield train(*words)
    bomb = "&a [x,x,x,x,x,x,x,x,x]"
    for i in range(8):
        bomb = f"[{bomb}, *a, *a]" if i == 0 else f"[{bomb}, {bomb}]"[:100_000]
    yield train(f"model_args={{a: {bomb}}}")


def measuring() -> Iterator[Invocation]:
    """bench, estimate, check and verify: nothing may be measured before these are refused."""
    for command in ("bench", "estimate", "check"):
        for value in ("nan", "inf", "0", "-5", "x", "", "1e400"):
            yield Invocation((command, "image", "--timeout", value), ("timeout",))
        for value in ("gpu", "", "CUDA", "\0", "mps"):
            yield Invocation((command, "image", "--device", value), ("device",))
    for command in ("bench", "estimate"):
        for value in ("0", "-1", "1", "x", "1.5", HUGE, str(2**64), "nan"):
            yield Invocation((command, "image", "--steps", value), ("steps",))
            if value != "1":
                yield Invocation((command, "image", "--warmup", value), ("warmup",))
        for out in ("a_file", "a_file/x", "/proc/x", "/dev/null", "a\0b", "x" * 5000):
            yield Invocation((command, "image", "--out", out), ("out",))
        yield Invocation((command, "nowhere.py"), ("nowhere.py",))
        yield Invocation((command, "nowhere.yaml"), ("nowhere.yaml",))
        yield Invocation((command, "a_folder"), ("a_folder",))
        yield Invocation((command, "imagge"), ("imagge",))
        yield Invocation((command, "--frobnicate"), ("frobnicate",))
        yield Invocation((command, "image", "--frobnicate", "1"), ("frobnicate",))
        yield Invocation((command, "image", "lr=nan"), ("learning_rate",))
    for sizes in ("", "0", "-4", "x", "1.5", "1,,2", HUGE, str(2**64), "nan"):
        yield Invocation(("bench", "image", "--batch-sizes", sizes), ("batch-sizes",))
    for modes in ("", "tdp", "ddp,", "DDP"):
        yield Invocation(("bench", "image", "--modes", modes), ("modes",))
    for value in ("0", "-1", "x", HUGE):
        yield Invocation(("bench", "image", "--repeats", value), ("repeats",))
    yield Invocation(("bench", "image", "--tune", "--precision"), ("tune", "precision"))
    for gpus in ("", "0", "-1", "x", "1,,2", "1.5", HUGE, str(2**70), "nan"):
        yield Invocation(("estimate", "--gpus", gpus, "--interconnect", "nvlink"), ("gpus",))
    for node in ("0", "-1", "x", HUGE):
        yield Invocation(("estimate", "--gpus-per-node", node), ("gpus-per-node",))
    for name in ("price", "electricity", "epochs", "samples"):
        for value in ("nan", "inf", "0", "-1", "x", "1e400"):
            yield Invocation(("estimate", f"--{name}", value), (name,))
    for value in ("", "tomorrow", "2026-13-45", "\0", "9" * 50):
        words = ("estimate", "--price", "2", "--price-date", value)
        yield Invocation(words, ("price-date",))
    yield Invocation(("estimate", "--scaling", "odd"), ("scaling",))
    yield Invocation(("estimate", "--price-per", "rack", "--price", "1"), ("price-per",))
    for ranks in ("1", "0", "-2", "x", "", "2,,3", "2.5", HUGE, "2;3"):
        yield Invocation(("verify", "image", "--ranks", ranks), ("ranks",))
    for steps in ("0", "3", "-1", "x", HUGE, str(2**64)):
        yield Invocation(("verify", "image", "--steps", steps), ("steps",))
    for device in ("gpu", "", "CUDA"):
        yield Invocation(("verify", "image", "--device", device), ("device",))
    yield Invocation(("verify", "nowhere.py"), ("nowhere.py",))
    yield Invocation(("verify", "a_folder"), ("a_folder",))
    for out in ("a_folder", "a_file/x", "/proc/x", "a\0b", "x" * 5000):
        yield Invocation(("check", "--save-curve", out), ("save-curve",))
    for folder in ("a_file", "a_file/x", "a\0b"):
        yield Invocation(("check", "--save-dir", folder), ("save-dir",))


FILES = (
    "binary", "empty", "deep.json", "deep.yaml", "huge_int.json", "nan.json", "list.json",
    "bomb.yaml",
    "huge_line.csv", "nul.csv", "latin1.csv", "half.json", "folder", "fifo", "device", "gone",
    "dangling", "loop", "unreadable", "big_field.csv", "utf16.csv", "gzip.csv", "tiny.csv",
    "negative.csv", "inf.csv", "long.yaml", "sparse",
)  # fmt: skip


def files() -> Iterator[Invocation]:
    """Files of every wrong kind for every flag that takes one."""
    for name in FILES:
        yield Invocation(("estimate", "--curve", name, "--gpus", "2"), (name,))
        catalog = ("estimate", "--catalog", name, "--accelerator", "H100")
        yield Invocation(catalog, (name,))
        yield Invocation(("estimate", "--profile", name), (name,))
        yield Invocation(("train", name, *ONE), (name,))
        yield train(f"forecast={name}", says=(name,))
        yield Invocation(("report", name), (name,))
        yield Invocation(("checkpoints", name), (name,))
        yield train(f"--resume={name}", says=(name,))
        two = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--cluster-token", name)
        yield Invocation(("run", *two, "ok.py"), ("cluster-token",))
    for text in ("defaults: [bomb.yaml]", "defaults: 5", "defaults: [[x]]", "? [a]\n: 1", "- 1"):
        yield Invocation(("train", f"text:{text}", *ONE))
    for text in ("recipe: {a: 1}", "recipe: 5", "recipe: image\nlr: !!binary x", "recipe: ''"):
        yield Invocation(("train", f"text:{text}", *ONE))
    for text in ("recipe: image\n1: 2", "recipe: image\nnull: 1", "recipe: image\n'': 1"):
        yield Invocation(("train", f"text:{text}", *ONE))
    for text in ("recipe: image\nseed: 18446744073709551616", "recipe: image\nlr: .nan"):
        yield Invocation(("train", f"text:{text}", *ONE))
    for text in ("recipe: image\ndata_dir: 2026-01-01", "recipe: image\nepochs: 2026-01-01"):
        yield Invocation(("train", f"text:{text}", *ONE))
    for text in ("recipe: image\nlr: ${lr}", "recipe: image\nlr: ${oc.decode:x}"):
        yield Invocation(("train", f"text:{text}", *ONE))


def machines() -> Iterator[Invocation]:
    for value in ("0", "-1", "x", "2:1", "1:", ":2", "1:2:3", HUGE, "1.5", "", "²"):
        yield Invocation(("run", "--nnodes", value, "ok.py"), ("nnodes",))
    for port in ("0", "-1", "65536", "x", HUGE, "1.5"):
        yield Invocation(
            ("run", "--num-gpus", "2", "--master-port", port, "ok.py"), ("master-port",)
        )
    for rank in ("-1", "2", "x", HUGE):
        two = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--insecure-network")
        yield Invocation(("run", *two, "--node-rank", rank, "ok.py"), ("node-rank",))
    for value in ("-1", "x", "nan", HUGE):
        yield Invocation(("run", "--max-restarts", value, "ok.py"), ("max-restarts",))
    for value in ("nan", "inf", "0", "-1", "x", "1e400"):
        yield Invocation(("run", "--recovery-timeout", value, "ok.py"), ("recovery-timeout",))
    for script in ("nowhere.py", "a_folder", "", "a\0b", "x" * 5000, "/dev/null", "fifo", "-x"):
        yield Invocation(("run", script))
    for address in ("", "a b", "\0", "999.999.999.999", "x" * 300):
        two = ("run", "--nnodes", "2", "--master-addr", address, "--insecure-network")
        yield Invocation((*two, "--recovery-timeout", "1", "--node-rank", "1", "ok.py"))
    variables = {
        "MASTER_PORT": ("http", "-1", "70000", HUGE, "²"),
        "RANK": ("first", "-1", HUGE, "1.5", ""),
        "WORLD_SIZE": ("two", "0", "-1", HUGE, "nan"),
        "LOCAL_RANK": ("x", "-1", HUGE),
        "MGT_RESUME_ANYWAY": ("maybe",),
        "MGT_FAULTS": ("rank=x", "[" * 1000, "kill@"),
        "SLURM_NTASKS": ("x", HUGE),
        "OMPI_COMM_WORLD_SIZE": ("x",),
        "GROUP_RANK": ("x", "-1"),
        "LOCAL_WORLD_SIZE": ("x", "-1", "0"),
        "TORCHELASTIC_RESTART_COUNT": ("x", "-1"),
    }
    ranked = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    ranked |= {"MASTER_PORT": "29511"}
    for name, values in variables.items():
        for value in values:
            env = (
                {**ranked, name: value}
                if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
                else {name: value}
            )
            unread = name.startswith(("MGT", "SLURM", "OMPI", "GROUP", "LOCAL_WORLD", "TORCHEL"))
            words = ("train", "image", "device=cpu", "max_steps=2", "progress=off")
            yield Invocation(words, () if unread else (name,), env, fails=not unread)


def others() -> Iterator[Invocation]:
    for words in (
        ("trian",), ("train",), ("report",), ("checkpoints",), ("run",), ("verify",), ("--x",),
        ("cluster",), ("cluster", "tokn"), ("cluster", "token", "a_folder"), ("recipes", "x"),
        ("cluster", "token", "a_file"), ("cluster", "token", "/proc/x"), ("info", "x"),
        ("cluster", "token", "a\0b"), ("cluster", "token", "gone/x/y"), ("config-schema", "x"),
        ("report", "a_folder", "--out", "a_folder"), ("report", "run", "--out", "a_folder"),
        ("report", "run", "--out", "a_file/x"), ("report", "run", "--out", "/proc/x"),
        ("report", "run", "--out", "a\0b"), ("report", "run", "--out", "x" * 5000),
        ("report", "run", "gone"), ("report", "run", "a_file"), ("report", SURROGATE),
        ("report", "a\0b"), ("report", "x" * 5000), ("report", ""), ("report", "run", "--out", ""),
        ("checkpoints", "a\0b"), ("checkpoints", SURROGATE), ("checkpoints", "x" * 5000),
        ("checkpoints", ""), ("checkpoints", "run/events"), ("launch",), ("launch", "nope"),
        ("train", ""), ("train", "\0"), ("train", SURROGATE), ("train", "x" * 5000), ("train", "-"),
        ("train", "a_folder"), ("train", "image" * 50), ("train", "."), ("train", "/"),
    ):  # fmt: skip
        yield Invocation(words)
    for recipe in ("image", "video", "ppo", "speech", "transformer"):
        for name in ("a_file", "a_folder", "gone", "fifo", "a\0b", "/dev/zero", "unreadable"):
            yield Invocation(("train", recipe, *ONE, "--data-dir", name))
        yield from recipe_options(recipe)


def recipe_options(name: str) -> Iterator[Invocation]:
    """Every option of a recipe with values of the wrong kind and size."""
    from multi_gpu_training.recipes.recipe import find_recipe

    for option, info in find_recipe(name).options.model_fields.items():
        kinds = str(info.annotation)
        if "bool" in kinds:
            bad: tuple[str, ...] = ("maybe",)
        elif "int" in kinds or "float" in kinds:
            bad = ("nan", "-1", "x", "1e400", HUGE, str(2**64))
        elif "Literal" in kinds:
            bad = ("nope", "[]")
        elif "dict" in kinds:
            bad = ("x", "[1]")
        else:
            bad = ("[1]", "a\0b")
        for value in bad:
            yield Invocation(("train", name, *ONE, f"{option}={value}"), (option,))


GROUPS = {
    "settings": settings,
    "flags": flags,
    "measuring": measuring,
    "files": files,
    "machines": machines,
    "others": others,
    **NEWER,
}


def prepare(folder: Path) -> None:
    """The files that the invocations name, and a run that `report` can read."""
    (folder / "ok.py").write_text("print('ok')\n")
    (folder / "a_file").write_text("x")
    (folder / "a_folder").mkdir()
    (folder / "binary").write_bytes(random.Random(0).randbytes(50_000))
    (folder / "empty").touch()
    (folder / "deep.json").write_text("[" * 200_000)
    (folder / "deep.yaml").write_text("recipe: " + "[" * 50_000)
    (folder / "huge_int.json").write_text('{"gpus": %s}' % ("9" * 100_000))
    (folder / "nan.json").write_text('{"gpus": NaN, "step_s": Infinity}')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "half.json").write_text('{"gpus": [1, 2')
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    names = "abcdefghijk"
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} [" + ", ".join([f"*{before}"] * 10) + "]")
    (folder / "bomb.yaml").write_text("recipe: image\n" + "\n".join(lines))
    (folder / "long.yaml").write_text(
        "recipe: image\nmodel_args:\n" + "".join(f"  k{i}: 1\n" for i in range(400_000))
    )
    header = "hardware,gpus,nodes,bytes,seconds\n"
    (folder / "huge_line.csv").write_text(header + "x" * 20_000_000)
    (folder / "nul.csv").write_bytes(header.encode() + b"a\0b,2,1,4,1\n")
    (folder / "latin1.csv").write_bytes(header.encode() + b"\xe9,2,1,4,1\n")
    (folder / "utf16.csv").write_bytes((header + "a,2,1,4,1\n").encode("utf-16"))
    (folder / "big_field.csv").write_text(header + '"' + "y" * 300_000 + '",2,1,4,1\n')
    (folder / "gzip.csv").write_bytes(gzip.compress(header.encode()))
    (folder / "tiny.csv").write_text("a\n1\n")
    (folder / "negative.csv").write_text(header + "h,-2,1,-4,-1\n")
    (folder / "inf.csv").write_text(header + "h,2,1,nan,inf\n")
    with (folder / "sparse").open("wb") as file:
        file.truncate(8 << 30)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "unreadable").write_text("x")
    (folder / "unreadable").chmod(0)
    (folder / "locked").mkdir(mode=0o500)
    (folder / "run").mkdir()
    (folder / "run" / "events").mkdir()
    event = {"v": 1, "run": "x", "rank": 0, "world_size": 1, "time": 1.7e9, "event": "rank"}
    text = json.dumps({**event, "step": 0}) + "\n"
    (folder / "run" / "events" / "rank-0.jsonl").write_text(text)


def invocations(groups: list[str]) -> list[Invocation]:
    found = [each for name in groups for each in GROUPS[name]()]
    return list({(each.words, *each.env.items()): each for each in found}.values())


def tried(invocation: Invocation, folder: Path) -> tuple[list[str], float]:
    """What is wrong with how it ended, and how long it took."""
    words = []
    for number, word in enumerate(invocation.words):
        if word.startswith("text:"):
            file = folder / f"text-{number}.yaml"
            file.write_text(word.removeprefix("text:"))
            word = file.name
        words.append(word)
    outside = files_below(folder.parent / "outside")
    ended = attempt(mgt(*words, env=invocation.env), folder)
    found = ended.problems(invocation.fails, invocation.says)
    if files_below(folder.parent / "outside") != outside:
        found.append("wrote outside its folder")
    return found, ended.seconds


def warm_up() -> None:
    """Import what the commands import, before the first fork."""
    import torch._dynamo  # what the first optimizer imports  # noqa: F401

    import multi_gpu_training.cli.app
    import multi_gpu_training.manager
    import multi_gpu_training.planning.check.checkup
    import multi_gpu_training.planning.forecast
    from multi_gpu_training.recipes import RECIPES
    from multi_gpu_training.recipes.recipe import find_recipe

    for file in Path(multi_gpu_training.cli.__file__).parent.glob("*_command.py"):
        importlib.import_module(f"multi_gpu_training.cli.{file.stem}")
    for name in RECIPES:
        find_recipe(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--only", default="", help="only invocations that hold one of these words")
    parser.add_argument("--part", default="", help="2/5: every fifth, from the second on")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warm_up()
    wanted = [word for word in given.only.split(",") if word]
    rows = []
    begun = time.monotonic()
    base = Path(tempfile.mkdtemp(prefix="wrong-"))
    (base / "outside").mkdir()
    try:
        folder = base / "here"
        folder.mkdir()
        prepare(folder)
        if set(NEWER) & set(given.groups.split(",")):
            prepare_newer(folder)
        known = {path.name for path in folder.iterdir()}
        chosen = invocations(given.groups.split(","))
        if given.part:
            part, parts = map(int, given.part.split("/"))
            chosen = chosen[part - 1 :: parts]
        for invocation in chosen:
            if wanted and not any(word in invocation.name for word in wanted):
                continue
            problems, seconds = tried(invocation, folder)
            rows.append({"invocation": invocation.name, "problems": problems, "seconds": seconds})
            if problems or given.verbose:
                print(f"{invocation.name}\n    {problems} {seconds:.1f} s", flush=True)
            for left in folder.iterdir():
                if left.name not in known:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
    finally:
        shutil.rmtree(base, ignore_errors=True)
    bad = [row for row in rows if row["problems"]]
    slowest = max((row["seconds"] for row in rows), default=0.0)
    print(f"{len(rows)} wrong invocations, {len(bad)} with problems, slowest {slowest:.1f} s, "
          f"{time.monotonic() - begun:.0f} s in all")  # fmt: skip
    if given.out is not None:
        facts = {"python": platform.python_version(), "invocations": len(rows), "bad": bad}
        given.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
