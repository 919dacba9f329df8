"""NVIDIA's management library, asked defensively, and what it tells of a GPU.

What it does not answer is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# GB/s in one direction: of an NVLink by its version, of a PCIe lane by its generation.
NVLINK_GBPS = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
PCIE_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True)
class Gpu:
    """One visible GPU; None where the driver does not say."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    bf16: bool
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    temperature_c: int | None = None
    slowed: int | None = None
    compute_mode: int | None = None
    uncorrected_errors: int | None = None
    mig: bool = False
    others: Sequence[str] = ()
    unsupported: Sequence[str] = ()


@dataclass(frozen=True)
class Port:
    """How one GPU is connected; None or 0 where the driver does not say."""

    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_width_now: int | None = None
    nvlinks: int = 0
    nvlink_version: int | None = None

    @property
    def nvlink_gbps(self) -> float | None:
        per_link = NVLINK_GBPS.get(self.nvlink_version or 0)
        return self.nvlinks * per_link if self.nvlinks and per_link else None

    @property
    def pcie_gbps(self) -> float | None:
        lane = PCIE_LANE_GBPS.get(self.pcie_generation or 0)
        width = self.pcie_width_now or self.pcie_width
        return lane * width if lane and width else None

    @property
    def pcie_name(self) -> str:
        return f"PCIe {self.pcie_generation}.0 x{self.pcie_width_now or self.pcie_width}"

    def describe(self) -> str:
        if self.nvlink_gbps:
            return f"{self.nvlinks} NVLinks of version {self.nvlink_version}"
        if self.pcie_gbps:
            return self.pcie_name
        return "a link that the driver does not name"


class Nvml:
    """`problem` says why it cannot be asked at all."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._library: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml
        except Exception as error:  # no library, no driver, no permission: all the same to us
            self.problem = str(error) or type(error).__name__

    def ask(self, function: str, *arguments: Any) -> Any:
        """What `function` answers. Drivers, cards and containers each refuse some questions, in
        their own ways: a refusal is no error here."""
        if self._library is None or any(argument is None for argument in arguments):
            return None
        try:
            return getattr(self._library, function)(*arguments)
        except Exception:
            return None

    def constant(self, name: str) -> Any:
        return getattr(self._library, name, None)

    def text(self, function: str, *arguments: Any) -> str | None:
        found = self.ask(function, *arguments)
        return found.decode(errors="replace") if isinstance(found, bytes) else found

    def number(self, function: str, *arguments: Any) -> int | None:
        found = self.ask(function, *arguments)
        return found if isinstance(found, int) else None

    @property
    def count(self) -> int:
        return self.number("nvmlDeviceGetCount") or 0

    def by_uuid(self, uuid: str) -> Any:
        """Older versions of the library want bytes."""
        found = self.ask("nvmlDeviceGetHandleByUUID", uuid)
        return found if found is not None else self.ask("nvmlDeviceGetHandleByUUID", uuid.encode())

    def uuids(self) -> list[str]:
        """Of every GPU of the machine, visible to this process or not."""
        handles = [self.ask("nvmlDeviceGetHandleByIndex", index) for index in range(self.count)]
        return [self.text("nvmlDeviceGetUUID", handle) or "" for handle in handles]

    def driver(self) -> str | None:
        return self.text("nvmlSystemGetDriverVersion")

    def driver_cuda(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver knows."""
        found = self.number("nvmlSystemGetCudaDriverVersion_v2")
        return (found // 1000, found % 1000 // 10) if found else None
