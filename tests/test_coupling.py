"""Modules keep to themselves: no reaching into another object, no methods put onto an instance."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "multi_gpu_training"
# Only these may use private names of torch and CPython.
INTERNALS = ("torch_internals.py", "python_internals.py")
# Documented in spite of their underscore: the namedtuple API, and the exit without cleaning up.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    files = sorted(SOURCE.rglob("*.py"))
    return [(str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in files]


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not dunder and name not in PUBLIC


def is_own(value: ast.expr) -> bool:
    """self, cls, super(), type(self)."""
    if isinstance(value, ast.Name):
        return value.id in ("self", "cls")
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super" or (
            value.func.id == "type" and bool(value.args) and is_own(value.args[0])
        )
    return False


def own_names(kind: ast.ClassDef) -> set[str]:
    """Names that a class gives to its instances: it may use them on others of its kind."""
    found = {n.name for n in ast.walk(kind) if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and is_own(node.value):
            found.add(node.attr)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return found


def private_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every underscore attribute of something else."""

    def look(node: ast.AST, allowed: set[str]) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.ClassDef):
            allowed = own_names(node)
        if (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and not is_own(node.value)
            and node.attr not in allowed
        ):
            yield node.lineno, ast.unparse(node)
        for inner in ast.iter_child_nodes(node):
            yield from look(inner, allowed)

    yield from look(tree, set())


def test_no_module_reads_another_objects_underscore_attribute() -> None:
    found = [
        f"{name}:{line} {text}"
        for name, tree in modules()
        if name not in INTERNALS
        for line, text in private_reads(tree)
    ]
    assert not found, "\n".join(found)


def only_methods() -> set[str]:
    """Names that are methods of some class here, and a field of none."""
    methods, fields = set(), set()
    for _, tree in modules():
        for kind in ast.walk(tree):
            for node in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(node, ast.FunctionDef):
                    decorators = " ".join(map(ast.unparse, node.decorator_list))
                    (fields if "property" in decorators else methods).add(node.name)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    fields.add(node.target.id)
            if isinstance(kind, (ast.Assign, ast.AnnAssign)):
                targets = kind.targets if isinstance(kind, ast.Assign) else [kind.target]
                own = [t for t in targets if isinstance(t, ast.Attribute) and is_own(t.value)]
                fields |= {target.attr for target in own}
    return methods - fields


def assigned(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.Call, str]]:
    """Every assignment to an attribute and the attribute's name, `setattr` included."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute):
                yield node, target.attr
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id == "setattr":
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node, name.value


def test_nothing_assigns_a_method_on_an_instance() -> None:
    methods = only_methods()
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)[:100]}"
        for name, tree in modules()
        for node, attribute in assigned(tree)
        if attribute in methods
    ]
    ignored = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, text in enumerate(path.read_text().splitlines(), start=1)
        if "ignore[method-assign]" in text
    ]
    assert not found and not ignored, "\n".join([*found, *ignored])


def test_no_two_modules_share_a_base_name() -> None:
    seen: dict[str, str] = {}
    clashes = []
    for name, _ in modules():
        base = Path(name).stem
        if base in ("__init__", "__main__"):
            continue
        if base in seen:
            clashes.append(f"{seen[base]} and {name}")
        seen[base] = name
    assert not clashes, "\n".join(clashes)


def test_no_two_classes_share_a_name() -> None:
    seen: dict[str, str] = {}
    clashes = []
    for name, tree in modules():
        for kind in ast.walk(tree):
            if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_"):
                if kind.name in seen:
                    clashes.append(f"{kind.name}: {seen[kind.name]} and {name}")
                seen[kind.name] = name
    assert not clashes, "\n".join(clashes)
