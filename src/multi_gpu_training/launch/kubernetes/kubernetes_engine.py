"""The engine that hands a run to Kubernetes: writes the manifest and submits it with kubectl."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from multi_gpu_training.config import MultiGPUConfig
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.engine import Engine, Hosts, LaunchPlan, RankJob, RunOutcome
from multi_gpu_training.launch.kubernetes.job_manifest import (
    KINDS,
    LABEL,
    MOUNT,
    RESOURCES,
    KubernetesJob,
    Manifest,
    name_problem,
    parse_pod_options,
    parse_toleration,
)
from multi_gpu_training.launch.signals import LauncherSignals
from multi_gpu_training.run_places import is_url
from multi_gpu_training.safe_output import brief, printable

MAX_RESTARTS = 5  # of a set of pods; each restarts its ranks by itself first
PATIENCE_S = 60.0


class KubernetesEngine(Engine):
    """Submits a job and returns: Kubernetes starts, restarts and ends its pods."""

    options = (
        *("image", "kind", "namespace", "claim", "toleration", "pod"),
        *("gpus_per_node", "max_requeues", "dry_run", "detach"),
    )

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan

    @classmethod
    def fits(cls, hosts: Hosts, config: MultiGPUConfig | None) -> bool:
        return False  # only where it is named

    @classmethod
    def identity(cls, config: MultiGPUConfig) -> Identity | None:
        return None

    def start(self, job: RankJob, signals: LauncherSignals) -> None:
        found = kubernetes_job(self.plan, job)
        if self.plan.hosts.engine_options.get("dry_run"):
            print(_shown(found), end="")
            return
        require_kubectl()
        token = secrets.token_hex(32)
        items = [found.secret(token)] if found.needs_secret else []
        # On standard input: command lines are for everybody to see.
        kubectl("apply", "-f", "-", text=as_list([*items, found.manifest()]))
        space = ["-n", found.namespace] if found.namespace else []
        chosen = shlex.join([*space, "-l", f"{LABEL}={found.name}"])
        _say(
            f"submitted {found.name}. Its pods: kubectl get pods {chosen}\n"
            f"  log: kubectl logs -f --prefix {chosen}\n"
            f"  end: kubectl delete {RESOURCES[found.kind]},secrets {chosen}"
        )

    def watch(self) -> RunOutcome | None:
        return RunOutcome()

    def stop(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass


def kubernetes_job(plan: LaunchPlan, job: RankJob) -> KubernetesJob:
    """The job for a plan. ConfigError: what its flags ask for is wrong, all of it at once."""
    hosts, given = plan.hosts, plan.hosts.engine_options
    problems = list(_unusable(plan, job))
    kind = given.get("kind") or "jobset"
    if kind not in KINDS:
        problems.append(f"--kind {brief(kind)}: use one of {', '.join(KINDS)}")
    gpus = str(given.get("gpus_per_node") or 0)
    if not gpus.isdecimal():
        problems.append(
            f"--gpus-per-node {brief(gpus)} with --engine kubernetes: give a number; choose the "
            "kind of GPU with --pod node-selector=LABEL:VALUE"
        )
        gpus = "0"
    ranks = plan.ranks_here or int(gpus)
    if not ranks:
        problems.append(
            "--engine kubernetes needs --gpus-per-node N, or --num-gpus N for CPU ranks in each pod"
        )
    tolerations = []
    for text in given.get("toleration") or ():
        try:
            tolerations.append(parse_toleration(text))
        except ConfigError as error:
            problems += error.problems
    pod = parse_pod_options(given.get("pod") or (), problems)
    problems += _idle_options(kind, given, pod, int(gpus))
    claim, _, mount = str(given.get("claim") or "").partition(":")
    command, keeps = _kept(job.command, claim, mount or MOUNT)
    problems += _storage_problems(keeps, claim, mount, given.get("namespace") or "")
    if problems:
        raise ConfigError(problems)
    restarts = given.get("max_requeues")
    name = _name(job.command)
    if kind == "pytorchjob" and command[:3] == ("-m", "multi_gpu_training", "train"):
        # Nothing tells these pods that they were started before.
        command = _with(command, "--run-name", name)
        command = _with(command, "--resume", "auto")
    return KubernetesJob(
        name,
        kind,
        given["image"],
        command,
        hosts.nodes,
        ranks,
        int(gpus),
        given.get("namespace"),
        None if claim in ("", "none") else claim,
        mount or MOUNT,
        tuple(tolerations),
        pod,
        MAX_RESTARTS if restarts is None else restarts,
        () if command[:1] == ("-m",) else _launcher_flags(plan),
    )


def _unusable(plan: LaunchPlan, job: RankJob) -> Iterator[str]:
    """What this engine cannot start, or not without an image."""
    hosts, given = plan.hosts, plan.hosts.engine_options
    if not job.command:
        yield ("--engine kubernetes starts scripts, not functions; use `mgt run FILE`")
    if hosts.master_addr is not None or hosts.node_rank:
        yield (
            "--engine kubernetes finds its nodes by itself; drop --master-addr and --node-rank, "
            "and unset MASTER_ADDR"
        )
    if hosts.elastic:
        yield (
            f"--nodes {hosts.least}:{hosts.nodes} with --engine kubernetes: give a fixed number; "
            "Kubernetes replaces pods that are lost"
        )
    if not given.get("image"):
        yield (
            "--engine kubernetes needs --image: a container image with this package, your script "
            "and what it imports"
        )
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}", given["image"]):
        yield (
            f"--image {brief(given['image'])}: give the name of an image, such as "
            "registry.example/team/train:2"
        )


def _storage_problems(keeps: bool, claim: str, mount: str, namespace: str) -> Iterator[str]:
    """Where checkpoints would be lost, or could not be mounted."""
    if not keeps:
        yield (
            "--engine kubernetes: a pod's disk ends with the pod, and the checkpoints with it; add "
            "--claim NAME (a persistent volume claim), or --save-dir with a URL such as "
            "s3://bucket/runs. --claim none does without"
        )
    for flag, value in (("--claim", claim), ("--namespace", namespace)):
        problem = name_problem(flag, value) if value else None
        if problem is not None:
            yield problem
    if mount and not mount.startswith("/"):
        yield f"--claim {claim}:{brief(mount)}: the path in the pods begins with /"


def _idle_options(
    kind: str, given: Mapping[str, Any], pod: Mapping[str, str], gpus: int
) -> Iterator[str]:
    """What was asked for and would do nothing."""
    if kind == "trainjob" and given.get("max_requeues") is not None:
        yield (
            "--max-requeues with --kind trainjob: its runtime says how often pods restart; drop it"
        )
    if kind != "trainjob" and "runtime" in pod:
        yield f"--pod runtime={brief(pod['runtime'])} is for --kind trainjob; drop it"
    if not gpus and "gpu" in pod:
        yield f"--pod gpu={brief(pod['gpu'])} needs --gpus-per-node N: how many of them"


def _launcher_flags(plan: LaunchPlan) -> tuple[str, ...]:
    flags = []
    if plan.max_restarts is not None:
        flags.append(f"--max-restarts={plan.max_restarts}")
    if plan.recovery_timeout != LaunchPlan.recovery_timeout:
        flags.append(f"--recovery-timeout={plan.recovery_timeout:g}")
    return tuple(flags)


def _kept(command: tuple[str, ...], claim: str, mount: str) -> tuple[tuple[str, ...], bool]:
    """The command with a place for its checkpoints, and whether that outlives a pod."""
    if command[:1] != ("-m",):  # a script says itself where its run is kept
        return command, bool(claim)
    names = [_setting(word) for word in command]
    places = [word.partition("=")[2] for word in command if _setting(word) == "save_dir"]
    places += [b for a, b in zip(names, command[1:], strict=False) if a == "save_dir"]
    if not any(places) and claim not in ("", "none"):
        return (*command, "--save-dir", f"{mount}/runs"), True
    return command, bool(claim) or any(is_url(place) for place in places)


def _setting(word: str) -> str:
    """The name that `--save-dir`, `--save-dir=X` or `save_dir=X` sets."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _with(command: tuple[str, ...], flag: str, value: str) -> tuple[str, ...]:
    given = _setting(flag) in map(_setting, command)
    return command if given else (*command, flag, value)


