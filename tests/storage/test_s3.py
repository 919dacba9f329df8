"""Runs at s3:// against a real S3 server (moto), with its failures."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import line, manager_for, points, sgd

from multi_gpu_training.errors import ConfigError

pytestmark = pytest.mark.engines

KEPT = {"batch_size": 4, "run_name": "run", "training_mode": "single", "checkpoint_frequency": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """The endpoint of a server with the bucket `bucket`, and its process."""
    pytest.importorskip("s3fs", reason="pip install s3fs for the tests against S3")
    pytest.importorskip("moto.server", reason="pip install 'moto[server]' for the tests against S3")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # After this many requests without looking, the server checks every signature.
    env = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "1000000"}
    process = subprocess.Popen(command, env=env, **quiet)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}", process.pid
    process.kill()
    process.wait()


@pytest.fixture
def bucket(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Any:
    import s3fs

    keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "hush-hush-hush"}
    place = {"AWS_ENDPOINT_URL": server[0], "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, **place}.items():
        monkeypatch.setenv(name, value)
    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    return fs


def manager_at(folder: Path, machine: str = "a", **settings: Any) -> Any:
    place = {"save_dir": "s3://bucket/runs", "local_dir": str(folder / machine)}
    given = {**KEPT, **place, "enable_fault_tolerance": True, "upload_wait_s": 60.0, **settings}
    return manager_for(folder, **given)


def trained(folder: Path, machine: str = "a", **settings: Any) -> None:
    manager_at(folder, machine, **settings).fit(line(), points(), optimizer=sgd)


def test_a_run_in_s3_continues_on_an_empty_disk_and_no_secret_is_written(
    bucket: Any, tmp_path: Path
) -> None:
    trained(tmp_path, epochs=1, keep_last=2)
    shutil.rmtree(tmp_path / "a")
    manager = manager_at(tmp_path, "b", epochs=2, keep_last=2, resume="auto")
    manager.setup_training(line(), points(), optimizer=sgd)
    assert manager.step == 4
    manager.loop.run()
    manager.finish()
    names = bucket.find("bucket/runs/custom/run")
    manifests = [name for name in names if name.endswith("manifest.json")]
    assert len(manifests) == 2 and any("step-00000008." in name for name in manifests)
    for name in names:
        assert b"hush-hush-hush" not in bucket.cat_file(name), name
    for path in (tmp_path / "b").rglob("*"):
        assert not path.is_file() or b"hush-hush-hush" not in path.read_bytes(), path


def test_only_one_of_two_writers_creates_a_lease(bucket: Any, tmp_path: Path) -> None:
    from multi_gpu_training.storage.remote_folder import RemoteFolder

    first, second = (RemoteFolder("s3://bucket/runs/custom/run") for _ in range(2))
    assert first.create("lease/00000001.json", b"{}")
    assert not second.create("lease/00000001.json", b"{}")


def test_large_files_whose_upload_was_cut_off_leave_nothing_behind(
    bucket: Any, tmp_path: Path
) -> None:
    bucket.call_s3("create_multipart_upload", Bucket="bucket", Key="runs/custom/run/checkpoints/x")
    bucket.call_s3("create_multipart_upload", Bucket="bucket", Key="of-somebody-else")
    trained(tmp_path, epochs=1)
    left = [upload["Key"] for upload in bucket.list_multipart_uploads("bucket")]
    assert left == ["of-somebody-else"]


def test_a_server_that_hangs_for_a_while_does_not_stop_training(
    server: tuple[str, int], bucket: Any, tmp_path: Path
) -> None:
    manager = manager_at(tmp_path, epochs=2, upload_every=0.5)
    manager.setup_training(line(), points(), optimizer=sgd)
    os.kill(server[1], signal.SIGSTOP)
    try:
        manager.loop.run()
        assert manager.step == 8
    finally:
        os.kill(server[1], signal.SIGCONT)
    manager.finish()
    assert any("step-00000008." in name for name in bucket.find("bucket/runs/custom/run"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"save_dir": "s3://nobucket/runs"}, "the bucket nobucket does not exist or is closed"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "cannot be reached"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "credentials"),
    ],
)
def test_storage_that_cannot_be_used_is_refused_before_training_with_the_remedy(
    wrong: dict[str, str],
    said: str,
    bucket: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {name: value for name, value in wrong.items() if name == "save_dir"}
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in wrong.items():
        if name.startswith("AWS") and value:
            monkeypatch.setenv(name, value)
        elif name.startswith("AWS"):
            monkeypatch.delenv(name)
    with pytest.raises(ConfigError) as error:
        manager_at(tmp_path, **settings).setup_training(line(), points())
    assert said in str(error.value) and len(error.value.problems) == 1
    assert "check" in str(error.value) or "create" in str(error.value)


def test_wrong_credentials_are_refused_with_the_remedy(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server that looks at signatures from the first request on, and knows nobody.
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    env = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "0"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=env, **quiet)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=r"refused.*check the credentials"):
            manager_at(tmp_path).setup_training(line(), points())
    finally:
        process.kill()
        process.wait()
