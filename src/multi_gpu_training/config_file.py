"""Settings from YAML files and `key=value` words, on their way to a MultiGPUConfig.

read_config_file   a file and its `defaults:`, merged
read_override      one `key=value`
flatten            sections and other spellings -> MultiGPUConfig field names
merge              one flat layer over another: overrides over a file
split              fields for MultiGPUConfig | options for the recipe
storable           settings as a run folder may keep them: without secrets
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from multi_gpu_training.config import MultiGPUConfig, unknown_key
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.redaction import redact_values
from multi_gpu_training.run_places import path_problem
from multi_gpu_training.safe_files import NOT_YAML, check_yaml, read_text
from multi_gpu_training.safe_output import brief
from multi_gpu_training.setting_names import ALIASES

READY_CONFIGS = Path(__file__).parent / "configs"
LONGEST_WORD = 2000
LARGEST_FILE = 2**20
SELF = "_self_"  # Hydra's word for the file's own keys in its list of defaults

# What a name means inside a section, where that differs from its meaning outside.
SECTIONS = {
    "training": {"batch_size": "global_batch_size"},
    "distributed": {"enabled": "training_mode"},
}
# What to do about a problem that the YAML parser names.
HINTS = {
    "mapping values": "put a space after each colon, quote a value that holds a colon, and indent "
    "the keys of a section alike, here and in the line above",
    "block end": "indent the keys of a section alike",
    "duplicate key": "keep one of them",
    "cannot start any token": "put the value in quotes",
    "expected ','": "close the bracket that is open, and quote a ${...} inside brackets",
    "end of stream": "close the quote that is open",
    "another document": "remove the `---` between them",
}


def ready_configs() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(path.stem for path in READY_CONFIGS.glob("*.yaml"))


def read_config_file(name: str) -> dict[str, Any]:
    """Everything in a YAML file and its `defaults:`. `name` is a path, or a ready config's name."""
    path = _find(name, Path.cwd())
    merged = _with_defaults(path, ())
    try:
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        _remember_references(OmegaConf.to_container(merged), values)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path}: {error.full_key}: {_reason(error)}; set {error.full_key}, or what it refers "
            "to, here or in a file of `defaults`",
            code="MGT103",
        ) from None
    return cast(dict[str, Any], values)


def storable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for a file that outlives the run: what a config file took from the environment is
    written as the reference it was, and what still looks like a secret is left out."""
    kept = {}
    for name, value in settings.items():
        source, resolved = _references.get(str(name), (None, None))
        kept[str(name)] = source if source is not None and resolved == value else value
    return redact_values(kept)


# Field or option -> (the text with ${...} in a config file, its value)
_references: dict[str, tuple[str, Any]] = {}


def _remember_references(written: Any, values: Any, fields: Mapping[str, str] = ALIASES) -> None:
    for key, value in written.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _remember_references(value, values[key], ALIASES | SECTIONS.get(key, {}))
        elif isinstance(value, str) and "${oc.env:" in value:
            _references[fields.get(str(key), str(key))] = (value, values[key])


def read_override(text: str) -> tuple[str, Any]:
    """Key and value of `key=value`; the value is typed as YAML types it."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(
            f"{brief(text)} is not a setting; write key=value, for example lr=2e-3 or "
            "training.lr=2e-3",
            code="MGT102",
        )
    if len(text) > LONGEST_WORD:
        raise ConfigError(
            f"{key[:80]}=...: the value has {len(text):,} characters, {LONGEST_WORD:,} at most are "
            "read; put it into a config file"
        )
    try:
        check_yaml(value, "it", aliases=True)
        # OmegaConf reads 2e-3 as a number; YAML 1.1, and so PyYAML, reads it as text.
        written = OmegaConf.from_dotlist([f"value={value}"])
        typed = OmegaConf.to_container(written, resolve=True)
        spelled = OmegaConf.to_container(written)
    except (
        OmegaConfBaseException,
        *NOT_YAML,
    ) as error:
        raise ConfigError(
            f"{brief(text)}: the value cannot be read ({_reason(error)}); to pass it as text, "
            f"quote it: {key}='\"...\"'"
        ) from None
    name = key.rpartition(".")[2]
    found = cast(dict[str, Any], typed)["value"]
    _remember_references({name: cast(dict[str, Any], spelled)["value"]}, {name: found})
    return key, found


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under MultiGPUConfig's names, out of their sections.

    What belongs to no field keeps its name: it is for the recipe. To let overrides win over a file
    flatten each alone, then `merge`: here two spellings of one field must agree.
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = str(key).split(".")
        layer = {name: value}
        for section in reversed(sections):
            layer = {section: layer}
        nested = merge(nested, layer)

    problems: list[str] = []
    spelled: list[tuple[str, str, Any]] = []  # as written, field, value
    for key, value in nested.items():
        if key not in SECTIONS:
            spelled.append((key, ALIASES.get(key, key), value))
        elif isinstance(value, Mapping):
            fields = ALIASES | SECTIONS[key]
            for name, inner in value.items():
                spelled.append((f"{key}.{name}", fields.get(name, str(name)), inner))
        elif value is not None:
            inside = "lr: 2e-3" if key == "training" else "enabled: true"
            problems.append(
                f"{key}={brief(value)} is a section; put its keys below it, as in `{inside}`"
            )

    flat: dict[str, Any] = {}
    written: dict[str, str] = {}
    for spelling, field, value in spelled:
        if field == "world_size" and spelling.endswith("num_gpus") and value == -1:
            continue  # all GPUs, which is what an unset world_size means
        meant = _training_mode(spelling, value, problems) if field == "training_mode" else value
        asked = f"{spelling}={brief(value)}"
        already = flat.setdefault(field, meant)
        # NaN differs from itself.
        if already is not meant and already != meant:
            problems.append(
                f"{written[field]} and {asked} both set {field}; keep one "
                "(a file wins over its `defaults` only under the same spelling)"
            )
        written.setdefault(field, asked)
    if problems:
        raise ConfigError(problems)
    return flat


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The layers as one; later ones win, mappings inside are merged as well."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.get(key)
            if isinstance(below, Mapping) and isinstance(value, Mapping):
                value = merge(below, value)
            merged[key] = value
    return merged


