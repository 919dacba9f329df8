"""A recipe's model after training: rebuilt from its description, fed with raw input, and read.

Each recipe has one `Pipeline`; `find_pipeline` finds it. Raw input is what a person has: a file, a
picture, a text. A sample is one raw input as tensors, a batch what the model takes.

    raw input --samples--> samples --collate--> tensors --program--> tensors --read--> results

Nothing here needs a launcher, a run folder or training data, except `evaluate` and `examples`.
"""

from __future__ import annotations

import copy
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.order import cut, seed_everything
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError, DataError, ModelError
from multi_gpu_training.recipes.recipe import Job, Options, find_recipe
from multi_gpu_training.run_places import path_problem
from multi_gpu_training.safe_output import brief
from multi_gpu_training.training.evaluation import choose_eval_fn, evaluate
from multi_gpu_training.training.loss import choose_loss
from multi_gpu_training.training.metrics import MetricsCollector
from multi_gpu_training.training.precision import Precision

Result = dict[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a program. A text in `shape` names a dimension that may vary."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    meaning: str

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape)}


class Pipeline(ABC):
    """How models of one recipe are rebuilt, fed and read.

    description: what the checkpoint says: `model` holds the arguments that rebuild it, `labels`
    and `preprocessing` what surrounds it.
    options, seed: of the run, from which its data are found again.
    trust: whether code that the description names may be imported.
    """

    recipe: ClassVar[str]
    tasks: tuple[str, ...] = ("predict",)  # what can be asked of the model; the first by default
    batch_size = 64  # for prediction and evaluation, where the user sets none

    def __init__(
        self,
        description: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        trust: bool = False,
    ) -> None:
        self.description = copy.deepcopy(dict(description))
        self.options = dict(options or {})
        self.seed = seed
        self.trust = trust

    @classmethod
    def recovered(
        cls, options: Mapping[str, Any], tensors: Mapping[str, Tensor], seed: int, trust: bool
    ) -> dict[str, Any]:
        """The description of a checkpoint that has none, as up to version 0.1: from the options
        of its run and from its data, which must still be there."""
        job = find_job(cls.recipe, cls.checked_options(options, trust), seed)
        return dict(job.description or {})

    # The model

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model is built from."""
        return dict(self.description["model"])

    @property
    def labels(self) -> list[str] | None:
        """Names of the classes in the order of the outputs; None where there are none."""
        found = self.description.get("labels")
        return None if found is None else [str(name) for name in found]

    @property
    def preprocessing(self) -> dict[str, Any]:
        return dict(self.description.get("preprocessing") or {})

    @property
    def compression(self) -> list[dict[str, Any]]:
        """What was done to the model after training, in order."""
        found: list[dict[str, Any]] = self.description.get("compression") or []
        return found

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with fresh weights."""

    def changed(self, **changes: Any) -> Pipeline:
        """The same with other arguments of the model, such as a smaller width."""
        unknown = [name for name in changes if name not in self.arguments]
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: the {self.recipe} model has no such argument; it has "
                f"{', '.join(self.arguments)}",
                code="MGT102",
            )
        described = {**self.description, "model": {**self.arguments, **changes}}
        return type(self)(described, self.options, self.seed, self.trust)

    def program(self, model: nn.Module) -> nn.Module:
        """The model as a plain function of the tensors of `collate`, for export too."""
        return model

    def export_program(
        self, model: nn.Module, length: int | None
    ) -> tuple[nn.Module, tuple[int, int] | None]:
        """The program in operations that other runtimes have, and the shortest and longest input
        it takes; None where inputs have one size."""
        if length is not None:
            raise ConfigError(f"--length is for sound and text; {self.recipe} inputs have one size")
        return self.program(copy.deepcopy(model)), None

    def save_pretrained(self, model: nn.Module, folder: Path) -> nn.Module | None:
        """Write the model for from_pretrained, and give it as read again; None where it is not a
        model of Hugging Face."""
        return None

    @abstractmethod
    def inputs(self) -> list[TensorSpec]:
        """What the program takes; the first dimension of each is the batch."""

    @abstractmethod
    def outputs(self) -> list[TensorSpec]: ...

    # Raw input

    @abstractmethod
    def sample(self, raw: Any) -> Any:
        """One raw input as tensors; DataError says why something cannot be used."""

    def samples(self, raw: Any) -> list[Any]:
        """The samples of one raw input: one, unless it is a recording that is cut up."""
        return [self.sample(raw)]

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, ...]:
        """The arguments of the program for several samples."""
        return (torch.stack(list(samples)),)

    def shorten(self, sample: Any, longest: int) -> Any:
        """The beginning of a sample, for programs that take no more."""
        return sample

    @abstractmethod
    def read(self, outputs: tuple[Tensor, ...], samples: Sequence[Any]) -> list[Result]:
        """What the program's outputs on the host say, one result per sample."""

    def join(self, raw: Any, results: list[Result]) -> Result:
        """The result of a raw input from those of its samples."""
        return results[0]

    def find(self, word: str, task: str) -> list[tuple[str, Any]]:
        """Names and raw inputs that a word of the command line stands for: a file, or a folder
        with all of its files that can be used."""
        problem = path_problem(word)
        if problem is not None:
            raise DataError(f"{brief(word)}: {problem}; give a file or a folder")
        path = Path(word)
        with suppress(RuntimeError):  # there is no such user: then it is a name that begins with ~
            path = path.expanduser()
        if path.is_dir():
            files = [one for one in sorted(path.rglob("*")) if one.is_file() and self.takes(one)]
            if not files:
                raise DataError(f"{word} holds no file that this {self.recipe} model takes")
            return [(str(one), one) for one in files]
        if not path.exists():
            raise DataError(f"{word} does not exist; give a file or a folder")
        return [(str(path), path)]

    def takes(self, path: Path) -> bool:
        """Whether a file in a folder looks like raw input."""
        return False

    @abstractmethod
    def synthetic(self, count: int) -> list[Any]:
        """Made-up samples of the right form, for speed and shapes where no data are at hand."""

    # Tasks

    def perform(
        self,
        task: str,
        model: nn.Module,
        raws: Sequence[Any],
        batch_size: int,
        first: int = 0,
        **how: Any,
    ) -> Iterator[Result]:
        """Results of a task, in the order of the raw inputs. first: the number of the first one
        among all, where these are a part."""
        if how:
            raise ConfigError(
                f"{', '.join(how)}: means nothing for the task {task!r} of the recipe {self.recipe}"
            )
        program, device = self.program(model), device_of(model)
        waiting: list[tuple[Any, list[Any]]] = []

        def ready() -> Iterator[Result]:
            every = [sample for _, samples in waiting for sample in samples]
            found = []
            for start in range(0, len(every), batch_size):
                part = every[start : start + batch_size]
                found += self.read(run_program(program, self.collate(part), device), part)
            for raw, samples in waiting:
                mine, found = found[: len(samples)], found[len(samples) :]
                yield self.join(raw, mine)

        for raw in raws:
            waiting.append((raw, self.samples(raw)))
            if sum(len(samples) for _, samples in waiting) >= batch_size:
                yield from ready()
                waiting.clear()
        yield from ready()

    # Data of the run

    def job(self, data_dir: str | None = None) -> Job:
        """The recipe's model, data, loss and metrics, as a training would get them. `data_dir`
        takes the place of the run's own."""
        return find_job(self.recipe, self.run_options(data_dir), self.seed)

    def run_options(self, data_dir: str | None = None) -> Options:
        """The run's options; DataError where the run's own data cannot be known."""
        given = self.options if data_dir is None else {**self.options, "data_dir": data_dir}
        return self.checked_options(given, self.trust)

    @classmethod
    def checked_options(cls, given: Mapping[str, Any], trust: bool) -> Options:
        kind = find_recipe(cls.recipe).options
        known = {name: value for name, value in given.items() if name in kind.model_fields}
        code = cls.code_in(known)
        if code is not None and not trust:
            raise ModelError(
                f"the checkpoint's options have {code}, which runs that code; allow it with "
                "load(run, trust=True) or --trust if you trust the author of the checkpoint",
                code="MGT404",
            )
        plain = kind()
        # Defaults are left out: recipes refuse options that were set and mean nothing.
        try:
            return kind(**{n: v for n, v in known.items() if v != getattr(plain, n)})
        except ValidationError as error:
            raise ConfigError(
                [f"{e['loc'][0]}={brief(e['input'])}: {e['msg']}" for e in error.errors()]
            ) from None

    @classmethod
    def code_in(cls, options: Mapping[str, Any]) -> str | None:
        """What among a run's options names code that would be run; None if nothing does."""
        return "trust_remote_code=true" if options.get("trust_remote_code") else None

    def other_preprocessing(self, job: Job) -> list[str]:
        """What differs between how a job prepares its data and what the model knows. Many models
        would take such inputs without a word, and be wrong."""
        theirs = json.loads(json.dumps((job.description or {}).get("preprocessing") or {}))
        ours = self.preprocessing
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        return [f"{name}: {brief(theirs.get(name))}, not {brief(ours.get(name))}" for name in names]

    def parts(self, job: Job, part: str) -> list[Dataset[Any]]:
        """The validation data, or with part="all" the training data as well."""
        other = self.other_preprocessing(job)
        if other:
            raise DataError(
                f"these data are not prepared as the model was trained ({'; '.join(other)}); give "
                "data of the same kind, or use mgt predict on single inputs"
            )
        found = [job.val_dataset] if part == "val" else [job.dataset, job.val_dataset]
        have = list((job.description or {}).get("labels") or [])
        if self.labels is None or have == self.labels:
            return found
        unknown = [name for name in have if name not in self.labels]
        if unknown:
            raise DataError(
                f"the data have the class {brief(unknown[0])}, which the model does not know; it "
                f"knows {', '.join(self.labels[:20])}"
            )
        # By name: other data may have fewer classes, and so number them differently.
        numbers = [self.labels.index(name) for name in have]
        return [Relabelled(dataset, numbers) for dataset in found]

    def evaluate(
        self,
        model: nn.Module,
        data_dir: str | None = None,
        part: str | None = None,
        batch_size: int | None = None,
        placement: Placement | None = None,
    ) -> dict[str, float]:
        """Metrics over all ranks, as a validation of the training gives them. Collective.

        part: val or all; by default the validation part of the run's own data, and all of others.
        """
        chosen = ("val" if data_dir is None else "all") if part is None else part
        if chosen not in ("val", "all"):
            raise ConfigError(f"part={chosen}: use val or all")
        job, placement, device = self.job(data_dir), placement or Placement(), device_of(model)
        same = list((job.description or {}).get("labels") or []) == (self.labels or [])
        collected = MetricsCollector()
        for dataset in self.parts(job, chosen):
            mine = range(*cut(len(dataset), placement.dp_size, placement.dp_rank))  # type: ignore[arg-type]
            collate = getattr(job.val_dataset, "collate", default_collate)
            size = batch_size or self.batch_size
            loader = DataLoader(Subset(dataset, mine), size, collate_fn=collate)
            found = evaluate(
                model,
                ((batch, True) for batch in (loader if len(mine) else ())),
                choose_loss(_on_device(job.loss_fn, device) if same else None),
                choose_eval_fn(job.eval_fn, placement.dp_size),
                Precision(MultiGPUConfig(), device, mixed=False),
                device,
            )
            collected.merge(found)
        return collected.compute(placement)

    def examples(self, count: int) -> list[Any]:
        """Raw inputs from the run's validation data."""
        dataset: Any = self.parts(self.job(), "val")[0]
        return [self.raw_of(dataset[index]) for index in range(min(count, len(dataset)))]

    def raw_of(self, item: Any) -> Any:
        """The input in an item of the dataset, in a form that `sample` takes."""
        return item[0]


