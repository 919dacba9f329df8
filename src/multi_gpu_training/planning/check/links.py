"""What the links between GPUs should give, and what copies over them gave.

`python -m ...links` is the program that copies: it reads what to copy from its first line of input
and writes a JSON line for each copy. A broken link can hang a copy for ever, so whoever started it
kills it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any

from multi_gpu_training.distributed.trial import Voice
from multi_gpu_training.planning.check.check_report import Finding, Group, Topic
from multi_gpu_training.planning.check.devices import used_gpus
from multi_gpu_training.planning.check.nvml import Gpu, Nvml, Port
from multi_gpu_training.planning.check.registry import Context, check
from multi_gpu_training.planning.check.watched_process import Watched, be_program, run_program

GROUP = Group("Links")
MOST_NVLINKS = 18  # of any GPU so far; the driver says which of them exist
# Real copies get 75 to 90 % of these figures; less than this share needs a reason.
ENOUGH = 0.5
COPIED_BYTES = 256 * 2**20
REPEATS = 5
NO_P2P = (
    "look at `nvidia-smi topo -m`; virtualisation and PCIe access control (ACS, IOMMU) stop "
    "direct copies. If training hangs: export NCCL_P2P_DISABLE=1"
)


@check(order=60)
def check_links(context: Context) -> Iterator[Finding]:
    if not context.gpus:
        return
    limit = context.options.timeout_s
    context.ports = look(context.nvml, context.gpus)
    yield from judge(measure(used_gpus(context), limit), context.ports, limit)


def look(nvml: Nvml, gpus: Sequence[Gpu]) -> dict[int, Port]:
    return {gpu.index: _port(nvml, nvml.by_uuid(gpu.uuid)) for gpu in gpus}


def _port(nvml: Nvml, handle: Any) -> Port:
    on = nvml.constant("NVML_FEATURE_ENABLED")
    active = [
        link
        for link in range(MOST_NVLINKS)
        if on is not None and nvml.number("nvmlDeviceGetNvLinkState", handle, link) == on
    ]
    version = nvml.number("nvmlDeviceGetNvLinkVersion", handle, active[0]) if active else None
    return Port(
        # An idle GPU turns its generation down, so that the largest counts; lanes it keeps.
        pcie_generation=nvml.number("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=nvml.number("nvmlDeviceGetMaxPcieLinkWidth", handle),
        pcie_width_now=nvml.number("nvmlDeviceGetCurrPcieLinkWidth", handle),
        nvlinks=len(active),
        nvlink_version=version,
    )


def expected_gbps(one: Port, other: Port, direct: bool) -> float | None:
    """What a copy between two GPUs should reach at most; None where nobody knows."""
    if direct and one.nvlink_gbps and other.nvlink_gbps:
        return min(one.nvlink_gbps, other.nvlink_gbps)
    if one.pcie_gbps is None or other.pcie_gbps is None:
        return None
    slower = min(one.pcie_gbps, other.pcie_gbps)
    # Without direct access each byte goes into host memory and out again.
    return slower if direct else slower / 2


def measure(gpus: Sequence[Gpu], limit_s: float) -> Watched:
    """Copies between host and GPUs and between all pairs, in a child process."""
    request = {"gpus": [gpu.index for gpu in gpus], "bytes": COPIED_BYTES}
    return run_program(__name__, request, limit_s)


def judge(program: Watched, ports: Mapping[int, Port], limit_s: float) -> Iterator[Finding]:
    for index, port in ports.items():
        if port.pcie_width and port.pcie_width_now and port.pcie_width_now < port.pcie_width:
            yield GROUP.warn(
                f"GPU {index}",
                f"PCIe gives it {port.pcie_width_now} lanes of {port.pcie_width}",
                "put the card into a wider slot, or look at risers and BIOS settings",
            )
    for line in program.told("host"):
        yield _host_copy(line, ports.get(line["host"], Port()))
    yield from _pairs(program.told("pair"), ports)
    last = GROUP.about(str(program.last("at") or "copies"))
    if program.timed_out:
        yield last.fail(
            f"the copy did not end within {limit_s:g} s: it hangs",
            f"direct copies between these GPUs are broken; {NO_P2P}",
        )
    elif program.code:
        yield last.fail(
            f"the copy failed: {program.complaint()}",
            "run `nvidia-smi`, then `dmesg | grep -i xid`; restart the machine if a GPU is lost",
        )


def _host_copy(line: Mapping[str, Any], port: Port) -> Finding:
    topic = GROUP.about(f"host - GPU {line['host']}")
    text = f"{line['to_gbps']:.1f} GB/s to it, {line['from_gbps']:.1f} GB/s back"
    if not line["right"]:
        return _wrong(topic, text)
    wanted = port.pcie_gbps
    if wanted is None:
        return topic.passed(f"{text}; the driver does not say what the link gives", **line)
    text += f"; {port.pcie_name} gives at most {wanted:.0f}"
    if min(line["to_gbps"], line["from_gbps"]) < ENOUGH * wanted:
        remedy = "is the machine busy? else look at PCIe settings and NUMA placement"
        return topic.warn(text, remedy, **line)
    return topic.passed(text, **line)


def _pairs(lines: Sequence[Mapping[str, Any]], ports: Mapping[int, Port]) -> Iterator[Finding]:
    """One line for each bad pair, and one for all the good ones."""
    good: list[Mapping[str, Any]] = []
    wanted = None
    for line in lines:
        one, other = line["pair"]
        topic = GROUP.about(f"GPU {one} - GPU {other}")
        ends = ports.get(one, Port()), ports.get(other, Port())
        wanted = expected_gbps(*ends, direct=line["direct"])
        text = f"{line['gbps']:.1f} GB/s"
        if not line["direct"]:
            text += ", through host memory: no direct access"
        if not line["right"]:
            yield _wrong(topic, text)
        elif not line["direct"]:
            yield topic.warn(text, NO_P2P, **line)
        elif wanted is not None and line["gbps"] < ENOUGH * wanted:
            yield topic.warn(
                f"{text}; {ends[0].describe()} should give up to {wanted:.0f}",
                "look at `nvidia-smi topo -m` and `nvidia-smi nvlink -s`; is another process "
                "using these GPUs?",
                **line,
            )
        else:
            good.append(line)
    if good:
        speeds = [line["gbps"] for line in good]
        text = f"{len(good)} copies right, {min(speeds):.0f} to {max(speeds):.0f} GB/s"
        if wanted is not None:
            text += f"; up to {wanted:.0f} expected"
        yield GROUP.passed("GPU - GPU", text, pairs=[dict(line) for line in good])


def _wrong(topic: Topic, text: str) -> Finding:
    return topic.fail(
        f"what arrived is not what was sent ({text})",
        f"do not train like this: results would be wrong. {NO_P2P}",
    )


# The program


def copy_all(request: dict[str, Any], voice: Voice) -> None:
    voice.say(stage="start", at="CUDA's start")
    import torch

    count, gpus = request["bytes"] // 4, request["gpus"]
    sent = torch.arange(count, dtype=torch.int32)
    voice.say(stage="host", at="host memory")
    pinned = sent.pin_memory()
    back = torch.empty_like(pinned).pin_memory()
    for gpu in gpus:
        voice.say(stage="copy", at=f"host - GPU {gpu}")
        there = torch.empty(count, dtype=torch.int32, device=f"cuda:{gpu}")
        forth = _seconds(gpu, partial(there.copy_, pinned, non_blocking=True))
        home = _seconds(gpu, partial(back.copy_, there, non_blocking=True))
        voice.say(
            host=gpu,
            to_gbps=request["bytes"] / forth / 1e9,
            from_gbps=request["bytes"] / home / 1e9,
            right=bool((back == sent).all()),
        )
        back.zero_()  # or the next GPU would be found right with this one's bytes
        del there
    for one, other in permutations(gpus, 2):
        voice.say(stage="copy", at=f"GPU {one} - GPU {other}")
        source = pinned.to(f"cuda:{one}")
        target = torch.zeros(count, dtype=torch.int32, device=f"cuda:{other}")
        seconds = _seconds(one, partial(target.copy_, source, non_blocking=True), other)
        wanted = torch.arange(count, dtype=torch.int32, device=f"cuda:{other}")
        voice.say(
            pair=[one, other],
            gbps=request["bytes"] / seconds / 1e9,
            direct=bool(torch.cuda.can_device_access_peer(one, other)),
            right=bool((target == wanted).all()),
        )
        del source, target, wanted


def _seconds(gpu: int, copy: Callable[[], Any], other: int | None = None) -> float:
    """The fastest of some copies; others on the machine may slow one down, never speed it up."""
    import torch

    def settle() -> None:
        for index in (gpu, other):
            if index is not None:
                torch.cuda.synchronize(index)

    copy()
    best = float("inf")
    for _ in range(REPEATS):
        settle()
        begun = time.perf_counter()
        copy()
        settle()
        best = min(best, time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    be_program(copy_all)
