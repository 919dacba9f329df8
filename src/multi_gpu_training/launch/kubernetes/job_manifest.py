"""The Kubernetes manifest of a run: one pod per node, each with a launcher and its ranks.

The launchers find each other as those of bare machines do (launch/elastic/), under a name that the
cluster's DNS gives to the first pod. What differs between the kinds is who makes the pods:

    jobset       kubernetes-sigs/jobset: one Indexed Job; a failed pod restarts the whole set
    pytorchjob   Kubeflow Training Operator v1: a master and workers; a failed container restarts
    trainjob     Kubeflow Trainer v2: a JobSet made from the runtime `torch-distributed`
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multi_gpu_training.distributed.cluster_token import TOKEN
from multi_gpu_training.distributed.identity import REQUEUES, RUN_KEY
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.safe_output import brief

Manifest = dict[str, Any]

KINDS = ("jobset", "pytorchjob", "trainjob")
RESOURCES = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "trainjob": "trainjobs.trainer.kubeflow.org",
}
MOUNT = "/claim"
PORT = 29500
GRACE_S = 120  # for the checkpoint of a pod that is asked to end
LABEL = "multi-gpu-training/run"
POD_OPTIONS = {
    "cpu": "8",
    "memory": "64Gi",
    "shm": "16Gi",
    "gpu": "nvidia.com/gpu",
    "python": "/opt/venv/bin/python",
    "node-selector": "LABEL:VALUE",
    "runtime": "torch-distributed",
}
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_RESTART = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
# What an operator sets for scripts that read it. Here the launchers set it, for each rank.
_FOREIGN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"


@dataclass(frozen=True)
class KubernetesJob:
    """What a run needs from the cluster. `command` is what `python` runs in each pod, without what
    says where it runs; `gpus` and `ranks` are those of each pod."""

    name: str
    kind: str
    image: str
    command: tuple[str, ...]
    nodes: int
    ranks: int
    gpus: int = 0
    namespace: str | None = None
    claim: str | None = None
    mount: str = MOUNT
    tolerations: tuple[Mapping[str, str], ...] = ()
    pod: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    launcher_flags: tuple[str, ...] = ()  # of `mgt run` in each pod; a recipe's config has them

    def manifest(self) -> Manifest:
        """The job itself, without the secret that its pods share."""
        kinds = {"jobset": self._jobset, "pytorchjob": self._pytorchjob, "trainjob": self._trainjob}
        return kinds[self.kind]()

    def secret(self, token: str) -> Manifest:
        """The token by which the launchers know each other."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(),
            "type": "Opaque",
            "stringData": {"token": token},
        }

    @property
    def needs_secret(self) -> bool:
        return self.nodes > 1

    # The kinds

    def _jobset(self) -> Manifest:
        pod = {
            "metadata": {"labels": {LABEL: self.name}},
            "spec": {**self._pod(), "restartPolicy": "Never"},
        }
        job = {
            "parallelism": self.nodes,
            "completions": self.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a run needs all its pods: restart the whole set
            "template": pod,
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata(),
            "spec": {
                "failurePolicy": {"maxRestarts": self.restarts},
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
            },
        }

    def _pytorchjob(self) -> Manifest:
        def replicas(count: int) -> Manifest:
            pod = {"metadata": {"labels": {LABEL: self.name}}, "spec": self._pod("pytorch")}
            return {"replicas": count, "restartPolicy": "OnFailure", "template": pod}

        specs = {"Master": replicas(1)}
        if self.nodes > 1:
            specs["Worker"] = replicas(self.nodes - 1)
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": self._metadata(),
            "spec": {
                "runPolicy": {"backoffLimit": self.restarts, "cleanPodPolicy": "Running"},
                "pytorchReplicaSpecs": specs,
            },
        }

    def _trainjob(self) -> Manifest:
        container = self._container("node")
        # The runtime owns the container; a job may add volumes to it, but no probe.
        patch = {
            **{key: value for key, value in self._pod().items() if key != "containers"},
            "containers": [{"name": "node", "volumeMounts": container["volumeMounts"]}],
        }
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata(),
            "spec": {
                "runtimeRef": {"name": self.pod.get("runtime", "torch-distributed")},
                "trainer": {
                    "image": self.image,
                    "command": container["command"],
                    "args": container["args"],
                    "env": container["env"],
                    "numNodes": self.nodes,
                    "resourcesPerNode": container["resources"],
                },
                "runtimePatches": [
                    {
                        "manager": "multi-gpu-training",
                        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
                            {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
                        ]}}},
                    }
                ],
            },
        }  # fmt: skip

    def _metadata(self) -> Manifest:
        found: Manifest = {"name": self.name, "labels": {LABEL: self.name}}
        return {**found, "namespace": self.namespace} if self.namespace else found

    # The pod

    def _pod(self, container: str = "node") -> Manifest:
        shm: Manifest = {"medium": "Memory"}
        if "shm" in self.pod:
            shm["sizeLimit"] = self.pod["shm"]
        # Loader workers hand their batches over in /dev/shm, of which a container has 64 MiB.
        volumes: list[Manifest] = [{"name": "shm", "emptyDir": shm}]
        if self.claim is not None:
            volumes.append(
                {"name": "claim", "persistentVolumeClaim": {"claimName": self.claim}},
            )
        tolerations = [dict(found) for found in self.tolerations]
        if self.gpus:
            tolerations.insert(0, {"key": self._gpu, "operator": "Exists", "effect": "NoSchedule"})
        found: Manifest = {
            "terminationGracePeriodSeconds": GRACE_S,
            "tolerations": tolerations,
            "volumes": volumes,
            "containers": [self._container(container)],
        }
        if "node-selector" in self.pod:
            label, _, value = self.pod["node-selector"].partition(":")
            found["nodeSelector"] = {label: value}
        return {key: value for key, value in found.items() if value != []}

    @property
    def _gpu(self) -> str:
        return self.pod.get("gpu", "nvidia.com/gpu")

    def _container(self, name: str) -> Manifest:
        asked = {key: self.pod[key] for key in ("cpu", "memory") if key in self.pod}
        limits = {self._gpu: str(self.gpus)} if self.gpus else {}
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
        if self.claim is not None:
            mounts.append({"name": "claim", "mountPath": self.mount})
        return {
            "name": name,
            "image": self.image,
            "command": ["/bin/sh", "-c"],
            "args": [self.script()],
            "env": self._environment(),
            "resources": {
                kind: amounts
                for kind, amounts in (("requests", {**asked, **limits}), ("limits", limits))
                if amounts
            },
            "volumeMounts": mounts,
            # The launcher finds ranks that hang by itself. Nobody else finds a stopped launcher.
            "livenessProbe": {
                "exec": {"command": ["/bin/sh", "-c", "! grep -q '^State:.[TZ]' /proc/1/status"]},
                "initialDelaySeconds": 60,
                "periodSeconds": 30,
                "failureThreshold": 4,
            },
        }

    def _environment(self) -> list[Manifest]:
        found: list[Manifest] = [{"name": "PYTHONUNBUFFERED", "value": "1"}]
        if self.kind != "pytorchjob":
            # A set that is restarted is the same run at a later attempt, and resumes.
            found.append({"name": RUN_KEY, "value": self.name})
            attempt = {"fieldRef": {"fieldPath": _RESTART}}
            found.append({"name": REQUEUES, "valueFrom": attempt})
        if self.needs_secret:
            token = {"secretKeyRef": {"name": self.name, "key": "token"}}
            found.append({"name": TOKEN, "valueFrom": token})
        return found

    def script(self) -> str:
        """What the shell of each pod runs; its launcher takes the shell's place, as process 1."""
        python = self.pod.get("python", "python3")
        flags = ["--num-gpus", str(self.ranks)]
        node, master = {
            "jobset": ("$JOB_COMPLETION_INDEX", f"{self.name}-node-0-0.{self.name}"),
            "pytorchjob": ("$RANK", f"{self.name}-master-0"),
            "trainjob": ("$JOB_COMPLETION_INDEX", f"{self.name}-node-0-0.{self.name}"),
        }[self.kind]
        if self.nodes > 1:
            flags += ["--nnodes", str(self.nodes), "--master-addr", master]
            flags += ["--master-port", str(PORT)]
        words = shlex.join(flags) + (' --node-rank "$node"' if self.nodes > 1 else "")
        if self.command[:1] == ("-m",):
            line = f"{shlex.join([python, *self.command])} {words}"
        else:
            run = shlex.join([python, "-m", "multi_gpu_training", "run"])
            line = f"{run} {words} {shlex.join([*self.launcher_flags, *self.command])}"
        return f'node="{node}"\nunset {_FOREIGN}\nexec {line}\n'


