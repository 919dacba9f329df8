"""Help and shell completion that know the recipe, without importing it: that would import torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

HELP = {"-h", "--help"}
RECIPE = "multi_gpu_training.recipe"
RECIPES_OWN = ("mode", "data_dir")  # flags of `mgt train` whose meaning the recipe knows better
LAST_PANEL = "Several machines"
TYPES = {"integer": int, "number": float}


class RecipeCommand(TyperCommand):
    """A command that takes a recipe's options: `--help` after its name lists them, Tab completes
    them. While it runs it leaves them to `train_command`, which types them as YAML does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or HELP & set(args):
            found = _recipe_among(args)
            ctx.meta[RECIPE] = found
            if found is not None and not ctx.resilient_parsing:
                ctx.default_map = _defaults(found, [param.name or "" for param in self.params])
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        recipe = ctx.meta.get(RECIPE)
        if recipe is None:
            return params
        kept = [param for param in params if param.name not in RECIPES_OWN]
        taken = {param.name for param in kept}
        own = _as_params(recipe, taken, every_setting=ctx.resilient_parsing)
        panels = [getattr(param, "rich_help_panel", None) for param in kept]
        place = panels.index(LAST_PANEL) if LAST_PANEL in panels else len(kept)
        return [*kept[:place], *own, *kept[place:]]


def complete_target(incomplete: str) -> list[tuple[str, str]]:
    """Recipes and ready configs. A shell that is offered nothing completes file names."""
    from multi_gpu_training.recipes import RECIPES

    configs = Path(__file__).parent.parent / "configs"
    offered = {**RECIPES, **{file.stem: "ready config" for file in configs.glob("*.yaml")}}
    return [(name, text) for name, text in offered.items() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    from multi_gpu_training.recipes import RECIPES

    return [(name, text) for name, text in RECIPES.items() if name.startswith(incomplete)]


def _recipe_among(words: list[str]) -> str | None:
    """The recipe that is named, or that a config file among the words names."""
    from multi_gpu_training.recipes import RECIPES

    for word in words:
        if word in RECIPES:
            return word
    for word in words:
        if word.endswith((".yaml", ".yml")):
            from multi_gpu_training.config_file import read_config_file
            from multi_gpu_training.errors import ConfigError

            try:
                named = read_config_file(word).get("recipe")
            except ConfigError:
                return None  # what is wrong with it is shown when it is trained
            return named if named in RECIPES else None
    return None


def _defaults(recipe: str, names: list[str]) -> dict[str, Any]:
    """What the recipe sets among the flags of a command, by the flag's name."""
    from multi_gpu_training.recipes.option_schemas import recipe_defaults
    from multi_gpu_training.setting_names import ALIASES

    found = recipe_defaults(recipe)
    return {
        name: found[ALIASES.get(name, name)] for name in names if ALIASES.get(name, name) in found
    }


def _as_params(recipe: str, taken: set[str], every_setting: bool) -> list[Any]:
    """The recipe's options, and where Tab asks all settings of a run, as parameters of typer."""
    from multi_gpu_training.recipes.option_schemas import option_schemas

    wanted = dict(_shown(option_schemas()[recipe], f"Options of {recipe}"))
    if every_setting:
        from multi_gpu_training.config_file import schema

        wanted = {**dict(_shown(schema()["properties"], "Settings")), **wanted}
    arguments = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in wanted.items()
        if name not in taken
    ]

    def command(**options: Any) -> None: ...

    # Typer makes its parameters from a signature; making them by hand would need its internals.
    command.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    command.__annotations__ = {argument.name: argument.annotation for argument in arguments}
    made = typer.Typer(add_completion=False)
    made.command()(command)
    return [param for param in typer.main.get_command(made).params if param.name != "help"]


def _shown(properties: dict[str, Any], panel: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, field in properties.items():
        kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
        choices = [str(value) for kind in kinds for value in kind.get("enum", [])]
        if [kind.get("type") for kind in kinds] == ["boolean"]:
            choices = ["true", "false"]
        only = TYPES.get(kinds[0].get("type"), str) if len(kinds) == 1 and not choices else str
        default = field.get("default")
        if isinstance(default, bool):
            default = str(default).lower()
        option = Option(
            f"--{name.replace('_', '-')}",
            help=field.get("description", ""),
            metavar="|".join(choices) or None,
            rich_help_panel=panel,
            autocompletion=_one_of(choices) if choices else None,
        )
        yield name, (Annotated[only | None, option], None if default in ([], {}) else default)


def _one_of(choices: list[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
