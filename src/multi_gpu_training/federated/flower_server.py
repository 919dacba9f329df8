"""The ServerApp: asks clients, judges their replies, averages with a Flower strategy, and saves.

    FOLDER/federation.json   what the federation does, and its name
    FOLDER/checkpoints/      the weights after each round, with the server's optimizer and history
    FOLDER/rounds.jsonl      one line per round, for people and programs
    FOLDER/report.html

A reply counts if it comes in time, has the model's names and shapes, is finite, and is not much
longer than those of the others. One that does not is named and left out. A round with too few
replies is repeated from the same weights; after `retries` times the server ends, to be resumed.
"""

from __future__ import annotations

import json
import math
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, Strategy

from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.checkpoint.snapshot import Snapshot
from multi_gpu_training.checkpoint.store import CheckpointStore, load
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.federated.client_run import Weights
from multi_gpu_training.federated.federation_settings import FederatedSettings
from multi_gpu_training.federated.flower_client import (
    ARRAYS,
    CLIENT,
    CONFIG,
    KINDS,
    METRICS,
    SAMPLES,
    SECONDS,
    changed,
    from_record,
    to_record,
)
from multi_gpu_training.federated.message_traffic import CountedGrid
from multi_gpu_training.federated.privacy import (
    STATISTICS,
    DPStrategy,
    clip,
    only_the_server_clips,
    private_strategy,
    refuse_statistics,
)
from multi_gpu_training.federated.rounds import RoundRecord, describe, error_text, reasons
from multi_gpu_training.federated.secure_aggregation import secure_round
from multi_gpu_training.safe_files import make_private, read_json, write_atomically
from multi_gpu_training.safe_output import printable

FILE, ROUNDS = "federation.json", "rounds.jsonl"
LOOK_EVERY_S = 0.5
# Settings that a resumed federation may have otherwise.
MAY_CHANGE = {
    *("rounds", "retries", "min_replies", "round_timeout_s", "connect_timeout_s"),
    *("max_update_ratio", "max_update_norm", "evaluate_every", "dp_max_epsilon"),
}


class FederationFailed(MultiGPUError):
    """The federation ended before its last round, and can be resumed."""

    code = "MGT800"


@dataclass
class ClientUpdate:
    """A reply that may count."""

    name: str
    weights: Weights
    samples: int
    metrics: dict[str, float]
    norm: float


@dataclass
class ServerState:
    """What the server must not lose: the weights, its optimizer's state, and what happened."""

    federation: str
    number: int = 0  # rounds that are done
    weights: Weights = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    moments: dict[str, Weights] = field(default_factory=dict)  # of FedAdam and FedAvgM
    privacy: dict[str, Any] = field(default_factory=dict)  # of the accountant
    frozen: list[str] = field(default_factory=list)  # weights that no client trains
    buffers: list[str] = field(default_factory=list)  # such as BatchNorm's statistics


