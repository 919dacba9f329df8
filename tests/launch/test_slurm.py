"""Jobs for Slurm without a Slurm: their scripts, what sbatch is told, what follows their end.

tests/launch/test_slurm_cluster.py runs them on a real one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Said, mgt_here

from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.distributed.identity import from_environment
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.slurm.batch_script import seconds_of
from multi_gpu_training.launch.slurm.fence import Fence
from multi_gpu_training.launch.slurm.job_supervisor import JobSupervisor
from multi_gpu_training.launch.slurm.node_lists import expand
from multi_gpu_training.launch.slurm.node_task import visible_gpus

Mgt = Callable[..., Said]
SLURM = ("--engine", "slurm", "--nodes", "2")


@pytest.fixture
def mgt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Mgt:
    """`mgt WORDS` in a folder of its own, on a machine whose only commands are in bin/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    (tmp_path / "train.py").write_text("print('trains')")
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


def command(folder: Path, name: str, body: str) -> None:
    """A stand-in for a command of Slurm, which notes how it was called."""
    (folder / "bin").mkdir(exist_ok=True)
    file = folder / "bin" / name
    file.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/called\n{body}\n')
    file.chmod(0o755)


def called(folder: Path) -> str:
    file = folder / "called"
    return file.read_text() if file.exists() else ""


def fake_slurm(folder: Path, state: str = "COMPLETED", code: str = "0:0") -> None:
    """One whose job 17 writes two lines and is in `state` at once."""
    fields = f"JobId=17 JobName=train Restarts=1 JobState={state} Reason=None ExitCode={code}"
    log = f"{folder}/slurm-jobs/17.log"
    command(folder, "sbatch", f"/bin/cat > {folder}/sent; echo one line >> {log}; echo '17;mgt'")
    command(folder, "scontrol", f"echo '{fields} NodeList=n[1-2] ExcNodeList=(null)'")
    command(folder, "sinfo", "echo main; echo low")
    command(folder, "scancel", "")


# Node lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("b7", ["b7"]),
        ("a[1-2],b7", ["a1", "a2", "b7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[3,5-6]-ib", [f"r{r}n{n}-ib" for r in (1, 2) for n in (3, 5, 6)]),
    ],
)
def test_node_lists_name_every_node_in_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["", "a[1-2", "a]1[", "a[2-1]", "a[x]", "a,,b", "a[1-9999999]"])
def test_what_is_no_node_list_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="a\\[1-2\\],b7"):
        expand(text)


# The script


