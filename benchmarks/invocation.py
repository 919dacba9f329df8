"""One wrong invocation of `mgt`, and values that several groups of them use."""

from __future__ import annotations

from dataclasses import dataclass, field

ONE = ("--multi-gpu", "single", "--num-gpus", "1", "device=cpu", "max_steps=2", "progress=off")
HUGE = "9" * 5000
SURROGATE = "\udc80\udcff"  # what Python makes of bytes that are not UTF-8
DEEP = "[" * 20_000


@dataclass(frozen=True)
class Invocation:
    words: tuple[str, ...]
    says: tuple[str, ...] = ()  # what its message must mention
    env: dict[str, str] = field(default_factory=dict)
    fails: bool = True  # False: it may also be accepted

    @property
    def name(self) -> str:
        text = " ".join([*(f"{k}={v}" for k, v in self.env.items()), "mgt", *self.words])
        return text.encode(errors="backslashreplace").decode()[:160].replace("\n", "\\n")