def _on_device(loss_fn: Any, device: torch.device) -> Any:
    return loss_fn.to(device) if isinstance(loss_fn, nn.Module) else loss_fn


def find_job(recipe_name: str, options: Options, seed: int) -> Job:
    """The job of a recipe, on this process alone."""
    recipe = find_recipe(recipe_name)
    if recipe.build is None:
        raise ConfigError(f"the recipe {recipe_name} makes its own data; it has no dataset")
    config = MultiGPUConfig(
        seed=seed, training_mode=TrainingMode.SINGLE, recipe=recipe_name, num_workers=0
    )
    with torch.random.fork_rng(devices=[]):
        seed_everything(seed)
        torch.manual_seed(seed)
        return recipe.build(config, options)


class Relabelled(Dataset[Any]):
    """A dataset of (input, label), each label replaced by numbers[label]."""

    def __init__(self, dataset: Any, numbers: Sequence[int]) -> None:
        self.dataset, self.numbers = dataset, numbers

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        *rest, label = self.dataset[index]
        return (*rest, self.numbers[int(label)])


def device_of(model: nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


@torch.no_grad()
def run_program(
    program: nn.Module, tensors: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, ...]:
    """The outputs on the host."""
    found = program(*(tensor.to(device) for tensor in tensors))
    return tuple(part.cpu() for part in tensors_in(found))


def tensors_in(found: Any) -> Iterator[Tensor]:
    """The tensors of an output in order; models give them alone, in tuples, dicts or objects."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for part in found:
            yield from tensors_in(part)
    elif isinstance(found, Mapping):
        yield from tensors_in(list(found.values()))
    elif is_dataclass(found) and not isinstance(found, type):
        yield from tensors_in([getattr(found, one.name) for one in fields(found)])
    elif found is not None:
        raise ModelError(
            f"the model gives a {type(found).__name__}; it must give tensors, alone or in tuples, "
            "dicts or dataclasses"
        )


def likeliest(scores: Tensor, labels: Sequence[str], most: int = 5) -> Result:
    """The likeliest class and the probabilities of the first few, from one row of scores."""
    chances = scores.double().softmax(0)
    best = chances.topk(min(most, len(labels)))
    named = [labels[number] for number in best.indices.tolist()]
    return {
        "label": named[0],
        "score": best.values[0].item(),
        "scores": dict(zip(named, best.values.tolist(), strict=True)),
    }


def find_pipeline(recipe: str) -> type[Pipeline]:
    """The pipeline of a recipe, in recipes/NAME/NAME_pipeline.py."""
    find_recipe(recipe)  # says which there are
    module = importlib.import_module(f"multi_gpu_training.recipes.{recipe}.{recipe}_pipeline")
    found: type[Pipeline] = module.PIPELINE
    return found


def imported(path: str, trust: bool) -> Any:
    """What `package.module:Name` names, if the user allows importing it."""
    if not trust:
        raise ModelError(
            f"the checkpoint says that {brief(path)} builds its model, which runs that code; allow "
            "it with load(run, trust=True) or --trust if you trust the author of the checkpoint",
            code="MGT404",
        )
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{brief(path)}, which builds this run's model, cannot be imported "
            f"({type(error).__name__}: {error!s:.200}); start in the folder that holds "
            f"{module.partition('.')[0]!r:.80}, or load it in Python: load(run, model=...)",
            code="MGT404",
        ) from None