def test_a_dry_run_shows_the_whole_job_on_a_machine_without_slurm(mgt: Mgt, tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("module load cuda/12\nsource env/bin/activate\n")
    said = mgt(
        *("run", *SLURM, "--gpus-per-node", "a100:4", "--time", "4:00:00", "--partition", "gpu"),
        *("--sbatch", "account=x", "--sbatch", "nodelist=a[1-2],b7", "--setup-file", "setup.sh"),
        *("--dry-run", "train.py", "--lr", "a b"),
    )
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert asked == {
        *("job-name=train", "nodes=2", "ntasks-per-node=1", "gpus-per-node=a100:4"),
        *("time=4:00:00", "partition=gpu", "account=x", "nodelist=a[1-2],b7", "requeue"),
        *("open-mode=append", "signal=B:USR1@120", f"output={tmp_path}/slurm-jobs/%j.log"),
    }
    # Set-up lines come before the run, whose words stay apart.
    assert lines.index("module load cuda/12") < lines.index("  -- train.py --lr 'a b'")
    assert subprocess.run(["/bin/bash", "-n"], input=said.out, text=True).returncode == 0
    assert not (tmp_path / "slurm-jobs").exists()


@pytest.mark.parametrize("kind", ["VIRTUAL_ENV", "CONDA_PREFIX", "MGT_PYTHON", "", "none"])
def test_a_job_uses_the_python_that_its_set_up_activates_or_else_the_submitters(
    mgt: Mgt, tmp_path: Path, kind: str
) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho the set-up\n")
    python.chmod(0o755)
    value = python if kind == "MGT_PYTHON" else tmp_path / "env"
    (tmp_path / "setup.sh").write_text(f"set -eu\n{f'export {kind}={value}' if kind else ''}\n")
    setup = () if kind == "none" else ("--setup-file", "setup.sh")
    script = mgt("run", *SLURM, "--num-gpus", "1", "--dry-run", *setup, "train.py").out
    # The user's own shell may have another environment active.
    env = {"VIRTUAL_ENV": "/other", "CONDA_PREFIX": "/other", "PATH": "/usr/bin:/bin"}
    if kind == "none":  # the job's own process runs outside
        env |= {"MGT_TASK_PREFIX": "apptainer exec image.sif", "MGT_PYTHON": "/in/the/container"}
    script = script.replace(sys.executable, "/bin/echo")
    done = subprocess.run(["/bin/bash"], input=script, env=env, capture_output=True, text=True)
    wanted = "the set-up" if kind not in ("", "none") else "-m multi_gpu_training.launch.slurm"
    assert done.stdout.startswith(wanted), done.stderr


def test_words_with_spaces_and_signs_reach_sbatch_whole(
    mgt: Mgt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm(tmp_path)
    folder = tmp_path / "my project %j"
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    words = ("run", *SLURM, "--num-gpus", "1")
    said = mgt(*words, "--dry-run", "--sbatch", r"comment=a #\b", "train.py")
    # Slurm drops quotes, and a backslash even inside them; in the name of a log %% is %.
    assert r"#SBATCH --comment='a #\\b'" in said.out
    assert f"#SBATCH --output='{tmp_path}/my project %%j/slurm-jobs/%j.log'" in said.out
    followed = mgt(*words, "--detach", "train.py")
    assert f"its log is {folder}/slurm-jobs/17.log" in followed.err


def test_ranks_of_a_recipe_are_not_told_where_they_run(mgt: Mgt) -> None:
    said = mgt(
        *("train", "image", *SLURM, "--num-gpus", "2", "--epochs=1", "--dry-run", "lr=0.1"),
        *("--max-requeues", "3", "--sbatch=exclusive", "--nnodes", "1:2"),
    )
    assert said.code == 0, said.err
    assert "  -- -m multi_gpu_training train image --epochs=1 lr=0.1\n" in said.out
    # Without tasks for both, Slurm gives one node even where two are idle.
    assert "#SBATCH --nodes=1-2\n#SBATCH --ntasks=2\n#SBATCH --overcommit\n" in said.out
    assert "--most-nodes=2" in said.out
    assert "--ranks=2" in said.out and "--max-requeues=3" in said.out
    assert "#SBATCH --job-name=image\n" in said.out


def test_gpus_bound_to_tasks_and_nodes_of_several_kinds_are_asked_for(mgt: Mgt) -> None:
    said = mgt(
        *("run", *SLURM, "--gpus-per-node", "4", "--gpus-per-task", "2"),
        *("--het", "nodes=1,gpus-per-node=8,partition=big,nodelist=a[1,3]", "--dry-run"),
        "train.py",
    )
    assert said.code == 0, said.err
    first, _, second = said.out.partition("#SBATCH hetjob\n")
    assert "--ntasks-per-node=2\n#SBATCH --gpus-per-task=2\n" in first
    for wanted in ("nodes=1", "gpus-per-node=8", "partition=big", "nodelist=a[1,3]"):
        assert f"#SBATCH --{wanted}\n" in second


def test_a_task_has_as_many_ranks_as_slurm_gave_it_gpus() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3", "SLURM_GPUS_ON_NODE": "4"}) == 2
    assert visible_gpus({"SLURM_GPUS_ON_NODE": "4"}) == 4
    assert visible_gpus({}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("30:00", 1800), ("4:00:00", 14400), ("1-12", 129600), ("2-0:30:10", 174610)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


# Bad input


def test_every_wrong_option_is_named_with_its_remedy(mgt: Mgt) -> None:
    said = mgt(
        *("run", *SLURM, "--time", "4h", "--sbatch", "a b", "--sbatch", "nodes=3"),
        *("--sbatch", "account=x\n#SBATCH --x", "--sbatch", "nodelist=a[1-", "--partition", "a b"),
        *("--setup-file", "none.sh", "--gpus-per-node", "3", "--dry-run", "train.py"),
    )
    assert said.code == 2
    problems = [line for line in said.err.splitlines() if line.startswith("  - ")]
    wanted = ["4:00:00", "'a b': write", "use --nodes instead", "account=NAME", "a bracket is open"]
    wanted += ["`sinfo` lists", "module load"]
    assert len(problems) == len(wanted)
    assert all(any(text in problem for problem in problems) for text in wanted), said.err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ((), "--gpus-per-node N, or --num-gpus N"),
        (("--gpus-per-node", "3", "--gpus-per-task", "2"), "does not divide --gpus-per-node 3"),
        (("--gpus-per-task", "2", "--num-gpus", "2"), "needs --gpus-per-node"),
        (("--num-gpus", "2", "--master-addr", "10.0.0.1"), "drop --master-addr"),
        (("--num-gpus", "2", "--time", "0:30"), "4:00:00 is four hours"),
        (("--num-gpus", "2", "--nnodes", "1:2", "--het", "nodes=1"), "fixed number of --nodes"),
        (("--num-gpus", "2", "--sbatch", "array=0-3"), "add --detach"),
        (("--num-gpus", "2", "--sbatch", "output=x"), "the log is followed"),
        (("--num-gpus", "2", "--setup-file", "/dev/zero"), "it is not a regular file"),
        (("--num-gpus", "2", "--het", "nodes=1,nodes=2"), "'nodes' is given twice"),
        (("--num-gpus", "2", "--gpu-ids", "0"), "the cluster chooses the GPUs"),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_one_sentence(
    mgt: Mgt, words: tuple[str, ...], remedy: str
) -> None:
    recipe = "--gpu-ids" in words
    said = mgt(
        *(("train", "image") if recipe else ("run",)),
        *SLURM,
        *words,
        *(() if recipe else ("train.py",)),
    )
    assert said.code == 2 and said.err.count("  - ") == 1 and remedy in said.err, said.err


@pytest.mark.parametrize(
    "words", [("run", *SLURM, "--num-gpus", "2", "train.py"), ("cancel", "17"), ("jobs",)]
)
def test_a_machine_without_slurm_says_where_to_go(
    mgt: Mgt, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "slurm-jobs").mkdir()
    (tmp_path / "slurm-jobs" / "17.sh").touch()
    said = mgt(*words)
    assert said.code == 2
    assert "sbatch is not on this machine; run it on a login node" in said.err


def test_options_of_slurm_need_the_engine_slurm(mgt: Mgt) -> None:
    said = mgt("run", "--num-gpus", "2", "--partition", "gpu", "train.py")
    assert said.code == 2 and "--partition does not belong to the engine 'local'" in said.err


def test_slurms_refusal_comes_with_what_to_do(mgt: Mgt, tmp_path: Path) -> None:
    fake_slurm(tmp_path)
    text = "sbatch: error: invalid partition specified: nope"
    command(tmp_path, "sbatch", f"echo '{text}' >&2; exit 1")
    said = mgt("run", *SLURM, "--num-gpus", "2", "--partition", "nope", "train.py")
    assert said.code == 2
    assert "invalid partition specified: nope" in said.err and "one of main, low" in said.err


def test_numbers_of_jobs_are_checked_before_slurm_sees_them(mgt: Mgt, tmp_path: Path) -> None:
    fake_slurm(tmp_path)
    for word in ("--help; rm", "x", "17.0"):
        assert mgt("cancel", "--", word).code == 2
    assert mgt("cancel", "17").code == 2  # it has ended
    assert "scancel" not in called(tmp_path)
    assert mgt("jobs").code == 2  # none was submitted here


def test_a_controller_that_is_away_is_named_with_what_to_do(mgt: Mgt, tmp_path: Path) -> None:
    fake_slurm(tmp_path)
    text = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    command(tmp_path, "scontrol", f"echo '{text}' >&2; exit 1")
    said = mgt("cancel", "17")
    assert said.code == 1 and "slurm_load_jobs" not in said.err
    assert "Slurm's controller (slurmctld) does not answer" in said.err
    assert "scontrol ping" in said.err


# Submitting and following


@pytest.mark.parametrize(
    ("state", "code", "result"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("FAILED", "0:9", 137),
        ("CANCELLED", "0:15", 143),
    ],
)
def test_a_followed_job_shows_its_log_and_ends_with_its_code(
    mgt: Mgt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: str, result: int
) -> None:
    monkeypatch.setattr("multi_gpu_training.launch.slurm.slurm_engine.LOG_LAG_S", 0.2)
    fake_slurm(tmp_path, state, code)
    said = mgt("run", *SLURM, "--num-gpus", "2", "train.py")
    assert said.code == result, said.err
    assert "one line" in said.out and "submitted job 17" in said.err
    assert (result == 0) == (f"ended as {state}" not in said.err)
    assert (tmp_path / "slurm-jobs" / "17.sh").read_text() == (tmp_path / "sent").read_text()
    if state == "COMPLETED":
        listed = json.loads(mgt("jobs", "--json").out)
        assert [(row["job"], row["state"]) for row in listed] == [("17", "completed")]


def test_a_job_whose_log_was_deleted_still_ends_with_its_code(
    mgt: Mgt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multi_gpu_training.launch.slurm.slurm_engine.LOG_LAG_S", 0.2)
    fake_slurm(tmp_path, "FAILED", "3:0")
    ended = tmp_path / "slurm-jobs" / "17"
    command(tmp_path, "sbatch", f"/bin/mkdir {ended}; echo 3 > {ended}/exit_code; echo 17")
    said = mgt("run", *SLURM, "--num-gpus", "2", "train.py")
    assert said.code == 3 and "it wrote no log: do the nodes see" in said.err, said.err


def test_a_detached_job_is_left_to_itself_and_can_be_cancelled(mgt: Mgt, tmp_path: Path) -> None:
    fake_slurm(tmp_path, "RUNNING")
    said = mgt("run", *SLURM, "--num-gpus", "2", "--detach", "--sbatch", "array=0-3", "train.py")
    assert said.code == 0 and "mgt cancel 17" in said.err
    assert "scontrol" not in called(tmp_path)
    assert "%A_%a.log" in (tmp_path / "sent").read_text()  # a log for each task
    assert mgt("cancel", "17", "18_3").code == 0
    assert "scancel 17 18_3" in called(tmp_path)


def test_each_task_of_an_array_is_listed_and_one_that_ended_keeps_none_alive(
    mgt: Mgt, tmp_path: Path
) -> None:
    fake_slurm(tmp_path, "RUNNING")
    mgt("run", *SLURM, "--num-gpus", "2", "--detach", "--sbatch", "array=0-4", "train.py")
    lines = [
        f"JobId={number} ArrayJobId=17 ArrayTaskId={task} JobName=train JobState={state} "
        f"Restarts={requeued} Reason=None ExitCode={code} NodeList=n1"
        for number, task, state, requeued, code in [
            (19, "1", "FAILED", 0, "3:0"),
            (17, "2", "RUNNING", 2, "0:0"),
            (20, "3-4", "PENDING", 0, "0:0"),
        ]
    ]
    text = "\n".join(lines)
    command(tmp_path, "scontrol", f"echo '{text}'")
    forgotten = tmp_path / "slurm-jobs" / "17_0"
    forgotten.mkdir()
    (forgotten / "exit_code").write_text("0")
    (tmp_path / "slurm-jobs" / "17_2.log").touch()
    rows = json.loads(mgt("jobs", "--json").out)
    assert [(row["job"], row["state"], row["requeued"]) for row in rows] == [
        ("17_0", "ended with 0", ""),
        ("17_1", "failed with 3", 0),
        ("17_2", "running", 2),
        ("17_3-4", "pending (None)", 0),
    ]
    assert [bool(row["log"]) for row in rows] == [False, False, True, False]
    assert mgt("cancel", "17").code == 0  # though its first task has ended


def test_a_check_names_what_the_queue_lacks(mgt: Mgt, tmp_path: Path) -> None:
    fake_slurm(tmp_path)
    command(
        tmp_path,
        "sinfo",
        """case "$*" in
*%a*) echo "main*|up|1:00:00";;
*%t*) echo "n1|idle"; echo "n2|down*";;
*) echo main;;
esac""",
    )
    words = ("check", *SLURM, "--num-gpus", "1", "--json", "--sbatch", "exclusive")
    found = json.loads(mgt(*words, "--time", "30:00").out)["findings"]
    partition = next(f for f in found if f["topic"] == "partition")
    assert partition["level"] == "fail" and "1 of 2 nodes" in partition["text"]
    assert "n2" in partition["remedy"]
    found = json.loads(mgt(*words, "--time", "2:00:00").out)["findings"]
    partition = next(f for f in found if f["topic"] == "partition")
    assert "1:00:00" in partition["remedy"]


# Inside the job


JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_RESTART_COUNT": "2",
}


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """One attempt at job 17 whose step ends with `code`."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)}
    monkeypatch.setattr("multi_gpu_training.launch.slurm.fence.WAIT_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)

    def run(code: int, most: int = 5, state: str = "RUNNING", down: str = "", **env: str) -> int:
        command(
            tmp_path,
            "srun",
            f'case "$*" in *--probe*) ! echo "$*" | grep -q "nodelist={down or "none"} ";;\n'
            f'*) echo "$MGT_CLUSTER_TOKEN $MGT_SLURM_MASTER $MGT_RUN_KEY $MGT_REQUEUES" > '
            f"{tmp_path}/told; exit {code};; esac",
        )
        fields = f"JobId=17 Restarts=2 JobState={state} ExcNodeList=(null) NodeAddr=10.0.0.1"
        command(tmp_path, "scontrol", f"echo '{fields}'")
        flags = {"folder": tmp_path / "jobs", "max_requeues": most, "submission": "ab", "ranks": 1}
        flags |= {"most_nodes": 0, "max_restarts": None, "recovery_timeout": 300.0}
        namespace: Any = Namespace(**flags, command=["train.py"])
        return JobSupervisor(namespace, {**os.environ, **JOB, **env}).run()

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_token_of_a_job_stands_neither_in_a_file_nor_on_a_command_line(
    attempt: Callable[..., int], tmp_path: Path
) -> None:
    assert attempt(0) == 0
    token, master, key, requeues = (tmp_path / "told").read_text().split()
    assert len(token) == 64 and re.fullmatch(r"10\.0\.0\.1:\d+", master)
    assert (key, requeues) == ("slurm-17-ab", "2")
    (tmp_path / "told").unlink()
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(token in text for text in written)
    assert attempt(0) == 0 and token not in (tmp_path / "told").read_text()  # each has its own


@pytest.mark.parametrize(
    ("code", "kwargs", "requeued"),
    [
        (0, {}, False),
        (3, {}, False),  # the training's own error
        (2, {}, False),  # a config that no node can mend
        (2, {"down": "n2"}, True),  # a program that is missing on one node
        (143, {}, True),  # its ranks were asked to end
        (143, {"most": 2}, False),  # it was requeued twice already
        (143, {"state": "CANCELLED"}, False),
        (1, {"down": "n2"}, True),
    ],
)
def test_a_job_is_requeued_when_that_helps(
    attempt: Callable[..., int],
    tmp_path: Path,
    code: int,
    kwargs: dict[str, Any],
    requeued: bool,
) -> None:
    assert attempt(code, **kwargs) == code
    assert ("scontrol requeue 17" in called(tmp_path)) == requeued
    excluded = "scontrol update JobId=17 ExcNodeList=n2" in called(tmp_path)
    assert excluded == (requeued and "down" in kwargs)


def test_one_task_of_an_array_is_requeued_without_the_others(
    attempt: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The array's own number is the job id of one of its tasks.
    task = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    assert attempt(143, **task) == 143
    assert "scontrol requeue 17_2\n" in called(tmp_path)
    assert "scontrol -o show job 17_2\n" in called(tmp_path)


def test_a_job_requeued_too_often_ends_before_it_trains(
    attempt: Callable[..., int], tmp_path: Path
) -> None:
    assert attempt(0, most=1) == 1
    assert "srun" not in called(tmp_path)


def test_what_an_earlier_attempt_left_running_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multi_gpu_training.launch.slurm.fence.WAIT_S", 0.0)
    assert Fence(tmp_path, 0).take()
    left = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, time; from pathlib import Path\n"
            "from multi_gpu_training.launch.slurm.fence import Fence\n"
            "Fence(Path(sys.argv[1]), 0).watch(); print('there', flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert left.stdout is not None and left.stdout.readline() == b"there\n"
    assert Fence(tmp_path, 1).take()
    assert left.wait(20) == -signal.SIGKILL
    left.communicate()
    assert Fence(tmp_path, 0).passed() and not Fence(tmp_path, 1).passed()


def test_a_requeued_job_waits_for_the_lock_of_a_node_that_lost_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multi_gpu_training.checkpoint.run_lock.GRACE_S", 0.0)
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use"):
            RunLock(tmp_path)
        monkeypatch.setenv("MGT_REQUEUES", "1")
        later = threading.Timer(0.3, lambda: fcntl.flock(held, fcntl.LOCK_UN))
        later.start()
        lock = RunLock(tmp_path)
        assert lock.held
        lock.release()
        later.join()


def test_a_requeued_job_is_the_same_run_at_a_later_attempt() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    rank |= {"MGT_RUN_KEY": "slurm-17-ab", "TORCHELASTIC_RESTART_COUNT": "3"}
    first, second = (
        from_environment(rank),
        from_environment({**rank, "MGT_REQUEUES": "1", "TORCHELASTIC_RESTART_COUNT": "0"}),
    )
    assert first is not None and second is not None
    assert first.run_id == second.run_id == "slurm-17-ab"
    assert first.attempt < second.attempt
    # A task of an array may come back with another job id.
    task = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "MASTER_ADDR": "a", "SLURM_STEP_ID": "0"}
    task |= {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4"}
    one, two = (from_environment({**task, "SLURM_JOB_ID": job}) for job in ("11", "12"))
    assert one is not None and two is not None and one.run_id == two.run_id == "9_4.0"
