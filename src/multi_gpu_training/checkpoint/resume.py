"""Everything that a checkpoint of a run holds, and how a run continues from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from multi_gpu_training.checkpoint.changed_settings import Change, RunDescription, table
from multi_gpu_training.checkpoint.integrity import fingerprint
from multi_gpu_training.checkpoint.live_state import LiveTensors
from multi_gpu_training.checkpoint.shards import fit_to
from multi_gpu_training.checkpoint.snapshot import Snapshot, by_file
from multi_gpu_training.checkpoint.store import CheckpointStore, read_verified
from multi_gpu_training.checkpoint.sync import CheckpointHosts, agree_on_newest, bring_to_all
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.sharding import by_rows, piece, whole
from multi_gpu_training.errors import CheckpointError
from multi_gpu_training.state_dicts import (
    Later,
    copied,
    from_text,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    packed,
    plain_name,
    set_random_state,
    taken_random_state,
    to_text,
)
from multi_gpu_training.training.callbacks import RunLog

Scope = Literal["replicated", "per_rank"]


class Stateful(Protocol):
    """Anything with PyTorch's two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@runtime_checkable
class Divisible(Protocol):
    """A state per rank that any number of ranks can take over from any other number."""

    def load_shares(self, states: list[dict[str, Any]]) -> None: ...


@runtime_checkable
class FollowsModel(Protocol):
    """A state that goes with the weights: it is kept in memory together with them, and begins anew
    from the weights of a checkpoint that does not hold it."""

    def kept(self) -> Callable[[], None]: ...

    def begin(self) -> None: ...


@runtime_checkable
class PartlySettled(Protocol):
    """A state with parts that no longer change, such as the epochs of the past. They may be
    `Later`, to be made plain data beside training, and `kept` need not copy them."""

    def state_to_save(self) -> dict[str, Any]: ...

    def kept(self) -> Callable[[], None]: ...