class FederatedServer:
    """All rounds of one federation. `say` gets a line per round."""

    def __init__(
        self,
        settings: FederatedSettings,
        folder: Path,
        resume: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.settings, self.folder = settings, folder
        self.say: Callable[[str], None] = lambda line: say(printable(line))  # clients write in it
        make_private(folder)
        self._lock = RunLock(folder)  # one server at a time
        self.store = CheckpointStore(folder / "checkpoints", keep_last=3)
        self.state = self._opened(resume)
        self.strategy = make_strategy(settings)
        self._restore_strategy()
        self.names: dict[int, str] = {}  # node -> client

    # The folder

    def _opened(self, resume: bool) -> ServerState:
        file = self.folder / FILE
        if file.exists() and not resume:
            raise ConfigError(
                f"{self.folder} already holds a federation; continue it with --resume, or choose "
                "another --save-dir",
                code="MGT106",
            )
        if not file.exists():
            federation = uuid.uuid4().hex[:12]
            facts = {"federation": federation, "settings": self.settings.model_dump()}
            write_atomically(file, json.dumps(facts, indent=1))
            return ServerState(federation)
        begun = read_json(file, dict[str, Any])
        federation = str(begun["federation"])
        self._compare(FederatedSettings(**begun["settings"]))
        path, damaged = self.store.newest_intact()
        for line in damaged:
            self.say(f"warning: {line}")
        if path is None:
            return ServerState(federation)
        found = load(path)
        arrays = {name: tensor.numpy() for name, tensor in found.model.items()}
        moments = {
            kind: {name: tensor.numpy() for name, tensor in tensors.items()}
            for kind, tensors in found.optimizer.items()
        }
        told = found.state
        self.say(f"resuming after round {found.step}")
        statistics = [name for name in arrays if name.endswith(STATISTICS)]
        return ServerState(
            *(federation, found.step, arrays, told["history"], moments, told["privacy"]),
            *(told.get("frozen", []), told.get("buffers", statistics)),
        )

    def _compare(self, before: FederatedSettings) -> None:
        """Refuse settings that would make it another training."""
        then, now = before.model_dump(), self.settings.model_dump()
        changed = [name for name in then if then[name] != now[name]]
        refused = [
            f"{self.folder} was begun with {name}={then[name]}, not {now[name]}; resume it with "
            f"--{name.replace('_', '-')} {then[name]}"
            for name in changed
            if name not in MAY_CHANGE
        ]
        if refused:
            raise ConfigError(refused)
        for name in changed:
            self.say(f"changed since the federation began: {name}={now[name]}, was {then[name]}")

    def _save(self) -> None:
        """When this returns the round is safe: from now on it will not be asked for again."""
        state = self.state
        inner = plain_strategy(self.strategy)
        if isinstance(inner, FedAdam) and inner.m_t is not None and inner.v_t is not None:
            state.moments = {"m": dict(inner.m_t), "v": dict(inner.v_t)}
        if isinstance(inner, FedAvgM) and inner.momentum_vector is not None:
            state.moments = {"m": dict(zip(state.weights, inner.momentum_vector, strict=True))}
        if isinstance(self.strategy, DPStrategy) and self.strategy.accountant is not None:
            state.privacy = self.strategy.accountant.state_dict()
        self.store.keep(
            self.store.save(
                Snapshot(
                    step=state.number,
                    epoch=state.number,
                    model=_tensors(state.weights),
                    aliases={},
                    optimizer={kind: _tensors(w) for kind, w in state.moments.items()},
                    state={
                        "config": {"recipe": "federated"},
                        "extra": {},
                        "history": state.history,
                        "privacy": state.privacy,
                        "frozen": state.frozen,
                        "buffers": state.buffers,
                    },
                )
            ),
            best=False,
        )
        lines = "".join(json.dumps(entry) + "\n" for entry in state.history)
        write_atomically(self.folder / ROUNDS, lines)

    def _restore_strategy(self) -> None:
        inner, state = plain_strategy(self.strategy), self.state
        if isinstance(inner, FedAdam) and state.moments:
            inner.m_t, inner.v_t = state.moments["m"], state.moments["v"]
        if isinstance(inner, FedAvgM) and state.moments:
            inner.momentum_vector = [state.moments["m"][name] for name in state.weights]
        if isinstance(self.strategy, DPStrategy) and state.privacy:
            assert self.strategy.accountant is not None
            # The limit may have been changed; Flower wants the one that it has now.
            limit = {"max_epsilon": self.settings.dp_max_epsilon}
            config = {**state.privacy["config"], **limit}
            self.strategy.accountant.load_state_dict({**state.privacy, "config": config})

    # The rounds

    def run(self, grid: Grid, context: Context) -> ServerState:
        """Train the rounds that are left, and let go of the folder."""
        try:
            return self._run(CountedGrid(grid), context)
        finally:
            self._lock.release()

    def _run(self, counted: CountedGrid, context: Context) -> ServerState:
        settings, state = self.settings, self.state
        self._connect(counted, settings.clients)
        if not state.weights:
            state.weights = self._first_weights(counted)
            self._save()
        if settings.dp != "off":
            refuse_statistics(state.weights)
        while state.number < settings.rounds:
            record = self._round(counted, context)
            state.number += 1
            state.history.append(vars(record))
            last = state.number == settings.rounds
            if settings.dp != "off":
                self._save()  # clients are about to see these weights: they must be accounted for
            if state.number % settings.evaluate_every == 0 or last:
                self._evaluate(counted, record)
            self._save()
            self.say(describe(record, settings.rounds))
        return state

    def _round(self, grid: CountedGrid, context: Context) -> RoundRecord:
        """One round, repeated until enough clients have answered well."""
        settings, number = self.settings, self.state.number + 1
        for attempt in range(settings.retries + 1):
            nodes = self._choose(grid, number, attempt)
            record = RoundRecord(number, attempt, [self.names[node] for node in nodes])
            begun, before = time.monotonic(), (grid.bytes_out, grid.bytes_in)
            new = self._attempt(grid, context, nodes, record)
            record.seconds = time.monotonic() - begun
            record.bytes_out = grid.bytes_out - before[0]
            record.bytes_in = grid.bytes_in - before[1]
            if new is not None:
                old = self.state.weights
                record.update_norm = distance(new, old)
                self.state.weights = new
                return record
            self.say(
                f"round {number} failed: {len(record.counted)} of {len(nodes)} updates count, and "
                f"{self._needed(len(nodes))} are needed{reasons(record)}"
            )
        raise FederationFailed(
            f"round {number} failed {settings.retries + 1} times; see {self.folder / ROUNDS} for "
            "the rounds before, and continue with --resume when the clients are well"
        )

    def _needed(self, asked: int) -> int:
        if self.settings.dp != "off":
            return asked  # the noise is made for all of them
        return self.settings.needed_of(asked)

    def _attempt(
        self, grid: CountedGrid, context: Context, nodes: list[int], record: RoundRecord
    ) -> Weights | None:
        """The new weights, or None where too few updates count."""
        settings, old = self.settings, self.state.weights
        arrays, config = to_record(old), self._config("train", record.round)
        inner = plain_strategy(self.strategy)
        if isinstance(inner, FedAvgM):
            # It would go on from its own copy, which a resumed server does not have.
            inner.current_arrays = arrays
        private = settings.dp != "off"
        # With --dp, what is not trained must not get noise; with --secure, it need not be masked.
        fixed = {*self.state.frozen, *(self.state.buffers if private else ())}
        try:
            messages = list(
                self.strategy.configure_train(record.round, arrays, config, grid.only(nodes))
            )
        except PrivacyBudgetExhausted as error:
            raise FederationFailed(
                f"round {record.round} would take epsilon above --dp-max-epsilon "
                f"{settings.dp_max_epsilon:g}, so the training ends here: {error}"
            ) from None
        if settings.dp == "server":
            only_the_server_clips(messages)
        if settings.secure:
            mean = secure_round(grid, context, settings, messages, old, fixed, self.names, record)
            good = [] if mean is None else [_as_reply(mean, old)]
            enough = bool(good) and len(record.counted) >= self._needed(len(nodes))
        else:
            replies = grid.ask(messages, settings.round_timeout_s)
            updates = self._judge(replies, nodes, record, fixed if private else ())
            enough = len(updates) >= self._needed(len(nodes))
            record.drift = drift(updates, old) if enough else None
            if private:  # one client, one vote: else the noise is too small
                trained = {name: value for name, value in old.items() if name not in fixed}
                clipped = [clip(u.weights, trained, settings.dp_clip) for u in updates]
                good = [_as_reply(weights, trained) for weights in clipped]
            else:
                good = [_as_reply(u.weights, old, u.samples) for u in updates]
                fixed = {
                    n for n in fixed if all(np.array_equal(u.weights[n], old[n]) for u in updates)
                }
        np.random.seed()  # Flower draws the noise of --dp from here: nobody must know its seed
        found, _ = self.strategy.aggregate_train(record.round, good if enough else [])
        if found is None or not enough:
            return None
        if isinstance(self.strategy, DPStrategy):
            spent = self.strategy.privacy_spent()
            record.epsilon = None if spent is None else spent.epsilon
        # Flower's server optimizers compute in float64: keep the model's types.
        new = {name: value.astype(old[name].dtype) for name, value in from_record(found).items()}
        if isinstance(inner, FedAdam | FedAvgM):
            new |= mean_buffers(good, self.state.buffers)
        new |= {name: old[name] for name in fixed}  # a mean of equal numbers is rounded
        if not all(np.isfinite(value).all() for value in new.values()):
            raise FederationFailed(
                f"round {record.round} gave weights that are not finite; lower --server-lr or "
                "--server-momentum"
            )
        return new

    def _judge(
        self,
        replies: Iterable[Message],
        nodes: Sequence[int],
        record: RoundRecord,
        fixed: Collection[str],
    ) -> list[ClientUpdate]:
        """The updates that count, in the order of their clients' names; why the others do not.
        `fixed`: weights that must be as they were."""
        updates: list[ClientUpdate] = []
        old = self.state.weights
        waiting = {node: self.names[node] for node in nodes}
        for message in replies:
            node = message.metadata.src_node_id
            name = waiting.pop(node, None)
            if name is None:
                continue  # a second answer, or an answer of somebody who was not asked
            found = read_update(message, name, old, self.settings.max_samples)
            moved = None if isinstance(found, str) else changed(found.weights, old, fixed)
            if isinstance(found, str):
                record.left_out[name] = found
            elif moved is not None:
                record.left_out[name] = (
                    f"{moved} was frozen, or a buffer, when the federation began, and has changed; "
                    "--dp cannot average it"
                )
            else:
                updates.append(found)
        for name in waiting.values():
            record.left_out[name] = f"no answer within {self.settings.round_timeout_s:g} s"
        updates.sort(key=lambda update: update.name)  # sums do not depend on who was faster
        kept = []
        for update in updates:
            problem = self._too_long(update, updates)
            if problem is not None:
                record.left_out[update.name] = problem
                continue
            kept.append(update)
            figures = {"samples": update.samples, "norm": update.norm, **update.metrics}
            record.counted[update.name] = figures
        return kept

    def _too_long(self, update: ClientUpdate, updates: list[ClientUpdate]) -> str | None:
        most = self.settings.max_update_norm
        if most is not None and update.norm > most:
            return f"its update has norm {update.norm:.3g}, above --max-update-norm {most:g}"
        middle = float(np.median([other.norm for other in updates]))
        ratio = self.settings.max_update_ratio
        # Of two, nobody can tell which one is wrong.
        if len(updates) > 2 and update.norm > ratio * middle > 0:
            return (
                f"its update has norm {update.norm:.3g}, more than {ratio:g} times the median "
                f"{middle:.3g} (--max-update-ratio)"
            )
        return None

    # Clients

    def _connect(self, grid: CountedGrid, least: int) -> list[int]:
        """Wait for clients and learn their names; the nodes that are there, by name."""
        deadline = time.monotonic() + self.settings.connect_timeout_s
        while True:
            online = list(grid.get_node_ids())
            self._ask_names(grid, [node for node in online if node not in self.names])
            known = sorted(
                (node for node in online if node in self.names), key=self.names.__getitem__
            )
            if len(known) >= least:
                return known
            if time.monotonic() > deadline:
                raise FederationFailed(
                    f"{len(known)} clients are connected and {least} are needed; continue with "
                    "--resume when they are there"
                )
            time.sleep(LOOK_EVERY_S)

    def _ask_names(self, grid: CountedGrid, nodes: list[int]) -> None:
        if not nodes:
            return
        record = RecordDict({CONFIG: self._config("hello", 0)})
        messages = [Message(record, node, MessageType.QUERY) for node in nodes]
        for reply in grid.ask(messages, self.settings.connect_timeout_s):
            if reply.has_error():
                continue
            node = reply.metadata.src_node_id
            told = reply.content.config_records.get(CLIENT, {})
            name = printable(str(told.get("name", f"client {node}")))[:100]
            taken = [other for other, known in self.names.items() if known == name]
            for other in taken:
                if other in set(grid.get_node_ids()):
                    self.say(f"warning: two clients are called {name}; give them --name")
                    name = f"{name} ({node})"
                else:
                    del self.names[other]  # it has come back under another number
            self.names[node] = name

    def _choose(self, grid: CountedGrid, number: int, attempt: int) -> list[int]:
        """The clients of a round: a pure function of the seed, the round and who is there."""
        settings = self.settings
        least = settings.sampled if settings.dp != "off" else settings.needed
        known = self._connect(grid, max(least, 3 if settings.secure else 1))
        count = min(len(known), settings.sampled)
        draw = random.Random(f"{settings.seed}/{number}/{attempt}")
        return sorted(draw.sample(known, count), key=self.names.__getitem__)

    def _first_weights(self, grid: CountedGrid) -> Weights:
        """Those of the untrained model, from the first client that can build it."""
        record = RecordDict({CONFIG: self._config("init", 0)})
        reasons = []
        for node in self._connect(grid, 1):
            message = Message(record, node, MessageType.QUERY)
            for reply in grid.ask([message], self.settings.round_timeout_s):
                if reply.has_error():
                    reasons.append(f"{self.names[node]}: {error_text(reply)}")
                elif ARRAYS in reply.content.array_records:
                    weights = from_record(reply.content.array_records[ARRAYS])
                    told = reply.content.config_records.get(CLIENT, {})
                    kinds = json.loads(str(told.get(KINDS, "{}")))
                    self.state.frozen = [n for n in kinds.get("frozen", []) if n in weights]
                    self.state.buffers = [n for n in kinds.get("buffers", []) if n in weights]
                    return weights
                else:
                    reasons.append(f"{self.names[node]}: its reply has no weights")
        raise FederationFailed("no client could build its model: " + "; ".join(reasons))

    def _config(self, task: str, number: int) -> ConfigRecord:
        return ConfigRecord(
            {
                "task": task,
                "federation": self.state.federation,
                "number": number,
                "facts": json.dumps(self.settings.for_clients()),
            }
        )

    def _evaluate(self, grid: CountedGrid, record: RoundRecord) -> None:
        """Metrics of the new weights on the validation data of all clients that are there."""
        nodes = self._connect(grid, 1)
        arrays, config = to_record(self.state.weights), self._config("evaluate", record.round)
        messages = self.strategy.configure_evaluate(record.round, arrays, config, grid.only(nodes))
        good = []
        for reply in grid.ask(list(messages), self.settings.round_timeout_s):
            name = self.names.get(reply.metadata.src_node_id, "?")
            if reply.has_error():
                record.left_out.setdefault(name, f"evaluation: {error_text(reply)}")
                continue
            samples = _metrics(reply).get(SAMPLES)
            if not isinstance(samples, int) or samples < 0:
                why = f"evaluation: its number of samples is {samples!r:.50}"
                record.left_out.setdefault(name, why)
            elif samples > 0:  # without validation data it has no say
                good.append(reply)
        good.sort(key=lambda reply: self.names[reply.metadata.src_node_id])
        _keep_common_metrics(good)
        found = self.strategy.aggregate_evaluate(record.round, good) if good else None
        metrics = dict(found or {})
        metrics.pop(SECONDS, None)
        record.metrics = {name: float(value) for name, value in metrics.items()}


def make_strategy(settings: FederatedSettings) -> Strategy:
    """Flower's strategy. Who takes part is decided before it is asked."""
    everyone: dict[str, Any] = {
        "fraction_train": 1.0,
        "fraction_evaluate": 1.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
        "weighted_by_key": SAMPLES,
        "arrayrecord_key": ARRAYS,
        "configrecord_key": CONFIG,
    }
    if settings.strategy == "fedprox":
        found: FedAvg = FedProx(**everyone, proximal_mu=settings.mu)
    elif settings.strategy == "fedavgm":
        found = FedAvgM(**everyone, server_momentum=settings.server_momentum)
    elif settings.strategy == "fedadam":
        found = FedAdam(**everyone, eta=settings.server_lr)
    else:
        found = FedAvg(**everyone)
    return found if settings.dp == "off" else private_strategy(found, settings)


def plain_strategy(strategy: Strategy) -> Strategy:
    return strategy.strategy if isinstance(strategy, DPStrategy) else strategy


# Replies


def read_update(
    message: Message, name: str, old: Weights, most_samples: int | None
) -> ClientUpdate | str:
    """What a client sent, or why it cannot count. Nothing in it is trusted."""
    if message.has_error():
        return error_text(message)
    try:
        record = message.content.array_records[ARRAYS]
        metrics = dict(message.content.metric_records[METRICS])
        weights = from_record(record)
    except Exception as error:  # a reply may hold anything
        return f"its reply cannot be read ({type(error).__name__}: {error!s:.100})"
    if set(weights) != set(old):
        return f"its update has other names: {sorted(set(weights) ^ set(old))[:3]}"
    for key, value in weights.items():
        if value.shape != old[key].shape:
            return f"{key} has shape {value.shape} instead of {old[key].shape}"
        if value.dtype != old[key].dtype:
            return f"{key} is {value.dtype} instead of {old[key].dtype}"
        if not np.isfinite(value).all():
            return f"{key} is not finite"
    samples = metrics.pop(SAMPLES, None)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        return f"its number of samples is {samples!r:.50}"
    if most_samples is not None and samples > most_samples:
        return f"it claims {samples} samples, above --max-samples {most_samples}"
    numbers = {key: float(value) for key, value in metrics.items() if _number(value)}
    norm = distance(weights, old)
    if not math.isfinite(norm):
        return "its update is too large for a number"
    return ClientUpdate(name, weights, samples, numbers, norm)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _as_reply(weights: Weights, order: Weights, weight: int = 1) -> Message:
    """What the strategy gets to see: weights and their weight, nothing else."""
    metrics = MetricRecord({SAMPLES: weight})
    # In the server's order: Flower's server momentum goes by position.
    arrays = to_record({name: weights[name] for name in order})
    content = RecordDict({ARRAYS: arrays, METRICS: metrics})
    return Message(content, 0, MessageType.TRAIN)


def _keep_common_metrics(replies: list[Message]) -> None:
    """Flower averages replies that have the same metrics."""
    if not replies:
        return
    records = [{k: v for k, v in _metrics(reply).items() if _number(v)} for reply in replies]
    common = set.intersection(*(set(record) for record in records))
    for reply, record in zip(replies, records, strict=True):
        metrics = {k: v for k, v in record.items() if k in common}
        reply.content = RecordDict({METRICS: MetricRecord(metrics)})


def _metrics(reply: Message) -> dict[str, Any]:
    return dict(reply.content.metric_records.get(METRICS, {}))


def mean_buffers(replies: Sequence[Message], names: Collection[str]) -> Weights:
    """The clients' mean of BatchNorm's statistics and the like. A server optimizer would take them
    for weights, and make variances negative."""
    total = sum(reply.content.metric_records[METRICS][SAMPLES] for reply in replies)
    found: Weights = {}
    for reply in replies:
        share = reply.content.metric_records[METRICS][SAMPLES] / total
        for name, array in reply.content.array_records[ARRAYS].items():
            if name in names:
                value = array.numpy()
                found[name] = found.get(name, np.zeros_like(value)) + share * value
    return found


# Figures


def distance(some: Weights, others: Weights) -> float:
    """The norm of the difference, over all weights."""
    with np.errstate(over="ignore"):
        total = sum(
            float(np.square(some[name].astype(np.float64) - others[name]).sum()) for name in others
        )
    return math.sqrt(total)


def drift(updates: Sequence[ClientUpdate], old: Weights) -> float:
    """How far clients went apart: their mean distance from the mean of their weights, as a part of
    how far that mean moved."""
    count = sum(update.samples for update in updates)
    mean: Weights = {
        name: np.sum([u.weights[name].astype(np.float64) * (u.samples / count) for u in updates], 0)
        for name in old
    }
    moved = distance(mean, old)
    apart = [distance(update.weights, mean) for update in updates]
    return float(np.mean(apart)) / moved if moved else 0.0


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
