"""The README of an exported model: what it is, what it takes and gives, how good it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multi_gpu_training.delivery.loaded_model import LoadedModel
from multi_gpu_training.recipes.pipeline import TensorSpec

USES = {
    "safetensors": "```python\nimport multi_gpu_training as mgt\n\nmodel = mgt.load(FOLDER)\n"
    "model.predict([...])\n```",
    "hf": "Load it with `from_pretrained` of transformers.",
}
PROGRAM = (
    "```bash\npython run.py inputs.npz outputs.npz    # numpy arrays by name, as below\n```\n\n"
    "`run.py` needs nothing of multi-gpu-training; in Python, `run.Model().run({...})`."
)


def model_card(loaded: LoadedModel, to: str, facts: Mapping[str, Any], notes: Sequence[str]) -> str:
    """The card in Markdown, with the metadata that model hubs read on top."""
    use = USES.get(to, PROGRAM)
    if loaded.recipe == "custom":  # its code is the user's, and stays with the user
        use = use.replace("mgt.load(FOLDER)", "mgt.load(FOLDER, model=Net)  # the trained class")
    count = sum(parameter.numel() for parameter in loaded.model.parameters())
    lines = [
        "---",
        f"license: {facts['license']}",
        "library_name: multi-gpu-training",
        "---",
        "",
        f"# {loaded.recipe} model",
        "",
        f"{type(loaded.model).__name__} with {count:,} parameters, trained for {loaded.step:,} "
        f"steps with the recipe `{loaded.recipe}` and exported to {to}.",
        "",
        "## Use",
        "",
        use,
        "",
        "## Inputs",
        "",
        *_table(loaded.inputs),
        "",
        "## Outputs",
        "",
        *_table(loaded.output_specs),
        "",
    ]
    if facts.get("max_batch"):
        limits = f"A batch has 1 to {facts['max_batch']:,} rows"
        if facts.get("length"):
            limits += f", an input {facts['shortest']:,} to {facts['length']:,} places"
        lines += [f"{limits}.", ""]
    if loaded.labels is not None:
        lines += ["## Labels", "", ", ".join(f"`{name}`" for name in loaded.labels), ""]
    lines += ["## Metrics in training", "", "| metric | value |", "|---|---|"]
    lines += [f"| {name} | {value:.6g} |" for name, value in loaded.metrics.items()]
    lines += ["", "## Checks", "", "| batch | largest difference from PyTorch |", "|---|---|"]
    lines += [f"| {c['batch']} | {c['difference']:.3g} |" for c in facts["checks"]]
    lines += ["", *(f"- {note}" for note in notes), ""]
    lines += [
        "`schema.json` has types, shapes, labels and preprocessing for programs, `model.json` all "
        "that the model is rebuilt from, and `export.json` the size and SHA-256 of every file.",
        "",
    ]
    return "\n".join(lines)


def _table(specs: Sequence[TensorSpec]) -> list[str]:
    rows = [
        f"| `{spec.name}` | {spec.dtype} | {', '.join(map(str, spec.shape))} | {spec.meaning} |"
        for spec in specs
    ]
    return ["| name | type | shape | meaning |", "|---|---|---|---|", *rows]
