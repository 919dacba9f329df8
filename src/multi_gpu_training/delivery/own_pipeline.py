"""Models that a script trained: how they are built again, fed and read."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from multi_gpu_training.errors import ConfigError, DataError, ModelError, MultiGPUError
from multi_gpu_training.recipes.pipeline import (
    Pipeline,
    Result,
    TensorSpec,
    imported,
    likeliest,
    tensors_in,
)
from multi_gpu_training.recipes.recipe import Job
from multi_gpu_training.safe_output import brief

SCRIPT_DATA = (
    "a script made this run, and only the script knows its data; call manager.evaluate(data) in "
    "it, or give samples to `mgt predict` or loaded.predict"
)
_HOW_TO_GIVE = (
    "nothing says what this model takes; give a tuple of tensors in the order of its forward, "
    'train with fit(..., description={"inputs": [...]}), or call loaded.model yourself'
)


class OwnProgram(nn.Module):
    """A model as a function from tensors to tensors, whatever it gives them in.

    names: of its inputs, where it is called by keyword.
    """

    def __init__(self, model: nn.Module, names: Sequence[str] | None) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.names is None:
            found = tuple(tensors_in(self.model(*tensors)))
        else:
            found = tuple(tensors_in(self.model(**dict(zip(self.names, tensors, strict=True)))))
        return found[0] if len(found) == 1 else found


class OwnPipeline(Pipeline):
    """A script's model. A raw input holds the tensors of one sample: the only one, a tuple of them
    in the order of `forward`, or a dict of them by name."""

    recipe = "custom"

    def __init__(self, *given: Any, build: Callable[[], nn.Module], **more: Any) -> None:
        super().__init__(*given, **more)
        self._build = build

    def build_model(self) -> nn.Module:
        return self._build()

    def changed(self, **changes: Any) -> Pipeline:
        raise ConfigError("a script's model is rebuilt by the script; use with_model(...)")

    def inputs(self) -> list[TensorSpec]:
        return _specs(self.description.get("inputs"))

    def outputs(self) -> list[TensorSpec]:
        return _specs(self.description.get("outputs"))

    def program(self, model: nn.Module) -> nn.Module:
        names = self._keywords()
        return model if names is None else OwnProgram(model, names)

    def export_program(
        self, model: nn.Module, length: int | None
    ) -> tuple[nn.Module, tuple[int, int] | None]:
        """Always wrapped: a program that torch exports cannot have a part named `meta` on top."""
        program, lengths = super().export_program(model, length)
        if not isinstance(program, OwnProgram):
            program = OwnProgram(program, None)
        return program, lengths

    def _keywords(self) -> list[str] | None:
        facts = self.description.get("inputs") or ()
        by_name = any(one.get("keyword") for one in facts)
        return [spec.name for spec in self.inputs()] if by_name else None

    def sample(self, raw: Any) -> Any:
        specs = self.inputs()
        if isinstance(raw, Mapping):
            raw = _in_order(raw, specs)
        parts = raw if isinstance(raw, tuple) else (raw,)
        if specs and len(parts) != len(specs):
            raise DataError(
                f"an input has {len(parts)} of the {len(specs)} tensors that the model takes, "
                f"{_named(specs)}; give them as a tuple in this order, or by name as a dict or an "
                ".npz file"
            )
        try:
            tensors = [torch.as_tensor(part) for part in parts]
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"a script's model takes arrays or tensors, one sample each, and got "
                f"{type(raw).__name__} ({error!s:.100})"
            ) from None
        if not specs:
            return tuple(tensors)
        typed = [isinstance(part, (Tensor, np.ndarray, np.generic)) for part in parts]
        return tuple(map(_as_trained, tensors, typed, specs))

    def find(self, word: str, task: str) -> list[tuple[str, Any]]:
        """Rows of the array in a .npy file, or of the arrays in an .npz file, by name."""
        try:
            found = np.load(word, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                with found as file:
                    found = {str(name): file[name] for name in file}
            counts = {np.shape(part)[:1] for part in _arrays(found)}
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise DataError(
                f"{brief(word)} cannot be read ({error!s:.200}); a script's model takes .npy files "
                "with one sample per row, or .npz files with such an array per input"
            ) from None
        if len(counts) != 1 or counts == {()}:
            told = ", ".join(str(np.shape(part)) for part in _arrays(found)) or "none"
            raise DataError(
                f"{brief(word)} holds arrays of the shapes {told}; all need the same number of "
                "rows, one per sample"
            )
        [[count]] = counts
        if not count:
            raise DataError(f"{brief(word)} has no rows; give at least one sample")
        rows = (
            ({name: part[number] for name, part in found.items()} for number in range(count))
            if isinstance(found, dict)
            else found
        )
        return [(f"{word}:{number}", row) for number, row in enumerate(rows)]

    def perform(
        self,
        task: str,
        model: nn.Module,
        raws: Sequence[Any],
        batch_size: int,
        first: int = 0,
        **how: Any,
    ) -> Iterator[Result]:
        """As every pipeline does; what the user's code raises becomes a DataError."""
        try:
            yield from super().perform(task, model, raws, batch_size, first, **how)
        except (MultiGPUError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            given = self.sample(raws[0])
            shown = ", ".join(f"{_kind(part)} {tuple(part.shape)}" for part in given)
            specs = self.inputs()
            wanted = f"it was trained with {_named(specs)}" if specs else _HOW_TO_GIVE
            raise DataError(
                f"{type(model).__name__} failed for samples of {shown} ({type(error).__name__}: "
                f"{error!s:.200}); {wanted}"
            ) from error

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, ...]:
        shapes = {tuple((part.shape, part.dtype) for part in sample) for sample in samples}
        if len(shapes) > 1:
            raise DataError(
                "the samples differ in shape or type and cannot be one batch; predict them one by "
                "one with batch_size=1 (--batch-size 1), or pad them as in training"
            )
        return tuple(torch.stack(list(column)) for column in zip(*samples, strict=True))

    def read(self, outputs: tuple[Tensor, ...], samples: Sequence[Any]) -> list[Result]:
        first = outputs[0]
        if self.labels and first.ndim == 2 and first.shape[1] == len(self.labels):
            return [likeliest(row, self.labels) for row in first]
        unlike = [tuple(part.shape) for part in outputs if part.shape[:1] != (len(samples),)]
        if unlike:
            raise ModelError(
                f"the model gives a tensor of shape {unlike[0]} for {len(samples)} samples; "
                "predictions need outputs with a row per sample: use loaded.model itself"
            )
        rows = zip(*(part.tolist() for part in outputs), strict=True)
        return [{"output": row[0] if len(row) == 1 else list(row)} for row in rows]

    def synthetic(self, count: int) -> list[Any]:
        specs = self.inputs()
        if not specs:
            raise DataError(
                "nothing says what this model takes: that is recorded only where a criterion or no "
                "loss_fn was given, and every input is a tensor with a row per sample; train with "
                'fit(..., description={"inputs": [{"name": "x", "dtype": "float32", "shape": '
                '["batch", 8]}]})'
            )
        noise = torch.Generator().manual_seed(0)
        found = []
        for _ in range(count):
            sample = []
            for spec in specs:
                shape = [side if isinstance(side, int) else 8 for side in spec.shape[1:]]
                kind = getattr(torch, spec.dtype)
                value = torch.randn(shape, generator=noise)
                sample.append(value.to(kind) if kind.is_floating_point else value.abs().to(kind))
            found.append(tuple(sample))
        return found

    def job(self, data_dir: str | None = None) -> Job:
        raise ConfigError(SCRIPT_DATA)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        self.job()
        return {}

    def examples(self, count: int) -> list[Any]:
        self.job()
        return []