class TrainingState(Stateful, Protocol):
    """What trains: its place in the run, the model and the optimizer. Read when it is saved."""

    @property
    def step(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> Optimizer: ...

    def held_state(self) -> dict[str, Any]:
        """The state_dict of the model as this rank holds it: parameters may be split."""

    def read_ahead(self) -> None:
        """Find now what takes long in the next `state_dict`, which is of the same step."""


@dataclass(frozen=True)
class _Ahead:
    """Of a snapshot to come: the step it is of, and the random numbers' state."""

    step: int
    random: Later


_NOTHING: dict[str, Tensor] = {}


class RunState:
    """The state of a run: what trains, every rank's generators, and what was registered.

    `replicated` objects are equal on every rank and saved once. `per_rank` ones are saved for
    each rank and restored only on the same number of ranks, unless they are `Divisible`.
    """

    def __init__(
        self,
        training: TrainingState,
        placement: Placement,
        hosts: CheckpointHosts,
        settings: Callable[[], dict[str, Any]],
    ) -> None:
        self.training = training
        self.placement = placement
        self.hosts = hosts
        self.settings = settings
        self.description: RunDescription | None = None  # once there is an optimizer
        # How the model is rebuilt and fed, as plain data; equal on all ranks.
        self.model_description: dict[str, Any] = {}
        # Which tensors are saved as the model: its own, or an average of them.
        self.model_to_save: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state
        self._live = LiveTensors()
        self._ahead: _Ahead | None = None
        self._made_plain: tuple[Any, Later] | None = None
        self._registered: dict[str, tuple[Stateful, Scope]] = {}
        self._partly_settled: dict[str, Callable[[], dict[str, Any]]] = {}
        self._keep_themselves: dict[str, FollowsModel | PartlySettled] = {}
        self._resumed: dict[str, Any] | None = None

    def register(self, name: str, item: Stateful, scope: Scope = "replicated") -> None:
        """Save and restore `item` with the run; after a resume it is restored at once."""
        if name in self._registered:
            raise CheckpointError(f"state {name!r} is already registered; choose another name")
        self._registered[name] = (item, scope)
        # Looked at here alone: asking whether an object follows a protocol takes a while.
        if isinstance(item, (FollowsModel, PartlySettled)):
            self._keep_themselves[name] = item
        if isinstance(item, PartlySettled) and scope == "replicated":
            self._partly_settled[name] = item.state_to_save
        if self._resumed is not None:
            self._restore(name, self._resumed)

    def kept(self) -> Callable[[], None]:
        """Copy what is registered, in memory; calling the result puts it back."""
        followers = [item.kept() for item in self._keep_themselves.values()]
        states = {
            name: copied(item.state_dict())
            for name, (item, _) in self._registered.items()
            if name not in self._keep_themselves
        }

        def put_back() -> None:
            for name, state in states.items():
                self._registered[name][0].load_state_dict(copied(state))
            for follow in followers:
                follow()

        return put_back

    def snapshot(self, facts: dict[str, Any]) -> Snapshot:
        """Return the state as it is now; `facts` go into the manifest. Collective."""
        training, ahead, self._ahead = self.training, self._ahead, None
        if ahead is not None and ahead.step != training.step:
            ahead = None
        tensors, aliases, optimizer, extra = self._tensors(ahead)
        states: dict[Scope, dict[str, Any]] = {"replicated": {}, "per_rank": {}}
        for name, (item, scope) in self._registered.items():
            states[scope][name] = self._partly_settled.get(name, item.state_dict)()
        per_rank = {name: to_text(state) for name, state in states["per_rank"].items()}
        random = taken_random_state(self.placement.device) if ahead is None else ahead.random
        if self.placement.group is None:
            ranks: Any = [{"random": random, "registered": per_rank}]
        else:
            mine = {"random": random.make(), "registered": per_rank}
            ranks = self.placement.gather_json(mine)
        settings = self.settings()
        return Snapshot(
            step=training.step,
            epoch=training.epoch,
            model=tensors,
            aliases=aliases,
            optimizer=optimizer,
            state={
                "trainer": training.state_dict(),
                "extra": extra,
                "replicated": states["replicated"],
                "ranks": ranks,
                "config": Later(lambda: settings),
                **self._made_with(),
            },
            facts={"world_size": self.placement.dp_size, **facts},
            description=self.model_description,
        )

    def read_ahead(self) -> Mapping[str, Mapping[str, Tensor]] | None:
        """Find what takes long in a `snapshot` of this step; return the tensors it will hold, by
        file, or None if this rank cannot tell alone. The caller makes sure that until then nobody
        replaces a tensor, draws a random number or freezes a layer."""
        training, self._ahead = self.training, None
        own = training.held_state()
        if self.hosts.several or self.model_to_save(own) is not own:
            return None
        live = self._live.read(own, training.model, training.optimizer)
        if live is None:
            return None
        training.read_ahead()
        self._ahead = _Ahead(training.step, taken_random_state(self.placement.device))
        return by_file(live.model, live.optimizer.tensors, _NOTHING)

    def _tensors(
        self, ahead: _Ahead | None
    ) -> tuple[dict[str, Tensor], dict[str, str], Any, dict[str, Any]]:
        """The model's tensors, those that share memory, the optimizer and other model state."""
        training = self.training
        live = None if ahead is None else self._live.again(training.optimizer)
        if live is None:
            own = training.held_state()
            held = self.model_to_save(own)
            if not self.hosts.several:
                live = self._live.read(held, training.model, training.optimizer)
                if held is not own:  # tensors made for this save alone must not stay in memory
                    self._live = LiveTensors()
            if live is None:
                return self._read(held)
        return live.model, live.aliases, live.optimizer, {}

    def _made_with(self) -> dict[str, Any]:
        """What the run is made of, as plain data; that does not change."""
        if self.description is None:
            return {}
        facts = self.description.facts
        if self._made_plain is None or self._made_plain[0] is not facts:
            found = packed(facts)
            self._made_plain = facts, Later(lambda: found)
        return {"made_with": self._made_plain[1]}

    def _read(
        self, held: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, str], Any, dict[str, Any]]:
        """Model and optimizer where tensors may be split over ranks, or have to be gathered."""
        tensors, aliases, extra = model_state(held, piece)
        optimizer = optimizer_state(self.training.model, self.training.optimizer)
        # Every disk gets the whole state, so that any of them may be lost. Teams split tensors by
        # columns too, and files hold rows.
        entire = self.hosts.several or self.placement.team_size > 1
        for named in (tensors, *optimizer["state"].values()):
            for name, value in named.items():
                if isinstance(value, Tensor) and (entire or not by_rows(value)):
                    named[name] = whole(value)
        if self.hosts.several:
            self._take_buffers_of_main(tensors)
        return tensors, aliases, optimizer, extra

    def restore(self, snapshot: Snapshot, where: str) -> str | None:
        """Load a snapshot; `where` names it in errors. Return what the user should know."""
        self._ahead = None
        try:
            return self._load(snapshot, where)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            # Its hashes are right: it was written like this, by other code or to do harm.
            raise CheckpointError(
                f"{where} does not hold what this run needs ({type(error).__name__}: "
                f"{error!s:.300}); resume with the code that wrote it, or from another checkpoint",
                code="MGT702",
            ) from error

    def _load(self, snapshot: Snapshot, where: str) -> str | None:
        _check_counts(snapshot)
        training, notes = self.training, []
        model, optimizer = training.model, training.optimizer
        changes: list[Change] = []
        # The model first: another one says more about what went wrong than any setting.
        extra = snapshot.state["extra"]
        own = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
        saved = {n: fit_to(own.get(plain_name(n)), t) for n, t in snapshot.model.items()}
        load_model_state(model, saved, snapshot.aliases, extra, where)
        if self.description is not None:
            fresh = optimizer_state(model, optimizer)
            snapshot, changes = self.description.adapt(snapshot, fresh)
        state = snapshot.state
        for name, values in snapshot.optimizer["state"].items():
            parameter = own.get(plain_name(name))
            values.update({key: fit_to(parameter, value) for key, value in values.items()})
        load_optimizer_state(model, optimizer, snapshot.optimizer, where)
        training.load_state_dict(state["trainer"])
        if self.description is not None and changes:
            self.description.settle(snapshot.step)
            notes.append(
                f"settings changed since step {snapshot.step} was saved:\n{table(changes)}"
            )
        self._resumed = state
        ranks, world = state["ranks"], self.placement.dp_size
        # On another number of ranks the generators start afresh. Nothing is lost: what training
        # draws is derived from the step.
        if len(ranks) == world:
            set_random_state(ranks[self.placement.dp_rank]["random"], self.placement.device)
        else:
            notes.append(
                f"the checkpoint was written by {len(ranks)} ranks, now there are {world}: same "
                "samples in the same order"
            )
        for name in self._registered:
            self._restore(name, state)
        return "\n".join(notes) or None

    def _restore(self, name: str, state: dict[str, Any]) -> None:
        """Give a registered object its saved state, if there is one for it."""
        item, scope = self._registered[name]
        ranks, rank, world = state["ranks"], self.placement.dp_rank, self.placement.dp_size
        if scope == "replicated":
            if name in state["replicated"]:
                item.load_state_dict(state["replicated"][name])
            elif isinstance(item, FollowsModel):
                item.begin()
        elif len(ranks) == world:
            if name in ranks[rank]["registered"]:
                item.load_state_dict(from_text(ranks[rank]["registered"][name]))
        elif isinstance(item, Divisible):
            saved = [part["registered"] for part in ranks[rank::world]]
            item.load_shares([from_text(part[name]) for part in saved if name in part])

    def _take_buffers_of_main(self, tensors: dict[str, Tensor]) -> None:
        """Give every disk rank 0's buffers: BatchNorm's, for one, may differ between ranks."""
        for name in sorted(name for name, _ in self.training.model.named_buffers()):
            if name in tensors:
                tensors[name] = tensors[name].detach().to(self.placement.wire, copy=True)
                self.placement.broadcast_tensors([tensors[name]])


