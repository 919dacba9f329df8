"""NVIDIA's management library, asked defensively: what it does not answer is None."""

from __future__ import annotations

from typing import Any


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
