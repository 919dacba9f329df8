"""The same training on every engine: are the weights and the order of the samples the same?

    python benchmarks/engines.py --out engines.json          those engines that can run here
    python benchmarks/engines.py --only local,elastic

Four CPU ranks in all, float64, the same seed and global batch:

    local      one launcher on this machine
    torchrun   torchrun --nproc-per-node 4
    slurm      a real Slurm: two nodes (network namespaces) with two ranks each; needs its packages
    ray        two raylets with two ranks each; needs the extra `ray`
    elastic    three nodes (network namespaces, disks of their own) with 2, 1 and 1 ranks

Each is compared with `local`: the largest relative difference of a weight tensor, and the samples
of every step, in the order of the ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import node_run
import nodes
from node_run import TOKEN, Run
from processes import quickly
from slurm_cluster import SlurmCluster
from slurm_cluster import why_not as no_slurm
from slurm_run import MGT, SCRIPT, SOURCE, SlurmRun, local_run

RANKS = 4
ON_NODES = (2, 1, 1)  # of the engine elastic
PATIENCE_S = node_run.PATIENCE_S = 1200.0
ENGINE: dict[str, Callable[[Path, int], Run]] = {}


def engine(function: Callable[[Path, int], Run]) -> Callable[[Path, int], Run]:
    ENGINE[function.__name__] = function
    return function


def call(run: SlurmRun, *words: str) -> Run:
    env = quickly({**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"})
    done = subprocess.run(
        [*words, "train.py", run.settings],
        cwd=run.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return run


@engine
def local(folder: Path, epochs: int) -> Run:
    return local_run(folder, epochs, RANKS)


@engine
def torchrun(folder: Path, epochs: int) -> Run:
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return call(SlurmRun(None, folder, epochs, 0.0), *module, "--nproc-per-node", str(RANKS))


@engine
def slurm(folder: Path, epochs: int) -> Run:
    with SlurmCluster() as cluster, SlurmRun(cluster, folder, epochs, 0.0, RANKS // 2) as run:
        run.submit("--nodes", "2", "--time", "1:00:00")
        assert run.finish() == 0, run.said()
        return run


@engine
def ray(folder: Path, epochs: int) -> Run:
    from ray_nodes import quick_nodes, ray_nodes

    quick_nodes()
    with ray_nodes(2, RANKS // 2) as cluster:
        words = ("--engine", "ray", "--ray-address", cluster.address, "--nnodes", "2")
        return call(SlurmRun(None, folder, epochs, 0.0), *MGT, "run", *words)


@engine
def elastic(folder: Path, epochs: int) -> Run:
    with nodes.Network(nodes=len(ON_NODES)) as network:
        run = Run(network, epochs, 0.0)
        for number, (node, ranks) in enumerate(zip(network.nodes, ON_NODES, strict=True)):
            (node.disk / "train.py").write_text(SCRIPT)
            hosts = ["--nnodes", len(ON_NODES), "--node-rank", number, "--num-gpus", ranks]
            hosts += ["--master-addr", network.nodes[0].address, "--master-port", 29500]
            env = {"PYTHONPATH": str(SOURCE), "MGT_CLUSTER_TOKEN": TOKEN}
            node.start(*MGT[1:], "run", *hosts, "train.py", run.settings, env=env)
        assert set(run.end()) == {0}, network.said()
        return _Kept(run)


class _Kept(Run):
    """A run whose nodes are gone."""

    def __init__(self, run: Run) -> None:
        self._lines, self._weights = run.lines(), run.weights()

    def lines(self) -> list[dict[str, Any]]:
        return self._lines

    def weights(self) -> dict[str, Any]:
        return self._weights


def why_not(name: str) -> str | None:
    if name == "slurm":
        return no_slurm()
    if name == "elastic":
        return nodes.why_not()
    if name == "ray" and importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    return None


def in_order(run: Run) -> dict[int, list[int]]:
    """The samples of each step, rank after rank."""
    parts: dict[int, dict[int, list[int]]] = {}
    for line in run.lines():
        assert line["world"] == RANKS and line["rank"] not in parts.get(line["step"], {}), line
        parts.setdefault(line["step"], {})[line["rank"]] = line["samples"]
    return {
        step: [sample for rank in range(RANKS) for sample in ranks[rank]]
        for step, ranks in parts.items()
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    import torch

    pairs = [(torch.tensor(one[k]).double(), torch.tensor(v).double()) for k, v in other.items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="engines, with commas; local is the reference")
    parser.add_argument("--epochs", type=int, default=20, help="of five steps")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    names = ["local", *(n for n in (given.only or ",".join(ENGINE)).split(",") if n != "local")]
    rows: list[dict[str, Any]] = []
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="mgt-engines-") as place:
        for name in names:
            reason = why_not(name)
            if reason is not None:
                rows.append({"engine": name, "skipped": reason})
                print(json.dumps(rows[-1]), flush=True)
                continue
            began = time.time()
            runs[name] = run = ENGINE[name](Path(place) / name, given.epochs)
            row: dict[str, Any] = {"engine": name, "steps": len(in_order(run))}
            row["difference"] = apart(run.weights(), runs["local"].weights())
            row["same_order"] = in_order(run) == in_order(runs["local"])
            row["seconds"] = round(time.time() - began, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    print("\n| engine | steps | largest relative difference | same samples in the same order |")
    print("|---|---|---|---|")
    for row in rows:
        if "skipped" in row:
            print(f"| {row['engine']} | not run: {row['skipped']} | | |")
        else:
            order = "yes" if row["same_order"] else "NO"
            print(f"| {row['engine']} | {row['steps']} | {row['difference']:.1e} | {order} |")
    if given.out is not None:
        facts = {"machine": platform.platform(), "cpus": os.cpu_count(), "engines": rows}
        given.out.write_text(json.dumps(facts, indent=1) + "\n")
    ran = [row for row in rows if "skipped" not in row]
    sys.exit(not all(row["same_order"] and row["difference"] <= 1e-12 for row in ran))


if __name__ == "__main__":
    main()
