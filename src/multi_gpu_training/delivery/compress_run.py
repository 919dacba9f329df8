"""`mgt compress`: make smaller models of a trained one, and measure what each costs and saves."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from multi_gpu_training.checkpoint.integrity import MANIFEST
from multi_gpu_training.compress.distillation import Teacher, with_teacher
from multi_gpu_training.compress.pruning import (
    KeepSparse,
    check_two_of_four,
    prune_channels,
    prune_two_of_four,
)
from multi_gpu_training.compress.quantization import GROUP, check_scheme, quantize
from multi_gpu_training.compress.tensor_packing import plain_tensors
from multi_gpu_training.data.order import seed_everything
from multi_gpu_training.delivery.compression_plan import ONNX, MaxDrop, Setting
from multi_gpu_training.delivery.inference_speed import Speed, measure_together
from multi_gpu_training.delivery.loaded_model import LoadedModel
from multi_gpu_training.delivery.model_folder import INDEX, WEIGHTS, file_facts, is_model_folder
from multi_gpu_training.delivery.onnx_int8 import OnnxModel, quantize_onnx
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.recipes.recipe import find_recipe
from multi_gpu_training.safe_files import read_json, read_yaml, write_atomically
from multi_gpu_training.training.callbacks import Callback
from multi_gpu_training.training.loss import choose_loss

# Settings of the run that its fine-tuning keeps; the rest are the recipe's.
KEPT = (
    *("batch_size", "global_batch_size", "base_batch_size", "lr_scaling", "learning_rate"),
    *("weight_decay", "max_grad_norm", "mixed_precision", "epochs"),
)
TUNING_SHARE, TUNING_RATE = 0.2, 0.2  # of the run's epochs and rate, to mend a pruned model
# Metrics by which models are compared, the first that an evaluation has. True: more is better.
JUDGED = {"accuracy": True, "f1": True, "wer": False, "cer": False}
DISTANCE, DISTANCE_SAMPLES = "distance", 64  # stands for a metric where no data are at hand
ONNX_DRAFTS = "onnx"  # folder of the files that are measured before they are kept
WIDTHS = ("width", "n_embd", "hidden_size")


@dataclass
class Compressed:
    """One row of the table. `drop` is what it lost of the judged metric, as a share."""

    name: str
    bytes: int
    speed: Speed
    metrics: dict[str, float]
    drop: float | None
    holds: bool
    folder: str | None = None
    problem: str | None = None

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass
class Compression:
    """A run's models: the original first."""

    metric: str
    rows: list[Compressed]


@dataclass(frozen=True)
class HowToTrain:
    """What the user says about the training that pruning and distillation need."""

    epochs: int | None = None
    learning_rate: float | None = None
    temperature: float = 3.0
    share: float = 0.7


def compress_run(
    loaded: LoadedModel,
    settings: Sequence[Setting],
    out: Path,
    tolerance: MaxDrop,
    how: HowToTrain,
    say: Callable[[str], None] = print,
) -> Compression:
    """Make, measure and save a model for every setting. Those that lose more than `tolerance`
    allows are not saved."""
    check(loaded, settings, tolerance)
    if loaded.recipe == "custom":  # only the script knows its data
        say("comparing outputs for made-up inputs: the data of a script are not known here")
        judge, metric = _distance_from(loaded), DISTANCE
    else:
        say(f"evaluating {loaded.checkpoint}")
        judge, metric = LoadedModel.evaluate, ""
    before = judge(loaded)
    metric = metric or judged_metric(before)
    # Each weight once, also where `save` writes tied ones under all of their names.
    bytes_before = len(safetensors.torch.save(plain_tensors(loaded.model)))
    made: list[tuple[Setting, LoadedModel | None, str | None]] = []
    for setting in settings:
        say(f"compressing: {setting.name}")
        try:
            made.append((setting, compress(loaded, setting, out, how, say), None))
        except MultiGPUError as error:
            # Others may still work; a row says why this one did not.
            problem = "; ".join(getattr(error, "problems", [str(error)]))
            made.append((setting, None, problem))
    batch = loaded.example_batch(max(1, min(loaded.pipeline.batch_size, 64)))
    programs = [loaded.program] + [one.program for _, one, _ in made if one is not None]
    speeds = iter(measure_together(programs, batch))
    rows = [Compressed("float32", bytes_before, next(speeds), before, 0.0, True)]
    for setting, model, why in made:
        if model is None:
            rows.append(Compressed(setting.name, 0, Speed(), {}, None, False, None, why))
            continue
        metrics = judge(model)
        drop = None if metric == DISTANCE else lost(metric, before, metrics)
        row = Compressed(setting.name, 0, next(speeds), metrics, drop, tolerance.holds(drop))
        folder = out / setting.folder
        row.bytes = _save(model, folder, row, loaded)
        if row.holds:
            row.folder = str(folder)
        rows.append(row)
    shutil.rmtree(out / ONNX_DRAFTS, ignore_errors=True)  # of models that lost too much
    found = Compression(metric, rows)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"run": str(loaded.checkpoint), "metric": metric, "max_drop": tolerance.most}
    text = json.dumps({**facts, "rows": [row.plain() for row in rows]}, indent=1)
    write_atomically(out / "compression.json", text)
    return found


