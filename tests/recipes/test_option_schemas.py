"""`mgt config-schema`, and what help and completion know of the recipes without importing them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from multi_gpu_training.config_file import READY_CONFIGS
from multi_gpu_training.recipes import option_schemas

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = option_schemas.config_file_schema()
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def fits(value: Any, schema: Any) -> bool:
    """Whether a JSON schema accepts a value, with the keywords that ours uses."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target: Any = SCHEMA
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return fits(value, target)
    kinds = schema.get("type", list(TYPES))
    named = [TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    if isinstance(value, bool) and bool not in named:
        return False
    if not any(isinstance(value, kind) for kind in named):
        return False
    number = isinstance(value, int | float)
    rules = [
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
        "pattern" not in schema or re.search(schema["pattern"], str(value)),
        not number or value >= schema.get("minimum", value),
        not number or value <= schema.get("maximum", value),
        "exclusiveMinimum" not in schema or not number or value > schema["exclusiveMinimum"],
        "exclusiveMaximum" not in schema or not number or value < schema["exclusiveMaximum"],
        "anyOf" not in schema or any(fits(value, part) for part in schema["anyOf"]),
        all(fits(value, part) for part in schema.get("allOf", [])),
        "if" not in schema or not fits(value, schema["if"]) or fits(value, schema["then"]),
    ]
    if isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        rules += [fits(inner, properties.get(key, more)) for key, inner in value.items()]
        rules += [key in value for key in schema.get("required", [])]
    if isinstance(value, list):
        rules += [fits(inner, schema.get("items", True)) for inner in value]
    return all(rules)


def accepted(text: str) -> bool:
    return fits(OmegaConf.to_container(OmegaConf.create(text)), SCHEMA)


def test_what_is_known_of_the_recipes_without_importing_them_is_what_they_declare() -> None:
    known = option_schemas.option_schemas()
    for name, found in option_schemas.declared().items():
        told = f"{name} has changed: run python scripts/write_option_schemas.py"
        assert known[name] == found["options"], told
        assert option_schemas.recipe_defaults(name) == found["defaults"], told


def test_the_schema_accepts_the_examples_of_the_documentation_and_the_ready_configs() -> None:
    shown = [
        block
        for page in sorted(DOCS.glob("*.md"))
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        if "\nparams:" not in block  # a study of `mgt search`, which reads it itself
    ]
    shown += [file.read_text() for file in sorted(READY_CONFIGS.glob("*.yaml"))]
    assert len(shown) > 6
    assert [block for block in shown if not accepted(block)] == []


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("recipe: speech\nlayout: fsdd\nbeam_width: 4", True),
        ("recipe: image\nlayout: fsdd", False),  # an option of another recipe
        ("recipe: speech\nlayout: packed", False),  # a value of another recipe's option
        ("recipe: image\nimage_size: big", False),
        ("recipe: image\nimage_size: ${oc.env:SIZE}\ntraining: {lr: 2e-3, batch_size: 8}", True),
        ("recipe: image\nepochz: 3", False),
        ("multi_gpu: ddp\nmode: cnn", True),  # a file of `defaults` need not name its recipe
    ],
)
def test_the_schema_knows_the_options_of_each_recipe(text: str, fine: bool) -> None:
    assert accepted(text) == fine
