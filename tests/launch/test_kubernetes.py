"""Jobs for Kubernetes without a cluster: their manifests, and what kubectl is told.

Nothing here runs in pods. The manifests are compared with the published models of their kinds where
those are installed: pip install kubeflow-trainer-api kubeflow-training.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import Said, mgt_here

Mgt = Callable[..., Said]
KUBERNETES = ("--engine", "kubernetes", "--image", "registry/me:1")
KINDS = ("jobset", "pytorchjob", "trainjob")


@pytest.fixture
def mgt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Mgt:
    """`mgt WORDS` on a machine whose only command is a kubectl that notes what it is told."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    (tmp_path / "train.py").write_text("print('trains')")
    return lambda *words: mgt_here(monkeypatch, capsys, *words)


def kubectl(folder: Path, body: str = "") -> None:
    file = folder / "bin" / "kubectl"
    note = f'echo "$@" >> {folder}/called\n'
    file.write_text(f"#!/bin/sh\n{note}[ -t 0 ] || /bin/cat > {folder}/sent\n{body}\n")
    file.chmod(0o755)


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The specification of the first node's pod."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        found = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    elif manifest["kind"] == "PyTorchJob":
        found = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    else:
        jobs = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
        found = jobs["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        found = {**found, "containers": [{**spec["trainer"], **found["containers"][0]}]}
    assert isinstance(found, dict)
    return found


def shown(mgt: Mgt, kind: str, *words: str) -> dict[str, Any]:
    said = mgt(*words[:1], *KUBERNETES, "--kind", kind, "--dry-run", *words[1:])
    assert said.code == 0, said.err
    found: dict[str, Any] = yaml.safe_load(said.out)
    return found


def started(manifest: dict[str, Any], number: int, folder: Path) -> list[str]:
    """The words that the shell of pod `number` would start."""
    (folder / "python3").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\nenv\n')
    (folder / "python3").chmod(0o755)
    container = pod_of(manifest)["containers"][0]
    # An operator's own variables must not make the launcher take itself for a rank.
    foreign = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere"}
    index = {} if manifest["kind"] == "PyTorchJob" else {"JOB_COMPLETION_INDEX": str(number)}
    env = {"PATH": f"{folder}:{os.defpath}", **foreign, **index}
    done = subprocess.run(
        [*container["command"], *container["args"]], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WORLD_SIZE" not in done.stdout and "elsewhere" not in done.stdout
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_shows_pods_whose_launchers_find_each_other_and_keep_their_checkpoints(
    mgt: Mgt, tmp_path: Path, kind: str
) -> None:
    flags = ("--nodes", "2", "--gpus-per-node", "4", "--claim", "runs", "--namespace", "team")
    flags += ("--toleration", "spot=yes:NoExecute", "--pod", "shm=8Gi", "--pod", "cpu=16")
    manifest = shown(mgt, kind, "train", "image", *flags, "--data-dir", "/in/the/image")
    pod = pod_of(manifest)
    container = pod["containers"][0]
    assert manifest["metadata"]["namespace"] == "team"
    assert container["image"] == "registry/me:1"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["claim"]["persistentVolumeClaim"] == {"claimName": "runs"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "claim": "/claim"}
    assert {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoExecute"} in (
        pod["tolerations"]
    )
    resources = container.get("resources") or container["resourcesPerNode"]
    assert resources["limits"] == {"nvidia.com/gpu": "4"} and resources["requests"]["cpu"] == "16"
    assert ("livenessProbe" in container) == (kind != "trainjob")
    (token,) = (one for one in container["env"] if one["name"] == "MGT_CLUSTER_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["name"] == manifest["metadata"]["name"]
    first, second = (started(manifest, number, tmp_path) for number in (0, 1))
    assert first[:4] == ["-m", "multi_gpu_training", "train", "image"]
    assert "/claim/runs" in first and "--engine" not in first and "--image" not in first
    assert first[first.index("--node-rank") + 1] == "0"
    assert second[second.index("--node-rank") + 1] == "1"
    master = first[first.index("--master-addr") + 1]
    assert master == second[second.index("--master-addr") + 1] and master.startswith("image-")


def test_a_restarted_set_of_pods_is_the_same_run(mgt: Mgt, tmp_path: Path) -> None:
    words = ("--nodes", "2", "--gpus-per-node", "1", "--save-dir", "s3://bucket/runs")
    for kind in ("jobset", "trainjob"):
        manifest = shown(mgt, kind, "train", "image", *words)
        env = {one["name"]: one for one in pod_of(manifest)["containers"][0]["env"]}
        assert env["MGT_RUN_KEY"]["value"] == manifest["metadata"]["name"]
        assert "restart-attempt" in env["MGT_REQUEUES"]["valueFrom"]["fieldRef"]["fieldPath"]
    manifest = shown(mgt, "pytorchjob", "train", "image", *words)
    first = started(manifest, 0, tmp_path)
    assert first[first.index("--resume") + 1] == "auto"
    assert first[first.index("--run-name") + 1] == manifest["metadata"]["name"]


def test_a_script_keeps_its_arguments_and_one_node_needs_no_token(mgt: Mgt, tmp_path: Path) -> None:
    words = ("--num-gpus", "2", "--claim", "runs:/data")
    manifest = shown(mgt, "jobset", "run", *words, "train.py", "--lr", "a b'c")
    assert started(manifest, 0, tmp_path)[:8] == [
        *("-m", "multi_gpu_training", "run", "--num-gpus", "2", "train.py", "--lr", "a b'c")
    ]
    container = pod_of(manifest)["containers"][0]
    assert "MGT_CLUSTER_TOKEN" not in {one["name"] for one in container["env"]}
    assert container["resources"] == {} and container["volumeMounts"][1]["mountPath"] == "/data"


def test_restarts_of_a_script_are_those_that_were_asked_for(mgt: Mgt, tmp_path: Path) -> None:
    words = ("--num-gpus", "2", "--claim", "runs", "--max-restarts", "9")
    manifest = shown(mgt, "jobset", "run", *words, "--recovery-timeout", "60", "train.py")
    told = started(manifest, 0, tmp_path)
    assert told[5:8] == ["--max-restarts=9", "--recovery-timeout=60", "train.py"]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("--kind", "trainjob", "--max-requeues", "3"), "its runtime says how often"),
        (("--pod", "runtime=mine"), "is for --kind trainjob"),
        (("--pod", "gpu=amd.com/gpu"), "needs --gpus-per-node N"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    mgt: Mgt, words: tuple[str, ...], remedy: str
) -> None:
    kept = ("--num-gpus", "2", "--claim", "runs", "--dry-run")
    said = mgt("run", *KUBERNETES, *kept, *words, "train.py")
    assert said.code == 2 and said.err.count("  - ") == 1 and remedy in said.err, said.err


def test_submitting_uses_kubectl_and_the_token_stands_on_no_command_line(
    mgt: Mgt, tmp_path: Path
) -> None:
    kubectl(tmp_path)
    words = ("--nodes", "2", "--gpus-per-node", "1", "--claim", "runs", "train.py")
    said = mgt("run", *KUBERNETES, *words)
    assert said.code == 0, said.err
    secret, job = json.loads((tmp_path / "sent").read_text())["items"]
    token = secret["stringData"]["token"]
    assert len(token) == 64 and job["kind"] == "JobSet"
    assert secret["metadata"]["name"] == job["metadata"]["name"]
    assert token not in (tmp_path / "called").read_text() + said.out + said.err
    assert "kubectl logs -f" in said.err and "kubectl delete" in said.err
    kubectl(tmp_path, "echo 'no matches for kind \"JobSet\"' >&2; exit 1")
    said = mgt("run", *KUBERNETES, *words)
    assert said.code == 1 and "install its operator" in said.err and "Traceback" not in said.err
    (tmp_path / "bin" / "kubectl").unlink()
    said = mgt("run", *KUBERNETES, *words)
    assert said.code == 2 and "kubectl, which is not on this machine" in said.err


def test_a_check_asks_the_cluster_whether_it_would_take_the_job(mgt: Mgt, tmp_path: Path) -> None:
    words = ("--engine", "kubernetes", "--image", "me:1", "--num-gpus", "2", "--claim", "runs")
    kubectl(
        tmp_path,
        """[ "$1" = version ] && echo '{"serverVersion": {"gitVersion": "v1.34"}}'; true""",
    )
    said = mgt("check", *words)
    assert said.code == 0, said.out + said.err
    for line in ("Kubernetes v1.34", "jobsets.jobset.x-k8s.io", "runs is there", "would take it"):
        assert line in said.out, said.out
    sent = json.loads((tmp_path / "sent").read_text())["items"]
    assert [one["kind"] for one in sent] == ["JobSet"]
    assert "apply --dry-run=server" in (tmp_path / "called").read_text()
    kubectl(tmp_path, "echo 'connection to the server was refused' >&2; exit 1")
    said = mgt("check", *words)
    assert said.code == 1 and "kubectl config current-context" in " ".join(said.out.split())


def test_every_wrong_option_for_pods_is_named_with_its_remedy(mgt: Mgt) -> None:
    wrong = ("--kind", "pod", "--pod", "cpu=many", "--pod", "disk=1", "--toleration", "a=b:Never")
    wrong += ("--gpus-per-node", "a100:4", "--claim", "My_Claim", "--nodes", "1:2")
    said = mgt("run", "--engine", "kubernetes", *wrong, "train.py")
    assert said.code == 2
    for remedy in (
        "needs --image",
        "use one of jobset, pytorchjob, trainjob",
        "'cpu=many': give a quantity",
        "'disk=1': use cpu=8",
        "'a=b:Never': use KEY",
        "give a number; choose the kind of GPU with --pod node-selector",
        "--claim 'My_Claim': names have small letters",
        "--nodes 1:2 with --engine kubernetes: give a fixed number",
    ):
        assert remedy in said.err, said.err
    wrong = ("--image", "a\nb: c", "--pod", "node-selector=a b:c", "--num-gpus", "2")
    said = mgt("run", "--engine", "kubernetes", *wrong, "train.py")
    assert said.code == 2 and "give the name of an image" in said.err
    assert "use node-selector=LABEL:VALUE" in said.err
    said = mgt("run", *KUBERNETES, "--num-gpus", "2", "train.py")
    assert said.code == 2 and "a pod's disk ends with the pod" in said.err
    said = mgt("train", "image", *KUBERNETES, "--gpus-per-node", "2", "--multi-gpu", "dp")
    assert said.code == 2 and "use ddp or fsdp" in said.err


@pytest.mark.engines
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_fit_the_published_models_of_their_kinds(mgt: Mgt, kind: str) -> None:
    """A field that a kind does not have, or of another type, does not survive its model."""
    flags = ("--nodes", "2", "--gpus-per-node", "4", "--claim", "runs", "--namespace", "team")
    flags += ("--toleration", "spot", "--pod", "shm=8Gi", "--pod", "node-selector=zone:a")
    manifest = shown(mgt, kind, "train", "image", *flags)
    assert through_its_model(kind, manifest) == manifest
    pod_of(manifest)["volumes"][0]["emptyDir"]["sizelimit"] = "8Gi"
    assert through_its_model(kind, manifest) != manifest, "the model takes anything"


def through_its_model(kind: str, manifest: dict[str, Any]) -> Any:
    text = json.dumps(manifest)
    if kind == "pytorchjob":
        name, reason = "kubeflow.training.api_client", "pip install kubeflow-training"
        client = pytest.importorskip(name, reason=reason).ApiClient()
        response = type("Response", (), {"data": text})
        return client.sanitize_for_serialization(
            client.deserialize(response, "KubeflowOrgV1PyTorchJob")
        )
    name, reason = "kubeflow_trainer_api.models", "pip install kubeflow-trainer-api"
    models = pytest.importorskip(name, reason=reason)
    name = "JobsetV1alpha2JobSet" if kind == "jobset" else "TrainerV1alpha1TrainJob"
    return json.loads(getattr(models, name).from_json(text).to_json())
