"""Ranks of two nodes meet, whoever starts them, with the token and not without.

A node is a network namespace with an address and a disk of its own (tests/nodes.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_run import PATIENCE_S, TOKEN, TRAIN
from nodes import Machine, Network, why_not
from ranks import run_ranks

SOURCE = str(Path(__file__).parent.parent.parent / "src")
SETTINGS = {"epochs": 1, "pause": 0.0, "recovery_timeout": 60}
# A network or a token is never inherited from whoever runs the tests.
BASE = {"PYTHONPATH": SOURCE, "MGT_CLUSTER_TOKEN_FILE": "", "MGT_INSECURE_NETWORK": ""}
PLAIN = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
t = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(t)
print("sum", t.item())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Network() as found:
        for node in found.nodes:
            (node.disk / "train.py").write_text(TRAIN)
            (node.disk / "plain.py").write_text(PLAIN)
        yield found


def start(how: str, network: Network, number: int, secret: dict[str, str], **settings: int) -> None:
    """Start one node's part of the run that `train.py` is."""
    node, master = network.nodes[number], network.nodes[0].address
    for left in (node.log, node.disk / "weights.json"):
        left.unlink(missing_ok=True)
    shutil.rmtree(node.disk / "runs", ignore_errors=True)
    words = [json.dumps({**SETTINGS, **settings})]
    env = {**BASE, **secret}
    rank = {"MASTER_ADDR": master, "MASTER_PORT": "29510"}
    hosts = ["--nnodes", 2, "--node-rank", number, "--master-addr", master]
    if how == "by hand":
        rank |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        node.start("train.py", *words, env={**env, **rank})
    elif how == "slurm":
        rank |= {"SLURM_PROCID": str(number), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
        node.start("train.py", *words, env={**env, **rank, "SLURM_JOB_NUM_NODES": "2"})
    elif how == "torchrun":
        node.start("-m", "torch.distributed.run", *hosts, "train.py", *words, env=env)
    elif how == "check":
        flags = ["--device", "cpu", "--num-gpus", 1, "--timeout", 30]
        node.start("-m", "multi_gpu_training", "check", *hosts, *flags, env=env)
    else:
        flags = ["--num-gpus", 1, "--recovery-timeout", 60]
        node.start("-m", "multi_gpu_training", "run", *hosts, *flags, "plain.py", env=env)


def ended(network: Network) -> list[int | None]:
    network.when(lambda: all(n.code is not None for n in network.nodes), PATIENCE_S, "the end")
    assert [node.pids() for node in network.nodes] == [[], []], "nothing is left running"
    return [node.code for node in network.nodes]


def both(how: str, network: Network, first: str, second: str, **settings: int) -> list[int | None]:
    for number, token in enumerate((first, second)):
        secret = {"MGT_INSECURE_NETWORK": "1"} if token == "insecure" else {}
        start(how, network, number, secret or {"MGT_CLUSTER_TOKEN": token}, **settings)
    return ended(network)


def weights(node: Machine) -> str:
    return (node.disk / "weights.json").read_text()


def alone(folder: Path) -> None:
    os.chdir(folder)
    sys.argv = ["train.py", json.dumps({"epochs": 1, "pause": 0.0})]
    exec(compile(TRAIN, "train.py", "exec"), {"__name__": "__main__"})


@pytest.mark.timeout(400)
def test_two_nodes_end_in_the_bits_of_one_machine_whoever_starts_their_ranks(
    network: Network, tmp_path: Path
) -> None:
    run_ranks(2, alone, tmp_path)
    expected = (tmp_path / "weights.json").read_text()
    cases = [("by hand", TOKEN), ("slurm", "insecure"), ("torchrun", TOKEN)]
    for how, token in cases:
        assert both(how, network, token, token) == [0, 0], network.said()
        assert [weights(node) for node in network.nodes] == [expected] * 2, how


def test_a_plain_script_on_two_nodes_joins_by_env(network: Network) -> None:
    assert both("plain", network, TOKEN, TOKEN) == [0, 0], network.said()
    assert all("sum 3.0" in node.said for node in network.nodes), network.said()


@pytest.mark.timeout(200)
def test_another_token_is_refused_on_both_nodes_with_the_reason(network: Network) -> None:
    first, second = network.nodes
    other = "another token that is long enough"
    assert both("by hand", network, TOKEN, other, recovery_timeout=8) == [1, 1], network.said()
    assert "1 x another cluster token" in first.said, first.said
    assert "ranks [1] of 2 did not come" in first.said, first.said
    assert "the other machine has another cluster token" in second.said, second.said
    assert "Traceback" not in second.said and "frame #" not in second.said, second.said
    assert not any((node.disk / "weights.json").exists() for node in network.nodes)


@pytest.mark.timeout(200)
def test_mgt_check_on_two_nodes_needs_the_token(network: Network) -> None:
    assert both("check", network, TOKEN, TOKEN) == [0, 0], network.said()
    assert "2 ranks on 2 machines met" in network.nodes[0].said
    start("check", network, 1, {})
    assert ended(network)[1] == 1
    assert "--insecure-network" in network.nodes[1].said, network.said()
