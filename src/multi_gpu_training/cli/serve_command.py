"""`mgt serve`: a trained model behind HTTP."""

from __future__ import annotations

import sys
from typing import Any

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.extras import install, installed
from multi_gpu_training.serving.http_limits import host_problems

LIMITS = {
    "max_batch": (1, 4096),
    "max_delay_ms": (0, 10_000),
    "max_waiting": (1, 1_000_000),
    "max_body_mib": (0.001, 1024),
    "rate": (0, 1_000_000),
    "port": (0, 65535),
}


def _plain(value: float) -> str:
    """The number as it was typed: `:g` would round 99999999 to 1e+08."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def serve(run: str, flags: dict[str, Any]) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 if every accepted input was answered."""
    problems = [
        f"--{name.replace('_', '-')} {_plain(flags[name])}: use {_plain(low)} to {_plain(high)}"
        for name, (low, high) in LIMITS.items()
        if not low <= flags[name] <= high
    ]
    problems += host_problems(flags["allow_host"])
    missing = [name for name in ("fastapi", "uvicorn") if not installed(name)]
    if missing:
        problems.append(f"mgt serve needs {' and '.join(missing)}; run {install('serve')}")
    if problems:
        raise ConfigError(problems, code="MGT105" if missing else "MGT100")
    from multi_gpu_training.delivery.loaded_model import load
    from multi_gpu_training.serving import http_server
    from multi_gpu_training.serving.http_limits import MIB, RequestLimits, is_loopback
    from multi_gpu_training.serving.request_bodies import ServedModel
    from multi_gpu_training.serving.web_app import Batching, ModelServer

    host, port = flags["host"], flags["port"]
    taken = http_server.listen(host, port)  # before the model is loaded, which takes longer
    how = {name: flags[name] for name in ("device", "dtype", "checkpoint", "trust")}
    loaded = load(run, **how)
    limits = RequestLimits(
        max_body_bytes=int(flags["max_body_mib"] * MIB),
        rate=flags["rate"],
        burst=2 * flags["rate"],
    )
    batching = Batching(flags["max_batch"], flags["max_delay_ms"] / 1000, flags["max_waiting"])
    hosts = http_server.allowed_hosts(host, flags["allow_host"])
    server = ModelServer(ServedModel(loaded, flags["task"]), limits, batching, hosts)
    shown = f"[{host}]" if ":" in host else host
    if not is_loopback(host):
        print(
            f"--host {host}: anyone who reaches this port can use the model; there is no password",
            file=sys.stderr,
        )
    taken.listen(http_server.BACKLOG)  # whoever reads the next line may connect at once
    print(f"serving {run} at http://{shown}:{taken.getsockname()[1]}/ (Ctrl-C stops)", flush=True)
    return http_server.serve(server, taken)
