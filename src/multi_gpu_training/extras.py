"""Optional packages: which are installed, and how to install the others."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path


def installed(package: str) -> bool:
    """Whether `import package` would find something; nothing is imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # sys.modules holds None or something without a spec
        return sys.modules.get(package) is not None


def install(extra: str) -> str:
    """The command that installs an extra of this project."""
    return f"pip install 'multi-gpu-training[{extra}]'"


def can_draw(picture: Path | str) -> bool:
    """Whether matplotlib is there; where it is not, a line says which picture is missing."""
    found = installed("matplotlib")
    if not found:
        print(
            f"{picture} is not written: matplotlib is not installed; run {install('plots')}",
            file=sys.stderr,
        )
    return found


def quiet_torchao() -> None:
    """Let torchao's import not complain about itself, by whatever library it is imported."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_not_of_torchao)


def _not_of_torchao(record: logging.LogRecord) -> bool:
    """Whether a warning is other than those of torchao's import: kernels of GPUs that are not
    here, and a name of torch that torchao should no longer use."""
    text = record.getMessage()
    return not (text.startswith("Failed to load ") or "is an Enum subclass" in text)
