"""Kind of request: one round of federated training, as an ordinary run of this client.

The run resumes where its last round ended, with its optimizer and its place in the data, and takes
the weights that the server sent. It trains for the round's steps, saves, and writes its weights.
Recipes and scripts need no change for this.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from multi_gpu_training.checkpoint.shards import fit_to
from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.own_batches import OwnBatches
from multi_gpu_training.data.partitions import partition
from multi_gpu_training.errors import ConfigError, DataError, ModelError
from multi_gpu_training.measure.request import (
    SYNONYMS,
    MeasuredRun,
    Measurement,
    MeasureRequest,
)
from multi_gpu_training.safe_files import write_atomically
from multi_gpu_training.state_dicts import plain_name
from multi_gpu_training.training.callbacks import Callback, Run

INCOMING, OUTGOING, RESULT = "incoming.safetensors", "outgoing.safetensors", "result.json"
ENDLESS = 10**9  # epochs: where a round ends is said in steps


class FederatedRound(Measurement):
    """Puts the server's weights into a run, and lets it train for one round.

    `request.round` holds: task (init, evaluate or train), rounds, local_epochs, local_steps, mu (of
    FedProx), part (how, parts, part, seed; None: all data are this client's).
    """

    looks_into_steps = False

    def __init__(self, request: MeasureRequest) -> None:
        super().__init__(request)
        assert request.round is not None
        self.asked = request.round
        self.samples: list[int] = []  # of the training data, then of each validation set
        self.begun = time.monotonic()

    def check_own_backward(self, optimizers: int) -> None:
        if self.asked["mu"] and optimizers > 1:
            raise ConfigError(
                f"FedProx pulls at the weights once a step, and this loop moves them with "
                f"{optimizers} optimizers; use --strategy fedavg, or one optimizer"
            )

    def adapt(self, config: MultiGPUConfig) -> MultiGPUConfig:
        asked, settings = self.asked, dict(self.request.settings)
        given = {name: getattr(config, name) for name in config.model_fields_set}
        refused = [name for name in ("ema_decay", "swa_start") if given.get(name) is not None]
        problems = [f"{name} averages the weights of one client; drop it" for name in refused]
        if asked["mu"] and given.get("mixed_precision_dtype") == "fp16":
            problems.append("FedProx does not work with scaled fp16 gradients; use bf16")
        if problems:
            raise ConfigError(problems)
        for name in settings:
            for other in SYNONYMS.get(name, ()):
                given.pop(other, None)
        # The schedule must see all rounds; where this one ends is set when it is built.
        length: dict[str, Any] = {"early_stopping_patience": None}
        if asked["local_steps"]:
            length |= {"max_steps": asked["rounds"] * asked["local_steps"], "epochs": ENDLESS}
        else:
            length |= {"epochs": asked["rounds"] * asked["local_epochs"], "max_steps": None}
        if asked["mu"]:
            length["step_execution"] = "eager"  # a recorded step would not call the callback
        if not TrainingMode(given.get("training_mode", "ddp")).has_ranks:
            settings.pop("world_size", None)
        changed = MultiGPUConfig(**{**given, **length, **settings})
        # The script holds this object too, and may make its optimizer from it.
        for name in {**length, **settings}:
            setattr(config, name, getattr(changed, name))
        return changed

    def shorten(self, dataset: Any, global_batch: int) -> Any:
        """This client's part, of the training data first and then of the validation data."""
        if dataset is None:
            return None
        part = self.asked["part"]
        if part is not None:
            if isinstance(dataset, DataLoader):
                raise DataError(
                    "a simulated federation cuts datasets into parts and cannot cut a DataLoader; "
                    "give the manager the dataset"
                )
            # Validation data are cut evenly: the mean over clients is then that of all samples.
            how = part["how"] if not self.samples else "iid"
            dataset = partition(dataset, how, part["parts"], part["part"], part["seed"])
        counted = dataset.dataset if isinstance(dataset, DataLoader) else dataset
        if not isinstance(counted, Sized):
            raise DataError(
                f"{type(counted).__name__} has no length, and federated averaging weighs clients "
                "by their samples; use a dataset with __len__"
            )
        self.samples.append(len(counted))
        return dataset

    def callbacks(self, run: MeasuredRun) -> list[Callback]:
        self._refuse(run)
        incoming = Path(self.request.out, INCOMING)
        if self.asked["task"] != "init":
            load_weights(run.model, load_file(incoming), "the server's model")
        if self.asked["task"] == "evaluate":
            metrics = run.evaluate() if run.val_loader is not None else {}
            if run.placement.is_main:
                self.write(run.step, metrics, sum(self.samples[1:]))
            raise SystemExit(0)
        if self.asked["task"] == "init":
            self._keep_weights(run)
            if run.placement.is_main:
                self.write(0, {}, self.samples[0], untrained(run.model))
            raise SystemExit(0)
        end = run.step + self._steps(run)
        run.config.max_steps, run.config.epochs = end, ENDLESS
        found: list[Callback] = [RoundEnd(self, run, end)]
        if self.asked["mu"]:
            found.append(ProximalTerm(self.asked["mu"]))
        return found

    def _refuse(self, run: MeasuredRun) -> None:
        """Raise where the server's weights would not be the whole model, or the rate would end
        early."""
        if not self.samples or isinstance(run.train_loader, OwnBatches):
            raise ConfigError(
                "federated training weighs clients by their samples, and this script makes its own "
                "batches; give the dataset to fit or setup_training"
            )
        optimizer = getattr(run.trainer, "optimizer", None)
        known = {id(parameter) for parameter in run.model.parameters()}
        groups = [] if optimizer is None else optimizer.param_groups
        if any(id(p) not in known for group in groups for p in group["params"]):
            raise ModelError(
                "the optimizer trains parameters outside the model (of the loss, perhaps), which "
                "would never reach the server; make them part of the model"
            )
        total = self.asked["rounds"] * self.asked["local_epochs"]
        changed = not self.asked["local_steps"] and run.config.epochs != total
        if changed and run.config.schedule != "constant":
            raise ConfigError(
                f"fit(epochs={run.config.epochs}) with schedule={run.config.schedule}: the "
                f"federation trains {total} epochs; drop epochs from fit"
            )

    def _steps(self, run: MeasuredRun) -> int:
        if self.asked["local_steps"]:
            return int(self.asked["local_steps"])
        per_epoch = run.train_loader.steps
        if per_epoch is None:
            raise DataError("the length of an epoch is unknown; use --local-steps")
        return int(self.asked["local_epochs"]) * per_epoch

    def finish(self, run: MeasuredRun) -> None:
        """The round is trained: write its weights and figures. Every rank must call it."""
        self._keep_weights(run)
        if run.placement.is_main:
            last = run.progress.last
            metrics = {f"train/{name}": value for name, value in last["train"].items()}
            metrics |= {f"val/{name}": value for name, value in last["val"].items()}
            self.write(run.step, metrics, self.samples[0])

    def _keep_weights(self, run: MeasuredRun) -> None:
        state = run.trainer.strategy.full_state()
        if run.placement.is_main:
            save_file(sendable(state), Path(self.request.out, OUTGOING))

    def write(
        self,
        step: int,
        metrics: dict[str, float],
        samples: int,
        kinds: dict[str, list[str]] | None = None,
    ) -> None:
        finite = {name: float(v) for name, v in metrics.items() if math.isfinite(v)}
        took = time.monotonic() - self.begun
        told = {"step": step, "samples": samples, "metrics": finite, "seconds": took}
        told |= {"kinds": kinds or {}}
        # Last: where this file is, the weights are whole.
        write_atomically(Path(self.request.out, RESULT), json.dumps(told))


class RoundEnd(Callback):
    """Hands over the weights when the run has ended well."""

    watches_only = True

    def __init__(self, round_: FederatedRound, run: MeasuredRun, end: int) -> None:
        self._round, self._run, self._end = round_, run, end

    def on_end(self, run: Run) -> None:
        if run.step >= self._end and sys.exception() is None:
            self._round.finish(self._run)


class ProximalTerm(Callback):
    """FedProx: adds mu * (weight - server's weight) to the gradient of each step."""

    def __init__(self, mu: float) -> None:
        self._mu = mu
        self._start: list[Tensor] = []

    def on_setup(self, run: Run) -> None:
        self._start = [p.detach().clone() for p in run.model.parameters()]

    @torch.no_grad()
    def on_optimizer(self, run: Run) -> None:
        for parameter, start in zip(run.model.parameters(), self._start, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=self._mu)


def sendable(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point tensors by name, in types that numpy has; of complex ones, the real and
    imaginary parts. Counters stay with the client: a mean of them means nothing."""
    found = {}
    for name, tensor in state.items():
        if is_averaged(tensor):
            real = as_real(tensor.detach())
            kind = real.dtype if real.dtype == torch.float64 else torch.float32
            found[name] = real.to("cpu", kind, copy=True).contiguous()
    return found


def is_averaged(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def untrained(model: torch.nn.Module) -> dict[str, list[str]]:
    """Which of the tensors that are sent are frozen parameters, and which are buffers."""
    found: dict[str, list[str]] = {"frozen": [], "buffers": []}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_averaged(tensor):
            continue
        if not isinstance(tensor, torch.nn.Parameter):
            found["buffers"].append(plain_name(name))
        elif not tensor.requires_grad:
            found["frozen"].append(plain_name(name))
    return found


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights into the model as it lies on its ranks; the error names all that do not fit."""
    own = {plain_name(name): t for name, t in model.state_dict().items()}
    floats = {name: as_real(tensor) for name, tensor in own.items() if is_averaged(tensor)}
    problems = [f"{name} is missing" for name in sorted(floats.keys() - weights.keys())]
    problems += [f"{name} is not in this model" for name in sorted(weights.keys() - floats.keys())]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, this model wants {tuple(mine.shape)}"
        for name, mine in floats.items()
        if name in weights and weights[name].shape != mine.shape
    ]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ModelError(f"{where} is another model: {'; '.join(problems[:6])}{more}")
    for name, mine in floats.items():
        mine.copy_(fit_to(mine, weights[name].to(mine.dtype)))


MEASUREMENT = FederatedRound
