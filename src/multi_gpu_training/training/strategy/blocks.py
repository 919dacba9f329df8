"""The blocks of a model, which sharded training gathers, computes and frees one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from multi_gpu_training.errors import ModelError


def find_blocks(model: nn.Module, asked: Sequence[str] | None, may_idle: bool) -> list[nn.Module]:
    """Blocks of `model`, outermost first, none inside another.

    asked: class names, or names of modules. Without it: what Hugging Face models say must not be
    split, or else the members of lists whose class repeats. may_idle: a batch may skip modules.
    Ranks gather a block together, so a module that some rank skips cannot be a block; the members
    of a plain list may be experts.
    """
    if asked is not None:
        found = _asked(model, asked)
    else:
        kept_whole = getattr(model, "_no_split_modules", None)
        found = [m for m in model.modules() if type(m).__name__ in set(kept_whole or ())]
        if not found and not may_idle:
            found = list(_repeated(model))
    blocks = [m for m in _outermost(found) if m is not model and any(True for _ in m.parameters())]
    return [block for block in blocks if not _shares_parameters(block, model)]


def _asked(model: nn.Module, asked: Sequence[str]) -> list[nn.Module]:
    named = dict(model.named_modules())
    kinds = {type(module).__name__ for module in named.values()}
    unknown = [name for name in asked if name not in named and name not in kinds]
    if unknown:
        raise ModelError(
            f"fsdp_blocks={list(asked)}: {type(model).__name__} has no module and no class "
            f"{', '.join(unknown)}; its classes are {', '.join(sorted(kinds)[:12])}"
        )
    return [m for name, m in named.items() if name in asked or type(m).__name__ in asked]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists whose class occurs at least twice in the list."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [m for m in module if any(True for _ in m.parameters())]
        often = Counter(type(m) for m in members)
        blocks = [m for m in members if often[type(m)] > 1]
        if blocks:
            yield from blocks
            return
    for child in module.children():
        yield from _repeated(child)


def _outermost(found: Sequence[nn.Module]) -> list[nn.Module]:
    inside = {id(inner) for block in found for inner in block.modules() if inner is not block}
    unique = {id(block): block for block in found if id(block) not in inside}
    return list(unique.values())


def _shares_parameters(block: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of the block is also used outside it (tied weights)."""
    mine = {id(p) for p in block.parameters()}
    inside = {id(m) for m in block.modules()}
    return any(
        id(p) in mine
        for module in model.modules()
        if id(module) not in inside
        for p in module.parameters(recurse=False)
    )
