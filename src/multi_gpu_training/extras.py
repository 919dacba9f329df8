"""Optional packages: which are installed, and how to install the others."""

from __future__ import annotations

from importlib.util import find_spec


def installed(package: str) -> bool:
    """Whether `import package` would find something; nothing is imported."""
    return find_spec(package) is not None


def install(extra: str) -> str:
    """The command that installs an extra of this project."""
    return f"pip install 'multi-gpu-training[{extra}]'"