def _distance_from(original: LoadedModel) -> Callable[[LoadedModel], dict[str, float]]:
    """How far the outputs of a model are from those of the original, by norm and as a share."""
    batch = original.pipeline.collate(original.pipeline.synthetic(DISTANCE_SAMPLES))
    wanted = original.outputs(batch)

    def distance(model: LoadedModel) -> dict[str, float]:
        both = list(zip(wanted, model.outputs(batch), strict=True))
        off = sum(float((a.double() - b.double()).square().sum()) for a, b in both)
        norm = sum(float(a.double().square().sum()) for a, _ in both)
        return {DISTANCE: math.sqrt(off / norm) if norm else math.sqrt(off)}

    return distance


def check(
    loaded: LoadedModel, settings: Sequence[Setting], tolerance: MaxDrop | None = None
) -> None:
    """Refuse what cannot work before anything is trained."""
    problems = []
    if loaded.recipe == "custom" and tolerance is not None and tolerance.most is not None:
        problems.append(
            "--max-drop: only the script knows the data of its run; leave it out, and evaluate "
            "what is written: manager.evaluate(data) with model=loaded.model"
        )
    trained = find_recipe(loaded.recipe) if loaded.recipe != "custom" else None
    quantised = any(step["method"] == "quantize" for step in loaded.pipeline.compression)
    for setting in settings:
        if setting.trains and (trained is None or trained.build is None):
            problems.append(
                f"--method {setting.name} trains the model, and a {loaded.recipe} run has no "
                "dataset to do it on; use --method quantize"
            )
        if quantised:
            problems.append(
                f"--method {setting.name}: the weights of {loaded.checkpoint} are quantised "
                "already; start from the run that it was made of"
            )
        if setting.quantize == ONNX and loaded.recipe == "custom":
            problems.append(
                f"--method {setting.name}: its ranges come from validation inputs, which only the "
                "script knows; use quantize:int8, or onnxruntime's quantize_static on the file of "
                "`mgt export --to onnx`"
            )
        elif setting.quantize == ONNX and loaded.program is not loaded.model:
            problems.append(
                f"--method {setting.name}: static int8 is measured for image and video models; "
                f"for a {loaded.recipe} model use quantize:int8, or `mgt export --to onnx`"
            )
        try:
            if setting.quantize not in (None, ONNX):
                check_scheme(str(setting.quantize))
            if isinstance(setting.student, dict) and trained is not None:
                loaded.pipeline.changed(**setting.student)  # knows the names of the arguments
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def compress(
    loaded: LoadedModel,
    setting: Setting,
    out: Path,
    how: HowToTrain,
    say: Callable[[str], None] = print,
) -> LoadedModel:
    """A compressed copy of the model; the model itself stays as it is."""
    current = described(loaded.with_model(copy.deepcopy(loaded.model)), loaded.pipeline.compression)
    if setting.student is not None:
        current = distil(loaded, setting, out, how)
    if setting.prune is not None:
        current = prune(current, setting, out, how)
    if setting.quantize == ONNX:
        folder = out / ONNX_DRAFTS / setting.folder
        step: dict[str, Any] = {"method": "quantize", "scheme": ONNX}
        model = OnnxModel(quantize_onnx(current, folder))
        return described(current.with_model(model), [*current.pipeline.compression, step])
    if setting.quantize is not None:
        names = quantize(current.model, setting.quantize).fallbacks
        if names:
            shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
            say(
                f"  int8 instead of int4 for {len(names)} layers, whose inputs do not come in "
                f"groups of {GROUP}: {shown}"
            )
        step = {"method": "quantize", "scheme": setting.quantize, "group": GROUP}
        current = described(current, [*current.pipeline.compression, step])
    return current


