"""A run at a URL: uploaded beside training, resumed from anywhere, written by one at a time.

`file://` stands for object storage here; test_s3.py repeats what matters against an S3 server.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import FEATURES, flat, line, manager_for, points, sgd
from torch import nn
from typer.testing import CliRunner

from multi_gpu_training import Callback, MultiGPUConfig
from multi_gpu_training.cli.app import app
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.console import Console
from multi_gpu_training.monitoring.events import EventFile, StructuredLogger
from multi_gpu_training.storage.event_mirror import PIECE, EventMirror, fetch_events
from multi_gpu_training.storage.lease import LeaseFile
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError
from multi_gpu_training.storage.remote_resume import open_remote_run
from multi_gpu_training.storage.remote_view import list_remote
from multi_gpu_training.storage.uploader import Uploader, UploadPlan

KEPT = {"batch_size": 4, "run_name": "run", "training_mode": "single", "checkpoint_frequency": 1}
RUN = "remote/custom/run"


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, do: Any) -> None:
        self.step, self.do = step, do

    def on_step_end(self, manager: Any, result: Any) -> None:
        if result.step == self.step:
            self.do()


def manager_at(folder: Path, machine: str = "a", **settings: Any) -> Any:
    place = {"save_dir": f"file://{folder}/remote", "local_dir": str(folder / machine)}
    given = {**KEPT, **place, "enable_fault_tolerance": True, "upload_wait_s": 20.0, **settings}
    return manager_for(folder, **given)


def trained(folder: Path, machine: str = "a", do: Any = None, **settings: Any) -> torch.Tensor:
    """Train on a machine, whose disk is a folder of that name; four steps per epoch."""
    manager, model = manager_at(folder, machine, **settings), line()
    manager.fit(model, points(), optimizer=sgd, callbacks=[do] if do else [])
    return flat(model)


def complete(folder: Path) -> list[str]:
    """The steps that are complete there, in order."""
    found = (folder / RUN).glob("checkpoints/step-*/manifest.json")
    return sorted(path.parent.name.partition(".")[0] for path in found)


def local(folder: Path, machine: str = "a") -> Path:
    [run] = (folder / machine).glob("*/custom/run")
    return run


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """Storage that cannot be reached: a file lies where its folder was."""
    (folder / "remote").rename(folder / "moved")
    (folder / "remote").write_text("")
    yield
    (folder / "remote").unlink()
    (folder / "moved").rename(folder / "remote")


def test_a_run_at_a_url_continues_on_an_empty_disk_as_if_nothing_had_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = trained(
        tmp_path, "whole", save_dir=str(tmp_path / "plain"), local_dir=None, epochs=3
    )
    trained(tmp_path, "a", keep_last=2, epochs=1)
    assert complete(tmp_path) == ["step-00000003", "step-00000004"]  # retention holds there, too
    shutil.rmtree(tmp_path / "a")
    result = trained(tmp_path, "b", keep_last=2, epochs=3, resume="auto")
    assert torch.equal(result, expected)
    assert complete(tmp_path) == ["step-00000011", "step-00000012"]
    events = (local(tmp_path, "b") / "events" / "rank-0.jsonl").read_text().splitlines()
    steps = {json.loads(text).get("step") for text in events}
    assert steps >= set(range(1, 13))  # those of the other machine as well
    for name in ("config.yaml", "environment.json", "events/index-0.json"):
        assert (tmp_path / RUN / name).exists()
    with pytest.raises(ConfigError, match="already has checkpoints; add --resume auto"):
        manager_at(tmp_path, "c").setup_training(line(), points())
    url = f"file://{tmp_path}/{RUN}"
    capsys.readouterr()
    shown = CliRunner().invoke(app, ["checkpoints", url])
    assert shown.exit_code == 0 and "--resume auto continues from step-00000012" in shown.output
    assert shown.output.count("complete") == 2 and "best" in shown.output
    shown = CliRunner().invoke(
        app, ["report", url, "--json", "--no-html"], env={"XDG_CACHE_HOME": str(tmp_path / "cache")}
    )
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)[0]["steps"] == 12


def test_an_outage_is_reported_once_and_never_stops_training_or_loses_the_local_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, epochs=1)
    manager = manager_at(tmp_path, epochs=2, resume="auto", upload_wait_s=0.5)
    manager.setup_training(line(), points(), optimizer=sgd)
    wait_for(lambda: (tmp_path / RUN / "checkpoints/lineage-00000002.json").exists())
    with away(tmp_path):
        manager.train_epoch(manager.train_loader, 1)
        manager.save_checkpoint()
        manager.finish()
    told = capsys.readouterr().err
    assert told.count("cannot upload to") == 1
    assert "Training continues" in told and "not uploaded" in told and "step-00000008" in told
    assert f"mgt checkpoints upload {local(tmp_path)}" in told
    assert "step-00000008" not in complete(tmp_path)
    events = (local(tmp_path) / "events" / "rank-0.jsonl").read_text()
    assert '"event": "upload_failed"' in events
    # What is here and newer wins, and is uploaded by the next run or by hand.
    uploaded = CliRunner().invoke(app, ["checkpoints", "upload", str(local(tmp_path))])
    assert uploaded.exit_code == 0, uploaded.output
    assert complete(tmp_path)[-1] == "step-00000008"


def test_a_newer_local_copy_wins_over_the_one_in_storage(tmp_path: Path) -> None:
    trained(tmp_path, epochs=2, keep_last=9)
    for newest in (tmp_path / RUN / "checkpoints").glob("step-0000000[5678].*"):
        shutil.rmtree(newest)  # as if the machine had died before they were uploaded
    manager = manager_at(tmp_path, epochs=2, keep_last=9, resume="auto")
    manager.setup_training(line(), points(), optimizer=sgd)
    assert manager.step == 8
    manager.finish()
    assert complete(tmp_path)[-1] == "step-00000008"


def test_incomplete_and_damaged_checkpoints_in_storage_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, epochs=1, keep_last=9)
    folders = sorted((tmp_path / RUN / "checkpoints").glob("step-*"))
    (folders[-1] / "manifest.json").unlink()  # an upload that was cut off
    damaged = folders[-2] / "model.safetensors"
    raw = damaged.read_bytes()
    damaged.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    manager = manager_at(tmp_path, "b", resume="auto", keep_last=9)
    manager.setup_training(line(), points(), optimizer=sgd)
    assert manager.step == 2
    manager.finish()
    told = capsys.readouterr().err
    assert "step-00000003 did not arrive intact: model.safetensors was changed" in told
    for folder in folders[:2]:
        (folder / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no intact checkpoint at file://.*state.json"):
        manager_at(tmp_path, "c", resume="auto").setup_training(line(), points())


def test_checkpoints_of_an_abandoned_timeline_do_not_come_back_on_an_empty_disk(
    tmp_path: Path,
) -> None:
    trained(tmp_path, epochs=2, keep_last=9)
    url = f"file://{tmp_path}/{RUN}/checkpoints/step-00000003"
    manager = manager_at(tmp_path, "b", epochs=2, keep_last=9, resume=url)
    manager.setup_training(line(), points(), optimizer=sgd)
    assert manager.step == 3
    manager.finish()  # nothing was saved since: only the history knows that 4 to 8 are abandoned
    manager = manager_at(tmp_path, "c", epochs=2, keep_last=9, resume="auto")
    manager.setup_training(line(), points(), optimizer=sgd)
    assert manager.step == 3
    manager.finish()
    # Machine a comes back with the abandoned ones on its disk: it must not continue from them.
    manager = manager_at(tmp_path, "a", epochs=2, keep_last=9, resume="auto")
    manager.setup_training(line(), points(), optimizer=sgd)
    assert manager.step == 3
    manager.finish()


def test_a_checkpoint_at_a_url_starts_another_run(tmp_path: Path) -> None:
    trained(tmp_path, epochs=1)
    url = f"file://{tmp_path}/{RUN}/checkpoints/best"
    other = {"run_name": "other", "save_dir": str(tmp_path / "plain")}
    manager = manager_at(tmp_path, "b", **other, resume=url, epochs=2)
    manager.setup_training(line(), points(), optimizer=sgd)
    assert manager.step == 4 and manager.folder == tmp_path / "plain/custom/other"
    manager.finish()
    missing = f"file://{tmp_path}/{RUN}/checkpoints/step-00000077"
    with pytest.raises(ConfigError, match="no such checkpoint; complete ones there: step-00000004"):
        manager_at(tmp_path, "b", resume=missing).setup_training(line(), points())


def lease_of_another_machine(folder: Path, number: int, beat: int = 0) -> None:
    facts = LeaseFile(
        host="elsewhere",
        pid=7,
        process="",
        run_id="",
        attempt=0,
        since="noon",
        beat_s=0.3,
        beat=beat,
    )
    path = folder / RUN / "lease" / f"{number:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(facts.model_dump_json())
    draft.replace(path)


def test_two_machines_never_write_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One that lives is not disturbed.
    done = threading.Event()

    def live() -> None:
        beat = 0
        while not done.wait(0.1):
            beat += 1
            lease_of_another_machine(tmp_path, 4, beat)

    lease_of_another_machine(tmp_path, 4)
    other = threading.Thread(target=live)
    other.start()
    try:
        with pytest.raises(ConfigError, match="is being trained by process 7 on elsewhere"):
            manager_at(tmp_path).setup_training(line(), points())
    finally:
        done.set()
        other.join()
    # One that shows no sign of life is succeeded, and one that is succeeded uploads no more.
    manager = manager_at(tmp_path, epochs=1)
    manager.setup_training(line(), points(), optimizer=sgd)
    wait_for(lambda: (tmp_path / RUN / "lease/00000005.json").exists())
    lease_of_another_machine(tmp_path, 6)
    manager.train_epoch(manager.train_loader, 0)
    manager.save_checkpoint()
    manager.finish()
    assert not list((tmp_path / RUN).glob("checkpoints/step-*/manifest.json"))
    told = capsys.readouterr().err
    assert "process 7 on elsewhere has continued the run" in told and "nothing more" in told
    assert (local(tmp_path) / "checkpoints/step-00000004").is_dir()


def test_two_copies_that_went_different_ways_are_not_mixed(tmp_path: Path) -> None:
    trained(tmp_path, "a", epochs=1, keep_last=9)
    shutil.copytree(tmp_path / "remote", tmp_path / "kept")
    trained(tmp_path, "a", epochs=2, keep_last=9, resume="auto")
    shutil.rmtree(tmp_path / "remote")
    shutil.copytree(tmp_path / "kept", tmp_path / "remote")
    # Another machine continues from the same step, and clips: it comes to other weights.
    trained(tmp_path, "b", epochs=2, keep_last=9, resume="auto", max_grad_norm=0.01)
    with pytest.raises(ConfigError, match="have gone different ways"):
        manager_at(tmp_path, "a", epochs=3, resume="auto").setup_training(line(), points())


def test_restarted_ranks_continue_from_their_disk_while_storage_is_away(tmp_path: Path) -> None:
    trained(tmp_path, epochs=1)
    run, url, told = local(tmp_path), f"file://{tmp_path}/{RUN}", []
    config = manager_at(tmp_path, resume="auto").config
    restarted = Identity(attempt=1, run_id="launch")
    with away(tmp_path):
        with pytest.raises(StorageError):  # a new start cannot know what is newest
            open_remote_run(url, run, config, Identity(), told.append)
        assert open_remote_run(url, run, config, restarted, told.append) is None
    assert "going on from the local copy" in told[-1]
    plan = UploadPlan(run, url, restarted)
    uploader = Uploader(plan, None, StructuredLogger(Console(), EventFile(None)))
    uploader.start()
    wait_for(lambda: (tmp_path / RUN / "lease/00000002.json").exists())
    uploader.close(20.0)
    assert not uploader.missing()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://bucket/runs", "nosuch:// is not a protocol that fsspec knows; use s3://"),
        ("s3:/bucket/runs", "a URL begins with s3://"),
        ("s3://", "name a place below s3://"),
        ("file://runs", "needs a whole path"),
        ("s3://me:hushhush@bucket/runs", "a password in a URL would be written into files"),
        ("simplecache::s3://bucket/runs", "use a plain URL like s3://bucket/runs"),
    ],
)
def test_a_url_that_cannot_hold_runs_is_refused_with_the_remedy(
    url: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        manager_for(tmp_path, save_dir=url, local_dir=str(tmp_path / "a"), **KEPT).setup_training(
            line(), points()
        )
    assert said in str(error.value) and "hushhush" not in str(error.value)
    assert not list(tmp_path.glob("*:*"))  # no folder named s3:


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # fsspec brings hdfs://, but not this
    with pytest.raises(ConfigError, match=r"hdfs:// needs pyarrow, .*; pip install pyarrow"):
        list_remote("hdfs://host/runs/custom/run")
    try:
        import s3fs  # noqa: F401

        url, said = "gs://bucket/runs", r"pip install 'multi-gpu-training\[gs\]'"
    except ImportError:
        url, said = "s3://bucket/runs", r"needs s3fs.*pip install 'multi-gpu-training\[s3\]'"
    with pytest.raises(ConfigError, match=said):
        list_remote(f"{url}/custom/run")


def test_local_dir_without_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"local_dir=.* does nothing without a URL"):
        MultiGPUConfig(save_dir="runs", local_dir=str(tmp_path))


def test_local_dir_holds_the_copies_and_upload_every_shows_events_during_training(
    tmp_path: Path,
) -> None:
    index = tmp_path / RUN / "events/index-0.json"
    seen = [0]

    def look() -> None:
        """Wait until more of the events can be seen there than before."""

        def shown() -> int:
            there = json.loads(index.read_text())["bytes"] if index.exists() else {}
            return int(there.get("rank-0.jsonl", 0))

        wait_for(lambda: shown() > seen[-1])
        seen.append(shown())

    manager = manager_at(tmp_path, epochs=1, upload_every=0.1, log_every=1)
    manager.fit(line(), points(), optimizer=sgd, callbacks=[At(2, look), At(4, look)])
    assert len(seen) == 3
    assert (local(tmp_path) / "checkpoints/step-00000004").is_dir()


def test_upload_wait_s_bounds_the_end_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "remote").mkdir()
    manager = manager_at(tmp_path, epochs=1, upload_wait_s=0.0)
    manager.setup_training(line(), points(), optimizer=sgd)
    wait_for(lambda: (tmp_path / RUN / "environment.json").exists())
    with away(tmp_path):
        manager.train_epoch(manager.train_loader, 0)
        manager.save_checkpoint()
        manager.finish()
    assert "not uploaded" in capsys.readouterr().err  # and the test has ended


def train_on_two_machines(folder: str, own_disks: bool, epochs: int) -> list[Any]:
    """Each rank on its own machine, or both on one."""
    rank = dist.get_rank()
    before = dict(os.environ)
    if own_disks:
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    try:
        settings = {"training_mode": "ddp", "epochs": epochs, "resume": "auto", "max_restarts": 0}
        machine = f"disk-{rank}" if own_disks else "disk"
        manager = manager_at(Path(folder), machine, **settings)
        manager.setup_training(line(), points(), optimizer=sgd)
        begun = manager.step
        manager.loop.run()
        manager.finish()
        kept = sorted(path.name for path in manager.run.checkpoints.glob("step-*"))
        return [begun, manager.step, kept]
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("own_disks", [False, True])
def test_ranks_on_one_or_two_machines_continue_on_empty_disks(
    own_disks: bool, tmp_path: Path
) -> None:
    run_ranks(2, train_on_two_machines, str(tmp_path), own_disks, 1)
    assert complete(tmp_path)[-1] == "step-00000002"
    for disk in tmp_path.glob("disk*"):
        shutil.rmtree(disk)
    again = run_ranks(2, train_on_two_machines, str(tmp_path), own_disks, 2)
    assert [answer[:2] for answer in again] == [[2, 4], [2, 4]]
    assert again[0][2] == again[1][2] and again[0][2][-1] == "step-00000004"
    assert complete(tmp_path)[-1] == "step-00000004"
    fetch_events(RemoteFolder(f"file://{tmp_path}/{RUN}"), tmp_path / "seen")
    for rank in (0, 1):  # both ranks, before and after
        lines = (tmp_path / "seen" / f"rank-{rank}.jsonl").read_text().splitlines()
        kinds = [json.loads(text)["event"] for text in lines]
        assert kinds.count("rank") == 2 and kinds.count("run_end") == 2


def train_sharded(folder: str, machine: str, ranks: int, epochs: int) -> tuple[int, torch.Tensor]:
    rank, before = dist.get_rank(), dict(os.environ)
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # a disk of its own for each rank
    try:
        own = {"training_mode": "fsdp", "global_batch_size": 4}
        more = {"epochs": epochs, "resume": "auto", "max_restarts": 0, "batch_size": 4 // ranks}
        manager = manager_at(Path(folder), f"{machine}-{rank}", **own, **more)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        begun = (
            manager.setup_training(model, points(16, torch.float64), optimizer=sgd) and manager.step
        )
        manager.loop.run()
        manager.finish()
        weights = [p.full_tensor().detach() for p in manager.model.parameters()]
        return begun, torch.cat([weight.flatten() for weight in weights])
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_sharded_run_at_a_url_continues_on_empty_disks_and_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    [(_, expected), *_] = run_ranks(2, train_sharded, str(tmp_path / "whole"), "disk", 2, 3)
    run_ranks(2, train_sharded, str(tmp_path / "moved"), "first", 2, 1)
    for machine, ranks, epochs in (("second", 3, 2), ("third", 2, 3)):
        for disk in (tmp_path / "moved").glob("*-[0-9]"):
            shutil.rmtree(disk)
        found = run_ranks(ranks, train_sharded, str(tmp_path / "moved"), machine, ranks, epochs)
        assert [begun for begun, _ in found] == [4 * (epochs - 1)] * ranks
    for _, weights in found:
        assert torch.allclose(weights, expected, rtol=1e-12)


def test_event_files_arrive_whole_whatever_is_renamed_or_cut_off(tmp_path: Path) -> None:
    events, there = tmp_path / "events", RemoteFolder(f"file://{tmp_path}/there")
    events.mkdir()
    mirror = EventMirror(there, events, 0)
    row = b'{"event": "step"}\n'
    (events / "rank-0.jsonl").write_bytes(row * (PIECE // len(row) + 9) + b'{"torn')
    mirror.upload()
    fetch_events(there, tmp_path / "first")
    assert (tmp_path / "first/rank-0.jsonl").read_bytes() == row * (PIECE // len(row) + 9)
    (events / "rank-0.jsonl").rename(events / "rank-0.000001.jsonl")
    (events / "rank-0.jsonl").write_bytes(row)
    mirror.upload()
    EventMirror(there, events, 0).upload()  # a restart sends nothing twice
    fetch_events(there, tmp_path / "second")
    found = {path.name: path.stat().st_size for path in (tmp_path / "second").iterdir()}
    assert found == {"rank-0.000001.jsonl": len(row) * (PIECE // len(row) + 9), "rank-0.jsonl": 18}
    pieces = [path for path in (tmp_path / "there/events").iterdir() if "index" not in path.name]
    assert len(pieces) == 3


def wait_for(condition: Any, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
