"""What the report believes of an event: every field of the type and size that it can have.

A folder may come from anybody. What has another type is left out, so that no reader of events needs
to ask; text is cut to a length that fits a page.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from multi_gpu_training.monitoring.event_crc import is_damaged
from multi_gpu_training.safe_files import Count, Ranks
from multi_gpu_training.safe_output import brief

LONGEST_TEXT = 4000
MOST_FIELDS = 1000
LARGEST = 1e100  # of any number: sums and ratios of such stay finite
LONGEST_S = 1e9
LARGEST_SIZE = 1e30  # bytes, samples, FLOPs

SIZES = frozenset(
    (
        *("bytes", "parameters", "global_batch", "per_rank_batch", "accumulation", "copies"),
        *("workers", "threads", "epoch_samples", "epoch_steps", "machine_cores", "operations"),
        *("flops", "peak_flops", "samples_per_s", "steps", "replayed", "dropped", "count"),
    )
)
TEXTS = frozenset(
    (
        *("message", "error", "level", "kind", "action", "host", "run", "device", "device_name"),
        *("device_uuid", "backend", "precision", "execution", "source", "problem"),
    )
)
METRICS = ("train", "val", "values")
NOT_FINITE = ("nan", "inf", "-inf")  # as the run writes such numbers


class _Event(BaseModel):
    """What says where an event belongs; a line without it is damaged."""

    event: Annotated[str, Field(max_length=40)]
    step: Count | None = None
    epoch: Count | None = None
    rank: Count | None = None
    attempt: Count = 0
    world_size: Ranks | None = None
    time: Annotated[float, Field(ge=0, le=1e11)] | None = None


_CHECK = TypeAdapter(_Event)


def parsed(text: bytes) -> dict[str, Any] | None:
    """The event of a line; None if somebody, or the disk, has changed it."""
    if is_damaged(text):
        return None
    try:
        _CHECK.validate_python(event := json.loads(text), strict=True)
    except (ValueError, RecursionError):
        return None
    if len(event) > MOST_FIELDS:
        return None
    return {name: value for name, value in event.items() if _fits(name, value)} | {
        name: value[:LONGEST_TEXT]
        for name, value in event.items()
        if isinstance(value, str) and len(value) > LONGEST_TEXT
    }


def is_number(value: Any) -> bool:
    """Whether it can be computed with."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -LARGEST < value < LARGEST  # not NaN either
    )


def _fits(name: str, value: Any) -> bool:
    if name in _Event.model_fields or value is None:
        return True
    if name in METRICS:
        return (
            isinstance(value, dict)
            and len(value) <= MOST_FIELDS
            and all(map(_metric, value.values()))
        )
    if name in TEXTS:
        return isinstance(value, str)
    if name == "cores":
        return isinstance(value, list) and all(type(core) is int for core in value)
    if name.endswith("_s") and name not in SIZES:
        return is_number(value) and 0 <= value <= LONGEST_S
    if name in SIZES or name.endswith("_bytes"):
        return is_number(value) and 0 <= value <= LARGEST_SIZE
    if isinstance(value, (int, float)):
        return isinstance(value, bool) or is_number(value)
    return isinstance(value, str) or len(brief(value, LONGEST_TEXT)) <= LONGEST_TEXT


def _metric(value: Any) -> bool:
    return value is None or is_number(value) or value in NOT_FINITE
