"""What a trace of torch.profiler says: where the time of a step goes, and what would gain most.

On a GPU, time is counted by its kernels and copies; on CPU ranks by torch's operators. Exchange is
exposed while nothing else is computed; idle is when neither runs.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from multi_gpu_training.monitoring.profiling.trace_intervals import (
    Interval,
    length,
    merged,
    within,
    without,
)
from multi_gpu_training.safe_files import open_regular, write_atomically

WAITING = "waiting for a batch"
NO_PAUSE = (WAITING, "c10d::", "gloo:", "nccl:")  # what the main thread waits in by itself
STEP = "ProfilerStep#"  # the name by which other viewers know steps, too
MOST_BYTES = 2**28  # of a trace, unpacked
MOST_EVENTS = 1_000_000  # 30 steps of 5,000 kernels have a third
MOST_NAME = 4096  # characters of a kernel's name
MOST_TIME = 1e18  # microseconds
MOST_ROWS = 12
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NEGLIGIBLE = 0.01  # shares of a step that are not worth a line
PAUSE = {"gpu": 1e3, "cpu": 5e3}  # microseconds without work that no fixed cost explains
PAUSE_SHARE = 0.02  # of a step, and at least that much of it
SMALL = 20.0  # microseconds of an operator on a CPU, most of which is its fixed cost
FEWEST_SMALL = 200  # per step
EXCHANGE = "exchange of gradients that no computation hides"
US = 1e-6
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_SPACES = re.compile(r"\s*")
KINDS = {
    "matrix products and convolutions": re.compile(
        r"gemm|cutlass|cublas|conv|wgrad|dgrad|xmma|::(add|bad)?d?b?mm|nvjet|aten::linear", re.I
    ),
    "attention": re.compile(r"flash|fmha|attention", re.I),
    "optimizer": re.compile(r"multi_tensor|adam|sgd", re.I),
}

# What a kernel made from a template does: the name that ends so, and not the template's.
FUNCTOR = re.compile(r"(\w+?)_?(?:Functor|functor|kernel_cuda|kernel_impl|kernel_impl_nocast)\b")
HOLLOW = {"gpu", "func"}  # templates inside templates

Event = dict[str, Any]


def short_name(kernel: str) -> str:
    """What a kernel is called without its namespaces, template arguments and parameters."""
    head, _, inside = kernel.removeprefix("void ").partition("<")
    base = head.partition("(anonymous namespace)::")[2] or head.partition("(")[0]
    base = base.rpartition("::")[2]
    if not inside:
        return base
    if "cutlass" in head:  # cutlass::Kernel2<what it computes>
        return re.split(r"[<>,(]", inside)[0]
    functors = (found[1] for found in FUNCTOR.finditer(inside))
    what = next((name for name in functors if name.lower() not in HOLLOW), None)
    return base if what is None else f"{base} ({what})"


def write_summary(trace: Path) -> Path:
    """Summarise a trace into a small file beside it. A ValueError says why that is impossible."""
    path = trace.with_name(trace.name.removesuffix(".json.gz") + ".summary.json")
    try:
        text = json.dumps(summarise(read_trace(trace)), indent=1, allow_nan=False)
    except (LookupError, TypeError, ArithmeticError, RecursionError, EOFError, zlib.error) as error:
        # Whoever prepared the folder may have put anything there.
        raise ValueError(f"it is not a trace of torch.profiler ({type(error).__name__})") from None
    write_atomically(path, text)
    return path


def read_trace(path: Path) -> list[Event]:
    """The events of a trace, one after the other: most of a hostile one is never kept."""
    with os.fdopen(open_regular(path), "rb") as file, gzip.open(file) as unpacked:
        raw = unpacked.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB unpacked")
    text = raw.decode()
    del raw
    start = _EVENTS.search(text)
    if start is None:
        raise ValueError("it is not a trace of torch.profiler")
    decode, found, place = json.JSONDecoder().raw_decode, [], _next(text, start.end())
    count = 0
    while text[place] != "]":
        event, place = decode(text, place)
        count += 1
        if count > MOST_EVENTS:
            raise ValueError(f"it has more than {MOST_EVENTS:,} events; trace fewer steps")
        if isinstance(event, dict) and _is_whole(event):
            event["name"] = event["name"][:MOST_NAME]
            found.append(event)
        place = _next(text, place)
        if text[place] == ",":
            place = _next(text, place + 1)
    return found


def _next(text: str, place: int) -> int:
    """Where the next character stands that is no space."""
    found = _SPACES.match(text, place)
    return found.end() if found else place


def _is_whole(event: Event) -> bool:
    timed = event.get("ph") == "X"
    return (
        _is_time(event.get("ts"))
        and (not timed or (_is_time(event.get("dur")) and event["dur"] >= 0))
        and (not timed or isinstance(event.get("tid"), int | str))
        and isinstance(event.get("name"), str)
        and isinstance(event.get("args", {}), dict)
    )


def _is_time(value: Any) -> bool:
    """Whether it is a number of microseconds; not NaN, and nothing that a float cannot hold."""
    return isinstance(value, int | float) and -MOST_TIME < value < MOST_TIME


def summarise(events: list[Event]) -> dict[str, Any]:
    """The figures of a trace, per step. Raises ValueError where no step is in it."""
    spans = [event for event in events if event.get("ph") == "X"]
    marks = [e for e in spans if e["name"].startswith(STEP) and e.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError("no step is in the trace")
    steps = sorted(int(mark["name"].removeprefix(STEP)) for mark in marks)
    main = marks[0]["tid"]
    kernels = [event for event in spans if event.get("cat") in ON_GPU]
    window = (
        min(mark["ts"] for mark in marks),
        max(event["ts"] + event["dur"] for event in [*marks, *kernels]),
    )
    host = [e for e in spans if e["tid"] == main and not e["name"].startswith(STEP)]
    host = [e for e in host if e.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime")]
    if kernels:
        work = [event for event in kernels if not _is_exchange(event)]
        exchange = [event for event in kernels if _is_exchange(event)]
        rows = _by_name(work, {k: op for k, op in _launching_ops(spans)})
    else:
        work = [event for event in spans if event["name"].startswith("aten::")]
        exchange = [event for event in spans if event["name"].startswith("gloo:")]
        rows = _by_name(_without_children(work), {})
    wall = window[1] - window[0]
    if wall <= 0:
        raise ValueError("its steps take no time")
    busy, talking = _times(work, window), _times(exchange, window)
    idle = without([window], merged([*busy, *talking]))
    each = US / len(steps)
    on = "gpu" if kernels else "cpu"
    shortest = max(PAUSE[on], PAUSE_SHARE * wall / len(steps))
    long = [gap for gap in idle if gap[1] - gap[0] >= shortest]
    pauses = [(name, s) for name, s in _during(long, host) if not name.startswith(NO_PAUSE)]
    copies = [
        event for event in kernels if event["cat"] == "gpu_memcpy" and "HtoD" in event["name"]
    ]
    computing = _times([event for event in work if event.get("cat") != "gpu_memcpy"], window)
    found: dict[str, Any] = {
        "first": steps[0],
        "last": steps[-1],
        "on": on,
        "step_s": wall * each,
        "busy_s": length(busy) * each,
        "exchange_s": length(talking) * each,
        "exposed_s": length(without(talking, busy)) * each,
        "copy_s": length(without(_times(copies, window), computing)) * each,
        "idle_s": length(idle) * each,
        "optimizer_s": length(_times([e for e in host if _is_optimizer(e)], window)) * each,
    }
    small = [row for row in rows if row["seconds"] < SMALL * row["calls"]] if on == "cpu" else []
    found["pauses"] = [{"during": name, "seconds": s * each} for name, s in pauses[:MOST_ROWS]]
    found["small_calls"] = sum(row["calls"] for row in small) / len(steps)
    found["small_s"] = sum(row["seconds"] for row in small) * each
    for row in rows:
        row["seconds"] *= each
        row["calls"] /= len(steps)
    found["kinds"] = _kinds(rows)
    found["top"] = rows[:MOST_ROWS]
    found["gaps"] = [
        {"during": name, "seconds": seconds * each}
        for name, seconds in _during(idle, host)[:MOST_ROWS]
    ]
    found["memory"] = _memory(events, host)
    found["recorded"] = any(event["name"] == "cudaGraphLaunch" for event in host)
    found["gains"] = gains(found)
    return found


def _is_exchange(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _is_optimizer(event: Event) -> bool:
    return bool(event["name"].startswith("Optimizer.step"))


def _times(events: Iterable[Event], window: Interval) -> list[Interval]:
    return merged(within(((e["ts"], e["ts"] + e["dur"]) for e in events), window))


def _launching_ops(spans: list[Event]) -> Iterable[tuple[Any, str]]:
    """By external id, the operator that launches a kernel; none for those of a CUDA graph."""
    for event in spans:
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {}):
            yield event["args"]["External id"], event["name"]


def _by_name(events: Iterable[Event], ops: dict[Any, str]) -> list[dict[str, Any]]:
    """Time and calls of each kernel or operator, longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    launched: dict[str, str] = {}
    for event in events:
        name = event["name"]
        seconds[name] += event["dur"]
        calls[name] += 1
        op = ops.get(event.get("args", {}).get("External id"))
        if op is not None:
            launched[name] = op
    order = sorted(seconds, key=lambda name: -seconds[name])
    return [
        {"name": name, "op": launched.get(name), "seconds": seconds[name], "calls": calls[name]}
        for name in order
    ]