def _name(command: tuple[str, ...]) -> str:
    """Unlike any other run's, and short enough for the names of its pods."""
    word = command[3] if command[0] == "-m" and len(command) > 3 else command[0]
    stem = re.sub(r"[^a-z0-9]+", "-", Path(word).stem.lower()).strip("-")[:20].strip("-")
    return f"{stem if stem[:1].isalpha() else f'mgt-{stem}'.strip('-')}-{uuid.uuid4().hex[:6]}"


def as_list(items: list[Manifest]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


class _Readable(yaml.SafeDumper):
    """Scripts as lines, as a person writes them."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Readable.add_representer(str, _as_block)


def _shown(job: KubernetesJob) -> str:
    text: str = yaml.dump(job.manifest(), Dumper=_Readable, sort_keys=False, width=1000)
    if not job.needs_secret:
        return text
    space = f" -n {job.namespace}" if job.namespace else ""
    return (
        "# Its launchers share a token, which `mgt` makes when it submits them. By hand:\n"
        f"#   mgt cluster token {job.name}.token\n"
        f"#   kubectl create secret generic {job.name}{space} --from-file=token={job.name}.token\n"
        f"{text}"
    )


# kubectl


def require_kubectl() -> None:
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "--engine kubernetes needs kubectl, which is not on this machine; install it, or add "
            "--dry-run and apply the manifest elsewhere",
            code="MGT505",
        )


def kubectl(*words: str, text: str | None = None) -> str:
    """What kubectl printed. LaunchError: it failed."""
    try:
        done = subprocess.run(
            ["kubectl", *words],
            input=text,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"kubectl {words[0]} did not answer within {PATIENCE_S:g} s; see whether `kubectl "
            "version` reaches the cluster",
            code="MGT505",
        ) from None
    if done.returncode == 0:
        return done.stdout
    said = printable(" ".join((done.stderr or done.stdout).split()))[:500]
    low = said.lower()
    remedies = {
        "no matches for kind": "the cluster lacks that kind of job; install its operator, or "
        "choose another --kind",
        "refused": "see whether `kubectl version` reaches the cluster, and `kubectl config "
        "current-context` names the right one",
        "forbidden": "your account may not do that; ask for the right, or use another --namespace",
        "not found": "see whether the --namespace exists",
    }
    remedy = next((advice for key, advice in remedies.items() if key in low), "")
    raise LaunchError(
        f"kubectl {words[0]} failed: {said}" + (f"; {remedy}" if remedy else ""), code="MGT505"
    )


def _say(text: str) -> None:
    print(f"kubernetes: {text}", file=sys.stderr, flush=True)
