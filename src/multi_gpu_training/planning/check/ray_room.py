"""Whether a Ray cluster has room for a run, and its nodes the same software, seen from a driver."""

from __future__ import annotations

from collections.abc import Iterator

from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.engine import LaunchPlan
from multi_gpu_training.launch.ray_cluster.ray_connection import RayOptions, connect
from multi_gpu_training.launch.ray_cluster.ray_engine import ranks_that_fit
from multi_gpu_training.planning.check.check_report import Finding, Group

RAY = Group("Ray")


def check_ray(plan: LaunchPlan) -> Iterator[Finding]:
    """What stands between this run and its start; the first failure is the last finding."""
    try:
        options = RayOptions.read(plan.hosts.engine_options)
        mine = connect(options)
    except (ConfigError, LaunchError) as error:
        problem, _, remedy = str(error).partition("; ")
        yield RAY.fail("cluster", problem, remedy or "see `ray status`")
        return
    import ray

    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        yield RAY.passed("cluster", f"Ray {ray.__version__}, {len(nodes)} nodes are alive")
        yield _room(plan, options, nodes)
    finally:
        if mine:
            ray.shutdown()


def _room(plan: LaunchPlan, options: RayOptions, nodes: list[dict[str, float]]) -> Finding:
    """Whether the nodes, empty, could hold the ranks."""
    topic, hosts = RAY.about("room"), plan.hosts
    gpus = options.gpus_per_rank
    if gpus is None:
        gpus = int(any(node.get("GPU", 0) >= 1 for node in nodes))
    each = {name: n for name, n in (("CPU", options.cpus_per_rank), ("GPU", gpus)) if n}
    ranks = plan.ranks_here or (ranks_that_fit(nodes, hosts.nodes, each) if each else 0)
    needed = {name: n * max(1, ranks) for name, n in each.items()}
    large = [node for node in nodes if all(node.get(k, 0) >= n for k, n in needed.items())]
    amounts = ", ".join(f"{n:g} {name}" for name, n in needed.items()) or "nothing"
    text = f"{ranks} ranks on each node need {amounts}: {len(large)} of {len(nodes)} nodes have it"
    if not ranks or len(large) < hosts.least:
        return topic.fail(
            f"{text}, {hosts.least} needed",
            "add nodes with `ray start --address=...`, or ask for less with --num-gpus, --nnodes "
            "or --ray-options",
        )
    if len(large) <= hosts.least:
        return topic.warn(text, "none is left to replace a node that fails")
    return topic.passed(text)
