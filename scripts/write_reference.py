"""Write docs/reference/: every setting and every recipe option, from what the code declares.

Run it after a change of either (of a recipe's options: after scripts/write_option_schemas.py);
tests/test_docs.py fails until then.
"""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.recipes.option_schemas import option_schemas, recipe_defaults

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
# The first setting of each section.
SECTIONS = {
    "training_mode": "Placement",
    "batch_size": "Batch and length",
    "step_execution": "[Speed](../speed.md) and arithmetic",
    "learning_rate": "Learning rate and [averaged weights](../validation.md#averaged-weights)",
    "find_unused_parameters": "DDP and [sharding](../sharding.md)",
    "num_workers": "Data loading",
    "enable_fault_tolerance": "Checkpoints and faults",
    "save_dir": "Output",
}
# Where a setting is explained.
PAGES = {
    "device": "tuning-and-memory.md#other-devices",
    "rank": "several-machines.md#by-hand",
    "balance": "unequal-gpus.md",
    "use_mixed_precision": "speed.md#what-is-on-by-default",
    "use_gradient_checkpointing": "tuning-and-memory.md#memory",
    "lr_scaling": "batch-size-and-learning-rate.md#learning-rate-scaling",
    "consistency_check_every": "same-result.md",
    "fsdp_blocks": "sharding.md#blocks",
    "checkpoint_interval_s": "checkpoints.md#saves-in-quick-succession",
    "grace_s": "preemption-and-hangs.md",
    "hang_timeout_s": "preemption-and-hangs.md#hangs",
    "max_restarts": "checkpoints.md#restarts",
    "keep_last": "checkpoints.md#which-are-kept",
    "on_out_of_memory": "faults.md#out-of-memory",
    "on_nonfinite": "faults.md#nan-and-infinity",
    "on_loss_spike": "faults.md#loss-spikes",
    "resume": "checkpoints.md#resume",
    "signing_key_file": "checkpoints.md#signed-checkpoints",
    "resume_anyway": "checkpoints.md#settings-that-changed",
    "save_dir": "storage.md",
    "forecast": "estimate.md#files",
    "loggers": "logging.md",
    "validate_every": "validation.md",
    "report": "report.md",
    "profile_steps": "profile.md",
}
SETTINGS = """# Settings

Every field of `MultiGPUConfig`, with its default. [How to set them](../config.md).
"""
OPTIONS = """# Recipe options

Every option of every recipe, with its default, as `mgt train RECIPE --help` prints them. Each is
a flag (`--image-size 64`), a `key=value` or a line of a config file, like the
[settings](settings.md).
"""


def pages() -> dict[Path, str]:
    """Both pages as they must stand in their files."""
    return {FOLDER / "settings.md": _settings(), FOLDER / "recipe-options.md": _options()}


def _settings() -> str:
    schema = MultiGPUConfig.model_json_schema()["properties"]
    parts = [SETTINGS]
    for name, field in MultiGPUConfig.model_fields.items():
        if name in SECTIONS:
            parts.append(f"\n## {SECTIONS[name]}\n\n")
        more = f" ([more](../{PAGES[name]}))" if name in PAGES else ""
        parts.append(f"- {_line(name, {**schema[name], 'default': field.default})}{more}\n")
    return "".join(parts)


def _options() -> str:
    parts = [OPTIONS]
    for name, schema in option_schemas().items():
        preset = ", ".join(f"`{k}={_written(v)}`" for k, v in recipe_defaults(name).items())
        parts.append(f"\n## {name}\n\nChanges these settings: {preset}.\n\n")
        parts += [f"- {_line(option, field)}\n" for option, field in schema.items()]
    return "".join(parts)


def _line(name: str, field: dict[str, Any]) -> str:
    """`name` (default): its values; what it does."""
    default = field.get("default")
    shown = f"`{name}`" if default in (None, "", [], {}) else f"`{name}` ({_written(default)})"
    choices = [
        *field.get("enum", ()),
        *(v for f in field.get("anyOf", ()) for v in f.get("enum", ())),
    ]
    parts = [", ".join(f"`{choice}`" for choice in choices), field.get("description", "")]
    return ": ".join([shown, "; ".join(filter(None, parts))]) if any(parts) else shown


def _written(value: Any) -> str:
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}"
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages().items():
        page.write_text(text)
        print(f"wrote {page}")
