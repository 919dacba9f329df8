"""The flags of the engines slurm and kubernetes, which several commands share, and what their ranks
run."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

from typer import Option

_PANEL = "Slurm (--engine slurm)"
_PODS = "Kubernetes (--engine kubernetes)"


def _option(*names: str, help: str, panel: str = _PANEL, **more: Any) -> Any:
    return Option(*names, help=help, rich_help_panel=panel, **more)


_SLURM: dict[str, tuple[Any, Any]] = {
    "gpus_per_node": (
        Annotated[str | None, _option(help="a number; for Slurm also TYPE:NUMBER such as a100:4")],
        None,
    ),
    "gpus_per_task": (
        Annotated[int | None, _option(help="bind GPUs to tasks: how many each task sees", min=1)],
        None,
    ),
    "time": (Annotated[str | None, _option(help="time limit of a job, such as 4:00:00")], None),
    "partition": (Annotated[str | None, _option(help="one that `sinfo` lists")], None),
    "sbatch": (
        Annotated[
            list[str] | None, _option(help="any option of sbatch, such as account=x; repeatable")
        ],
        None,
    ),
    "het": (
        Annotated[
            list[str] | None,
            _option(help="further nodes of another kind: nodes=1,gpus-per-node=8; repeatable"),
        ],
        None,
    ),
    "setup_file": (
        Annotated[str | None, _option(help="shell lines before the run: modules, venv, container")],
        None,
    ),
    "max_requeues": (
        Annotated[
            int | None,
            _option(
                help="how often a job may continue after a time limit or lost node; default: 50",
                min=0,
            ),
        ],
        None,
    ),
    "dry_run": (
        Annotated[bool, _option("--dry-run", help="show the script or manifest")],
        False,
    ),
    "detach": (Annotated[bool, _option("--detach", help="submit and return")], False),
}
_KUBERNETES: dict[str, tuple[Any, Any]] = {
    "image": (
        Annotated[str | None, _option(help="a container with this package", panel=_PODS)],
        None,
    ),
    "kind": (
        Annotated[str | None, _option(help="jobset, pytorchjob or trainjob", panel=_PODS)],
        None,
    ),
    "namespace": (Annotated[str | None, _option(help="namespace of the job", panel=_PODS)], None),
    "claim": (
        Annotated[
            str | None,
            _option(help="persistent volume claim for checkpoints: NAME[:/path]", panel=_PODS),
        ],
        None,
    ),
    "toleration": (
        Annotated[
            list[str] | None,
            _option(help="KEY, KEY=VALUE or KEY=VALUE:EFFECT; repeatable", panel=_PODS),
        ],
        None,
    ),
    "pod": (
        Annotated[
            list[str] | None,
            _option(
                help="cpu=8, memory=64Gi, shm=16Gi, gpu=RESOURCE, python=PATH, "
                "node-selector=LABEL:VALUE; repeatable",
                panel=_PODS,
            ),
        ],
        None,
    ),
}
ENGINE_OPTIONS = {**_SLURM, **_KUBERNETES}
# What the ranks of a job must not be told: where they are is the scheduler's answer.
_FLAGS = {"dry-run", "detach", "insecure-network"}
_VALUES = {name.replace("_", "-") for name in ENGINE_OPTIONS} - _FLAGS
_VALUES |= {"engine", "nnodes", "nodes", "node-rank", "master-addr", "master-port", "num-gpus"}
_VALUES |= {"cluster-token", "ray-address", "ray-options"}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags above. It finds them in `ctx.params`."""

    @functools.wraps(command)
    def with_them(**params: Any) -> None:
        command(**{name: value for name, value in params.items() if name not in ENGINE_OPTIONS})

    own = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own.parameters.values()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in ENGINE_OPTIONS.items()
    ]
    with_them.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_them.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_them


def rank_command(words: Sequence[str] | None = None) -> list[str]:
    """What each rank of a job runs: this command, without what says where it runs."""
    rest = list(sys.argv[1:] if words is None else words)
    kept = ["-m", "multi_gpu_training"]
    while rest:
        word = rest.pop(0)
        name, equals, _ = word[2:].partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--") or name not in _FLAGS | _VALUES | {"debug"}:
            kept.append(word)
        elif name in _VALUES and not equals and rest:
            rest.pop(0)
    return kept
