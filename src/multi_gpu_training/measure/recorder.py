"""Record a short training for `mgt verify`: samples, losses, rates, gradients, weights, buffers.

`mgt verify` trains the same global batches on one rank and on several. Each rank writes one line
per step as it goes, so that a run that fails or ends early can be compared up to there;
planning/verify compares.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.batch import attach, map_tensors, share_of
from multi_gpu_training.data.order import Share
from multi_gpu_training.measure.batch_rows import (
    row_hashes,
    row_leaves,
    sample_dims,
    sample_shapes,
)
from multi_gpu_training.measure.comparable_math import DoubleMath, SampleNoise
from multi_gpu_training.measure.plain_replay import PlainReplay
from multi_gpu_training.measure.request import MeasuredRun, Measurement, MeasureRequest
from multi_gpu_training.measure.split_probe import SplitProbe
from multi_gpu_training.measure.tensor_sketch import sketch, sketches
from multi_gpu_training.measure.trainer_access import BATCH_NORMS, DROPOUTS, watch_loss
from multi_gpu_training.training.callbacks import Callback, Run
from multi_gpu_training.training.loss import read_loss
from multi_gpu_training.training.step import StepResult

DDP = TrainingMode.DISTRIBUTED_DATA_PARALLEL
# Settings that change what is computed, and that a script may compute from the number of ranks:
# what the rate follows, what only a whole run shows, and all of them.
RATE_SETTINGS = (
    "learning_rate",
    "lr_scaling",
    "base_batch_size",
    "warmup_epochs",
    "warmup_steps",
    "schedule",
    "schedule_step_epochs",
    "schedule_gamma",
    "scheduler_unit",
    "weight_decay",
    "epochs",
    "max_steps",
    "steps_per_epoch",
)
LATE_SETTINGS = (
    *RATE_SETTINGS,
    "max_grad_norm",
    "max_grad_value",
    "ema_decay",
    "swa_start",
    "swa_every",
)
TELLING = (
    *LATE_SETTINGS,
    "gradient_accumulation_steps",
    "sync_bn",
    "seed",
    "shuffle",
    "validate_every",
    "limit_val_batches",
    "early_stopping_patience",
)
KEPT_BYTES = 64 * 2**20  # of samples, per rank, for comparing them one by one


class Recorder(Callback):
    """Follows one training on one rank, and ends the process after the requested steps.

    Writes `steps-RANK-MANAGER.jsonl`: a header, a line per step, and a last line. Samples go to
    `rows-RANK-MANAGER.pt`.
    """

    def __init__(
        self, run: MeasuredRun, request: MeasureRequest, asked: dict[str, Any] | None = None
    ) -> None:
        self.run = run
        self.asked = asked or {}
        self.request = request
        rank, out = run.placement.identity.rank, Path(request.out)
        self.number = len(list(out.glob(f"steps-{rank}-*.jsonl")))  # a script may train twice
        self.file = out / f"steps-{rank}-{self.number}.jsonl"
        self.rows_file = out / f"rows-{rank}-{self.number}.pt"
        self.rows: list[dict[str, Any]] = []
        self.rows_bytes = 0
        self.line: dict[str, Any] = {}
        self.micros: list[dict[str, Any]] = []
        self.share: Share | None = None  # of the micro-batch under way
        self.before: dict[str, Tensor] = {}
        self.replay = PlainReplay(run, request) if request.ranks == 1 else None
        self.done = False
        self.off = _switch_off_dropout(run.trainer.state.trained)
        run.trainer.state.transform = self.transform
        watch_loss(run.trainer, self.compute_loss)
        run.optimizer.register_step_pre_hook(self.before_move)
        run.optimizer.register_step_post_hook(self.after_move)
        self._write(self._header())

    def _header(self) -> dict[str, Any]:
        run, model = self.run, self.run.trainer.state.trained
        config = run.config
        return {
            "kind": "header",
            "parameters": sketches(model.named_parameters()),
            "buffers": sketches(model.named_buffers()),
            "batchnorm": [name for name, m in model.named_modules() if isinstance(m, BATCH_NORMS)],
            "dropout": self.off,
            "sync_bn": config.sync_bn,
            "broadcast_buffers": config.broadcast_buffers,
            "max_grad_norm": config.max_grad_norm,
            "lr_scaling": config.lr_scaling,
            "accumulation": run.sizes.accumulation,
            "samples": getattr(getattr(run.train_loader, "source", None), "samples", None),
            "steps_per_epoch": run.train_loader.steps,
            "managers_in_script": managers_in(Path(sys.argv[0])),
            **self.asked,
        }

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # The parts of a step

    def on_step_begin(self, run: Run, step: int) -> None:
        model = self.run.trainer.state.trained
        self.line = {
            "kind": "step",
            "step": step,
            "begin": sketches(model.named_parameters()),
            "buffers_begin": sketches(model.named_buffers()),
        }
        self.micros = []
        self.before = {}
        if self.replay is not None:
            self.replay.begin(step)

    def on_forward(self, run: Run, share: Share) -> None:
        self.share = share

    def on_micro_batch_end(self, run: Run) -> None:
        self.share = None

    def transform(self, batch: Any) -> Any:
        """Note the samples of a training batch; any batch comes back in the precision that was
        asked for. The trainer calls this right before the loss."""
        if self.share is not None and self.share.count and not self.done:
            self._note_samples(batch, self.share)
        return self._precise(batch)

    def _precise(self, batch: Any) -> Any:
        if not self.request.double:
            return batch
        share = share_of(batch)
        batch = map_tensors(batch, lambda t: t.double() if t.dtype is torch.float32 else t)
        return batch if share is None else attach(batch, share)

    def _note_samples(self, batch: Any, share: Share) -> None:
        rows = row_leaves(batch, share.count)
        self.micros.append(
            {
                "epoch": share.epoch,
                "position": share.position,
                "indices": list(share.indices),
                "count": share.count,
                "window": share.window_count,
                "changed": share.changed,
                "hashes": row_hashes(rows, share.count),
                "layout": sample_dims(batch, share.count),
                "shapes": sample_shapes(rows),
                "kept": None,
            }
        )
        size = sum(r.nbytes for leaf in rows.values() for r in leaf if isinstance(r, Tensor))
        if self.rows_bytes + size <= KEPT_BYTES:
            self.rows_bytes += size
            self.micros[-1]["kept"] = len(self.rows)
            kept = {
                path: leaf
                for path, leaf in rows.items()
                if all(isinstance(r, (Tensor, str, int, float)) for r in leaf)
            }
            self.rows.append(kept)

    def compute_loss(self, loss_fn: Any, model: nn.Module, batch: Any) -> Any:
        """Run the user's loss function, and note what it gave and which random numbers it drew."""
        batch = self._precise(batch)  # also a stand-in, which no transform has seen
        share = self.share
        if share is None or not share.count or self.done or not self.micros:
            with self._math(0, []):
                return loss_fn(model, batch)
        micro = self.micros[-1]
        keys = [int(text, 16) >> 1 for text in micro["hashes"]]
        noise, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
        before = _generator_states()
        with self._math(self.line["step"], keys):
            result = loss_fn(model, batch)
        after = _generator_states()
        found = read_loss(result, next(model.parameters()).device)
        micro["drew"] = [name for name in before if before[name] != after[name]]
        micro["loss"] = found.mean.item()
        micro["weight"] = None if found.weight is None else float(found.weight)
        micro["metrics"] = {
            name: [float(total), float(weight)] for name, (total, weight) in found.metrics.items()
        }
        if self.replay is not None:
            self.replay.note(self.line["step"], batch, share, noise, found.mean.item())
        self._probe(loss_fn, model, batch, share, buffers, noise)
        return result

    def _math(self, step: int, keys: list[int]) -> ExitStack:
        stack = ExitStack()
        if self.request.sample_noise:
            stack.enter_context(SampleNoise(step, keys))
        if self.request.double:
            stack.enter_context(DoubleMath())
        return stack

    def _probe(
        self,
        loss_fn: Any,
        model: nn.Module,
        batch: Any,
        share: Share,
        buffers: list[Tensor],
        noise: Tensor,
    ) -> None:
        """Where this run was started to look at one micro-batch: do so, and end."""
        asked = self.request.probe
        here = self.number, self.line["step"], len(self.micros) - 1
        if asked is None or here != (asked["manager"], asked["step"], asked["micro"]):
            return
        self.done = True
        tolerance = 1e-9 if self.request.double else 1e-4

        def loss(model: nn.Module, part: Any) -> Any:
            with self._math(0, []):
                return loss_fn(model, part)

        if self.run.config.sync_bn:
            # Synchronised, BatchNorm does not mix more on several ranks: leave it out.
            for module in model.modules():
                if isinstance(module, BATCH_NORMS):
                    module.eval()
        probe = SplitProbe(model, loss, batch, share.count, buffers, noise, tolerance)
        try:
            found = probe.run(asked["parts"])
        except Exception as error:  # what the user's code may raise on parts of a batch
            found = {"error": f"{type(error).__name__}: {error}"}
        self._write({**self.line, "micros": self.micros})
        Path(self.request.out, "probe.json").write_text(json.dumps(found))
        self._finish()

    def before_move(self, optimizer: Optimizer, *_: Any) -> None:
        # Not in a step past the trainer, nor in that of the class an optimizer is derived from.
        if self.done or self.share is None or self.before:
            return
        named = dict(self.run.trainer.state.trained.named_parameters())
        kind = {"optimizer": type(optimizer).__name__}
        self.line["settings"] = [kind | _settings(group) for group in optimizer.param_groups]
        self.line["grads"] = sketches((n, p.grad) for n, p in named.items() if p.grad is not None)
        self.line["before"] = sketches(named.items())
        self.before = {name: p.detach().clone() for name, p in named.items()}

    def after_move(self, optimizer: Optimizer, *_: Any) -> None:
        if self.done or self.share is None or not self.before:
            return
        named = dict(self.run.trainer.state.trained.named_parameters())
        moves = {n: p.detach() - self.before[n] for n, p in named.items() if n in self.before}
        self.line["moves"] = sketches(moves.items())
        self.line["moved"] = sketches(named.items())
        if self.replay is not None:
            self.replay.moved(self.line["step"], optimizer)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self.done:
            return
        norm, trained = result.grad_norm, self.run.trainer.state.trained
        self.line |= {
            "micros": self.micros,
            "norm": None if norm is None else float(norm),
            "after": sketches(trained.named_parameters()),
            "buffers": sketches(trained.named_buffers()),
            "state": _optimizer_state(trained, run.optimizer),
        }
        self._write(self.line)
        if result.step >= self.request.steps:
            self._conclude()

    def on_validation(self, run: Run, metrics: Any) -> None:
        if not self.done:
            self._write({"kind": "validation", "step": run.step, "metrics": _numbers(metrics)})

    def on_end(self, run: Run) -> None:
        """The script is done with fewer steps than were asked for."""
        if not self.done and sys.exception() is None:
            self.done = True
            self._last_line(None, None)

    def _conclude(self) -> None:
        run = self.run
        self.done = True
        metrics: Any = None
        failed = None
        if run.val_loader is not None:
            try:
                with self._math(0, []):
                    metrics = _numbers(run.evaluate(run.val_loader))
            except Exception as error:  # noted: it must not hide how the training compares
                failed = f"{type(error).__name__}: {error}"
        self._last_line(metrics, failed)
        run.placement.barrier()
        raise SystemExit(0)

    def _last_line(self, metrics: Any, failed: str | None) -> None:
        by_hand = None
        if self.replay is not None:
            try:
                with self._math(0, []):
                    by_hand = self.replay.compare()
            except Exception as error:
                by_hand = {"skipped": f"{type(error).__name__}: {error}"}
        self._write(
            {"kind": "last", "metrics": metrics, "metrics_failed": failed, "by_hand": by_hand}
        )
        self._finish(leave=False)

    def _finish(self, leave: bool = True) -> None:
        torch.save(self.rows, self.rows_file)
        run = self.run
        Path(self.request.out, f"rank-{run.placement.identity.rank}.json").write_text("{}")
        if leave:
            raise SystemExit(0)