def _without_children(events: list[Event]) -> Iterable[Event]:
    """Each operator with the time that it did not spend in others."""
    by_thread: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        open_: list[Event] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            own = dict(event)
            while open_ and open_[-1]["ts"] + open_[-1]["whole"] <= event["ts"]:
                yield open_.pop()
            own["whole"] = event["dur"]
            if open_:
                open_[-1]["dur"] -= event["dur"]
            open_.append(own)
        yield from open_


def _kinds(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        text = f"{row['name']} {row['op'] or ''}"
        kind = next((kind for kind, words in KINDS.items() if words.search(text)), "other kernels")
        found[kind] += row["seconds"]
    return dict(found)


def _during(idle: list[Interval], host: list[Event]) -> list[tuple[str, float]]:
    """What the main thread did while nothing was computed, longest first."""
    found: defaultdict[str, float] = defaultdict(float)
    coming = sorted(host, key=lambda e: (e["ts"], -e["dur"]))
    open_: list[Event] = []
    place = 0
    for start, end in idle:
        middle = (start + end) / 2
        while place < len(coming) and coming[place]["ts"] <= middle:
            open_.append(coming[place])
            place += 1
        open_ = [event for event in open_ if event["ts"] + event["dur"] > middle]
        found[_plain(open_[-1]["name"]) if open_ else "Python, between operators"] += end - start
    return sorted(found.items(), key=lambda item: -item[1])


def _plain(name: str) -> str:
    if "DataLoader" in name and name.startswith("enumerate"):
        return WAITING
    return name.partition("#")[0]


def _memory(events: list[Event], host: list[Event]) -> dict[str, Any] | None:
    """The largest memory of the GPU that tensors had, and what ran then."""
    told = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 1]
    if not told:
        return None
    peak = max(told, key=lambda event: event["args"]["Total Allocated"])
    at = peak["ts"]
    around = [e for e in host if e["ts"] <= at <= e["ts"] + e["dur"]]
    inner = min(around, key=lambda event: event["dur"], default=None)
    return {
        "peak_bytes": int(peak["args"]["Total Allocated"]),
        "during": _plain(inner["name"]) if inner else None,
    }


