"""Signed checkpoints: with a key, intact also means mine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import flat, line, manager_for, points, sgd, squares

from multi_gpu_training.cli.checkpoints_command import show_checkpoints
from multi_gpu_training.errors import ConfigError, MultiGPUError
from multi_gpu_training.safe_files import signed


def train(folder: Path, key: Path | None, steps: int, **settings: Any) -> Any:
    given = {"training_mode": "single", "batch_size": 2, "epochs": 2, "run_name": "it"}
    given |= {"enable_fault_tolerance": True, "checkpoint_frequency": 2, "keep_last": 99}
    given |= {"max_steps": steps, "signing_key_file": str(key) if key else None, **settings}
    manager, model = manager_for(folder, **given), line()
    manager.fit(model, points(), loss_fn=squares, optimizer=sgd)
    return flat(model)


def secret(path: Path, content: bytes = b"k" * 40) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def forge(step: Path, **changes: Any) -> None:
    """A manifest with a fitting hash, as anybody can write it."""
    facts = json.loads((step / "manifest.json").read_text())
    facts.pop("sha256")
    (step / "manifest.json").write_text(json.dumps(signed({**facts, **changes}), indent=1))


def test_a_run_with_a_key_resumes_only_from_what_it_signed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, other = secret(tmp_path / "key"), secret(tmp_path / "other", b"x" * 40)
    whole = train(tmp_path / "whole", None, 8)
    train(tmp_path, key, 6)
    run = tmp_path / "custom" / "it"
    steps = run / "checkpoints"
    assert show_checkpoints(str(run), False, str(key)) == 0
    assert show_checkpoints(str(run), False, str(other)) == 1
    assert "signed with another key than other" in capsys.readouterr().out
    forge(steps / "step-00000006", epoch=1)
    assert show_checkpoints(str(run), False) == 0  # intact, but not mine
    assert "continues from step-00000006" in capsys.readouterr().out
    assert show_checkpoints(str(run), False, str(key)) == 0
    said = capsys.readouterr().out
    assert "its signature does not fit" in said and "continues from step-00000004" in said
    forge(steps / "step-00000004", signature=None)
    with pytest.raises(MultiGPUError, match=r"step-00000004.*not signed"):
        train(tmp_path, key, 8, resume=str(steps / "step-00000004"))
    assert torch.equal(train(tmp_path, key, 8, resume="auto"), whole)  # from step 2
    with pytest.raises(MultiGPUError, match="another key"):
        train(tmp_path, other, 8, resume=str(steps / "step-00000008"))


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"k" * 40, 0o644, "chmod 600"),
        (b"short", 0o600, "at least 32"),
        (b"k" * 100_000, 0o600, "more than"),
        (b"-----BEGIN NONSENSE-----", 0o600, "ed25519|cryptography"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused_before_training(
    tmp_path: Path, content: bytes | None, mode: int, words: str
) -> None:
    key = tmp_path / "key"
    if content is None:
        key.mkdir()
    else:
        key.write_bytes(content)
        key.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, key, 2)


def test_a_public_ed25519_key_verifies_and_does_not_sign(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    form = pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
    key = secret(tmp_path / "key.pem", private.private_bytes(*form))
    public = tmp_path / "public.pem"
    told = pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(private.public_key().public_bytes(*told))
    train(tmp_path, key, 4)
    run = tmp_path / "custom" / "it"
    assert show_checkpoints(str(run), False, str(public)) == 0
    with pytest.raises(ConfigError, match="public key"):
        train(tmp_path, public, 6)
    forge(run / "checkpoints" / "step-00000004", epoch=1)
    forge(run / "checkpoints" / "step-00000002", epoch=1)
    assert show_checkpoints(str(run), False, str(public)) == 1