class Recording(Measurement):
    """The user's training made comparable: same global batch, full precision, a short epoch.

    `as_is` keeps the script's own batch size, workers and dataset.
    """

    reproducible = True
    brought = False
    made: ClassVar[int] = 0  # managers of this process

    def __init__(self, request: MeasureRequest) -> None:
        super().__init__(request)
        self.number = str(Recording.made)
        Recording.made += 1
        self.own_batch: int | None = None

    def adapt(self, config: MultiGPUConfig) -> MultiGPUConfig:
        self.asked = config
        # A DataLoader brings its own batch size, which is known only once it is seen.
        self.brought = not {"batch_size", "global_batch_size"} & config.model_fields_set
        self.adapted = super().adapt(config)
        return self.adapted

    def changes(self, config: MultiGPUConfig) -> dict[str, Any]:
        batch = self._over_all_ranks(config.batch_size * config.gradient_accumulation_steps)
        weights = config.share_weights
        kept = weights is not None and len(weights) == self.request.ranks
        total = max(config.global_batch_size or batch, self.request.least_batch)
        found = {
            "training_mode": config.training_mode if config.training_mode.has_ranks else DDP,
            "world_size": self.request.ranks,
            "global_batch_size": total,
            "balance": "auto" if kept else "equal",
            "use_mixed_precision": False,
            "mixed_precision_dtype": "auto",
            "use_fp16_allreduce": False,
            "fp16_compression": False,
            "fsdp_gather_dtype": None,
            "allow_tf32": False,
            "fast_defaults": False,
            "step_execution": "eager",
            "channels_last": False,
            "fused_optimizer": False,
            "data_on_gpu": False,
            # Replicas that drift apart are what this looks for: it must not end the run.
            "consistency_check_every": 0,
        }
        if not self.request.as_is:
            found |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
            if not self.brought:
                # As much as one rank can be given: the accumulation stays what the script says.
                base = config.base_batch_size or config.batch_size
                found |= {"batch_size": total, "base_batch_size": base}
        return found

    def _over_all_ranks(self, batch: int) -> int:
        """The global batch of a script that gives the batch of a rank. Where that stays the same on
        more ranks, steps would grow: one rank's batch is kept. Else the script has computed it
        from the number of ranks, and means what it says."""
        self.own_batch = batch
        alone = self.request.batches.get(self.number, {}).get("own_batch") or batch
        return batch if batch == alone else batch * self.request.ranks

    def shorten(self, dataset: Any, global_batch: int) -> Any:
        if self.brought and isinstance(dataset, DataLoader) and dataset.batch_size is not None:
            accumulation = self.adapted.gradient_accumulation_steps
            batch = self._over_all_ranks(dataset.batch_size * accumulation)
            self.adapted.global_batch_size = max(batch, self.request.least_batch)
        self.brought = False  # the validation data come next, and do not count
        if self.request.as_is:
            return dataset
        # The same samples on any number of ranks, whatever their batch.
        total = self.adapted.global_batch_size or global_batch
        total = self.request.batches.get(self.number, {}).get("total") or total
        return shorten(dataset, self.request.steps, total)

    def prepare(self, model: nn.Module) -> None:
        if self.request.double:
            model.double()

    def callbacks(self, run: MeasuredRun) -> list[Callback]:
        if self.request.double:
            _double_forward(run.model)
        given = self.asked.model_dump(mode="json", include=set(TELLING))
        fixed = self.asked.global_batch_size is not None
        asked = {
            "asked": given,
            "number": self.number,
            "own_batch": None if fixed else self.own_batch,
            "total": self.adapted.global_batch_size,
        }
        return [*super().callbacks(run), Recorder(run, self.request, asked)]


