"""Cut one dataset into the parts of several clients, as a simulated federation needs it.

    iid              shuffled, equal parts
    dirichlet:ALPHA  each class is shared out by a draw from a Dirichlet distribution; the smaller
                     ALPHA, the fewer classes a client has

Every sample belongs to exactly one part, and the parts are a pure function of the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset

from multi_gpu_training.errors import ConfigError, DataError

LEAST = 2  # samples of a part: fewer cannot be trained on by two ranks
TRIES = 1000


def check_partition(text: str) -> tuple[str, float]:
    """The kind of a partition and its parameter, such as ("dirichlet", 0.3)."""
    kind, _, value = text.partition(":")
    if kind == "iid" and not value:
        return kind, math.inf
    try:
        alpha = float(value)
    except ValueError:
        alpha = math.nan
    if kind != "dirichlet" or not 0 < alpha < math.inf:
        raise ConfigError(f"--partition {text[:80]!r} is unknown; use iid or dirichlet:0.3")
    return kind, alpha


def partition(dataset: Any, how: str, parts: int, part: int, seed: int) -> Subset[Any]:
    """Part number `part` of a dataset that is cut into `parts`."""
    kind, alpha = check_partition(how)
    if not isinstance(dataset, Sized):
        raise DataError(
            f"{type(dataset).__name__} has no length, so it cannot be cut into {parts} parts; give "
            "each client its own data (mgt federated client)"
        )
    whole: Any = dataset
    count = len(dataset)
    if count < LEAST * parts:
        raise DataError(
            f"{count} samples are too few for {parts} clients; use fewer clients", code="MGT302"
        )
    random = np.random.default_rng([seed, parts])
    if kind == "iid":
        chosen = np.array_split(random.permutation(count), parts)[part]
    else:
        chosen = _dirichlet(labels_of(dataset), alpha, parts, random)[part]
    return Subset(whole, [int(index) for index in np.sort(chosen)])


def _dirichlet(
    labels: NDArray[Any], alpha: float, parts: int, random: np.random.Generator
) -> list[NDArray[Any]]:
    """Indices of each part. Drawn again until no part is too small to train on."""
    by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(TRIES):
        found: list[list[NDArray[Any]]] = [[] for _ in range(parts)]
        for members in by_class:
            shares = random.dirichlet(np.full(parts, alpha))
            cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
            pieces = np.split(random.permutation(members), cuts)
            for own, piece in zip(found, pieces, strict=True):
                own.append(piece)
        joined = [np.concatenate(own) for own in found]
        if min(len(own) for own in joined) >= LEAST:
            return joined
    raise DataError(
        f"--partition dirichlet:{alpha:g} left a client without data in {TRIES} draws; use a "
        "larger value or fewer clients"
    )


def labels_of(dataset: Any) -> NDArray[Any]:
    """The class of every sample: what the dataset says about itself, or else each sample's last
    entry."""
    if isinstance(dataset, Subset):
        return np.asarray(labels_of(dataset.dataset)[np.asarray(dataset.indices)])
    found: Any = None
    if isinstance(dataset, TensorDataset):
        found = dataset.tensors[-1]
    for name in ("targets", "labels"):
        if found is None and len(getattr(dataset, name, ())) == len(dataset):
            found = getattr(dataset, name)
    if found is None:
        found = [_label(dataset[index]) for index in range(len(dataset))]
    labels = np.asarray(torch.as_tensor(found).cpu())
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"--partition dirichlet needs one class number per sample, and the targets of "
            f"{type(dataset).__name__} are {labels.dtype} of shape {labels.shape}; use iid"
        )
    return labels


def _label(sample: Any) -> Any:
    try:
        return int(sample[-1])
    except (TypeError, ValueError, KeyError, IndexError):
        raise DataError(
            "--partition dirichlet needs samples like (input, class); use --partition iid"
        ) from None
