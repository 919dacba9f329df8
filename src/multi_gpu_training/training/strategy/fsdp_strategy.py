"""One process per GPU, each with a shard of every parameter, gradient and optimizer state.

A block's parameters are gathered when it runs and freed afterwards; its backward sums the gradients
and splits them again (`torch.distributed.fsdp.fully_shard`). In addition, ranks exchange one short
vector per step: its weight, the order in which blocks ran, and which parameters were used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.data.order import Share
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.sharding import (
    fill,
    forget_step,
    gathered,
    is_split,
    make_mesh,
    over_team,
    own_parameters,
    part_of,
    piece,
    shard,
    sharded_modules,
    split_like,
    whole,
)
from multi_gpu_training.distributed.tensor_parallel import parallelise
from multi_gpu_training.errors import ConfigError, DataError, DivergenceError, ModelError
from multi_gpu_training.state_dicts import plain_name
from multi_gpu_training.torch_internals import (
    apply_to_tensors,
    foreach_mul_,
    foreach_norm,
    gradient_hooks,
    initialise_sharded,
    is_view,
    read_split_scalars_whole,
)
from multi_gpu_training.training.loss import LossFn
from multi_gpu_training.training.step import MicroResult, StepModule
from multi_gpu_training.training.strategy import Forward, StandIn, Strategy
from multi_gpu_training.training.strategy.blocks import find_blocks
from multi_gpu_training.training.strategy.compiled_blocks import CompiledBlocks
from multi_gpu_training.training.strategy.deferred_init import source_of

_ORDERS = 2**20  # distinct orders of blocks: sums of squares stay exact in float64
# Of torch's optimizers, those whose update of one element depends on others of its parameter. Muon
# would run, but multiplies rounded parts in bfloat16: 1 % off after six steps.
_NEED_WHOLE = ("Adafactor", "Muon", "Rprop")
# What torch says where an operation cannot handle split tensors.
_SPLIT_ERRORS = ("DTensor", "Sharding propagation", "unevenly sharded")
_NO_ROWS = "numel() == 0"  # and where a rank holds no row of one


class FSDPStrategy(Strategy):
    """A shard of the model in every process. Without a process group it trains unwrapped."""

    def __init__(self, config: MultiGPUConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.root: Any = None
        self.computes_alone = placement.group is None
        self.whole_gradients = placement.group is None
        # Tensor-parallel teams split layers other than by rows: build their models whole.
        self.builds_in_parts = placement.group is not None and placement.team_size == 1
        self._compiled: CompiledBlocks | None = None
        self._copies = 1  # copies of the model, each over the same number of ranks
        self._names: list[str] = []  # of the trained parameters
        self._whole: list[nn.Parameter] = []  # on every rank: those without rows to split
        self._replaced: dict[int, nn.Parameter] = {}
        self._originals: list[nn.Parameter] = []  # keeps the ids above from being reused
        self._watched: set[int] = set()
        # Of the current step
        self._used: set[str] = set()
        self._excused = False
        self._order = 0
        self._told: Tensor | None = None  # of the previous step, if reading it at once would stall
        self._fresh_buffers = False
        self._in_forward = False

    # Wrapping

    def place(self, model: nn.Module) -> None:
        if not self.builds_in_parts or source_of(model) is None:
            super().place(model)
            return
        device = self.placement.device
        apply_to_tensors(model, lambda t: t if t.is_meta else t.to(device))

    def make_wrapper(self, step_module: StepModule) -> nn.Module:
        if self.placement.group is None:
            return step_module
        model = step_module.model
        _refuse_unsupported(step_module)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                # Every rank starts from rank 0's weights, as under DDP; rows must be contiguous.
                tensor.data = tensor.data.contiguous()
                if not tensor.is_meta:
                    self.placement.world.broadcast_tensors([tensor.data])
        step_module.replicated = step_module.sharded = step_module.needs_graph = True
        self._whole = [p for p in model.parameters() if p.ndim == 0]
        blocks = find_blocks(model, self.config.fsdp_blocks, self.config.find_unused_parameters)
        if self.config.step_execution == "compile" and blocks:
            self._compiled = CompiledBlocks(step_module, blocks)
        before = list(model.named_parameters())
        read_split_scalars_whole()
        mesh = make_mesh(self.placement, self._copy_size())
        if self.placement.team_size > 1:
            parallelise(model, mesh["tp"])
            mesh = mesh["dp"]
        wrapper = ShardedStep(step_module)
        for block in blocks:  # before fully_shard, whose own hook must come second
            block.register_forward_hook(_BlockOutput(self.refuse_inner_backward))
        dtype = torch.bfloat16 if self.config.fsdp_gather_dtype == "bf16" else None
        self.root = shard(
            wrapper,
            blocks,
            [*self._whole, step_module.tally],
            mesh=mesh,
            reshard=self.config.fsdp_reshard,
            gather_dtype=dtype,
        )
        source = source_of(model)
        if source is not None:
            read = source.read if source.everywhere else None
            fill(wrapper, model, lambda name: source.values([name])[name], read, self.placement)
        initialise_sharded(self.root)  # once no weight is missing
        for number, module in enumerate(sharded_modules(wrapper)):
            module.register_forward_pre_hook(_Attendant(self, number))  # type: ignore[attr-defined]
        after = dict(model.named_parameters())
        self._originals = [p for _, p in before]
        self._replaced = {id(p): after[name] for name, p in before}
        self._find_parameters()
        return wrapper

    def _copy_size(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        asked, ranks = self.config.fsdp_copy_size, self.placement.dp_size
        size = self.placement.identity.local_world_size if asked == "machine" else asked or ranks
        if ranks % size:
            raise ConfigError(
                f"fsdp_copy_size={asked}: {ranks} ranks cannot hold copies of {size} ranks each; "
                f"use a divisor of {ranks}"
            )
        self._copies = ranks // size
        return size

    def _find_parameters(self) -> None:
        super()._find_parameters()
        named = self.step_module.model.named_parameters()
        self._names = [name for name, p in named if p.requires_grad]

    def adopt(self, optimizer: Any) -> None:
        replaced, self._replaced, self._originals = self._replaced, {}, []  # frees whole parameters
        if not isinstance(optimizer, Optimizer) or not replaced:
            return
        for parameter in [p for p in optimizer.state if id(p) in replaced]:
            ours, state = replaced[id(parameter)], optimizer.state.pop(parameter)
            optimizer.state[ours] = {k: _split_state(ours, k, v) for k, v in state.items()}
        for group in optimizer.param_groups:
            group["params"][:] = [replaced.get(id(p), p) for p in group["params"]]

    def check_optimizer(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if self.root is not None and isinstance(optimizer, _kinds(optim, _NEED_WHOLE)):
            raise ModelError(
                f"{name} needs whole parameters, and under training_mode=fully_sharded each rank "
                "holds only some rows; use an optimizer that treats every element by itself "
                "(AdamW, Adam, SGD), or training_mode=ddp",
                code="MGT403",
            )

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            about_splitting = _is_about_splitting(error) or _NO_ROWS in str(error)
            if self.root is None or not about_splitting:
                raise
            raise ModelError(
                f"{type(optimizer).__name__} cannot step where each rank holds only some rows of a "
                f"parameter, as under training_mode=fully_sharded ({_in_short(error)}); use an "
                "optimizer that treats every element by itself, or training_mode=ddp",
                code="MGT403",
            ) from error

    def train_beside(self, beside: nn.Module) -> None:
        if self.root is None:
            super().train_beside(beside)
        else:
            self.refuse_beside(beside, "fully_sharded")

    def take_parameters(self) -> None:
        if self.root is None:
            super().take_parameters()
            return
        raise ModelError(
            "parameters were frozen, unfrozen or added during the run, which "
            "training_mode=fully_sharded does not support; do so before setup_training",
            code="MGT403",
        )

    # The step

    @property
    def forward(self) -> Forward:
        return self.step_module.forward if self.root is None else self._forward

    def _forward(self, batch: Any, count: int, window_count: int, ranks: int) -> MicroResult:
        if self._fresh_buffers and self.config.broadcast_buffers:
            self._fresh_buffers = False
            self.placement.broadcast_tensors(self._sample_statistics())
        self._in_forward = True
        try:
            result: MicroResult = self.root(batch, count, window_count, ranks)
        except RuntimeError as error:
            if not _is_about_splitting(error):
                raise
            raise _reads_blocks(f" ({_in_short(error)})") from error
        finally:
            self._in_forward = False
        if is_split(result.mean):
            raise _reads_blocks("")
        self._excused |= self.step_module.silent
        return result

    def refuse_inner_backward(self, gradient: Tensor) -> None:
        """Runs in every backward through a block. In one that model or loss begin themselves, torch
        would free parameters that the backward of the step still reads."""
        if self._in_forward:
            raise ModelError(
                "the model or the loss runs a backward of its own (a gradient penalty, a force), "
                "which frees the blocks' parameters under training_mode=fully_sharded; use "
                "training_mode=ddp, or set fsdp_blocks=[] to keep all parameters whole in a step",
                code="MGT403",
            )

    def no_sync(self, last: bool) -> AbstractContextManager[Any]:
        if self.root is not None:
            self.root.set_requires_gradient_sync(last)
        return nullcontext()

    def absent(self, share: Share, stand_in: StandIn | None) -> MicroResult:
        if self.root is not None and stand_in is None:
            raise DataError(
                "this rank has no sample in a micro-batch, and none to stand in for one; under "
                "training_mode=fully_sharded every rank must run the model: give every rank a "
                "batch, or the dataset to setup_training"
            )
        try:
            return super().absent(share, stand_in)
        except Exception as error:
            error.add_note(
                "this rank has no sample in the micro-batch and ran the model on another sample of "
                "the dataset in its place, as training_mode=fully_sharded asks of every rank"
            )
            raise

    def attend(self, number: int, module: nn.Module) -> None:
        """A sharded module is about to run; its parameters are gathered."""
        if not torch.is_grad_enabled():
            return
        self._order = (self._order * 31 + number + 1) % _ORDERS
        if number in self._watched:
            return
        self._watched.add(number)
        names = {id(p): name for name, p in self.step_module.model.named_parameters()}
        for parameter in {id(p): p for p in own_parameters(module)}.values():
            name = names.get(id(parameter))  # the tally has none
            if name is not None and parameter.requires_grad and parameter.ndim:
                parameter.register_post_accumulate_grad_hook(
                    _Mark(self._used, name, self.step_module)
                )

    def weigh(self, window_count: int, weighted: bool, unweighted: int) -> None:
        if self.root is None:
            super().weigh(window_count, weighted, unweighted)
            return
        tally = self.step_module.tally.grad
        assert tally is not None
        self._used.update(
            name
            for name, p in zip(self._names, self.parameters, strict=True)
            if p.ndim == 0 and p.grad is not None
        )
        finds = self.config.find_unused_parameters
        if not finds and not self._excused:
            self._refuse_unused()
        loose = [p for p in self._whole if p.requires_grad]
        facts = [float(self._order), float(self._order) ** 2]
        facts += [float(name in self._used) for name in self._names] if finds else []
        zero = torch.zeros((), dtype=torch.float64, device=tally.device)
        parts = [tally.double(), *(zero if p.grad is None else p.grad.double() for p in loose)]
        told = torch.cat([torch.stack(parts), torch.tensor(facts, dtype=zero.dtype).to(zero)])
        told = self.placement.sum(told)
        ranks = self.placement.dp_size
        for parameter, total in zip(loose, told[1 : len(parts)], strict=True):
            parameter.grad = (total / ranks).to(parameter.dtype)
        self._check_order(told[len(parts) : len(parts) + 2])
        if finds:
            # A parameter that no rank used must have no gradient: AdamW would move it.
            used = told[len(parts) + 2 :].tolist()
            for parameter, count in zip(self.parameters, used, strict=True):
                if not count:
                    parameter.grad = None
        self._begin_step()
        self._divide(told[0] / ranks, window_count)

    def _begin_step(self) -> None:
        self._used.clear()
        self._excused = False
        self._order = 0
        self._fresh_buffers = True

    def _refuse_unused(self) -> None:
        missing = [name for name in self._names if name not in self._used]
        if missing:
            raise ModelError(
                f"{len(missing)} parameters got no gradient from the loss: {', '.join(missing[:8])}"
                f"{' ...' if len(missing) > 8 else ''}; use them in the loss, freeze them with "
                "requires_grad_(False), or set find_unused_parameters=true",
                code="MGT402",
            )

    def _check_order(self, sums: Tensor) -> None:
        """Raise unless all ranks ran the same blocks in the same order. Otherwise they would have
        gathered shards of different blocks, and nothing else would notice."""
        if sums.device.type == "cuda":
            sums, self._told = self._told, sums  # type: ignore[assignment]
            if sums is None:
                return
        order, squares = sums.tolist()
        if order * order != squares * self.placement.dp_size:
            raise DivergenceError(
                "ranks ran different blocks of the model, or in another order, and have mixed up "
                "their parameters; blocks that some batches leave out (experts, dropped layers) "
                "must not be sharded by themselves: set find_unused_parameters=true, or name "
                "blocks that every batch runs in fsdp_blocks"
            )

    def gradients(self) -> list[Tensor]:
        return [piece(grad) for p in self.parameters if (grad := p.grad) is not None]

    def held(self, parameter: Tensor) -> Tensor:
        return piece(parameter)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, grad in super().named_gradients():
            yield name, piece(grad)

    def any_rank(self, flag: Tensor) -> None:
        self.placement.sum(flag)
        self.placement.team_sum(flag)

    def forget_step(self) -> None:
        if self.root is not None:
            forget_step(self.root)
            self._begin_step()

    def clip(self, max_norm: float) -> Tensor:
        if self.root is None:
            return super().clip(max_norm)
        grads = self.gradients()
        graded = [p for p in self.parameters if p.grad is not None]
        held = [g for p, g in zip(graded, grads, strict=True) if p.ndim and piece(p).numel()]
        loose = [g for p, g in zip(graded, grads, strict=True) if not p.ndim]
        kind = torch.float64 if any(g.dtype is torch.float64 for g in grads) else torch.float32
        # Of what a team's ranks hold a shard of each, and of what each of them holds whole.
        sums = torch.zeros(2, dtype=kind, device=self.placement.device)
        split = [over_team(p) for p in graded if p.ndim and piece(p).numel()]
        for norm, by_team in zip(foreach_norm(held) if held else (), split, strict=True):
            sums[0 if by_team else 1] += norm.to(kind) ** 2
        sums = self.placement.sum(sums) / self._copies
        squares = self.placement.team_sum(sums[0].clone()) + sums[1]
        for grad in loose:  # every rank has them whole
            squares = squares + grad.to(kind) ** 2
        norm = squares.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            by_type.setdefault(grad.dtype, []).append(grad)
        for dtype, same in by_type.items():
            foreach_mul_(same, factor.to(dtype))
        return norm

    # The model as a whole

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext() if self.root is None else gathered(self.root, self.config.fsdp_reshard)

    @contextmanager
    def in_step(self) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        try:
            yield lambda function: self.root(None, 0, 0, 0, function)
        finally:
            for module in sharded_modules(self.root):
                module.reshard()

    def full_state(self) -> dict[str, Tensor]:
        held = self.held_state()
        return {n: whole(t) if isinstance(t, Tensor) else t for n, t in held.items()}

    def held_state(self) -> dict[str, Tensor]:
        return super().full_state()

    def check_replicas(self, step: int) -> None:
        """Nothing to compare: no two ranks hold the same shard."""
        if self.root is None:
            super().check_replicas(step)

    # What others ask about it

    def recording_obstacle(self) -> str | None:
        return None if self.root is None else "fully sharded steps gather parameters as they go"

    def compile_obstacle(self) -> str | None:
        if self.root is None:
            return None
        if self.config.step_execution != "compile":
            return "sharded steps are compiled only if step_execution=compile asks for it"
        if self._compiled is None:
            return "no block was found to compile; name some in fsdp_blocks"
        if self.forward_exchanges:
            return "sync_bn exchanges statistics inside the blocks"
        if self.config.use_gradient_checkpointing and self._blocks_recompute_otherwise():
            return "torch cannot compile how this model recomputes its blocks"
        if self.placement.team_size > 1:
            return "tensor_parallel exchanges activations inside the blocks"
        return None

    def compile(self, loss_fn: LossFn) -> LossFn:
        return (
            super().compile(loss_fn) if self._compiled is None else self._compiled.compile(loss_fn)
        )

    def _blocks_recompute_otherwise(self) -> bool:
        """Whether checkpoints lie around the blocks (Hugging Face), or keep buffers."""
        model = self.step_module.model
        if callable(getattr(model, "gradient_checkpointing_enable", None)):
            return True
        blocks = (m for m in sharded_modules(self.root) if m is not self.root)
        return any(True for block in blocks for _ in block.buffers())  # type: ignore[attr-defined]

    @property
    def compile_failure(self) -> Exception | None:
        return None if self._compiled is None else self._compiled.failure


class ShardedStep(nn.Module):
    """The root module that `fully_shard` hooks into. The step module itself cannot be the root,
    because it is called without its hooks."""

    def __init__(self, step: StepModule) -> None:
        super().__init__()
        self.step = step

    def forward(
        self, batch: Any, count: int, window_count: int, ranks: int, instead: Any = None
    ) -> Any:
        """Compute a micro-batch, or whatever `instead` does with the model."""
        if instead is not None:
            return instead()
        result = self.step.forward(batch, count, window_count, ranks)
        scaled = result.scaled
        return result._replace(scaled=scaled.clone()) if is_view(scaled) else result


class _Attendant:
    """Tells the strategy that a sharded module is about to run."""

    def __init__(self, strategy: FSDPStrategy, number: int) -> None:
        self.strategy = strategy
        self.number = number

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self.strategy.attend(self.number, module)


class _Mark:
    """Notes that a parameter got a gradient."""

    def __init__(self, used: set[str], name: str, step_module: StepModule) -> None:
        self.used = used
        self.name = name
        self.step_module = step_module

    def __call__(self, _: Tensor) -> None:
        if not self.step_module.silent:  # its backward still runs, with zeros
            self.used.add(self.name)


class _BlockOutput:
    """A forward hook of a block: its outputs are no views, and their backward is watched.

    An in-place operation on a view would remove the hook that gathers the block's parameters in
    backward.
    """

    def __init__(self, watch: Callable[[Tensor], None]) -> None:
        self.watch = watch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._watched(output)

    def _watched(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            if not output.requires_grad:
                return output
            output = output.clone() if is_view(output) else output
            output.register_hook(self.watch)
            return output
        if type(output) in (tuple, list):
            return type(output)(map(self._watched, output))
        if type(output) is dict:
            return {key: self._watched(item) for key, item in output.items()}
        return output


def _kinds(module: Any, names: Sequence[str]) -> tuple[type, ...]:
    """Those of the classes that this version of torch has."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def _split_state(parameter: nn.Parameter, name: str, value: Any) -> Any:
    """What an optimizer keeps of a whole parameter, as it would keep it of the sharded one."""
    if not isinstance(value, Tensor) or value.ndim == 0 or not is_split(parameter):
        return value
    if value.shape != parameter.shape:
        raise ModelError(
            f"the optimizer's {name} has the shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}, and cannot be split like it; give a function that builds "
            "the optimizer from the sharded parameters"
        )
    return split_like(parameter, part_of(parameter, value).clone())