MEASUREMENT = Recording


def _double_forward(model: nn.Module) -> None:
    """Let the model's own code run in float64 wherever it is called, in validation too."""
    stacks: list[ExitStack] = []

    def enter(*_: Any) -> None:
        stacks.append(ExitStack())
        stacks[-1].enter_context(DoubleMath())

    def leave(*_: Any) -> None:
        if stacks:
            stacks.pop().close()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def _switch_off_dropout(model: nn.Module) -> list[str]:
    """Its noise depends on the rank, so that results would differ. Returns the modules."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, DROPOUTS) and module.p:
            module.p = 0.0
            found.append(name)
        if isinstance(module, nn.RNNBase) and module.dropout:
            module.dropout = 0.0
            found.append(name)
        if isinstance(module, nn.MultiheadAttention) and module.dropout:
            module.dropout = 0.0
            found.append(name)
        # Many models keep it as a number, for F.dropout or for attention.
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float) and 0 < value < 1:
                setattr(module, key, 0.0)
                found.append(f"{name}.{key}".strip("."))
    return found


def managers_in(script: Path) -> int:
    """At how many places a script makes a manager; 0 where that cannot be read."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 0
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [getattr(call, "attr", getattr(call, "id", "")) for call in calls]
    return names.count("MultiGPUTrainingManager")


