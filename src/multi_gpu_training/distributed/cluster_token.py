"""The secret that the machines of a run share: made, found and checked.

It comes from a file or the environment, never from the command line, which every user can read.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from multi_gpu_training.errors import ConfigError

TOKEN = "MGT_CLUSTER_TOKEN"
TOKEN_FILE = "MGT_CLUSTER_TOKEN_FILE"
INSECURE = "MGT_INSECURE_NETWORK"
SHORTEST, LONGEST = 32, 1024
# What everybody knows: machines that were told --insecure-network use it as their secret.
PUBLIC_KEY = b"mgt: no token, --insecure-network"

_MAKE_ONE = (
    "make one with `mgt cluster token FILE`, copy the file to every machine and give "
    f"--cluster-token FILE there (or {TOKEN_FILE}, or the token itself in {TOKEN})"
)


def write_new_token(path: Path) -> None:
    """Write a new token that only this user can read. An existing file is left alone."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists; choose another name, or delete it if no run uses it",
            code="MGT106",
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", code="MGT704") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read_token(path: Path) -> bytes:
    """The token in a file that nobody else can read."""
    try:
        # Not to wait for ever at a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        # The path is not repeated: somebody may have given the token itself.
        raise ConfigError(
            f"--cluster-token is the path of a file, and it cannot be read: {error.strerror}; "
            f"{_MAKE_ONE}",
            code="MGT503",
        ) from None
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):  # Python opens no folder
        os.close(descriptor)
        raise ConfigError(
            f"--cluster-token {path} is not a regular file; {_MAKE_ONE}", code="MGT503"
        )
    with os.fdopen(descriptor, "rb") as file:
        if facts.st_mode & 0o077:
            raise ConfigError(
                f"--cluster-token {path} can be read by other users (mode "
                f"{stat.S_IMODE(facts.st_mode):04o}); chmod 600 it, or make a new one",
                code="MGT503",
            )
        return _checked(file.read(LONGEST + 2).strip(), str(path))


def cluster_token(environment: Mapping[str, str] | None = None) -> bytes | None:
    """The token that the environment gives, or None."""
    found = os.environ if environment is None else environment
    if found.get(TOKEN_FILE):
        return read_token(Path(found[TOKEN_FILE]))
    if found.get(TOKEN):
        return _checked(found[TOKEN].strip().encode(), TOKEN)
    return None


def network_key(what: str) -> bytes:
    """The key for messages between machines. ConfigError: there is none, and nobody waived it."""
    token = cluster_token()
    if token is not None:
        return token
    if os.environ.get(INSECURE, "") not in ("", "0"):
        return PUBLIC_KEY
    raise ConfigError(
        f"{what} needs a secret that the machines share: without one, anyone who reaches their "
        f"ports can join, change or end the run. Either {_MAKE_ONE}, or accept that with "
        f"--insecure-network ({INSECURE}=1) inside your own network",
        code="MGT503",
    )


def remember(token_file: str | None, insecure: bool) -> None:
    """Put what the flags said where this process and its ranks find it."""
    if token_file is not None:
        path = Path(token_file).absolute()
        read_token(path)
        os.environ[TOKEN_FILE] = str(path)
    if insecure:
        os.environ[INSECURE] = "1"


def _checked(token: bytes, source: str) -> bytes:
    if not SHORTEST <= len(token) <= LONGEST:
        raise ConfigError(
            f"the cluster token in {source} has {len(token)} characters; {SHORTEST} to {LONGEST} "
            f"are allowed; {_MAKE_ONE}",
            code="MGT503",
        )
    return token