# What the flags say


def parse_toleration(text: str) -> dict[str, str]:
    """`KEY`, `KEY=VALUE` or either with `:EFFECT`, as `kubectl taint` writes taints."""
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if not key or effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise ConfigError(
            f"--toleration {brief(text)}: use KEY, KEY=VALUE or KEY=VALUE:EFFECT with the effect "
            "NoSchedule, PreferNoSchedule or NoExecute"
        )
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    found |= {"value": value} if equals else {}
    return {**found, "effect": effect} if effect else found


_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,316}:([A-Za-z0-9][A-Za-z0-9._-]{0,62})?")


def parse_pod_options(given: Sequence[str], problems: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in POD_OPTIONS or not value:
            known = ", ".join(f"{key}={example}" for key, example in POD_OPTIONS.items())
            problems.append(f"--pod {brief(text)}: use {known}")
        elif name in ("cpu", "memory", "shm") and not _QUANTITY.fullmatch(value):
            problems.append(f"--pod {brief(text)}: give a quantity such as 500m, 8 or 64Gi")
        elif name == "node-selector" and not _LABEL.fullmatch(value):
            problems.append(f"--pod {brief(text)}: use node-selector=LABEL:VALUE")
        found[name] = value
    return found


def name_problem(flag: str, name: str) -> str | None:
    """What is wrong with the name of an object in Kubernetes."""
    if _NAME.fullmatch(name):
        return None
    return f"{flag} {brief(name)}: names have small letters, digits, - and . only"