def _check_counts(snapshot: Snapshot) -> None:
    """Refuse counts that no training reaches. Adam takes the root of a power of its steps."""
    saved = snapshot.state["trainer"]
    if saved["step"] != snapshot.step or min(saved["epoch"], saved["position"]) < 0:
        raise ValueError(
            f"step {saved['step']} of epoch {saved['epoch']}, at batch {saved['position']}, in the "
            f"checkpoint of step {snapshot.step}"
        )
    for name, values in snapshot.optimizer["state"].items():
        step = values.get("step", 0)
        if isinstance(step, Tensor):  # on a device, looking at it would have the host wait
            step = step.item() if step.numel() == 1 and step.device.type == "cpu" else 0
        if isinstance(step, int | float) and step < 0:
            raise ValueError(f"the optimizer took {step:g} steps with {name}")


def locate(
    where: str, placement: Placement, hosts: CheckpointHosts, store: CheckpointStore, log: RunLog
) -> Path | None:
    """Find the checkpoint `where`, or the newest intact one for "auto". Collective.

    All ranks get the same one, each as its own disk has it. None if there is no checkpoint yet;
    if there are only damaged ones, that is an error.
    """
    if where != "auto":
        return bring_to_all(placement, hosts, store, Path(where))
    found = agree_on_newest(placement, hosts, store)
    for line in found.damaged:
        log.warning(line)
    for line in found.said:
        log.info(line)
    if found.path is None and found.damaged:
        raise CheckpointError(
            f"no intact checkpoint in {store.folder}: {'; '.join(found.damaged)}", code="MGT701"
        )
    return found.path


def read_together(path: Path, placement: Placement, store: CheckpointStore) -> Snapshot:
    """Load a checkpoint on every rank; each file is hashed once per host, not once per rank.

    Of the ranks that see the same files on the same host, the lowest verifies them; nobody reads
    a checkpoint in which any of them found damage. Collective.
    """
    seen = [placement.identity.host, fingerprint(path)]
    every = placement.gather_json(seen)
    verifies = every.index(seen) == placement.dp_rank
    problem = store.verifier.damage(path) if verifies else None
    problems = [line for line in placement.gather_json(problem) if line]
    if problems:
        raise CheckpointError(
            f"{path} is damaged: {problems[0]}; resume from another checkpoint", code="MGT701"
        )
    return read_verified(path)
