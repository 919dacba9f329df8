"""`mgt dashboard` and `mgt top`: runs while they run."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.extras import install, installed
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_output import brief

SHORTEST_TOKEN = 12


def check_folders(command: str, runs: Sequence[str]) -> None:
    """Refuse what was named and is no folder. Only runs/, the default, may come later."""
    problems = []
    for run in runs:
        if not is_url(run) and not Path(run).is_dir():
            found = "not a folder" if Path(run).exists() else "no such folder"
            problems.append(
                f"mgt {command} {brief(run, 80)}: {found}; give a run or a folder of runs"
            )
    if problems:
        raise ConfigError(problems, code="MGT104")


def dashboard(
    runs: Sequence[str],
    host: str,
    port: int,
    token: str | None,
    allow_host: Sequence[str],
    read_only: bool,
) -> int:
    """Serve the page until SIGTERM or Ctrl-C."""
    problems = []
    missing = [name for name in ("starlette", "uvicorn") if not installed(name)]
    if missing:
        problems.append(f"mgt dashboard needs {' and '.join(missing)}; run {install('dashboard')}")
    if not 0 <= port <= 65535:
        problems.append(f"--port {port}: use 0 to 65535")
    from multi_gpu_training.serving.http_limits import host_problems, is_loopback

    if token is None and not is_loopback(host):
        problems.append(
            f"--host {host}: anyone who reaches this port could stop your runs; give a --token, or "
            "set MGT_DASHBOARD_TOKEN, to let in only those who know it"
        )
    if token is not None and not re.fullmatch(rf"[!-~]{{{SHORTEST_TOKEN},}}", token):
        problems.append(
            f"--token has {len(token)} characters; use at least {SHORTEST_TOKEN} plain ones, "
            "without spaces"
        )
    problems += host_problems(allow_host)
    if problems:
        raise ConfigError(problems, code="MGT105" if missing else "MGT100")
    from multi_gpu_training.dashboard.dashboard_app import Dashboard
    from multi_gpu_training.dashboard.live_runs import LiveRuns
    from multi_gpu_training.serving import http_server

    taken = http_server.listen(host, port)
    token = token or secrets.token_urlsafe(24)
    found = LiveRuns(runs)
    hosts = http_server.allowed_hosts(host, list(allow_host))
    page = Dashboard(found, token, hosts, read_only)
    found.watch()
    taken.listen(http_server.BACKLOG)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{taken.getsockname()[1]}/"
    if not is_loopback(host):
        print(
            f"--host {host}: the token crosses the network unencrypted; an ssh tunnel does not "
            "need --host",
            file=sys.stderr,
        )
    print(f"dashboard of {', '.join(runs)} at {address}#token={token} (Ctrl-C stops)", flush=True)
    try:
        http_server.serve_until_signal(page, taken, drain_s=0.6)
        return 0
    finally:
        found.close()


def top(runs: Sequence[str], once: bool, interval_s: float) -> int:
    """Show the runs in the terminal until `q`; once, where there is none."""
    from multi_gpu_training.dashboard.terminal_view import show_runs

    return show_runs(runs, once, interval_s)
