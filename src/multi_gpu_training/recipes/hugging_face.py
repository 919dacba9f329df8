"""Models of Hugging Face: from a folder or the hub, and back into a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from safetensors import safe_open
from torch import Tensor, nn

from multi_gpu_training.checkpoint.store import load
from multi_gpu_training.distributed.sharding import is_split
from multi_gpu_training.errors import ModelError
from multi_gpu_training.extras import quiet_torchao
from multi_gpu_training.recipes.user_data import library
from multi_gpu_training.safe_output import brief
from multi_gpu_training.training.callbacks import Run
from multi_gpu_training.training.strategy.deferred_init import (
    WeightSource,
    build_deferred,
    set_source,
    source_of,
)

MOST_JSON = 2**28  # a large tokenizer has 20 MiB
MOST_LAYERS, MOST_SIZE = 10_000, 2**31
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def transformers() -> Any:
    """The library, which only models of Hugging Face need."""
    quiet_torchao()  # which it imports where it is installed
    needed = "models of Hugging Face need the transformers library"
    return library("transformers", needed, extra="transformer")


def has_weights(name: str) -> bool:
    """Whether a folder holds weights; what is not here is a hub name, and models there do."""
    path = Path(name).expanduser()
    if path.is_dir():
        return any(any(path.glob(end)) for end in WEIGHTS)
    return not path.is_file()


def fetch(kind: str, option: str, name: str, trust: bool = False, **more: Any) -> Any:
    """`kind.from_pretrained(name)` of transformers, with errors that say what to do.

    trust: run Python code that came with the model, where it has any.
    """
    path = Path(name).expanduser()
    _check_files(option, name, path)
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(
            f"{option}={name!r} does not exist; give a folder that save_pretrained has written, or "
            "a name of the Hugging Face hub",
            code="MGT404",
        )
    try:
        with no_progress_bar():
            loader = getattr(transformers(), kind)
            # Explicitly: left open, transformers would ask on the terminal whether to run
            # code that came with the model.
            told = kind.startswith("AutoModel") and not trust
            if told:
                more["output_loading_info"] = True
            found = loader.from_pretrained(
                str(path) if path.exists() else name, trust_remote_code=trust, **more
            )
        if kind == "AutoConfig":
            check_config(f"{option}={name!r}", found)
        return _with_its_weights(f"{option}={name!r}", *found) if told else found
    except ModelError:
        raise
    # A file of nonsense fails in transformers in every way there is.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{option}={name!r} brings its own Python code, which is not run unless you trust "
                "its author: read it, then set trust_remote_code=true",
                code="MGT404",
            ) from None
        if path.exists():
            raise ModelError(
                f"{option}={name!r} cannot be loaded by {kind}: {first_line(error)}; give a folder "
                "that save_pretrained has written",
                code="MGT404",
            ) from None
        raise ModelError(
            f"{option}={name!r} is not a folder here, and could not be fetched from the Hugging "
            f"Face hub: {first_line(error)}; check the name and the network, or fetch it where "
            "there is one "
            f"(hf download {name} --local-dir {Path(name).name}) and give the folder",
            code="MGT404",
        ) from None


def _with_its_weights(asked: str, model: Any, told: Mapping[str, Any]) -> Any:
    """The model, unless all but its head would begin at random: that is no pretrained model."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = [name for name, _ in model.named_parameters()]
    body = [name for name in names if name.startswith(prefix)] or names
    if set(body) <= set(told.get("missing_keys", ())):
        raise ModelError(
            f"{asked}: none of its weights fits a {type(model).__name__}, as its config.json "
            "describes it; give the folder that belongs to these weights, or from_scratch=true",
            code="MGT404",
        )
    return model


def check_config(asked: str, config: Any) -> None:
    """Refuse sizes that no model has; building one would take all memory, or forever."""
    for key, value in config.to_dict().items():
        numbers = value if isinstance(value, list) else [value]
        most = MOST_LAYERS if "layer" in key or "depth" in key else MOST_SIZE
        for number in numbers:
            if isinstance(number, int) and abs(number) > most:
                raise ModelError(
                    f"{asked}: {key}={brief(value, 80)} is not possible; check config.json",
                    code="MGT404",
                )

    sizes = {"layers": 1, "width": 1}
    for key, value in config.to_dict().items():
        kind = "layers" if "layer" in key else "width" if key in WIDTHS else None
        if kind is not None and type(value) is int:
            sizes[kind] = max(sizes[kind], value)
    _check_bytes(asked, 4 * sizes["width"] ** 2 * sizes["layers"])


