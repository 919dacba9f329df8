"""The ClientApp: Flower's messages in, rounds of this client's run out.

What leaves a client in the clear, also under SecAgg+: its name, its number of samples, its training
and validation metrics, and how long it took.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins
from numpy.typing import NDArray

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.federated.client_run import (
    ClientSetup,
    RoundFailed,
    RoundResult,
    RoundTask,
    Weights,
    do_round,
)

ARRAYS, CONFIG, METRICS, CLIENT = "arrays", "config", "metrics", "client"
SAMPLES, SECONDS = "num-examples", "seconds"
KINDS = "kinds"  # of the untrained model's weights: frozen parameters, buffers
CLIPPING = "clipping_norm"  # as Flower's wrapper for clipping by clients calls it


def make_client_app(setup_of: Callable[[Context], ClientSetup]) -> ClientApp:
    """A ClientApp for the client that `setup_of` finds in Flower's context."""

    def guard(message: Message, context: Context, call_next: Any) -> Message:
        """Choose the mod by the message; a client that wants SecAgg+ answers nothing else."""
        if message.metadata.message_type != MessageType.TRAIN:
            return _message(call_next(message, context))
        if RECORD_KEY_CONFIGS in message.content.config_records:
            return _message(secaggplus_mod(message, context, call_next))
        if setup_of(context).require_secure:
            raise ConfigError(
                "the server asks for this client's update in the clear, and the client was started "
                "with --require-secure; start the server with --secure"
            )
        if CLIPPING in message.content.config_records.get(CONFIG, {}):
            return clipped(message, context, call_next)
        return _message(call_next(message, context))

    app = ClientApp(mods=[guard])

    def hello(message: Message, context: Context) -> Message:
        """Tell the name; with task=init also the weights of the untrained model."""
        setup = setup_of(context)
        content = RecordDict({CLIENT: ConfigRecord({"name": setup.name})})
        config = message.content.config_records[CONFIG]
        if config["task"] == "init":
            found = do_round(setup, _task("init", config, {}))
            content[ARRAYS] = to_record(found.weights)
            content[CLIENT][KINDS] = json.dumps(dict(found.kinds))
        return Message(content, reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        setup, content = setup_of(context), message.content
        weights = from_record(content.array_records[ARRAYS])
        found = do_round(setup, _task("evaluate", content.config_records[CONFIG], weights))
        return Message(_reply(setup, found), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        setup, content = setup_of(context), message.content
        if RECORD_KEY_CONFIGS in content.config_records:
            return Message(_masked_round(setup, content), reply_to=message)
        weights = from_record(content.array_records[ARRAYS])
        found = do_round(setup, _task("train", content.config_records[CONFIG], weights))
        reply = _reply(setup, found)
        # In the server's order: Flower's clipping goes by position.
        reply[ARRAYS] = to_record({name: found.weights[name] for name in weights})
        return Message(reply, reply_to=message)

    app.query()(hello)
    app.evaluate()(evaluate)
    app.train()(train)
    return app


def clipped(message: Message, context: Context, call_next: Any) -> Message:
    """Flower's clipping of the update, which divides by its norm."""
    reply = _message(call_next(message, context))
    if reply.has_error():
        return reply
    sent, found = message.content.array_records[ARRAYS], reply.content.array_records[ARRAYS]
    if all(np.array_equal(sent[name].numpy(), array.numpy()) for name, array in found.items()):
        return reply
    return _message(fixedclipping_mod(message, context, lambda *_: reply))


def _message(found: Any) -> Message:
    assert isinstance(found, Message)
    return found


def _task(task: str, config: Any, weights: Weights) -> RoundTask:
    facts = json.loads(str(config["facts"]))
    return RoundTask(task, str(config["federation"]), int(config["number"]), facts, weights)


def _reply(setup: ClientSetup, found: RoundResult) -> RecordDict:
    numbers = {SAMPLES: found.samples, SECONDS: found.seconds, **found.metrics}
    return RecordDict({METRICS: MetricRecord(numbers), CLIENT: ConfigRecord({"name": setup.name})})


# SecAgg+


def _masked_round(setup: ClientSetup, content: RecordDict) -> RecordDict:
    """Train, and give Flower's mod the update as one vector, which it masks before it leaves."""
    asked = recorddict_to_fitins(content, keep_input=True)
    names, shapes = json.loads(str(asked.config["names"])), json.loads(str(asked.config["shapes"]))
    flat = parameters_to_ndarrays(asked.parameters)[0]
    weights = unflatten(flat, names, shapes, json.loads(str(asked.config["types"])))
    found = do_round(setup, _task("train", asked.config, weights))
    fixed = set(json.loads(str(asked.config["fixed"])))
    problem = changed(found.weights, weights, fixed)
    if problem is not None:
        raise RoundFailed(f"{problem} was frozen when the federation began, and has changed")
    names = [name for name in names if name not in fixed]
    update = flatten(found.weights, names) - flatten(weights, names)
    refuse_unmaskable(
        update, found.samples, float(asked.config["range"]), int(asked.config["max_samples"])
    )
    numbers: dict[str, Any] = {SECONDS: found.seconds, **found.metrics, "name": setup.name}
    reply = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([update]), found.samples, numbers)
    return fitres_to_recorddict(reply, keep_input=True)


def refuse_unmaskable(update: NDArray[Any], samples: int, range_: float, max_samples: int) -> None:
    """Raise where Flower's mod would clip or overflow, which nobody could see in the sum."""
    if not np.isfinite(update).all():
        raise RoundFailed("the update is not finite")
    if samples > max_samples:
        raise RoundFailed(
            f"{samples} samples, and SecAgg+ was set up for {max_samples}; start the server with "
            f"--max-samples {samples}"
        )
    largest = float(np.abs(update).max(initial=0.0))
    if largest > range_:
        raise RoundFailed(
            f"an element of the update is {largest:.3g}, and SecAgg+ holds up to {range_:g}; start "
            "the server with a larger --secure-range"
        )


def flatten(weights: Weights, names: list[str]) -> NDArray[np.float64]:
    return np.concatenate([weights[name].ravel().astype(np.float64) for name in names])


def unflatten(
    flat: NDArray[Any], names: list[str], shapes: list[list[int]], types: list[str]
) -> Weights:
    found, start = {}, 0
    for name, shape, kind in zip(names, shapes, types, strict=True):
        size = int(np.prod(shape))
        found[name] = flat[start : start + size].reshape(shape).astype(kind)
        start += size
    return found


# Records


def changed(weights: Weights, before: Weights, names: Collection[str]) -> str | None:
    """The first of these that is not as it was."""
    found = (name for name in sorted(names) if not np.array_equal(weights[name], before[name]))
    return next(found, None)


def to_record(weights: Weights) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in weights.items()})


def from_record(record: ArrayRecord) -> Weights:
    return {name: array.numpy() for name, array in record.items()}


def deployed_setup(context: Context) -> ClientSetup:
    """The client of a SuperNode that `mgt federated client` started."""
    return ClientSetup.load(Path(str(context.node_config["setup"])))
