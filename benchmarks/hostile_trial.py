"""One hostile attempt: a call in a forked process, with its time, memory and files watched.

The parent has imported torch and the package, so an attempt costs milliseconds, not the seconds of
a fresh interpreter. A child that hangs is killed; one that takes gigabytes hits its own limit.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What mgt itself needs on top of the parent, with room; a believed header asks for far more.
MEMORY = 1 << 30
ADDRESSES = 12 << 30  # torch reserves addresses that it never touches
SHOWN = 200_000


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended."""

    code: int
    said: str
    seconds: float
    grown: int  # bytes of memory beyond the parent's, at the peak
    hung: bool

    def problems(self, must_fail: bool = True, least_words: tuple[str, ...] = ()) -> list[str]:
        """What is wrong with the way it ended."""
        found = []
        if self.hung:
            found.append(f"hung for {self.seconds:.0f} s")
        if "Traceback (most recent call last)" in self.said or self.code == 70:
            found.append("traceback: " + self.said.strip().splitlines()[-1][:200])
        elif self.code < 0 and not self.hung:
            found.append(f"killed by signal {-self.code}")
        if self.grown > MEMORY:
            found.append(f"took {self.grown / 2**30:.1f} GiB")
        if must_fail and self.code == 0:
            found.append("was accepted")
        if self.code > 0 and not self.said.strip():
            found.append("failed without a word")
        missing = [word for word in least_words if word.lower() not in self.said.lower()]
        if missing and not found:
            found.append(f"does not mention {missing}: {self.said.strip()[-200:]!r}")
        return found


def attempt(call: Callable[[], object], folder: Path, timeout_s: float = 240.0) -> Attempt:
    """Make the call in a child whose working directory is `folder`."""
    reader, writer = os.pipe()
    begun = time.monotonic()
    before = _peak(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_the_child(call, folder, writer)
    os.close(writer)
    said, peak, hung = b"", 0, False
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            peak = max(peak, _peak(child))
            ready, _, _ = select.select([pipe], [], [], 0.02)
            if ready:
                part = pipe.read(65536)
                if not part:
                    break
                said = (said + part)[-SHOWN:]
            if time.monotonic() - begun > timeout_s:
                hung = True
                break
    if hung:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    peak = max(peak, used.ru_maxrss * 1024)
    text = said.decode(errors="replace")
    seconds = time.monotonic() - begun
    code = os.waitstatus_to_exitcode(status)
    return Attempt(code, text, seconds, max(0, peak - before), hung)


def _peak(pid: int) -> int:
    """Resident bytes of a process now; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def _be_the_child(call: Callable[[], object], folder: Path, writer: int) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        sys.stdout = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            call()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def mgt(
    *words: str, env: dict[str, str] | None = None, servers: bool = False
) -> Callable[[], None]:
    """`mgt WORDS`, to be called in the child. No rank process is ever started, and no server unless
    `servers` says so."""

    def call() -> None:
        from multi_gpu_training.cli import main
        from multi_gpu_training.launch.local import LocalEngine

        def started(*_: object) -> None:
            print("RANKS WOULD HAVE BEEN STARTED", file=sys.stderr)
            sys.stderr.flush()
            os._exit(0)

        LocalEngine.start = started  # type: ignore[method-assign]
        if not servers:
            _without_servers()
        os.environ.update(env or {})
        sys.argv = ["mgt", *words]
        sys.orig_argv = [sys.executable, *sys.argv]
        main()

    return call


def _without_servers() -> None:
    """What would run until Ctrl-C, train, or start another program, ends at once as accepted."""
    from multi_gpu_training.cli import profile_command
    from multi_gpu_training.federated import deployment, simulation
    from multi_gpu_training.launch.elastic import witness
    from multi_gpu_training.search import run_search
    from multi_gpu_training.serving import http_server

    def begun(*_: object, **__: object) -> None:
        print("IT WOULD HAVE BEGUN", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0)

    for place, name in (
        (deployment, "_start"),
        (run_search.Searcher, "run"),
        (http_server, "serve_until_signal"),
        (witness, "WitnessServer"),
    ):
        assert hasattr(place, name), name
        setattr(place, name, begun)

    def traced(command: list[str], asked: Any, num_gpus: int) -> None:
        words = profile_command._started(command, asked.device, num_gpus)
        mgt(*words[words.index("multi_gpu_training") + 1 :])()

    profile_command._traced = traced  # type: ignore[assignment]
    # Flower need not be here: what is wrong is said before it is imported.
    for module in (deployment, simulation):
        module.require_flower = lambda *_, **__: None  # type: ignore[assignment]


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> (size, time of the last change) of all that lies there, links not followed."""
    found = {}
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(base) / name
            stat = path.lstat()
            found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns)
    return found
