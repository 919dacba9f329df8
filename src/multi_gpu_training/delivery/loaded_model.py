"""`load`: a trained model with its weights, preprocessing and labels, in plain PyTorch."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multi_gpu_training.accelerator import choose
from multi_gpu_training.checkpoint.signature import ManifestSigner, read_signer
from multi_gpu_training.checkpoint.store import StoredModel, load_model
from multi_gpu_training.compress.compressed_model import check_steps, restore
from multi_gpu_training.delivery.bf16_weights import (
    check_dtype,
    is_in_bf16,
    put_in_bf16,
    put_in_float32,
)
from multi_gpu_training.delivery.checkpoint_source import find_checkpoint, other_checkpoints
from multi_gpu_training.delivery.model_folder import (
    finish,
    is_model_folder,
    new_folder,
    read_model_folder,
    write_weights,
)
from multi_gpu_training.delivery.own_pipeline import OwnPipeline, other_model, own_builder
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    MultiGPUError,
)
from multi_gpu_training.recipes import RECIPES
from multi_gpu_training.recipes.pipeline import (
    Pipeline,
    Result,
    TensorSpec,
    device_of,
    find_pipeline,
    run_program,
)
from multi_gpu_training.recipes.recipe import Job
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_files import read_yaml
from multi_gpu_training.safe_output import brief
from multi_gpu_training.state_dicts import load_model_state

VERIFY_KEY = "MGT_VERIFY_KEY"
# How much larger a freshly built model may be than its stored weights: tied weights and what is
# computed again are not stored, and compressing takes away most of them.
MOST_SHARED, MOST_COMPRESSED, SPARE_BYTES = 4, 1000, 2**28


@dataclass
class LoadedModel:
    """A trained model and what surrounds it; `multi_gpu_training.delivery` lists what it offers.

    checkpoint: the folder it came from, None for one that was just built.
    """

    model: nn.Module
    pipeline: Pipeline
    checkpoint: Path | None = None
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def recipe(self) -> str:
        return self.pipeline.recipe

    @property
    def labels(self) -> list[str] | None:
        return self.pipeline.labels

    @property
    def description(self) -> dict[str, Any]:
        return self.pipeline.description

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.pipeline.tasks

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def program(self) -> nn.Module:
        return self.pipeline.program(self.model)

    @property
    def inputs(self) -> list[TensorSpec]:
        return self.pipeline.inputs()

    @property
    def output_specs(self) -> list[TensorSpec]:
        return self.pipeline.outputs()

    def predict(
        self,
        raws: Sequence[Any],
        task: str | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> list[Result]:
        """Return one result per raw input, in the same order."""
        if isinstance(raws, (str, bytes, Path)):
            raise DataError("predict takes a list of inputs; put the one you have into a list")
        chosen = self.task(task)
        size = batch_size or self.pipeline.batch_size
        return list(self.pipeline.perform(chosen, self.model, raws, size, **options))

    def task(self, asked: str | None) -> str:
        """The requested task, or the default one."""
        if asked is not None and asked not in self.tasks:
            raise ConfigError(
                f"task={brief(asked)}: this {self.recipe} model can {' and '.join(self.tasks)}"
            )
        return asked or self.tasks[0]

    def preprocess(self, raws: Sequence[Any]) -> tuple[Tensor, ...]:
        """The arguments of `program`. A long recording is cut into several rows."""
        return self.pipeline.collate([s for raw in raws for s in self.pipeline.samples(raw)])

    def outputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The program's outputs, on the host."""
        return run_program(self.program, tensors, self.device)

    def read(self, outputs: Sequence[Tensor], raws: Sequence[Any]) -> list[Result]:
        """Results from outputs for the rows of `preprocess(raws)`."""
        per_raw = [self.pipeline.samples(raw) for raw in raws]
        rows = self.pipeline.read(tuple(outputs), [s for samples in per_raw for s in samples])
        found = []
        for raw, samples in zip(raws, per_raw, strict=True):
            mine, rows = rows[: len(samples)], rows[len(samples) :]
            found.append(self.pipeline.join(raw, mine))
        return found

    def example_inputs(self, count: int = 2) -> list[Any]:
        """Raw inputs from the run's validation data."""
        return self.pipeline.examples(count)

    def example_batch(self, count: int = 2) -> tuple[Tensor, ...]:
        """Real samples as tensors, or made-up ones if the run's data is gone."""
        return self.pipeline.collate(self.example_samples(count)[0])

    def example_samples(self, count: int = 2) -> tuple[list[Any], bool]:
        """The same samples one by one, and whether they are real."""
        try:
            raws = self.pipeline.examples(count)
            samples = [sample for raw in raws for sample in self.pipeline.samples(raw)][:count]
            if len(samples) == count:
                return samples, True
        except (DataError, ConfigError, OSError):
            pass
        return self.pipeline.synthetic(count), False

    def evaluate(
        self,
        data: str | Path | None = None,
        part: str | None = None,
        batch_size: int | None = None,
        placement: Placement | None = None,
    ) -> dict[str, float]:
        """The metrics of a validation, over all ranks of `placement`. Every rank must call it."""
        data_dir = None if data is None else str(data)
        return self.pipeline.evaluate(self.model, data_dir, part, batch_size, placement)

    def job(self, data: str | Path | None = None) -> Job:
        """Arguments of `MultiGPUTrainingManager.fit` that continue training this model."""
        if is_in_bf16(self.model):
            raise ConfigError("a model in bf16 cannot be trained; load it without dtype")
        found = self.pipeline.job(None if data is None else str(data))
        return replace(found, model=self.model, description=self.description)

    def rebuild(self, **changes: Any) -> LoadedModel:
        """A model of the same recipe with new weights and other arguments."""
        pipeline = self.pipeline.changed(**changes)
        try:
            model = pipeline.build_model()
        except MultiGPUError:
            raise
        except Exception as error:  # arguments that fit no model fail in every way there is
            asked = ", ".join(f"{name}={brief(value)}" for name, value in changes.items())
            raise ConfigError(
                f"no {self.recipe} model can be built with {asked} ({type(error).__name__}: "
                f"{error!s:.200}); choose other values"
            ) from None
        return LoadedModel(model.to(self.device).eval(), pipeline)

    def with_model(self, model: nn.Module) -> LoadedModel:
        """The same, around another module with the same inputs and outputs."""
        return replace(self, model=model.eval())

    def facts(self) -> dict[str, Any]:
        """What an export records about where the model comes from."""
        return {
            "recipe": self.recipe,
            "step": self.step,
            "metrics": self.metrics,
            "options": self.pipeline.options,
            "seed": self.pipeline.seed,
        }

    def save(self, folder: str | Path, **facts: Any) -> Path:
        """Write weights and description as a new folder that `load` reads; `facts` are recorded
        beside the others in its export.json."""
        path, model = Path(folder), self.model
        if is_in_bf16(model):
            model = copy.deepcopy(model)
            put_in_float32(model)
        with new_folder(path) as draft:
            write_weights(model, draft, self.pipeline.compression)
            finish(draft, {**self.facts(), "to": "safetensors", **facts}, self.description)
        return path