def check_memory(asked: str, build: Callable[[], Any]) -> None:
    """Refuse a model whose weights alone exceed this machine's memory."""
    needed = 0
    # Without weights; and what building draws from the generators must be drawn again.
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
        needed = sum(p.numel() * 4 for p in build().parameters())
    _check_bytes(asked, needed)


def _check_bytes(asked: str, needed: int) -> None:
    there = psutil.virtual_memory().total
    if needed > there:
        raise ModelError(
            f"{asked} has weights of {needed / 2**30:,.0f} GiB, this machine {there / 2**30:,.0f} "
            "GiB of memory; choose a smaller one",
            code="MGT404",
        )


def _check_files(option: str, name: str, path: Path) -> None:
    """Refuse JSON files that only fill memory, and what is not a file, before anything is read."""
    for file in path.glob("*.json") if path.is_dir() else [path]:
        if not file.exists() or file.is_dir():
            continue
        if not file.is_file() or file.stat().st_size > MOST_JSON:
            raise ModelError(
                f"{option}={name!r}: {file.name} is not a regular file of at most "
                f"{MOST_JSON // 2**20} MiB, as a model's JSON files are",
                code="MGT404",
            )


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """The console is the run's: no bar of transformers in it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def weights_to_keep(run: Run) -> tuple[dict[str, Any] | None, str]:
    """At the end of a run: the best weights, or None where only the model itself has any; and
    which these are, in words."""
    best = run.folder / "checkpoints" / "best"
    # Without fault tolerance nothing is saved: a file there would be an older run's.
    if run.config.enable_fault_tolerance and (best / "model.safetensors").is_file():
        return load(best).model, "the best"
    if any(is_split(p) for p in run.model.parameters()):
        raise ModelError(
            "training_mode=fully_sharded leaves a part of the model on each rank, and nothing was "
            "saved to export; train with enable_fault_tolerance=true"
        )
    return None, "the last"


# Weights that are read in parts


def stream_pretrained(kind: Any, folder: str | Path, **more: Any) -> nn.Module:
    """`kind.from_pretrained(folder)`, whose weights are read when the model is placed.

    kind: a class of transformers, such as `AutoModelForCausalLM`. Under training_mode=fsdp each
    rank reads its own rows from the safetensors files; everywhere else all of them are read. Use
    it in the function that builds the model. A folder that holds other tensors than the model has
    (renamed, fused, quantised, missing) is loaded by `from_pretrained` as usual.
    """
    config, dtype = more.pop("config", None), more.pop("dtype", torch.float32)
    if config is None:
        config = transformers().AutoConfig.from_pretrained(folder)
    if not more:
        with no_progress_bar():
            model = build_deferred(lambda: _fresh(kind, config, dtype), draw=False)
        files = PretrainedFiles(Path(folder), source_of(model))
        if files.fit(model):
            set_source(model, files)
            return cast(nn.Module, model.eval())  # as from_pretrained leaves it
    with no_progress_bar():
        loaded: nn.Module = kind.from_pretrained(folder, config=config, dtype=dtype, **more)
    return loaded


def _fresh(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    if hasattr(kind, "from_config"):
        return kind.from_config(config, dtype=dtype)
    return kind(config).to(dtype)


class PretrainedFiles:
    """The tensors of a `save_pretrained` folder; what else was left out comes from `others`."""

    everywhere = True  # each rank reads its own part

    def __init__(self, folder: Path, others: WeightSource | None) -> None:
        self._places: dict[str, Any] = {}
        self._others = others
        for path in sorted(folder.glob("model*.safetensors")):
            file = safe_open(path, framework="pt")
            self._places |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    def fit(self, model: nn.Module) -> bool:
        """Whether the files hold exactly what the model has; its small tensors are read now."""
        own = dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
        }
        tied = model.state_dict().keys() - own.keys()
        extra = self._places.keys() - own.keys() - tied
        if extra or not all(self._holds(name, tensor) for name, tensor in own.items()):
            return False
        with torch.no_grad():
            for name, tensor in own.items():
                if not tensor.is_meta:
                    tensor.copy_(self._places[name].get_tensor(name))
        return True

    def _holds(self, name: str, tensor: Tensor) -> bool:
        file = self._places.get(name)
        return file is not None and file.get_slice(name).get_shape() == list(tensor.shape)

    def values(self, names: Sequence[str]) -> dict[str, Tensor]:
        found = {n: self._places[n].get_tensor(n) for n in names if n in self._places}
        rest = [name for name in names if name not in found]
        return (
            found if self._others is None or not rest else found | dict(self._others.values(rest))
        )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._places:
            rows: Tensor = self._places[name].get_slice(name)[start:stop]
            return rows
        assert self._others is not None
        return self._others.read(name, start, stop)
