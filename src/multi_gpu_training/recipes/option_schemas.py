"""The recipes' options and defaults without their code, for help, Tab and editors.

Importing a recipe imports torch, which takes seconds. So `recipes/options.json` holds what they
declare: `python scripts/write_option_schemas.py` writes it, and a test compares it with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from multi_gpu_training.config_file import SECTIONS, schema
from multi_gpu_training.setting_names import ALIASES

FILE = Path(__file__).parent / "options.json"


def option_schemas() -> dict[str, dict[str, Any]]:
    """Recipe -> option -> its JSON schema."""
    return {name: found["options"] for name, found in _read().items()}


def recipe_defaults(recipe: str) -> dict[str, Any]:
    """Fields of MultiGPUConfig that the recipe sets where the user does not."""
    found: dict[str, Any] = _read()[recipe]["defaults"]
    return found


def _read() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def config_file_schema() -> dict[str, Any]:
    """JSON schema of a config file: settings, their other spellings, sections, recipe options.

    It keeps to what draft 7 has, which is what editors know.
    """
    found = schema()
    recipes = option_schemas()
    # A file may say only whether there are several ranks, or use the short names.
    modes = {
        "enum": [*found["$defs"].pop("TrainingMode")["enum"], "dp", "ddp", "fsdp", True, False]
    }
    fields = {
        **found["properties"],
        "training_mode": {"description": "ddp, fsdp, dp, single", **modes},
    }
    fields = {name: _or_reference(field) for name, field in fields.items()}
    fields |= {alias: {"$ref": f"#/properties/{name}"} for alias, name in ALIASES.items()}
    # Which of them fit is a question of the recipe; a file of `defaults` need not name one.
    names = sorted({name for options in recipes.values() for name in options} - fields.keys())
    fields |= {name: {} for name in names}
    fields["recipe"] = {"enum": [*recipes, "custom"], "description": "what is trained"}
    here = {name: {"$ref": f"#/properties/{name}"} for name in fields}
    for section, inside in SECTIONS.items():
        other = {name: {"$ref": f"#/properties/{field}"} for name, field in inside.items()}
        fields[section] = {
            "type": ["object", "null"],
            "properties": {**here, **other},
            "additionalProperties": False,
        }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Config file of mgt train",
        "description": "One training run: settings of MultiGPUConfig, and options of its recipe.",
        "type": "object",
        "$defs": {**found["$defs"], "reference": {"type": "string", "pattern": r"\$\{"}},
        "properties": {**fields, "defaults": {"type": "array", "items": {"type": "string"}}},
        "additionalProperties": False,
        "allOf": [
            {
                "if": {"properties": {"recipe": {"const": recipe}}, "required": ["recipe"]},
                "then": {
                    "properties": {
                        name: _or_reference(options[name]) if name in options else False
                        for name in names
                    }
                },
            }
            for recipe, options in recipes.items()
        ],
    }


def _or_reference(field: dict[str, Any]) -> dict[str, Any]:
    """The field, or a reference such as ${epochs} or ${oc.env:HOME} in its place."""
    told: dict[str, Any] = {k: field[k] for k in ("description", "default") if k in field}
    plain = {key: value for key, value in field.items() if key not in (*told, "title")}
    return {**told, "anyOf": [*plain.pop("anyOf", [plain]), {"$ref": "#/$defs/reference"}]}


def declared() -> dict[str, dict[str, Any]]:
    """What the file must hold, from the recipes themselves."""
    from multi_gpu_training.recipes import RECIPES
    from multi_gpu_training.recipes.recipe import find_recipe

    found = {}
    for name in RECIPES:
        recipe = find_recipe(name)
        schema = recipe.options.model_json_schema()
        if "$defs" in schema:
            raise NotImplementedError(f"{name}: options of nested models have no place here yet")
        options = {
            option: {key: value for key, value in field.items() if key != "title"}
            for option, field in schema["properties"].items()
        }
        found[name] = {"defaults": dict(recipe.defaults), "options": options}
    return found