def gains(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The three largest shares of a step that something can be done about, and what."""
    step = found["step_s"]
    gpu = found["on"] == "gpu"
    waits = sum(gap["seconds"] for gap in found["gaps"] if gap["during"] == WAITING)
    pauses = found["pauses"]
    paused = sum(pause["seconds"] for pause in pauses)
    top = found["top"][0] if found["top"] else None
    kinds = found["kinds"]
    claims = [
        (
            found["exposed_s"],
            EXCHANGE,
            "exchange less often (gradient_accumulation_steps, larger batches), or let "
            "`mgt bench --tune` search bucket sizes; where a rank is slow (--ranks all shows it), "
            "the others wait for it here",
        ),
        (
            waits,
            WAITING,
            "raise num_workers, or keep the data on the GPU (data_on_gpu)",
        ),
        (
            found["idle_s"] - waits - paused,
            "the GPU waits for Python" if gpu else "time outside torch's operators",
            _idle_advice(found),
        ),
        (found["copy_s"], "copies to the GPU that no computation hides", "pin_memory=true"),
    ]
    if gpu and kinds.get("other kernels", 0.0) > 0:
        claims.append(
            (
                kinds["other kernels"] / 2,
                "element-wise and other small kernels, of which fusing saves about half",
                "let step_execution=auto compile them, which it does in runs that are long enough",
            )
        )
    if pauses:
        where = pauses[0]["during"]
        claims.append(
            (
                paused,
                f"pauses in which nothing is computed, the longest in {where}",
                "look in the trace for what the script does there: files, prints, .item(), another "
                "library; or another process has its core",
            )
        )
    if found["small_calls"] >= FEWEST_SMALL:
        claims.append(
            (
                found["small_s"],
                f"{found['small_calls']:,.0f} small operators per step, mostly their fixed cost",
                "compute on whole tensors instead of in loops, or torch.compile that part",
            )
        )
    if not gpu:
        claims.append(
            (found["optimizer_s"], "the optimizer", "set fused_optimizer, or a larger batch")
        )
    if top is not None:
        who = short_name(top["name"]) + (f" (of {top['op']})" if top["op"] else "")
        kind = "kernel" if gpu else "operator"
        claims.append((top["seconds"], f"the longest {kind}: {who}", _advice(top["name"], gpu)))
    worth = [claim for claim in claims if claim[0] / step >= NEGLIGIBLE]
    worth.sort(key=lambda claim: -claim[0])
    return [{"share": s / step, "what": what, "do": do} for s, what, do in worth[:3]]


def _idle_advice(found: dict[str, Any]) -> str:
    if found["on"] != "gpu":
        return "use larger batches: every operator has a fixed cost"
    if found.get("recorded"):
        return "use larger batches: steps are recorded already, and tracing widens these gaps"
    return "use step_execution=auto, which records steps; the report says where it cannot"


def _advice(name: str, gpu: bool) -> str:
    if not KINDS["matrix products and convolutions"].search(name):
        return "see in the trace what launches it"
    if gpu and re.search(r"sgemm|f32f32_f32f32|_s1688_(?!tf32)", name) and "tf32" not in name:
        return "it computes in float32: use_mixed_precision or allow_tf32"
    return f"this is the work itself: lower precision or {'another GPU' if gpu else 'more cores'}"