def shorten(dataset: Any, steps: int, global_batch: int) -> Any:
    """The part of a dataset whose epoch ends, with a short batch, within `steps`."""
    if isinstance(dataset, DataLoader) and type(dataset.sampler) in (
        RandomSampler,
        SequentialSampler,
    ):
        if dataset.batch_size is None:
            return dataset
        return DataLoader(
            shorten(dataset.dataset, steps, global_batch),
            batch_size=dataset.batch_size,
            shuffle=type(dataset.sampler) is RandomSampler,
            collate_fn=dataset.collate_fn,
            drop_last=dataset.drop_last,
        )
    if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset):
        return dataset
    wanted = (steps - 2) * global_batch + max(1, global_batch // 3)
    samples = len(dataset)  # type: ignore[arg-type]
    if samples <= wanted:
        return dataset
    # A dataset that forms its own batches must still do so.
    subset = getattr(dataset, "subset", None)
    return subset(range(wanted)) if callable(subset) else Subset(dataset, range(wanted))


def _generator_states() -> dict[str, str]:
    def digest(value: bytes) -> str:
        return hashlib.blake2b(value, digest_size=8).hexdigest()

    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),
    }
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: digest(value) for name, value in states.items()}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group is moved with, as plain numbers."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, (tuple, list)) and key != "params":
            value = [float(part) for part in value if isinstance(part, (int, float, Tensor))]
        if isinstance(value, (int, float, list, bool)) and key != "params":
            found[key] = value
    found["parameters"] = len(group["params"])
    return found


def _optimizer_state(trained: nn.Module, optimizer: Optimizer) -> dict[str, list[float]]:
    """Momenta and the like, per parameter."""
    found = {}
    for name, parameter in trained.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                found[f"{name} {key}"] = sketch(value)
    return found


def _numbers(metrics: Any) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}