def load(
    where: str | Path,
    *,
    device: str | torch.device = "auto",
    checkpoint: str | None = None,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    trust: bool = False,
    verify_key: str | Path | None = None,
    dtype: str = "float32",
) -> LoadedModel:
    """Load the trained model of a run or checkpoint folder, or of its URL.

    - `device`: auto, cpu, cuda, ...
    - `dtype`: float32, or bf16 for half the memory and faster matrix products on GPUs
    - `checkpoint`: best or step-N; default: the best if the run has one, else the newest
    - `model`: for a script's run, the model or a function that builds it
    - `trust`: import the code that the checkpoint names, if any
    - `verify_key`: key file, default MGT_VERIFY_KEY; anything not signed with it is refused
    """
    key = verify_key or os.environ.get(VERIFY_KEY) or None
    try:
        signer = read_signer(None if key is None else str(key), signs=False)
        place = torch.device(choose(device)) if isinstance(device, str) else device
        check_dtype(dtype, place)
        loaded = load_signed(where, signer, place, checkpoint, model, trust)
        if dtype == "bf16":
            if any(step["method"] == "quantize" for step in loaded.pipeline.compression):
                raise ConfigError("dtype=bf16: its weights are quantised; leave out dtype")
            put_in_bf16(loaded.model)
        return loaded
    except ConfigError as error:
        error.args = (error.under(f"{where} cannot be loaded:"),)  # no run was to start
        raise


