"""Outputs of a model for every sample of a dataset, in dataset order, from any number of ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multi_gpu_training.data.batch import share_of, tensors_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import DataError, ModelError
from multi_gpu_training.state_dicts import from_bytes, to_bytes

# The outputs of a batch, one row per sample: predict_fn(model, batch).
PredictFn = Callable[[nn.Module, Any], Any]
# Position of a batch's first sample in the pass, number of samples, outputs.
Part = tuple[int, int, Any]


def call_model(model: nn.Module, batch: Any) -> Any:
    """The outputs when there is no predict_fn. As in training, the last entry of a list or tuple is
    the target, and so are the `labels` of a mapping."""
    if isinstance(batch, Mapping):
        named = {str(key): value for key, value in batch.items() if key != "labels"}
        _check_call(model, (), named)
        output = model(**named)
        return getattr(output, "logits", output)
    if isinstance(batch, (list, tuple)):
        inputs = batch[:-1] if len(batch) > 1 else batch
        _check_call(model, inputs, {})
        return model(*inputs)
    return model(batch)


def _check_call(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Say what to do where the model's forward takes something else than batches have."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*inputs, **named)
    except TypeError as error:
        given = f"the entries {', '.join(named)}" if named else f"{len(inputs)} inputs"
        left_out = "" if named else ", without the last entry of the batch, the target"
        raise ModelError(
            f"{type(model).__name__}.forward{signature} cannot be called with {given}{left_out} "
            f"({error}); give predict_fn, a function of (model, batch) that returns the outputs"
        ) from None


def gather_outputs(pairs: Iterable[tuple[Any, Any]], placement: Placement) -> Any:
    """Outputs of all ranks in the order of the data, on every rank, in host memory.

    pairs: (batch, outputs) of this rank, with batches from a loader of the manager. Outputs are
    tensors with one row per sample, lists with one entry per sample, or tuples and dicts of those.
    Tensors whose rows differ in shape from batch to batch become a list of rows. Collective.
    """
    mine: list[Part] = []
    for batch, output in pairs:
        share = _share(batch)
        if output is None:
            raise _without_rows("None", share.count)
        mine.append((share.place, share.count, _on_host(output, share.count)))
    if placement.group is None:
        parts = mine
    else:
        raws = placement.gather_bytes(to_bytes(mine))
        parts = [part for raw in raws for part in from_bytes(raw)]
    parts.sort(key=lambda part: part[0])
    for (place, count, _), (following, *_) in pairwise(parts):
        if place + count > following:
            raise DataError(
                f"sample {following} came twice: gather takes the batches of one pass over a "
                "loader, each once"
            )
    if not parts:
        raise DataError(
            "there is no sample to predict; check the data and their filters", code="MGT302"
        )
    return _joined([output for *_, output in parts])


def _share(batch: Any) -> Share:
    """The share of a batch, even if it was unpacked or moved."""
    shares = [share_of(batch), *map(share_of, tensors_of(batch))]
    found = next((share for share in shares if share is not None), None)
    if found is None:
        raise DataError(
            "a batch does not say which samples it holds, so its outputs cannot be put in order; "
            "give predict a dataset or a DataLoader, and gather batches of val_loader as they come"
        )
    return found


def _on_host(output: Any, count: int) -> Any:
    """The outputs in host memory; raises for anything without one row per sample."""
    if output is None:
        return None
    if isinstance(output, np.ndarray):
        output = torch.from_numpy(output)
    if isinstance(output, Tensor):
        if output.shape[:1] != (count,):
            raise _without_rows(f"a tensor of shape {tuple(output.shape)}", count)
        return output.detach().cpu()
    if isinstance(output, Mapping):
        return {key: _on_host(part, count) for key, part in output.items()}
    if isinstance(output, tuple):
        return tuple(_on_host(part, count) for part in output)
    if isinstance(output, list):
        if len(output) != count:
            raise _without_rows(f"a list of {len(output)}", count)
        return [part.detach().cpu() if isinstance(part, Tensor) else part for part in output]
    raise _without_rows(type(output).__name__, count)


def _without_rows(found: str, count: int) -> ModelError:
    return ModelError(
        f"the outputs of a batch of {count} samples are {found}; return tensors with one row per "
        "sample, lists with one entry per sample, or tuples and dicts of those (predict_fn)"
    )


def _joined(outputs: list[Any]) -> Any:
    """The outputs of all batches, concatenated."""
    first = outputs[0]
    forms = {_form(output) for output in outputs}
    if len(forms) > 1:
        raise ModelError(
            f"batches gave outputs of different forms ({', '.join(sorted(forms))}); return the "
            "same form for every batch"
        )
    if isinstance(first, Tensor):
        if len({(output.shape[1:], output.dtype) for output in outputs}) == 1:
            return torch.cat(outputs)
        return [row for output in outputs for row in output]
    if isinstance(first, dict):
        return {key: _joined([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*outputs, strict=True))
    return None if first is None else [entry for output in outputs for entry in output]


def _form(output: Any) -> str:
    if isinstance(output, dict):
        return f"dict with {sorted(map(str, output))}"
    if isinstance(output, tuple):
        return f"tuple of {len(output)}"
    return type(output).__name__
