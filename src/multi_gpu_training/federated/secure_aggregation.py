"""A round with Flower's SecAgg+: the server gets masked vectors, whose masks cancel in the sum.

The four stages and the mod on the clients are Flower's. What is added here: clients send updates
instead of weights, as one vector, so that the range of the quantisation can be small; and clients
that drop out before they have shared their keys are forgotten, where Flower would ask the others
for shares that do not exist.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import (
    SecAggPlusWorkflow,
    WorkflowState,
)

from multi_gpu_training.federated.client_run import Weights
from multi_gpu_training.federated.federation_settings import (
    MODULUS,
    QUANTISATION,
    FederatedSettings,
)
from multi_gpu_training.federated.flower_client import CONFIG, flatten, unflatten
from multi_gpu_training.federated.message_traffic import CountedGrid
from multi_gpu_training.federated.rounds import RoundRecord, error_text


def secure_round(
    grid: CountedGrid,
    context: Context,
    settings: FederatedSettings,
    messages: Sequence[Message],
    old: Weights,
    fixed: Collection[str],
    names: Mapping[int, str],
    record: RoundRecord,
) -> Weights | None:
    """The weighted mean of the clients' weights, of which the server sees nothing else; None where
    too few clients stayed. `fixed`: those that nobody trains, which stay as they are."""
    order = sorted(old)
    nodes = [message.metadata.dst_node_id for message in messages]
    facts: dict[str, Any] = {
        **dict(messages[0].content.config_records[CONFIG]),
        "names": json.dumps(order),
        "shapes": json.dumps([list(old[name].shape) for name in order]),
        "types": json.dumps([str(old[name].dtype) for name in order]),
        "fixed": json.dumps(sorted(fixed)),
        "range": settings.secure_range,
        "max_samples": settings.most_samples,
    }
    parameters = ndarrays_to_parameters([flatten(old, order)])
    asked = _AskedClients(nodes, FitIns(parameters, facts))
    watched = _FailureGrid(grid, names, record)
    workflow = _Workflow(
        num_shares=1.0,  # every client holds a share of every other one's keys
        reconstruction_threshold=settings.secure_threshold,
        max_weight=float(settings.most_samples),
        clipping_range=settings.secure_range,
        quantization_range=QUANTISATION,
        modulus_range=MODULUS,
        timeout=settings.round_timeout_s,
    )
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: record.round}),
            MAIN_PARAMS_RECORD: parameters_to_arrayrecord(parameters, keep_input=True),
        }
    )
    plain = Context(context.run_id, context.node_id, context.node_config, state, context.run_config)
    legacy = LegacyContext(plain, strategy=asked)
    try:
        workflow(watched, legacy)
    except Exception as error:  # a masked vector of another length, say: nobody can tell whose
        record.left_out["secure aggregation"] = f"{type(error).__name__}: {error!s:.200}"
        return None
    if asked.mean is None:
        return None
    for node, result in asked.results.items():
        metrics = {k: float(v) for k, v in result.metrics.items() if isinstance(v, int | float)}
        record.counted[names[node]] = {"samples": result.num_examples, **metrics}
    record.rounding = quantisation_error(
        settings, [int(figures["samples"]) for figures in record.counted.values()]
    )
    trained = [name for name in order if name not in fixed]
    moved = flatten(old, trained) + asked.mean
    shapes = [list(old[name].shape) for name in trained]
    return {**old, **unflatten(moved, trained, shapes, [str(old[n].dtype) for n in trained])}


def quantisation_error(settings: FederatedSettings, samples: Sequence[int]) -> float:
    """The largest error of an element of the mean update: each client rounds to one of 2**22 steps
    over the range, and its weight to one of 2**22 steps up to max_samples."""
    weights = sum(count / settings.most_samples for count in samples)
    step = 2 * settings.secure_range / QUANTISATION
    by_weight = settings.secure_range * len(samples) / QUANTISATION
    return (len(samples) * step + by_weight) / weights


class _Workflow(SecAggPlusWorkflow):  # type: ignore[misc]
    def share_keys_stage(self, grid: Any, context: LegacyContext, state: WorkflowState) -> bool:
        """Flower's stage. Who left before the end of it has no masks in the sum."""
        enough = bool(super().share_keys_stage(grid, context, state))
        state.sampled_node_ids = set(state.active_node_ids)
        return enough


class _Node:
    """What Flower's workflow asks of a client's proxy."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.cid = str(node_id)


class _AskedClients:
    """What Flower's workflow asks of a strategy: whom to ask, and where the result goes."""

    def __init__(self, nodes: Sequence[int], asked: FitIns) -> None:
        self._nodes, self._asked = nodes, asked
        self.mean: np.ndarray[Any, Any] | None = None
        self.results: dict[int, FitRes] = {}

    def configure_fit(self, *_: Any) -> list[tuple[_Node, FitIns]]:
        return [(_Node(node), self._asked) for node in self._nodes]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[_Node, FitRes]], failures: Any
    ) -> tuple[Parameters, dict[str, Any]]:
        # Every result carries the mean: the single ones were never here.
        self.results = {node.node_id: result for node, result in results}
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return results[0][1].parameters, {}


class _FailureGrid:
    """Notes which clients failed at which stage of the protocol."""

    STAGES = ("setup", "key sharing", "training", "unmasking")

    def __init__(self, grid: CountedGrid, names: Mapping[int, str], record: RoundRecord) -> None:
        self._grid, self._names, self._record = grid, names, record
        self._stage = 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        waiting = {message.metadata.dst_node_id for message in sent}
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        stage = self.STAGES[min(self._stage, 3)]
        self._stage += 1
        for reply in replies:
            node = reply.metadata.src_node_id
            waiting.discard(node)
            if reply.has_error():
                self._record.left_out[self._names[node]] = f"{stage}: {error_text(reply)}"
        for node in waiting:
            self._record.left_out[self._names[node]] = f"{stage}: no answer in time"
        return replies
