"""Connect to a Ray cluster, and send it the code that the ranks run."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.safe_output import brief

# Ray leaves out what .gitignore names; these are large and never code.
NOT_SHIPPED = ["/runs/", ".git/", ".venv/", "venv/", "__pycache__/", "*.pt", "*.pth", "*.ckpt"]
NOT_SHIPPED += ["*.safetensors", "*.npy", "*.npz", "*.parquet", "*.tar", "*.zip", "*.mp4", "*.wav"]
PACKAGE = Path(__file__).parents[2]
_CONNECT_S = 5.0


@dataclass(frozen=True)
class RayOptions:
    """What `--ray-address` and `--ray-options` say.

    gpus_per_rank None: one where the cluster has GPUs. working_dir None: nothing but this package
    is sent.
    """

    address: str = "auto"
    cpus_per_rank: float = 1.0
    gpus_per_rank: int | None = None
    working_dir: str | None = "."

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> RayOptions:
        """From the flags; ConfigError names all that is wrong with them."""
        problems = []
        address = given.get("ray_address") or os.environ.get("RAY_ADDRESS") or "auto"
        problem = _address_problem(address)
        if problem is not None:
            problems.append(problem)
        found: dict[str, Any] = {}
        asked = given.get("ray_options")
        for part in [] if asked is None else str(asked).split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name == "cpus_per_rank" and _is_amount(value):
                found[name] = float(value)
            elif name == "gpus_per_rank" and value in ("0", "1"):
                found[name] = int(value)
            elif name == "working_dir" and (value == "none" or Path(value).is_dir()):
                found[name] = None if value == "none" else value
            else:
                problems.append(
                    f"--ray-options {brief(part)}: use cpus_per_rank=N, gpus_per_rank=0 or 1, "
                    "working_dir=FOLDER (none: send nothing), with commas between them"
                )
        if problems:
            raise ConfigError(problems)
        return cls(address, **found)


def _is_amount(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and float(text) < 1e6


def _address_problem(address: str) -> str | None:
    if address == "auto":
        return None
    asked = f"--ray-address {brief(address)}"
    if address.startswith("ray://"):
        return (
            f"{asked}: a Ray Client does not hear what becomes of the ranks; start mgt on a node "
            "of the cluster, or as a job: `ray job submit --working-dir . -- mgt train ... "
            "--engine ray`"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        return f"{asked}: use auto, or HOST:PORT such as 10.0.0.1:6379 (`ray status` shows it)"
    return None


def connect(options: RayOptions) -> bool:
    """Connect this process to the cluster. False: it was connected already."""
    if options.address != "auto":
        _knock(options.address)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--engine ray needs Ray; install it with `pip install 'multi-gpu-training[ray]'`, "
            "here and on the nodes of the cluster",
            code="MGT105",
        )
    # Ray reads these when it is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    if ray.is_initialized():
        return False
    try:
        ray.init(
            address=options.address,
            runtime_env=_shipped(options),
            logging_level="error",
            log_to_driver=False,  # the ranks' output comes with their looks
        )
    except ConnectionError:
        raise LaunchError(
            f"--engine ray: no Ray cluster was found at --ray-address {options.address}; start one "
            "with `ray start --head`, or give HOST:PORT of its head",
            code="MGT505",
        ) from None
    except Exception as error:
        ray.shutdown()
        hint = ""
        if "exceeds" in str(error):
            hint = (
                "; the current folder is sent to the nodes: name data in .gitignore, send another "
                "with --ray-options working_dir=FOLDER, or nothing with working_dir=none"
            )
        raise LaunchError(
            f"--engine ray: Ray could not start: {brief(error, 600)}{hint}", code="MGT505"
        ) from None
    return True


def _knock(address: str) -> None:
    """Say at once that nobody is there; Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"--ray-address {address}: nothing answers there ({error}); give HOST:PORT of the "
            "cluster's head, or start one with `ray start --head`",
            code="MGT505",
        ) from None


def _shipped(options: RayOptions) -> dict[str, Any]:
    """The runtime environment of the actors: this package, and the user's folder."""
    asked: dict[str, Any] = {"py_modules": [str(PACKAGE)]}
    if options.working_dir is not None:
        asked |= {"working_dir": str(Path(options.working_dir).resolve()), "excludes": NOT_SHIPPED}
    # In a Ray job its submitter has said some of this, and Ray refuses to hear it twice.
    try:
        said = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"] or {}
    except (KeyError, ValueError, TypeError):
        said = {}
    if "working_dir" in said:
        said = {**said, "excludes": None}
    return {name: value for name, value in asked.items() if name not in said}