def _is_about_splitting(error: RuntimeError) -> bool:
    return any(words in str(error) for words in _SPLIT_ERRORS)


def _in_short(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0][:160]


def _reads_blocks(found: str) -> ModelError:
    return ModelError(
        "the loss or the model uses the weights of a block outside that block's forward, as a "
        "penalty on weights does; under training_mode=fully_sharded a rank holds only some of "
        f"their rows there{found}. Set fsdp_blocks=[] to keep all parameters whole in a step, name "
        "in fsdp_blocks only blocks whose weights nothing else uses, or give the optimizer a "
        "weight_decay instead",
        code="MGT403",
    )


def _refuse_unsupported(step_module: StepModule) -> None:
    """Raise a single error that lists everything in the model that cannot be sharded."""
    model, problems = step_module.model, []
    if step_module.precision.scaler.is_enabled():
        problems.append("fp16 mixed precision needs loss scaling; use mixed_precision_dtype=bf16")
    if step_module.sparse:
        problems.append("an embedding has sparse=True; its gradients cannot be split by rows")
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(trained) > 1:
        kinds = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in trained))
        problems.append(f"its trained parameters are of several types: {kinds}; convert the model")
    hooked = [name for name, p in model.named_parameters() if gradient_hooks(p)]
    if hooked:
        problems.append(f"hooks on {', '.join(hooked[:4])} would be lost; use callbacks instead")
    compiled = [name for name, _ in model.named_parameters() if plain_name(name) != name]
    if compiled:
        problems.append("torch.compile wraps a part of it; give the model itself")
    if problems:
        raise ModelError(
            f"training_mode=fully_sharded cannot train {type(model).__name__}:\n"
            + "\n".join(f"  - {problem}" for problem in problems),
            code="MGT403",
        )