def load_signed(
    where: str | Path,
    signer: ManifestSigner | None,
    device: str | torch.device = "auto",
    checkpoint: str | None = None,
    model: Any = None,
    trust: bool = False,
) -> LoadedModel:
    """`load` with the key at hand; without a signer anything intact is loaded."""
    folder = None if is_url(str(where)) else Path(where).expanduser()
    saved = folder is not None and is_model_folder(folder)
    path = folder if folder is not None and saved else find_checkpoint(where, checkpoint)
    if saved and signer is not None:
        raise ConfigError(
            "it is an export or a compressed model, which carry no signature; load its run, or "
            f"leave out verify_key and {VERIFY_KEY}",
            code="MGT706",
        )
    try:
        stored = read_model_folder(path) if saved else load_model(path)
    except CheckpointError as error:
        if saved or "is damaged" not in str(error):
            raise
        others = other_checkpoints(path)
        hint = f"load {others[0]}, which is intact" if others else "give another run"
        raise CheckpointError(f"{error}; {hint}", code=error.code) from None
    problem = None if signer is None else signer.problem(stored.facts)
    if problem is not None:
        raise CheckpointError(f"{path} is refused: {problem}", code="MGT706")
    pipeline = _pipeline(stored, path, model, trust, unsigned=signer is None)
    built = _built(pipeline, path, stored)
    if pipeline.compression:
        restore(built, pipeline.compression, stored.tensors)
    else:
        _match_type(built, stored)
        remedy = other_model(stored.description, given=model is not None)
        load_model_state(built, stored.tensors, stored.aliases, stored.extra, str(path), remedy)
    place = torch.device(choose(device)) if isinstance(device, str) else device
    metrics = dict(stored.facts.get("metrics") or {})
    return LoadedModel(built.to(place).eval(), pipeline, path, stored.step, metrics)


def _built(pipeline: Pipeline, path: Path, stored: StoredModel) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]):  # fresh weights are drawn only to be replaced
            _check_size(pipeline, path, stored)
            return pipeline.build_model()
    except MultiGPUError:
        raise
    except Exception as error:  # a description of nonsense fails in every way there is
        raise CheckpointError(
            f"the model that {path} describes cannot be built ({type(error).__name__}: "
            f"{error!s:.300}); load it with the version that wrote it",
            code="MGT702",
        ) from error


def _check_size(pipeline: Pipeline, path: Path, stored: StoredModel) -> None:
    """Refuse a description of gigabytes beside a few weights, before any memory is taken."""
    if pipeline.recipe not in RECIPES:
        return  # the user's own code
    try:
        with torch.device("meta"):
            sketch = pipeline.build_model()
        parts = [*sketch.parameters(), *sketch.buffers()]
    except Exception:  # what cannot be sketched is built, or fails there
        return
    asked = sum(part.numel() * part.element_size() for part in parts)
    kept = sum(tensor.numel() * tensor.element_size() for tensor in stored.tensors.values())
    most = SPARE_BYTES + kept * (MOST_COMPRESSED if pipeline.compression else MOST_SHARED)
    if asked > most:
        raise CheckpointError(
            f"{path} describes a model of {asked:,} bytes and holds weights of {kept:,}: it is not "
            "the description of these weights; load another checkpoint",
            code="MGT702",
        )


def _pipeline(
    stored: StoredModel, path: Path, model: Any, trust: bool, unsigned: bool = True
) -> Pipeline:
    """How to rebuild and feed the model of a checkpoint. unsigned: files beside it count too."""
    options, config = _settings(stored, path, unsigned)
    seed = config.get("seed") or 0
    recipe = stored.description.get("recipe") or config.get("recipe")
    if not isinstance(seed, int) or not isinstance(recipe, str | None):
        raise CheckpointError(
            f"{path} was trained with seed={brief(seed)} and recipe={brief(recipe)}, it says: "
            "neither can be; load another checkpoint",
            code="MGT702",
        )
    if model is not None or recipe not in RECIPES:
        build = own_builder(stored.description, path, model, trust)
        return OwnPipeline(stored.description, options, seed, trust, build=build)
    kind = find_pipeline(str(recipe))
    description = stored.description
    if not isinstance(description.get("model"), dict):
        try:
            description = kind.recovered(options, stored.tensors, seed, trust)
        except (DataError, ConfigError) as error:
            raise ModelError(
                f"{path} was written by a version that did not describe models, and what its "
                f"run was trained on is needed to rebuild it: {'; '.join(error.problems)}",
                code="MGT404",
            ) from None
    try:
        check_steps(description.get("compression"))
        return kind(description, options, seed, trust)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / 'model.json'} does not describe a {recipe} model ({type(error).__name__}: "
            f"{error!s:.200}); load it with the version that wrote it",
            code="MGT702",
        ) from None


def _settings(
    stored: StoredModel, path: Path, unsigned: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the recipe and config of the run; up to version 0.1 those of config.yaml."""
    options, config = dict(stored.facts.get("options") or {}), dict(stored.config)
    if unsigned and (not options or not config):
        try:
            written = read_yaml(path.parent.parent / "config.yaml")
        except (OSError, ValueError):
            written = {}
        config = config or written
        options = options or written
    return options, config


def _match_type(model: nn.Module, stored: StoredModel) -> None:
    """Give the model the type of the weights, where all of them have one: float64, bf16."""
    kinds = {t.dtype for t in stored.tensors.values() if t.is_floating_point()}
    own = {t.dtype for t in model.state_dict().values() if t.is_floating_point()}
    if len(kinds) == 1 and len(own) == 1 and kinds != own:
        model.to(kinds.pop())
