"""Signed manifests: "intact" then also means "mine".

Hashes in a manifest find damage, not forgery: whoever can write the folder can write fitting
hashes. With `signing_key_file` every manifest carries a signature over all its facts, among them
the hashes of all files, and only checkpoints with a fitting one are resumed from.

A key file holds either a secret of 32 bytes and more (`mgt cluster token FILE` writes one), for
HMAC-SHA256, or an ed25519 key in PEM form, which needs the `cryptography` package: with the public
key alone others can verify, but not sign.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any, Protocol

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_files import open_regular

FIELD = "signature"
MOST_KEY = 2**14
LEAST_SECRET = 32
_CONTEXT = b"multi-gpu-training checkpoint manifest 1\n"


class Key(Protocol):
    """Signs, unless it is a public key, and verifies."""

    algorithm: str
    key_id: str

    def sign(self, message: bytes) -> bytes: ...

    def fits(self, message: bytes, signature: bytes) -> bool: ...


class ManifestSigner:
    """Signs manifests with one key, and tells which ones it has signed."""

    def __init__(self, key: Key, name: str) -> None:
        self._key = key
        self._name = name

    def signed(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts with their signature."""
        value = self._key.sign(_message(facts)).hex()
        told = {"algorithm": self._key.algorithm, "key_id": self._key.key_id, "value": value}
        return {**facts, FIELD: told}

    def problem(self, facts: dict[str, Any]) -> str | None:
        """Why these facts cannot be told to be ours; None if they are."""
        told = facts.get(FIELD)
        if told is None:
            return f"it is not signed, and only what {self._name} signed is trusted"
        given = told.get("value") if isinstance(told, dict) else None
        if not isinstance(given, str) or len(given) > 1024:
            return "its signature is unreadable"
        try:
            fits = self._key.fits(_message(facts), bytes.fromhex(given))
        except ValueError:
            fits = False
        if fits:
            return None
        another = told.get("key_id") != self._key.key_id
        return (
            f"it is signed with another key than {self._name}"
            if another
            else (f"its signature does not fit: it was changed by somebody without {self._name}")
        )


def read_signer(path: str | None, signs: bool = True) -> ManifestSigner | None:
    """The signer with the key in a file; None without one. `signs`: a public key is not enough."""
    if path is None:
        return None
    file = Path(path)
    try:
        # A symbolic link is fine: mounted secrets are links.
        descriptor = open_regular(file.resolve())
        with os.fdopen(descriptor, "rb") as opened:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            raw = opened.read(MOST_KEY + 1)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the key file {path} cannot be read: {reason}", code="MGT706") from None
    if len(raw) > MOST_KEY:
        raise ConfigError(
            f"the key file {path} has more than {MOST_KEY:,} bytes; give a key", code="MGT706"
        )
    key: Key = _Ed25519(raw, path) if b"-----BEGIN" in raw else _Secret(raw.strip(), path)
    if signs and isinstance(key, _Ed25519) and not key.can_sign:
        raise ConfigError(
            f"the key file {path} holds a public key, which verifies but cannot sign; give the "
            "private one",
            code="MGT706",
        )
    secret = not isinstance(key, _Ed25519) or key.can_sign
    if secret and mode & 0o077:
        raise ConfigError(
            f"the key file {path} may be read by others (mode {mode:04o}); run chmod 600 {path}",
            code="MGT706",
        )
    return ManifestSigner(key, file.name)


def _message(facts: dict[str, Any]) -> bytes:
    kept = {name: value for name, value in facts.items() if name not in (FIELD, "sha256")}
    return _CONTEXT + json.dumps(kept, sort_keys=True).encode()


class _Secret:
    algorithm = "hmac-sha256"

    def __init__(self, secret: bytes, path: str) -> None:
        if len(secret) < LEAST_SECRET:
            raise ConfigError(
                f"the key file {path} holds {len(secret)} bytes; a secret has at least "
                f"{LEAST_SECRET}: `mgt cluster token FILE` writes one",
                code="MGT706",
            )
        self._secret = secret
        self.key_id = hmac.new(secret, b"key id", hashlib.sha256).hexdigest()[:16]

    def sign(self, message: bytes) -> bytes:
        return hmac.new(self._secret, message, hashlib.sha256).digest()

    def fits(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)


class _Ed25519:
    algorithm = "ed25519"

    def __init__(self, raw: bytes, path: str) -> None:
        try:
            from cryptography.exceptions import (  # type: ignore[import-not-found, unused-ignore]
                InvalidSignature,
            )
            from cryptography.hazmat.primitives import (  # type: ignore[import-not-found, unused-ignore]
                serialization as pem,
            )
        except ImportError:
            raise ConfigError(
                f"the key file {path} is in PEM form, which needs the `cryptography` package; "
                "install it, or use a secret of `mgt cluster token FILE`",
                code="MGT105",
            ) from None
        self._private: Any = None
        try:
            if b"PRIVATE" in raw:
                self._private = pem.load_pem_private_key(raw, None)
                self._public: Any = self._private.public_key()
            else:
                self._public = pem.load_pem_public_key(raw)
            form = pem.Encoding.Raw, pem.PublicFormat.Raw
            self.key_id = hashlib.sha256(self._public.public_bytes(*form)).hexdigest()[:16]
            self._public.verify  # noqa: B018 - only keys that sign messages as they are have it
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the key file {path} holds no ed25519 key without a password: {error}",
                code="MGT706",
            ) from None
        self._invalid = InvalidSignature

    @property
    def can_sign(self) -> bool:
        return self._private is not None

    def sign(self, message: bytes) -> bytes:
        return bytes(self._private.sign(message))

    def fits(self, message: bytes, signature: bytes) -> bool:
        try:
            self._public.verify(signature, message)
        except self._invalid:
            return False
        return True