def _arrays(found: Any) -> list[Any]:
    return list(found.values()) if isinstance(found, dict) else [found]


def _named(specs: Sequence[TensorSpec]) -> str:
    parts = (f"{spec.name}: {spec.dtype} {spec.shape[1:]}" for spec in specs)
    return ", ".join(parts).replace("'", "")


def _in_order(raw: Mapping[str, Any], specs: Sequence[TensorSpec]) -> tuple[Any, ...]:
    """The tensors of a dict as the model takes them."""
    names = [spec.name for spec in specs]
    if not names:
        raise DataError(f"an input is a dict with {', '.join(map(str, raw))}, but {_HOW_TO_GIVE}")
    if set(names) != set(raw):
        raise DataError(
            f"an input is a dict with {', '.join(map(str, raw))}; the model takes {_named(specs)}"
        )
    return tuple(raw[name] for name in names)


def _as_trained(part: Tensor, typed: bool, spec: TensorSpec) -> Tensor:
    """The tensor in the type that the model was trained on, where that changes no meaning: files
    of NumPy hold float64, but whole numbers may be pixels that training divided by 255."""
    wanted = getattr(torch, spec.dtype)
    if part.dtype == wanted:
        return part
    cast = part.to(wanted)
    both_real = part.dtype.is_floating_point and wanted.is_floating_point
    plain = not typed and wanted.is_floating_point and not part.dtype.is_complex
    both_whole = not any(one.is_floating_point or one.is_complex for one in (part.dtype, wanted))
    if both_real or plain or (both_whole and bool((cast == part).all())):
        return cast
    raise DataError(
        f"{spec.name} holds {_kind(part)}, and the model was trained on {spec.dtype}; convert it "
        "as the script's dataset does, scaling included"
    )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _specs(facts: Any) -> list[TensorSpec]:
    return [
        TensorSpec(
            str(one.get("name", f"input{number}")),
            str(one.get("dtype", "float32")),
            tuple(one["shape"]),
            str(one.get("meaning", "")),
        )
        for number, one in enumerate(facts or ())
    ]


