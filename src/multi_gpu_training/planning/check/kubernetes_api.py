"""Whether a Kubernetes cluster would take a job, asked with the user's kubectl."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

from multi_gpu_training.errors import LaunchError
from multi_gpu_training.launch.kubernetes.job_manifest import RESOURCES, KubernetesJob
from multi_gpu_training.launch.kubernetes.kubernetes_engine import as_list, kubectl
from multi_gpu_training.planning.check.check_report import Finding, Group

KUBERNETES = Group("Kubernetes")


def check_kubernetes(job: KubernetesJob) -> Iterator[Finding]:
    """What stands between this job and its start; the first failure is the last finding."""
    if shutil.which("kubectl") is None:
        text = "kubectl is not on this machine"
        yield KUBERNETES.fail("kubectl", text, "install it, or check where it is")
        return
    try:
        server = json.loads(kubectl("version", "-o", "json")).get("serverVersion", {})
        yield KUBERNETES.passed("cluster", f"Kubernetes {server.get('gitVersion', '(unknown)')}")
        resource = RESOURCES[job.kind]
        kubectl("get", "crd", resource)
        yield KUBERNETES.passed("operator", f"{resource} is installed")
        space = ["-n", job.namespace] if job.namespace else []
        if job.claim is not None:
            kubectl("get", "pvc", job.claim, *space)
            yield KUBERNETES.passed("claim", f"{job.claim} is there")
        sent = as_list([job.manifest()])
        kubectl("apply", "--dry-run=server", *space, "-f", "-", text=sent)
        yield KUBERNETES.passed("job", f"the cluster would take it; image {job.image}, not pulled")
    except (LaunchError, ValueError) as error:
        problem, _, remedy = str(error).partition("; ")
        yield KUBERNETES.fail("cluster", problem, remedy or "see `kubectl version`")
