"""Keeps a run's state safe while it trains, and brings it back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import CheckpointError, ConfigError, NonFiniteLossError
from multi_gpu_training.monitoring.events import StructuredLogger
from multi_gpu_training.reliability.checkpoint import CheckpointStore
from multi_gpu_training.reliability.codec import from_text, to_text
from multi_gpu_training.reliability.disks import Disks, one_disk
from multi_gpu_training.reliability.passing import PassedOver
from multi_gpu_training.reliability.policies import RESTART, ROLLBACK, STOP, Policy, judge
from multi_gpu_training.reliability.saver import Saver
from multi_gpu_training.reliability.snapshot import Snapshot, load
from multi_gpu_training.reliability.state import (
    keep_tensors,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    random_state,
    set_random_state,
)
from multi_gpu_training.reliability.transfer import agree, bring
from multi_gpu_training.training.reminder import leave_word
from multi_gpu_training.training.trainer import MultiGPUTrainer

Scope = Literal["replicated", "per_rank"]


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@runtime_checkable
class Divisible(Protocol):
    """A state per rank that other ranks can take over: what several had, any number may have."""

    def load_shares(self, states: list[dict[str, Any]]) -> None: ...


class FaultToleranceManager:
    """Checkpoints of one run: when they are due, what is in them, where to go on.

    Objects registered with `register` are saved and restored with the model: `replicated` ones
    are alike on every rank and saved once, `per_rank` ones are saved for each rank and restored
    only on the same number of ranks, unless they are `Divisible`.
    """

    def __init__(
        self,
        config: MultiGPUConfig,
        placement: Placement,
        trainer: MultiGPUTrainer,
        logger: StructuredLogger,
        folder: Path,
        disks: Disks | None = None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.trainer = trainer
        self.logger = logger
        self.store = CheckpointStore(folder, config.keep_last, keep_best=config.keep_best)
        self.disks = disks or one_disk(placement)
        self.saver = Saver(config, placement, logger, self.store, self.disks)
        self._registered: dict[str, tuple[Stateful, Scope]] = {}
        self._resumed: dict[str, Any] | None = None
        self.rollbacks = 0
        self.passed_over = PassedOver()
        self.register("passed_over", self.passed_over)

    def register(self, name: str, item: Stateful, scope: Scope = "replicated") -> None:
        if name in self._registered:
            raise CheckpointError(f"state {name!r} is registered already; choose another name")
        self._registered[name] = (item, scope)
        if self._resumed is not None:
            self._restore(name)

    def kept(self) -> Callable[[], None]:
        """What is registered, as it is now; the result puts it back. Nothing is written."""
        states = {
            name: copy.deepcopy(item.state_dict()) for name, (item, _) in self._registered.items()
        }

        def put_back() -> None:
            for name, state in states.items():
                self._registered[name][0].load_state_dict(copy.deepcopy(state))

        return put_back

    def due(self, step: int) -> bool:
        return self.config.enable_fault_tolerance and step % self.config.checkpoint_frequency == 0

    def save(
        self, facts: dict[str, Any] | None = None, best: bool = False, wait: bool = True
    ) -> Path:
        """Save the state as it is now; the path it has, or will have. Collective.

        With `wait` it is safe on the disk when this returns; see `Saver.save`.
        """
        return self.saver.save(lambda: self._snapshot(facts or {}), best, wait)

    def find(self, where: str | None) -> Path | None:
        """The checkpoint to go on from: `where` is a path, or "auto" for this run's newest intact
        one. Ranks that were restarted take the newest, whatever was asked for first. Collective.
        """
        path = self._choose("auto") if self.placement.identity.attempt else None
        if path is None and where is not None:
            path = self._choose(where)
            if path is None:
                self.logger.info("resume: no checkpoint yet, starting from the beginning")
        return path

    def refuse_to_overwrite(self) -> None:
        """A new run must not mix with what an earlier one of the same name has saved."""
        taken = self.disks.keeps and self.disks.known and any(self.store.folder.glob("step-*"))
        if any(self.placement.gather_json(taken)):
            raise ConfigError(
                f"the run {self.store.folder.parent} has checkpoints already; add --resume auto to "
                "go on with it, or choose another --run-name"
            )

    def resume(self, path: Path) -> None:
        """Load a checkpoint into model, optimizer, trainer and everything registered."""
        snapshot = load(path)
        trainer = self.trainer
        extra = snapshot.state["extra"]
        load_model_state(trainer.model, snapshot.model, snapshot.aliases, extra, str(path))
        load_optimizer_state(trainer.model, trainer.optimizer, snapshot.optimizer, str(path))
        trainer.load_state_dict(snapshot.state["trainer"])
        self._resumed = snapshot.state
        self._restore_random()
        for name in self._registered:
            self._restore(name)
        if self.disks.keeps:
            self.store.branch(snapshot.step)
        self.placement.barrier()
        self.logger.info(f"resumed from {path}", step=snapshot.step, epoch=snapshot.epoch)

    def handle_error(self, error: BaseException, aloud: bool = True) -> None:
        """Act on an error of a training step as the table in docs/faults.md says, and record it.

        Where the policy is to roll back, returns after the state of the last checkpoint is back.
        Everything else is raised again, to end this rank: the launcher ends the others, and starts
        all of them again from the last checkpoint where that helps.
        """
        policy = judge(error, self.config)
        path = self._choose("auto") if policy.action == ROLLBACK else None
        here = isinstance(error, NonFiniteLossError) and error.step == self.trainer.step + 1
        if policy.action == ROLLBACK:
            problem = None if path or here else "there is no checkpoint yet to roll back to"
            if self.rollbacks >= self.config.max_restarts:
                problem = f"rolled back {self.rollbacks} times already, max_restarts allows no more"
            if problem is not None:
                policy = Policy(policy.kind, STOP)
                error.add_note(f"({problem})")
        text = f"{type(error).__name__}: {error}"
        self.record_fault(policy.kind, policy.action, text, aloud=aloud)
        if policy.kind == "out_of_memory" and policy.action == RESTART:
            leave_word(self.store.folder.parent, self.trainer.memory)
        if policy.action != ROLLBACK:
            raise error
        self.rollbacks += 1
        self.passed_over.add(error)
        if path is not None:
            reached = self.trainer.step
            self.roll_back(path)
            if aloud and reached > self.trainer.step:  # else train_epoch gives the batches again
                self.logger.warning(
                    f"back at step {self.trainer.step}; a loop of your own goes on with its next "
                    f"batch: what the {reached - self.trainer.step} steps since then learned is "
                    "gone. `train_epoch` gives their batches again"
                )
        # Else the weights are still those of the step before: only its batch is left out.

    def record_fault(
        self,
        kind: str,
        action: str,
        text: str,
        facts: dict[str, Any] | None = None,
        aloud: bool = True,
    ) -> None:
        """Tell people and the run's events what went wrong and what was done. An error that is
        raised is printed where it ends; `aloud` says so here as well."""
        rank, step = self.placement.identity.rank, self.trainer.step + 1
        given = {"step": step, "rank": rank, **(facts or {})}
        self.logger.record("fault", kind=kind, action=action, message=text, **given)
        if action not in (STOP, RESTART):
            self.logger.warning(text)
        elif aloud:
            self.logger.error(text, rank=rank, step=self.trainer.step)

    def roll_back(self, path: Path) -> None:
        """Bring back the state of a checkpoint while the ranks go on. Collective."""
        trainer = self.trainer
        before = {p: dict(state) for p, state in trainer.optimizer.state.items()}
        memory = trainer.memory.state_dict()
        passed_over = self.passed_over.state_dict()
        trainer.forget_step()
        self.resume(path)
        trainer.memory.load_state_dict(memory)  # what was learned since the checkpoint stays
        self.passed_over.load_state_dict(passed_over)
        keep_tensors(trainer.optimizer, before)
        trainer.execution.went_back()
        trainer.finite.start()

    def _snapshot(self, facts: dict[str, Any]) -> Snapshot:
        trainer = self.trainer
        tensors, aliases, extra = model_state(trainer.model)
        if self.disks.several:
            self._take_buffers_of_main(tensors)
        per_rank = {
            name: to_text(item.state_dict())
            for name, (item, scope) in self._registered.items()
            if scope == "per_rank"
        }
        mine = {"random": random_state(self.placement.device), "registered": per_rank}
        ranks = self.placement.gather_json(mine)
        state = {
            "trainer": trainer.state_dict(),
            "extra": extra,
            "replicated": {
                name: item.state_dict()
                for name, (item, scope) in self._registered.items()
                if scope == "replicated"
            },
            "ranks": ranks,
            "config": self.config.plain(),
        }
        return Snapshot(
            step=trainer.step,
            epoch=trainer.epoch,
            model=tensors,
            aliases=aliases,
            optimizer=optimizer_state(trainer.model, trainer.optimizer),
            state=state,
            facts={"world_size": self.placement.dp_size, **facts},
        )

    def _take_buffers_of_main(self, tensors: dict[str, Tensor]) -> None:
        """Every disk gets what rank 0 has: buffers may differ between ranks, as BatchNorm's do."""
        for name in sorted(name for name, _ in self.trainer.model.named_buffers()):
            if name in tensors:
                tensors[name] = tensors[name].detach().to(self.placement.wire, copy=True)
                self.placement.broadcast_tensors([tensors[name]])

    def _restore_random(self) -> None:
        """Each rank's generators. Another number of ranks starts with fresh ones: what training
        draws is derived from the step, so that nothing is lost."""
        assert self._resumed is not None
        ranks = self._resumed["ranks"]
        if len(ranks) != self.placement.dp_size:
            self.logger.info(
                f"the checkpoint was written by {len(ranks)} ranks, now there are "
                f"{self.placement.dp_size}: same samples in the same order"
            )
            return
        set_random_state(ranks[self.placement.dp_rank]["random"], self.placement.device)

    def _restore(self, name: str) -> None:
        """Give a registered object its saved state, where there is one for it."""
        assert self._resumed is not None
        item, scope = self._registered[name]
        ranks = self._resumed["ranks"]
        if scope == "replicated" and name in self._resumed["replicated"]:
            item.load_state_dict(self._resumed["replicated"][name])
        elif scope == "per_rank" and len(ranks) == self.placement.dp_size:
            saved = ranks[self.placement.dp_rank]["registered"]
            if name in saved:
                item.load_state_dict(from_text(saved[name]))
        elif scope == "per_rank" and isinstance(item, Divisible):
            mine = ranks[self.placement.dp_rank :: self.placement.dp_size]
            saved = [rank["registered"] for rank in mine]
            item.load_shares([from_text(part[name]) for part in saved if name in part])

    def _choose(self, where: str) -> Path | None:
        if self.disks.several:
            return self._choose_of_all(where)
        answer: dict[str, Any] = {}
        if self.placement.is_main:
            self.saver.wait()  # what is being written may be the newest
            if where == "auto":
                self.store.recover()
                found, damaged = self.store.newest_intact()
                answer = {"path": str(found) if found else None, "damaged": damaged}
            else:
                given = Path(where)
                answer = {"path": str(given), "damaged": []}
                if not (given / "manifest.json").exists():
                    answer = {"problem": f"--resume {where}: no checkpoint there"}
        answer = self.placement.broadcast_json(answer)
        if "problem" in answer:
            raise CheckpointError(
                answer["problem"] + "; give a folder checkpoints/step-N of a run, or auto"
            )
        for line in answer["damaged"]:
            self.logger.warning(line)
        if answer["path"] is None and answer["damaged"]:
            raise CheckpointError(
                f"no intact checkpoint in {self.store.folder}: {'; '.join(answer['damaged'])}"
            )
        if answer["path"] is None or where != "auto":
            return Path(answer["path"]) if answer["path"] else None
        return self.store.folder / Path(answer["path"]).name  # as this node sees the disk

    def _choose_of_all(self, where: str) -> Path | None:
        """The same where the nodes have disks of their own: a node without it receives it."""
        self.saver.wait()
        if where != "auto":
            return bring(self.placement, self.disks, self.store, Path(where))
        found = agree(self.placement, self.disks, self.store)
        for line in found.damaged:
            self.logger.warning(line)
        for line in found.said:
            self.logger.info(line)
        if found.path is None and found.damaged:
            raise CheckpointError(
                f"no intact checkpoint in {self.store.folder}: {'; '.join(found.damaged)}"
            )
        return found.path