def own_builder(
    description: Mapping[str, Any], path: Path, model: Any, trust: bool
) -> Callable[[], nn.Module]:
    """What builds the model of a script."""
    arguments = description.get("arguments")
    named = description.get("model")
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model)
    if model is None:
        if not isinstance(named, str) or named.startswith("__main__:") or "<" in named:
            raise ModelError(f"{path} {_what_to_keep(named, arguments)}", code="MGT404")
        model = imported(named, trust)
        if arguments is None and _needs_arguments(model):
            name = named.rpartition(":")[2]
            unrecorded = description.get("unrecorded")
            if isinstance(unrecorded, dict) and unrecorded:
                told = ", ".join(f"{word} (a {kind})" for word, kind in unrecorded.items())
                raise ModelError(
                    f"{named} built the model of {path} from {told}, which a checkpoint does not "
                    f"record; train with a function in that module that takes plain numbers and "
                    f"texts and calls {name}, or load it in Python: load(run, model={name}(...))",
                    code="MGT404",
                )
            raise ModelError(
                f"{named} built the model of {path}, but its arguments are not recorded; train "
                f"with a factory, fit(partial({name}, ...), ...), or load it in Python: "
                f"load(run, model={name}(...))",
                code="MGT404",
            )
    given = dict(arguments or {})

    def build() -> nn.Module:
        try:
            found = model(**given)
        except TypeError as error:
            raise ModelError(
                f"the model of {path} cannot be built with its recorded arguments {given} "
                f"({error}); pass the built model: load(run, model=Net(...))",
                code="MGT404",
            ) from None
        if not isinstance(found, nn.Module):
            raise ModelError(
                f"{named or model} built a {type(found).__name__}, not a module", code="MGT404"
            )
        return found

    return build


def other_model(description: Mapping[str, Any], given: bool) -> str:
    """What to do where the weights of a checkpoint do not fit the model that was built."""
    if given:
        return "Give load the model that was trained, with the same arguments: model=Net(...)"
    named = description.get("model")
    if not isinstance(named, str):
        return "Load it with the version that wrote it"
    name = named.rpartition(":")[2]
    if "arguments" in description:
        return f"{named} has changed since: go back to the code that was trained"
    return (
        f"Its arguments are not recorded, because fit got a built {name}; load it in Python, "
        f"load(run, model={name}(...)), or train with fit(partial({name}, ...), ...)"
    )


def _what_to_keep(named: Any, arguments: Mapping[str, Any] | None) -> str:
    """Why the model of a script cannot be built anew, and how to train so that it can."""
    name = named.rpartition(":")[2].rpartition(".")[2] if isinstance(named, str) else ""
    if not name.isidentifier():
        return (
            "holds the weights of a script's model, but not the code that builds it; move a "
            "function that builds it into a module such as nets.py and train with "
            "fit(build_model, ...), or load it in Python: load(run, model=build_model())"
        )
    words = ", ".join(f"{word}={brief(value)}" for word, value in (arguments or {}).items())
    words = words if arguments is not None else "..."
    factory = name if arguments == {} else f"partial({name}, {words})"
    return (
        f"holds the weights of a script's {name}, but not its code, which is in the script itself; "
        f"move {name} into a module such as nets.py and train with fit({factory}, ...), or load it "
        f"in Python: load(run, model={name}({words}))"
    )


def _needs_arguments(maker: Any) -> bool:
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in kinds for p in parameters)
