"""`mgt check` judges what it sees rightly, and says what to do: plain numbers, no processes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from multi_gpu_training.config_fields import TrainingMode
from multi_gpu_training.data.feeding import BatchSizes
from multi_gpu_training.measure.case import Case, Failure
from multi_gpu_training.measure.memory_model import MemoryModel, MemoryParts, MemoryPoint
from multi_gpu_training.measure.request import ASKED
from multi_gpu_training.measure.script_runner import HOW, ScriptRunner
from multi_gpu_training.planning.check import (
    devices,
    links,
    machine,
    network_check,
    rank_trial,
    recommendation,
    registry,
    software,
    training_fit,
)
from multi_gpu_training.planning.check.check_report import CheckReport, Finding, Level, Printer
from multi_gpu_training.planning.check.links import expected_gbps
from multi_gpu_training.planning.check.network_check import network_gbps
from multi_gpu_training.planning.check.nvml import Gpu, Nvml, Port
from multi_gpu_training.planning.check.software import (
    Software,
    nvidia_devices,
    runs_on,
    visible_problem,
)
from multi_gpu_training.planning.check.topology import Team
from multi_gpu_training.planning.check.training_fit import MeasuredSpeed, TrainingFit
from multi_gpu_training.planning.check.watched_process import Watched
from multi_gpu_training.planning.estimate import profiling

GIB = 2**30
TWO = ["GPU-aa11", "GPU-bb22"]
HEALTHY = Software(
    torch="2.13.0+cu130",
    cuda="13.0",
    driver="580.10",
    driver_cuda=(13, 0),
    nccl="2.28.3",
    uuids=TWO,
    visible=2,
    architectures=["sm_80", "sm_90"],
    capabilities={"NVIDIA H200": (9, 0)},
)
H200 = Gpu(0, "NVIDIA H200", "GPU-aa11", 141 * GIB, 140 * GIB, True, 345, 1980, 30, 0, 0, 0)
HOST = machine.Machine(
    8 * GIB, 8 * GIB, 65536, 65536, 16, None, 64 * GIB, "the machine", None, None
)


def bad(findings: Iterable[Finding]) -> list[Finding]:
    """All that does not pass; each says what to do."""
    found = [finding for finding in findings if finding.level is not Level.PASS]
    assert all(finding.remedy for finding in found)
    return found


def only(findings: Iterable[Finding]) -> Finding:
    (found,) = bad(findings)
    return found


def said(**lines: Any) -> Watched:
    """A program that has ended and said these lines."""
    program = Watched.__new__(Watched)
    program.lines = lines.pop("lines", [])
    program.timed_out = lines.pop("timed_out", False)
    program.killed = False
    code = lines.pop("code", 0)
    program.process = SimpleNamespace(returncode=code, poll=lambda: code)  # type: ignore[assignment]
    program._errors = [lines.pop("errors", "").encode()]
    assert not lines
    return program


# Software


def test_a_healthy_machine_passes() -> None:
    assert not bad(software.judge(HEALTHY))
    assert not bad(devices.judge([H200]))
    assert not bad(machine.judge(HOST, 2, 2))


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"torch": "2.4.1"}, Level.FAIL, r"torch 2\.4\.1"),
        ({"driver_cuda": (12, 4)}, Level.FAIL, r"up to CUDA 12\.4.*too old"),
        ({"nccl": None}, Level.FAIL, "no NCCL"),
        ({"visible": 0}, Level.FAIL, "sees no GPU of 2"),
        ({"visible": 0, "driver": None, "uuids": [], "pci_gpus": 2}, Level.FAIL, "2 NVIDIA GPUs"),
        ({"visible": 0, "driver": None, "uuids": []}, Level.WARN, "no NVIDIA driver answers"),
        ({"visible": 0, "cuda": None}, Level.FAIL, "without CUDA, and this machine has 2 GPUs"),
        ({"capabilities": {"NVIDIA B200": (10, 0)}}, Level.FAIL, "B200 is sm_100"),
        ({"hip": "6.4", "cuda": None}, Level.WARN, "AMD.*untested"),
        ({"visible_devices": "0,7", "visible": 1}, Level.FAIL, "'7' does not exist"),
        ({"visible_devices": "", "visible": 0}, Level.WARN, "hides every GPU"),
        ({"visible_devices": "0,1", "visible": 1}, Level.FAIL, "names 2 GPUs and torch sees 1"),
    ],
)
def test_versions_that_do_not_fit_are_named(
    change: dict[str, Any], level: Level, says: str
) -> None:
    found = only(software.judge(replace(HEALTHY, **change)))
    assert found.level is level
    assert re.search(says, found.text), found.text


def test_a_cpu_is_enough_unless_a_gpu_is_asked_for() -> None:
    cpu = Software(torch="2.13.0+cpu")
    assert only(software.judge(cpu)).level is Level.WARN
    assert only(software.judge(cpu, "cuda")).level is Level.FAIL
    assert not bad(software.judge(cpu, "cpu"))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0", None),
        ("1,0", None),
        ("GPU-bb", None),
        ("MIG-1234,MIG-5678", None),
        ("0,5,1", r"'5' does not exist: .*0 to 1, and hides all after it \(5, 1\)"),
        ("GPU-cc", "not the number or UUID"),
        ("all", "not the number or UUID"),
        ("0,", "an empty entry"),
        ("1,1", "named twice"),
        ("-2", "'-2' does not exist"),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(value: str, says: str | None) -> None:
    found = visible_problem(value, TWO)
    assert found is None if says is None else re.search(says, found or ""), found


def test_code_runs_on_newer_minor_versions_of_the_same_gpu() -> None:
    assert runs_on((8, 6), ["sm_80"])
    assert not runs_on((8, 0), ["sm_86"])
    assert not runs_on((10, 0), ["sm_80", "sm_90a"])
    assert runs_on((10, 0), ["sm_90", "compute_90"])


def test_gpus_without_a_driver_are_seen_on_the_bus(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("a", "0x10de", "0x030200"),
        ("b", "0x10de", "0x040300"),  # its sound
        ("c", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert nvidia_devices(tmp_path) == 1


# GPUs and links


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"free_bytes": 10 * GIB, "others": ["77 (ann: python)"]}, Level.WARN, "77 .ann: python"),
        ({"others": ["77 (ann: python)"]}, Level.WARN, "others use it"),
        ({"slowed": 0x20 | 0x04}, Level.WARN, "held down by heat$"),
        ({"temperature_c": 91}, Level.WARN, "91 C"),
        ({"compute_mode": 3}, Level.WARN, "exclusive"),
        ({"compute_mode": 2}, Level.FAIL, "prohibited"),
        ({"uncorrected_errors": 3}, Level.FAIL, "3 uncorrected"),
        ({"mig": True}, Level.WARN, "MIG"),
    ],
)
def test_the_trouble_of_a_gpu_is_named(change: dict[str, Any], level: Level, says: str) -> None:
    found = only(devices.judge([replace(H200, **change)]))
    assert found.level is level
    assert re.search(says, found.text), found.text


def test_mixed_gpus_are_named() -> None:
    found = only(devices.judge([H200, replace(H200, index=1, name="NVIDIA A100")]))
    assert "1: NVIDIA A100; 0: NVIDIA H200" in found.text


class Refusing:
    """An NVML that starts and then refuses every question, each in another way."""

    NVML_CLOCK_SM = 1

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetHandleByUUID(self, uuid: Any) -> object:
        return object()

    def nvmlDeviceGetUUID(self, handle: Any) -> bytes:
        return b"GPU-\xff"


def test_a_driver_that_answers_nothing_stops_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml.__new__(Nvml)
    nvml.problem, nvml._library = None, Refusing()
    info = {
        "index": 0,
        "name": "GPU",
        "uuid": "GPU-aa",
        "total_memory_gb": 10.0,
        "free_memory_gb": 9.5,
        "bf16": True,
    }
    gpu = devices._describe(nvml, info, [])
    assert "clock_mhz" in gpu.unsupported and gpu.others == []
    assert not bad(devices.judge([gpu]))
    assert nvml.uuids() == [] and nvml.driver_cuda() is None
    assert links.look(nvml, [gpu]) == {0: Port()}
    assert "not name" in Port().describe() and expected_gbps(Port(), Port(), True) is None


def test_links_give_what_their_kind_allows() -> None:
    h200 = Port(5, 16, 16, nvlinks=18, nvlink_version=4)
    pcie = Port(4, 16, 16)
    assert expected_gbps(h200, h200, True) == pytest.approx(450)
    assert expected_gbps(pcie, pcie, True) == pytest.approx(31.5, abs=0.1)
    assert expected_gbps(pcie, pcie, False) == pytest.approx(15.75, abs=0.1)
    assert expected_gbps(h200, pcie, True) == pytest.approx(31.5, abs=0.1)


def test_slow_wrong_and_hanging_copies_are_findings() -> None:
    port = Port(4, 16, 16)
    ports = {0: port, 1: port}
    good = {"pair": [0, 1], "gbps": 25.0, "direct": True, "right": True}
    host = {"host": 0, "to_gbps": 25.0, "from_gbps": 26.0, "right": True}
    assert not bad(links.judge(said(lines=[host, good]), ports, 9))
    slow = only(links.judge(said(lines=[host, {**good, "gbps": 5.0}]), ports, 9))
    assert "5.0 GB/s; PCIe 4.0 x16 should give up to 32" in slow.text
    wrong = only(links.judge(said(lines=[{**good, "right": False}]), ports, 9))
    assert wrong.level is Level.FAIL and "not what was sent" in wrong.text
    through = only(links.judge(said(lines=[{**good, "direct": False}]), ports, 9))
    assert "through host memory" in through.text
    lines = [{"stage": "copy", "at": "GPU 0 - GPU 1"}]
    hang = only(links.judge(said(lines=lines, timed_out=True, code=None), ports, 9))
    assert hang.topic == "GPU 0 - GPU 1" and "within 9 s: it hangs" in hang.text
    assert "NCCL_P2P_DISABLE=1" in hang.remedy
    lost = only(links.judge(said(lines=lines, code=1, errors="CUDA error: 999\n"), ports, 9))
    assert "CUDA error: 999" in lost.text
    narrow = only(links.judge(said(), {0: Port(4, 16, 4)}, 9))
    assert "4 lanes of 16" in narrow.text


def test_network_cards_are_counted_in_gigabytes(tmp_path: Path) -> None:
    assert network_gbps(tmp_path) is None
    for name, speed in (("eth0", "25000"), ("lo", "99999"), ("down", "-1")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "speed").write_text(speed)
    assert network_gbps(tmp_path) == pytest.approx(25 / 8)
    for card in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "infiniband" / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert network_gbps(tmp_path) == pytest.approx(100)


# Host


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({"shm_free_bytes": 16 * 2**20, "shm_bytes": 16 * 2**20}, Level.FAIL, "16 MB free"),
        ({"shm_free_bytes": GIB // 2, "shm_bytes": GIB // 2}, Level.WARN, "512 MB free"),
        ({"shm_free_bytes": None, "shm_bytes": None}, Level.FAIL, "not there"),
        ({"open_files": 64}, Level.FAIL, "64 open files"),
        ({"open_files": 512}, Level.WARN, "512 open files"),
        ({"cores": 2}, Level.WARN, "none left for loader workers"),
        ({"quota_cores": 1.0}, Level.WARN, r"may use 1 of 16.*wait for each other"),
        ({"memory_free_bytes": GIB // 2}, Level.FAIL, "512 MB of host memory"),
        ({"memory_free_bytes": 3 * GIB}, Level.WARN, "3.0 GB of host memory"),
        ({"address_space_bytes": 64 * GIB}, Level.FAIL, "ulimit -v.*CUDA"),
        ({"omp": "many"}, Level.FAIL, "not a number of threads"),
        ({"omp": "0"}, Level.FAIL, "not a number of threads"),
        ({"omp": "16"}, Level.WARN, "more than 16 cores"),
    ],
)
def test_a_host_that_is_too_small_is_named(change: dict[str, Any], level: Level, says: str) -> None:
    found = only(machine.judge(replace(HOST, **change), 2, 2))
    assert found.level is level
    assert re.search(says, found.text), found.text


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_a_container_are_read(tmp_path: Path, version: int) -> None:
    member = tmp_path / "cgroup"
    assert machine.memory_left(tmp_path, member) is None
    if version == 2:
        member.write_text("0::/job\n")
        folder, cpu = tmp_path / "job", tmp_path / "job"
        files = {"memory.max": "1000000", "memory.current": "400000"}
        quota = {"cpu.max": "150000 100000"}
    else:
        member.write_text("5:memory:/job\n3:cpu,cpuacct:/\n")
        folder, cpu = tmp_path / "memory" / "job", tmp_path / "cpu,cpuacct"
        files = {"memory.limit_in_bytes": "1000000", "memory.usage_in_bytes": "400000"}
        quota = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}
    files["memory.stat"] = "cache 5\ninactive_file 50000\n"
    for place, content in ((folder, files), (cpu, quota)):
        place.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            (place / name).write_text(text + "\n")
    assert machine.memory_left(tmp_path, member) == 650000
    assert machine.cores_allowed(tmp_path, member) == 1.5


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"WORLD_SIZE": "4"}, "no RANK"),
        ({"RANK": "1"}, "no WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "0 to WORLD_SIZE - 1"),
    ],
)
def test_half_a_launcher_is_named(env: dict[str, str], says: str) -> None:
    found = only(network_check.launcher_variables(env))
    assert found.level is Level.FAIL and says in found.text and "unset" in found.remedy


def test_network_cards_that_are_not_there_are_named() -> None:
    there = ["eth0", "lo"]
    assert not bad(network_check.interfaces({"NCCL_SOCKET_IFNAME": "eth"}, there))
    assert not bad(network_check.interfaces({"NCCL_SOCKET_IFNAME": "^docker"}, there))
    found = only(network_check.interfaces({"GLOO_SOCKET_IFNAME": "ib0"}, there))
    assert "no network card 'ib0', only eth0, lo" in found.text


# Ranks

TEAM = Team(0, 2, 2, 1, "127.0.0.1", 29500, ["cpu", "cpu"], "nccl", 10.0)
ENDED = [
    {"all_came": True},
    {"done": "values", "wrong_anywhere": 0},
    {"done": "curve", "curve": [[4096, 1e-5], [2**28, 1e-3]]},
    {"done": "training", "steps": 3, "apart": 1e-8, "replicas_differ": False},
    {"stage": "end"},
]


def test_sums_and_steps_that_are_wrong_fail() -> None:
    def judged(*changes: tuple[int, dict[str, Any]]) -> Finding:
        lines = [dict(line) for line in ENDED]
        for place, change in changes:
            lines[place].update(change)
        return only(rank_trial.judge(TEAM, [said(lines=lines), said(lines=lines)], 450.0))

    assert not bad(rank_trial.judge(TEAM, [said(lines=ENDED)], 450.0))
    assert "7 elements of known sums are wrong" in judged((1, {"wrong_anywhere": 7})).text
    assert "differ by 1.0e+09" in judged((3, {"apart": 1e9})).text
    assert "between ranks" in judged((3, {"replicas_differ": True})).text
    slow = judged((2, {"curve": [[4096, 1e-5], [2**28, 1e-2]]}))
    assert slow.level is Level.WARN and "27 GB/s at 256 MiB; the links give up to 450" in slow.text


def test_a_hang_names_the_rank_that_is_behind() -> None:
    ahead = said(lines=[{"stage": "curve", "bytes": 2**20}], timed_out=True, code=None)
    behind = said(lines=[{"stage": "join"}], timed_out=True, code=None)
    found = only(rank_trial.judge(TEAM, [ahead, behind]))
    assert "a hang: rank 1 of 2" in found.text and "joining the group" in found.text
    both = only(rank_trial.judge(TEAM, [ahead, ahead]))
    assert "every rank" in both.text and "(1 MiB)" in both.text


def test_a_failure_elsewhere_is_told_by_rank_0() -> None:
    lines = [{"stage": "values"}, {"peer": 5, "error": "RuntimeError: no memory"}]
    found = only(rank_trial.judge(TEAM, [said(lines=lines, timed_out=True, code=None)]))
    assert found.topic == "rank 5" and "no memory" in found.text
    gone = said(lines=[{"stage": "values"}, {"error": "Connection closed by peer"}], code=1)
    cause = said(lines=[{"stage": "values"}, {"error": "CUDA out of memory"}], code=1)
    first = only(rank_trial.judge(TEAM, [gone, cause]))
    assert first.topic == "rank 1" and "CUDA out of memory" in first.text
    assert "look at its machine" in only(rank_trial.judge(TEAM, [gone])).remedy
    killed = only(rank_trial.judge(TEAM, [said(lines=[{"stage": "join"}], code=-9)]))
    assert "killed, by the system where its memory was full" in killed.text


# Fit


COUNTED = {
    "parameters": 100,
    "gradients": 100,
    "optimizer": 200,
    "buffers": 0,
    "batch": 64,
    "activations": 640,
    "samples": 1000,
    "in_memory": False,
}


def fit_of(*speeds: MeasuredSpeed, **changes: Any) -> TrainingFit:
    memory = MemoryModel.from_points([MemoryPoint(32, 2000), MemoryPoint(64, 2800)])
    values: dict[str, Any] = {
        "unit": "GPU",
        "asked": {"epochs": 10, "batch_size": 32},
        "counted": COUNTED,
        "memory_parts": MemoryParts.of(COUNTED, 32, 2000),
        "memory": memory,
        "available_bytes": 10_000,
        "precision": "bf16 mixed precision",
        "speeds": list(speeds),
    }
    return TrainingFit(**{**values, **changes})


ONE = MeasuredSpeed("1 GPU", "single", 1, 100.0, 0.32, BatchSizes(32, 1, 1, 32))


def test_memory_adds_up() -> None:
    fit = fit_of(ONE)
    assert fit.memory_parts.total == 2000 and fit.memory_parts.workspace == 2000 - 1104
    assert fit.memory_parts.bytes_per_sample == 22 and fit.memory_parts.checkpoint_bytes == 300
    assert [row[0] for row in recommendation.memory_rows(fit)][-1] == "together"
    assert recommendation.time_rows(fit)[0][-2:] == ("10.0 s", "100.0 s")


def test_the_recommended_command_is_the_faster_way() -> None:
    two = MeasuredSpeed("2 GPUs", "ddp", 2, 190.0, 0.34, BatchSizes(32, 1, 2, 64))
    words = ["image", "--mode", "cnn", "--batch-size", "99", "num_workers=5", "lr=0.1"]
    found = recommendation.recommend(fit_of(ONE, two), words, 3, 2)
    assert found.command == (
        "mgt train image --mode cnn lr=0.1 --num-gpus 2 --batch-size 32 num_workers=3 "
        "use_mixed_precision=true"
    )
    slower = recommendation.recommend(
        fit_of(ONE, replace(two, samples_per_s=90.0)), ["image"], 3, 2
    )
    assert "--multi-gpu single" in slower.command and slower.ranks == 1
    script = recommendation.recommend(fit_of(ONE, two), ["my train.py", "--lr", "1"], 0, 2)
    assert script.command.startswith("mgt run --num-gpus 2 'my train.py' --lr 1    # with")


@pytest.mark.parametrize("with_manager", [False, True])
def test_a_script_that_measures_nothing_is_told_as_by_estimate(
    tmp_path: Path, with_manager: bool
) -> None:
    runner = ScriptRunner(["plain.py"], tmp_path, 8, 3, "cpu")
    out = tmp_path / "000"
    out.mkdir()
    if with_manager:
        (out / ASKED).write_text('{"epochs": 1}')
    found = runner.read(Case("one rank", TrainingMode.SINGLE, 1), 0, "")
    assert found.failure is (Failure.TOO_SHORT if with_manager else Failure.NO_MANAGER)
    assert training_fit.broken(found).remedy.startswith(HOW)
    assert profiling.why_not_profiled(found, runner) == found.error
    assert HOW in found.error
    assert "--warmup" not in found.error and "--steps" not in found.error  # check has neither


def test_a_batch_that_ran_and_leaves_too_little_is_a_warning() -> None:
    lines = {one.topic: one for one in training_fit.judge(fit_of(ONE, available_bytes=2100), None)}
    assert lines["memory"].level is Level.WARN and "leaves too little" in lines["memory"].text
    lines = {one.topic: one for one in training_fit.judge(fit_of(ONE, available_bytes=2300), None)}
    assert lines["memory"].level is Level.PASS


# The report


def test_a_check_is_added_by_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_checks", list(registry._checks))
    before = registry.all_checks()

    @registry.check(order=35)
    def clock(context: registry.Context) -> list[Finding]:
        return [machine.GROUP.passed("clock", f"{context.ranks_here} ranks agree")]

    after = registry.all_checks()
    assert [one for one in after if one in before] == before
    place = after.index(clock)
    assert after[place - 1] is machine.check_machine
    assert "check_disk" in getattr(after[place + 1], "__name__", "")


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(width: int) -> None:
    out = StringIO()
    printer = Printer(Console(file=out, width=width))
    report = CheckReport(printer.show)
    report.add(machine.judge(replace(HOST, shm_free_bytes=0, omp="x"), 2, 2))
    report.add([rank_trial.GROUP.fail("meeting", "a word " * 40, "do this " * 30)], "node-2")
    fit = fit_of(ONE)
    printer.summary(report)
    chosen = recommendation.recommend(fit, ["image"], 2, 1)
    recommendation.show(printer, fit, chosen)
    lines = out.getvalue().splitlines()
    # The command stays in one piece, to be copied.
    assert max(len(line) for line in lines if not line.startswith("  mgt ")) <= width
    assert "  fail meeting          node-2: a word" in out.getvalue()
    assert "Not ready to train: /dev/shm, OMP threads, meeting" in " ".join(lines)
    assert report.exit_code == 1
    plain = report.plain()
    assert [Finding.from_plain(raw) for raw in plain["findings"]] == report.findings