def split(
    values: Mapping[str, Any], options: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flat values as (MultiGPUConfig fields, recipe options)."""
    fields = list(MultiGPUConfig.model_fields)
    options = list(options)
    known = fields + options
    problems = [unknown_key(str(key), known) for key in values if key not in known]
    if problems:
        raise ConfigError(problems, code="MGT102")
    return (
        {key: value for key, value in values.items() if key in fields},
        {key: value for key, value in values.items() if key not in fields},
    )


def schema() -> dict[str, Any]:
    """JSON schema of MultiGPUConfig, as a config file writes it."""
    found = MultiGPUConfig.model_json_schema()
    timeout = found["properties"]["timeout"]
    del timeout["type"], timeout["format"]
    timeout["anyOf"] = [{"type": "number"}, {"type": "string", "format": "duration"}]
    timeout["default"] = MultiGPUConfig.model_fields["timeout"].default.total_seconds()
    return found


def _training_mode(spelling: str, value: Any, problems: list[str]) -> Any:
    if spelling != "training_mode" and isinstance(value, bool):
        mode = TrainingMode.DISTRIBUTED_DATA_PARALLEL if value else TrainingMode.SINGLE
        return mode.value
    if spelling == "distributed.enabled":
        problems.append(f"{spelling}={value!r} must be true or false")
        return value
    try:
        return TrainingMode(value).value  # dp and ddp in full, so that spellings can be compared
    except ValueError:
        return value  # MultiGPUConfig says which values there are


def _with_defaults(path: Path, chain: tuple[Path, ...]) -> DictConfig:
    """The file over its defaults, references still unresolved. `chain` holds who asked for it."""
    if path in chain:
        circle = " -> ".join(p.stem for p in (*chain[chain.index(path) :], path))
        raise ConfigError(
            f"{chain[-1]}: `defaults` go in a circle: {circle}; take one name out of its list",
            code="MGT103",
        )
    own, names = _load(path)
    merged = OmegaConf.create()
    for name in names:
        layer: Any = own
        if name != SELF:
            layer = _with_defaults(_find(name, path.parent, asked_by=path), (*chain, path))
        try:
            merged = cast(DictConfig, OmegaConf.merge(merged, layer))
        except (OmegaConfBaseException, TypeError) as error:
            raise ConfigError(
                f"{path}: {name} in `defaults` does not fit the ones before it ({_reason(error)}); "
                "make the key a list in each, or a section in each",
                code="MGT103",
            ) from None
    return merged


def _find(name: str, folder: Path, asked_by: Path | None = None) -> Path:
    problem = path_problem(name) or (None if Path(name).name else "it names no file")
    if problem is not None:
        raise ConfigError(
            f"config {brief(name, 80)}: {problem}; give the path of a YAML file", code="MGT103"
        )
    path = folder / Path(name).expanduser()
    if path.suffix == ".py":
        raise ConfigError(
            f"config {name!r} is a Python script; run it with `mgt run {name}`", code="MGT103"
        )
    if asked_by is None and (path / "config.yaml").is_file():
        raise ConfigError(
            f"config {name!r} is a run folder; `mgt resume {name}` continues the run, and its "
            f"settings are in {name.rstrip('/')}/config.yaml",
            code="MGT103",
        )
    suffixed = path.suffix in {".yaml", ".yml"}
    places = [path] if suffixed else [path.with_name(path.name + s) for s in (".yaml", ".yml")]
    if asked_by is None and path.is_file():
        return path.resolve()
    for place in [*places, READY_CONFIGS / f"{name.removesuffix('.yaml')}.yaml"]:
        if place.is_file():
            return place.resolve()
    ready = ready_configs()
    looked = f"looked for {' and '.join(map(str, places))} and the ready configs {', '.join(ready)}"
    close = difflib.get_close_matches(name, ready, n=1)
    if asked_by is not None:
        hint = f"did you mean {close[0]!r}?" if close else "create it, or take it out of `defaults`"
        raise ConfigError(
            f"{asked_by}: `defaults` names {name!r}, not found; {looked}; {hint}", code="MGT103"
        )
    if path.is_dir():
        raise ConfigError(
            f"config {name!r} is a folder; give the path of a YAML file in it", code="MGT103"
        )
    hint = f"did you mean {close[0]!r}?" if close else "give the path of a YAML file, or one name"
    raise ConfigError(f"config {name!r} not found; {looked}; {hint}", code="MGT103")


def _load(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The file's own keys, and the names it lists under `defaults` with itself among them."""
    text = ""
    try:
        text = read_text(path, LARGEST_FILE).removeprefix("\ufeff")
        check_yaml(text, path.name, aliases=True)
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}: the top level is a {root.id}; a config file holds `key: value` lines",
                code="MGT103",
            )
        own = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(io.StringIO(text))))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}, {_syntax(error, text)}", code="MGT103") from None
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path}: {_reason(error)}; write a reference as ${{name}}, a key as text or a number",
            code="MGT103",
        ) from None
    except (AttributeError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{path}: a tag such as !!timestamp stands before a value that it cannot have "
            f"({_reason(error)}); write plain values without tags",
            code="MGT103",
        ) from None
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{path} cannot be read ({_reason(error)}); it must be a text file in UTF-8 that you "
            "may open",
            code="MGT103",
        ) from None

    names = own.pop("defaults", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{path}: defaults={brief(names)} must be a list of names, each a YAML file beside "
            f"this one, a ready config or {SELF}",
            code="MGT103",
        )
    if names.count(SELF) > 1:
        raise ConfigError(
            f"{path}: `defaults` holds {SELF} {names.count(SELF)} times; keep one", code="MGT103"
        )
    for section in SECTIONS:
        # Keys that are all commented out must not erase the section of a default.
        if own.get(section, ...) is None:
            del own[section]
    return own, names if SELF in names else [*names, SELF]


def _syntax(error: yaml.YAMLError, text: str) -> str:
    """`line N: what is wrong; what to do` for text that is not YAML."""
    problem = _reason(error)
    # A bracket or quote that is never closed is noticed at the end; show where it was opened.
    where = "context_mark" if "stream" in problem else "problem_mark"
    mark = getattr(error, where, None) or getattr(error, "problem_mark", None)
    # Only a forbidden character, known by its position, carries no mark.
    number = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
    line = "".join(text.split("\n")[number : number + 1])
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"line {number + 1}: tab; indent with spaces"
    hint = next((hint for part, hint in HINTS.items() if part in problem), "take it out")
    return f"line {number + 1}: {problem} in {line.strip()!r}; {hint}"


def _reason(error: Exception) -> str:
    told = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return str(told)[:300] or type(error).__name__
