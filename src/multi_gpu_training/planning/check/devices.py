"""Each GPU: memory, clocks, throttling, and who else uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from multi_gpu_training.distributed.trial import Voice
from multi_gpu_training.planning.check.check_report import Finding, Group, Topic
from multi_gpu_training.planning.check.nvml import Gpu, Nvml
from multi_gpu_training.planning.check.registry import Context, check
from multi_gpu_training.planning.check.watched_process import Watched, be_program, run_program

GROUP = Group("GPUs")
FREE_SHARE = 0.9
HOT_C = 85
# What slows a GPU down, by its bit in the driver's mask.
SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "external power brake",
}
EXCLUSIVE, PROHIBITED = 3, 2  # NVML's numbers of compute modes


@check(order=20)
def check_gpus(context: Context) -> Iterator[Finding]:
    if not context.gpu_count:
        return
    limit = context.options.timeout_s
    program = measure(limit)
    gpus = [Gpu(**line["gpu"]) for line in program.told("gpu")]
    context.gpu_count = len(gpus)  # those that answered: the ranks can use no others
    context.gpus = gpus
    yield from trouble(program, limit)
    yield from judge(gpus, context.options.num_gpus)


def used_gpus(context: Context) -> Sequence[Gpu]:
    """Those that the ranks of this machine will train on."""
    return context.gpus[: context.ranks_here]


def measure(limit_s: float) -> Watched:
    """Look at the GPUs in a child process: asking CUDA takes memory on each of them until the
    process ends, and a broken driver may not answer."""
    return run_program(__name__, {}, limit_s)


def trouble(program: Watched, limit_s: float) -> Iterator[Finding]:
    remedy = "run `nvidia-smi`, then `dmesg | grep -i xid`; restart the machine if it hangs too"
    if program.timed_out:
        yield GROUP.fail("GPUs", f"CUDA does not answer within {limit_s:g} s", remedy)
    elif program.code:
        yield GROUP.fail("GPUs", f"they cannot be asked: {program.complaint()}", remedy)


def look(nvml: Nvml) -> Iterator[Gpu]:
    """Who uses each GPU is asked first: afterwards this very process does."""
    # Not at the top: a check of a machine with too little memory for torch must still speak.
    from multi_gpu_training.gpus import get_gpu_info

    users = {uuid: _others(nvml, nvml.by_uuid(uuid)) for uuid in nvml.uuids()}
    for info in get_gpu_info():
        yield _describe(nvml, info, users.get(info["uuid"], []))


def _describe(nvml: Nvml, info: dict[str, Any], others: Sequence[str]) -> Gpu:
    handle = nvml.by_uuid(info["uuid"])
    clock, sensor = nvml.constant("NVML_CLOCK_SM"), nvml.constant("NVML_TEMPERATURE_GPU")
    uncorrected = nvml.constant("NVML_MEMORY_ERROR_TYPE_UNCORRECTED")
    since_start = nvml.constant("NVML_VOLATILE_ECC")
    slowed = nvml.number("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if slowed is None:  # its name before driver 535
        slowed = nvml.number("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    asked = {
        "clock_mhz": nvml.number("nvmlDeviceGetClockInfo", handle, clock),
        "max_clock_mhz": nvml.number("nvmlDeviceGetMaxClockInfo", handle, clock),
        "temperature_c": nvml.number("nvmlDeviceGetTemperature", handle, sensor),
        "slowed": slowed,
        "compute_mode": nvml.number("nvmlDeviceGetComputeMode", handle),
        "uncorrected_errors": nvml.number(
            "nvmlDeviceGetTotalEccErrors", handle, uncorrected, since_start
        ),
    }
    return Gpu(
        index=info["index"],
        name=info["name"],
        uuid=info["uuid"],
        total_bytes=int(info["total_memory_gb"] * 2**30),
        free_bytes=int(info["free_memory_gb"] * 2**30),
        bf16=info["bf16"],
        mig=bool(mig and mig[0] == 1),
        others=others,
        unsupported=[name for name, value in asked.items() if value is None],
        **asked,
    )


def _others(nvml: Nvml, handle: Any) -> list[str]:
    """Processes on this GPU beside this one, as people know them."""
    found = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
    names = []
    for process in found:
        pid = getattr(process, "pid", None)
        if pid is None:
            continue
        used = getattr(process, "usedGpuMemory", None)
        # NVML says "not available" with a huge number.
        size = f", {used / 2**30:.1f} GB" if isinstance(used, int) and used < 2**50 else ""
        names.append(f"{pid} ({_name_of(pid)}{size})")
    return names


def _name_of(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return f"{process.username()}: {process.name()}"
    except (psutil.Error, KeyError, OSError):
        return "of another container or user"


def _topic(gpu: Gpu) -> Topic:
    return GROUP.about(f"GPU {gpu.index}")


def judge(gpus: Sequence[Gpu], asked: int = -1) -> Iterator[Finding]:
    """`asked`: how many to use; -1 is all."""
    if asked > len(gpus) > 0:
        text = f"--num-gpus {asked} asked for, {len(gpus)} are there"
        yield GROUP.fail("GPUs", text, f"use at most {len(gpus)}")
    for gpu in gpus:
        yield _whole(gpu)
        yield from _state(gpu)
    kinds = sorted({gpu.name for gpu in gpus})
    if len(kinds) > 1:
        listed = "; ".join(
            f"{', '.join(str(gpu.index) for gpu in gpus if gpu.name == kind)}: {kind}"
            for kind in kinds
        )
        yield GROUP.warn(
            "mixed GPUs",
            f"{len(kinds)} kinds of GPU ({listed})",
            "shares of a batch follow measured speed (balance=auto, docs/unequal-gpus.md); "
            "--gpu-ids takes one kind alone",
            kinds=kinds,
        )


def _whole(gpu: Gpu) -> Finding:
    """Memory and clocks: the line that every GPU has."""
    free = gpu.free_bytes / 2**30
    text = f"{gpu.name}, {free:.1f} of {gpu.total_bytes / 2**30:.1f} GB free"
    if gpu.clock_mhz is not None and gpu.max_clock_mhz is not None:
        text += f", clock {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz"
    if gpu.temperature_c is not None:
        text += f", {gpu.temperature_c} C"
    if gpu.unsupported:
        text += f" (not said by the driver: {', '.join(gpu.unsupported)})"
    facts = {"uuid": gpu.uuid, "free_bytes": gpu.free_bytes, "total_bytes": gpu.total_bytes}
    if gpu.free_bytes >= FREE_SHARE * gpu.total_bytes:
        return _topic(gpu).passed(text, **facts)
    who = f"; used by process {', '.join(gpu.others)}" if gpu.others else ""
    remedy = "end what uses it (`nvidia-smi` lists processes), or leave it out with --gpu-ids"
    return _topic(gpu).warn(text + who, remedy, **facts)


def _state(gpu: Gpu) -> Iterator[Finding]:
    topic = _topic(gpu)
    slowed = [name for bit, name in SLOWED_BY.items() if (gpu.slowed or 0) & bit]
    if slowed:
        remedy = "look at cooling and power supply: nvidia-smi -q -d PERFORMANCE"
        yield topic.warn(f"its clock is held down by {', '.join(slowed)}", remedy)
    if gpu.temperature_c is not None and gpu.temperature_c >= HOT_C:
        yield topic.warn(f"it has {gpu.temperature_c} C", "look at its cooling")
    if gpu.others and gpu.free_bytes >= FREE_SHARE * gpu.total_bytes:
        remedy = "steps will wait for them; end them, or leave this GPU out with --gpu-ids"
        yield topic.warn(f"others use it: process {', '.join(gpu.others)}", remedy)
    default_mode = f"sudo nvidia-smi -i {gpu.uuid} -c DEFAULT"
    if gpu.compute_mode == EXCLUSIVE:
        yield topic.warn("its compute mode is exclusive process", default_mode)
    if gpu.compute_mode == PROHIBITED:
        yield topic.fail("its compute mode is prohibited", default_mode)
    if gpu.uncorrected_errors:
        yield topic.fail(
            f"{gpu.uncorrected_errors} uncorrected memory errors since it was started",
            f"reset it (sudo nvidia-smi -r -i {gpu.uuid}); if they come back, replace the card",
        )
    if gpu.mig:
        yield topic.warn(
            "it is cut into parts (MIG), which cannot exchange gradients over NCCL",
            f"sudo nvidia-smi -i {gpu.uuid} -mig 0, or train on one part",
        )


def report_gpus(request: Any, voice: Voice) -> None:
    for gpu in look(Nvml()):
        voice.say(stage="look", gpu=asdict(gpu))


if __name__ == "__main__":
    be_program(report_gpus)