def described(loaded: LoadedModel, steps: Sequence[dict[str, Any]]) -> LoadedModel:
    """The model with these steps in its description."""
    pipeline = copy.copy(loaded.pipeline)
    pipeline.description = {**loaded.description, "compression": list(steps)}
    return dataclasses.replace(loaded, pipeline=pipeline)


# Pruning and distillation, with the trainer that made the run


def prune(loaded: LoadedModel, setting: Setting, out: Path, how: HowToTrain) -> LoadedModel:
    callbacks: list[Callback] = []
    names: list[str] = []
    if setting.prune == "2:4":
        names = prune_two_of_four(loaded.model)
        step: dict[str, Any] = {"method": "prune", "kind": "2:4", "weights": names}
        callbacks = [KeepSparse(names)]
    else:
        assert isinstance(setting.prune, float)
        examples = tuple(part.to(loaded.device) for part in loaded.example_batch(2))
        shapes = prune_channels(loaded.model, loaded.program, examples, setting.prune)
        step = {"method": "prune", "kind": "structured", "shapes": shapes}
    _fit(loaded, setting, "prune", out, how, callbacks=callbacks)
    check_two_of_four(loaded.model, names)
    return described(loaded, [*loaded.pipeline.compression, step])


def distil(teacher: LoadedModel, setting: Setting, out: Path, how: HowToTrain) -> LoadedModel:
    changes = setting.student
    if isinstance(changes, float):
        changes = smaller(teacher, changes)
    assert isinstance(changes, dict)
    seed_everything(teacher.pipeline.seed)
    torch.manual_seed(teacher.pipeline.seed)
    student = teacher.rebuild(**changes)
    _copy_buffers(teacher.model, student.model)
    taught = Teacher(copy.deepcopy(teacher.model), how.temperature, how.share)
    _fit(student, setting, "distil", out, how, teacher=taught)
    student = dataclasses.replace(student, checkpoint=teacher.checkpoint, step=teacher.step)
    return described(student, [{"method": "distil", "changes": changes}])


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Buffers that belong to the data and not to the weights, such as the mean of all pixels."""
    own = dict(target.named_buffers())
    for name, buffer in source.named_buffers():
        if name in own and own[name].shape == buffer.shape:
            own[name].copy_(buffer)


def smaller(loaded: LoadedModel, share: float) -> dict[str, Any]:
    """Arguments of the widest model of the recipe with at most this share of the parameters."""
    arguments = loaded.pipeline.arguments
    arguments = {**arguments, **(arguments.get("config") or {})}
    name = next((name for name in WIDTHS if isinstance(arguments.get(name), int)), None)
    if name is None:
        raise ConfigError(
            f"distil:{share:g}: this {loaded.recipe} model has no width to reduce; name what is "
            f"to change, as in distil:NAME=VALUE, of {', '.join(arguments)}"
        )
    heads = arguments.get("n_head") or arguments.get("num_attention_heads") or 1
    inner = {"intermediate_size"} & set(arguments) if name == "hidden_size" else set()

    def changes(units: int) -> dict[str, Any]:
        width = units * heads
        return {name: width, **{other: 4 * width for other in inner}}

    def count(model: nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    most = share * count(loaded.model)
    low, high = 0, arguments[name] // heads  # the widest that fits lies between
    while high - low > 1:
        middle = (low + high) // 2
        fits = count(loaded.pipeline.changed(**changes(middle)).build_model()) <= most
        low, high = (middle, high) if fits else (low, middle)
    if low == 0:
        raise ConfigError(f"distil:{share:g}: even {name}={heads} has more parameters than that")
    return changes(low)


def _fit(
    loaded: LoadedModel,
    setting: Setting,
    method: str,
    out: Path,
    how: HowToTrain,
    teacher: Teacher | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train the model of `loaded` in place, on the data of its run."""
    recipe, pipeline = find_recipe(loaded.recipe), loaded.pipeline
    given = _run_settings(loaded)
    epochs = int(given.pop("epochs", 0) or recipe.defaults.get("epochs", 10))
    if method == "prune":
        epochs = max(1, round(TUNING_SHARE * epochs))
        given["learning_rate"] = TUNING_RATE * float(
            given.get("learning_rate") or recipe.defaults["learning_rate"]
        )
    given["epochs"] = how.epochs or epochs
    if how.learning_rate is not None:
        given["learning_rate"] = how.learning_rate
    given |= {
        "training_mode": "single",
        "device": loaded.device.type,
        "seed": pipeline.seed,
        "save_dir": str(out / "training"),
        "run_name": f"{setting.folder}-{method}",
        "resume": "auto",
    }
    _claim(loaded, setting, how, Path(given["save_dir"]) / f"{given['run_name']}.json")
    loaded.model.train().requires_grad_(True)
    job = loaded.job()
    loss_fn = choose_loss(job.loss_fn)
    if teacher is not None:
        if dataclasses.is_dataclass(loss_fn) and hasattr(loss_fn, "direct"):
            # The teacher is shown what the model's own forward gets, so that must be called.
            loss_fn = dataclasses.replace(loss_fn, direct=False)  # type: ignore[type-var]
        loss_fn = with_teacher(loss_fn, teacher)
    manager = MultiGPUTrainingManager(recipe.config(given, pipeline.run_options()))
    manager.recipe_options = dict(pipeline.options)
    job = dataclasses.replace(job, loss_fn=loss_fn, callbacks=[*job.callbacks, *callbacks])
    manager.fit(**vars(job))
    loaded.model.eval()


