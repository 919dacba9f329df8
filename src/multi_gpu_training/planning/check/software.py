"""Versions of torch, CUDA, the driver and NCCL, and whether they fit each other and the GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu_training.planning.check.check_report import Finding, Group
from multi_gpu_training.planning.check.nvml import Nvml

GROUP = Group("Software")
INSTALL = "install a torch with CUDA (https://pytorch.org/get-started)"
OLDEST_TORCH = (2, 11)
NVIDIA = "0x10de"


@dataclass(frozen=True)
class Software:
    """What is installed here. `cuda` is torch's, `driver_cuda` the newest that the driver knows;
    `uuids` are all GPUs that the driver shows, `visible` those that torch sees."""

    torch: str
    python: str = platform.python_version()
    cuda: str | None = None
    hip: str | None = None
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    driver_problem: str | None = None
    nccl: str | None = None
    uuids: Sequence[str] = ()
    pci_gpus: int = 0
    visible: int = 0
    visible_devices: str | None = None
    architectures: Sequence[str] = ()
    capabilities: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def look(nvml: Nvml, env: Mapping[str, str]) -> Software:
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Software(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        driver=nvml.driver(),
        driver_cuda=nvml.driver_cuda(),
        driver_problem=nvml.problem,
        nccl=_nccl(),
        uuids=nvml.uuids(),
        pci_gpus=nvidia_devices(Path("/sys/bus/pci/devices")),
        visible=visible,
        visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        architectures=torch.cuda.get_arch_list() if visible else [],
        capabilities={
            torch.cuda.get_device_name(index): torch.cuda.get_device_capability(index)
            for index in range(visible)
        },
    )


def _nccl() -> str | None:
    import torch

    try:
        found: Any = torch.cuda.nccl.version()
        return ".".join(map(str, found))
    except Exception:  # a torch without NCCL has no such function, or one that fails
        return None


def nvidia_devices(folder: Path) -> int:
    """Graphics devices of NVIDIA on the bus, with a driver or without."""
    found = 0
    for device in folder.glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        found += vendor == NVIDIA and kind.startswith("0x03")  # display controllers
    return found


def judge(found: Software, device: str = "auto") -> Iterator[Finding]:
    yield _torch(found)
    if found.hip:
        yield GROUP.warn(
            "ROCm",
            f"torch is built for AMD GPUs (ROCm {found.hip}), {found.visible} visible; "
            "multi-gpu-training is untested there",
            "run `mgt verify image` and tell us what you see",
        )
        return
    yield _driver(found, device)
    if found.visible_devices is not None and device != "cpu":
        yield _visible_devices(found)
    if found.visible:
        if found.nccl is None:
            text = "this torch has no NCCL: GPUs cannot exchange gradients"
            yield GROUP.fail("NCCL", text, INSTALL)
        else:
            yield GROUP.passed("NCCL", f"NCCL {found.nccl}", nccl=found.nccl)
        yield from _kernels(found)


def _torch(found: Software) -> Finding:
    text = f"torch {found.torch}, Python {found.python}"
    version = tuple(int(part) for part in found.torch.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        remedy = "this project needs torch 2.11 or newer: pip install -U torch"
        return GROUP.fail("torch", text, remedy)
    return GROUP.passed("torch", text, torch=found.torch, python=found.python)


def _driver(found: Software, device: str) -> Finding:
    """CUDA and the driver: there, and made for each other."""
    topic = GROUP.about("driver")
    there = max(len(found.uuids), found.pci_gpus)
    if found.cuda is None:
        text = f"torch {found.torch} is built without CUDA"
        if there and device != "cpu":
            return GROUP.fail("CUDA", f"{text}, and this machine has {there} GPUs", INSTALL)
        return _on_cpu(text, device, f"on a machine with GPUs {INSTALL}")
    if found.driver is None:
        text = f"torch has CUDA {found.cuda}, but no NVIDIA driver answers"
        remedy = "install the NVIDIA driver, until `nvidia-smi` shows the GPUs"
        if found.driver_problem:
            text += f" ({found.driver_problem})"
        if found.visible:
            return topic.warn(f"{text}: clocks and links cannot be read", remedy)
        if there and device != "cpu":
            return topic.fail(f"{text}; this machine has {there} NVIDIA GPUs", remedy)
        return _on_cpu(text, device, f"{remedy}; in a container start it with --gpus all")
    text = f"CUDA {found.cuda} in torch, driver {found.driver}"
    known = found.driver_cuda
    if known is not None:
        text += f" (up to CUDA {known[0]}.{known[1]})"
        # Within a major version, any driver runs any CUDA (minor version compatibility).
        if known[0] < int(found.cuda.split(".")[0]):
            remedy = f"update the driver, or install a torch for CUDA {known[0]}"
            return topic.fail(f"{text}: the driver is too old for this torch", remedy)
    if not found.visible and found.visible_devices is None and device != "cpu":
        return topic.fail(
            f"{text}, but torch sees no GPU of {len(found.uuids)}",
            "run `nvidia-smi`; after an update of the driver restart the machine, in a container "
            "start it with --gpus all",
        )
    return topic.passed(text, driver=found.driver, cuda=found.cuda)


def _on_cpu(text: str, device: str, remedy: str) -> Finding:
    if device == "cuda":
        return GROUP.fail("CUDA", f"{text}, and --device cuda was asked for", remedy)
    if device == "cpu":
        return GROUP.passed("CUDA", f"{text}: training runs on the CPU, as asked")
    return GROUP.warn("CUDA", f"{text}: training runs on the CPU", remedy)


def _visible_devices(found: Software) -> Finding:
    topic = GROUP.about("visible GPUs")
    value = found.visible_devices or ""
    text = f"CUDA_VISIBLE_DEVICES={value}"
    if value.strip() in ("", "-1", "NoDevFiles"):
        text += " hides every GPU"
        if not found.uuids:
            return topic.passed(f"{text}; there is none to hide")
        return topic.warn(text, "unset CUDA_VISIBLE_DEVICES to train on GPUs")
    known: Sequence[str] = found.uuids or [""] * found.visible
    problem = visible_problem(value, known)
    if problem is not None:
        numbers = ",".join(map(str, range(len(known))))
        remedy = f"set it to GPUs that are there: export CUDA_VISIBLE_DEVICES={numbers}"
        return topic.fail(f"{text}: {problem}", remedy if known else "unset CUDA_VISIBLE_DEVICES")
    named = len(value.split(","))
    if found.visible != named:
        remedy = "unset it and look at `mgt info`; a scheduler may allow this job fewer"
        return topic.fail(f"{text} names {named} GPUs and torch sees {found.visible}", remedy)
    return topic.passed(f"{text}: {found.visible} of {len(known)} GPUs")


def _kernels(found: Software) -> Iterator[Finding]:
    """Whether torch was compiled for these GPUs."""
    for name, capability in found.capabilities.items():
        if found.architectures and not runs_on(capability, found.architectures):
            yield GROUP.fail(
                "kernels",
                f"{name} is sm_{capability[0]}{capability[1]}, and this torch holds "
                f"{', '.join(found.architectures)}",
                "install a torch that is built for this GPU",
            )


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Code of the same major version and no newer minor one runs; `compute_` is compiled anew."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdecimal():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if major == capability[0] and minor <= capability[1]:
            return True
    return False


def visible_problem(value: str, uuids: Sequence[str]) -> str | None:
    """What is wrong with CUDA_VISIBLE_DEVICES on a machine with these GPUs, or None.

    CUDA stops reading at the first entry that it does not know: what follows is hidden too.
    """
    entries = [entry.strip() for entry in value.split(",")]
    count = len(uuids)
    some = {0: "no GPU", 1: "GPU 0 alone"}.get(count, f"GPUs 0 to {count - 1}")
    seen: list[int] = []
    for place, entry in enumerate(entries):
        hidden = f", and hides all after it ({', '.join(entries[place:])})" if place else ""
        if entry.startswith("MIG-"):
            continue  # a part of a GPU, which the list does not hold
        index = _index_of(entry, uuids)
        if index is None:
            numeric = entry.lstrip("-").isdecimal()
            kind = "does not exist" if numeric else "is not the number or UUID of a GPU here"
            return f"{entry or 'an empty entry'!r} {kind}: this machine has {some}{hidden}"
        if index in seen:
            return f"GPU {index} is named twice, and CUDA then shows none"
        seen.append(index)
    return None


def _index_of(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    if entry.startswith("GPU-"):
        # The beginning of a UUID is enough.
        return next((i for i, uuid in enumerate(uuids) if uuid.startswith(entry)), None)
    return None