def _claim(loaded: LoadedModel, setting: Setting, how: HowToTrain, path: Path) -> None:
    """Note what a training starts from. Continued from another start, it would give a model that
    has little to do with the one that is asked for, and nothing would show it."""
    source = loaded.checkpoint
    index = None if source is None else source / (INDEX if is_model_folder(source) else MANIFEST)
    facts = {
        "method": setting.name,
        "checkpoint": None if index is None else file_facts(index)["sha256"],
        **dataclasses.asdict(how),
    }
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(facts, indent=1))
        return
    try:
        earlier = read_json(path, dict[str, Any])
    except (OSError, ValueError):
        earlier = {}
    other = [name for name in facts if earlier.get(name) != facts[name]]
    if other:
        raise ConfigError(
            f"{path.with_suffix('')} was trained with another {', '.join(other)}, and would be "
            f"continued; remove {path.parent}, or choose another --out",
            code="MGT106",
        )


def _run_settings(loaded: LoadedModel) -> dict[str, Any]:
    """What the run's config.yaml says of KEPT; empty where the checkpoint came without one."""
    if loaded.checkpoint is None:
        return {}
    try:
        written = read_yaml(loaded.checkpoint.parent.parent / "config.yaml")
    except (OSError, ValueError):
        return {}
    return {name: written[name] for name in KEPT if written.get(name) is not None}


# Judging


def judged_metric(metrics: dict[str, float]) -> str:
    for name in (*JUDGED, "loss"):
        if name in metrics:
            return name
    return next(iter(metrics))


def lost(metric: str, before: dict[str, float], after: dict[str, float]) -> float:
    """How much worse `after` is: points of accuracy or error rate as a share, and for a loss the
    growth of the perplexity."""
    old, new = before[metric], after.get(metric, math.nan)
    if metric in JUDGED:
        drop = old - new if JUDGED[metric] else new - old
    elif metric == "loss":
        drop = math.exp(min(new - old, 700.0)) - 1
    else:
        drop = (old - new) / abs(old) if old else old - new
    return drop if math.isfinite(drop) else math.inf


def _written_bytes(loaded: LoadedModel, folder: Path) -> int:
    """Bytes of the weights as `save` writes them."""
    try:
        return (loaded.save(folder) / WEIGHTS).stat().st_size
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _save(model: LoadedModel, folder: Path, row: Compressed, original: LoadedModel) -> int:
    """Write the model, unless it lost too much. Returns the bytes of its weights."""
    if isinstance(model.model, OnnxModel):
        size = model.model.path.stat().st_size
        if row.holds:
            folder.parent.mkdir(parents=True, exist_ok=True)
            model.model.path.parent.rename(folder)
        return size
    saved = dataclasses.replace(model, metrics=row.metrics)
    if not row.holds:
        return _written_bytes(saved, folder.with_name(f".{folder.name}"))
    path = saved.save(folder, compressed_from=str(original.checkpoint))
    return (path / WEIGHTS).stat().st_size
