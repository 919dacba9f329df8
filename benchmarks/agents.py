"""What the launchers of many nodes cost: control traffic and CPU of the leader, by number of nodes.

    python benchmarks/agents.py --nodes 2,4,8,16,32,64 --out benchmarks/agents.json

The launchers are real (`Rendezvous`, with the cluster token), their ranks are not: nothing is
trained. The leader has its own process and network namespace (tests/nodes.py; root is needed), all
others share a second one. Counted in the leader's namespace are the bytes and packets of its
interface and the CPU time of its process,
    steady   per second, while all nodes are in a round
    round    in all, from the first node that stops until every node is in the next round
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent / "tests"))

KEY = b"the token of the nodes in this benchmark"
PORT = 29500
PATIENCE_S = 300.0


def traffic() -> tuple[int, int]:
    """Bytes and packets of this namespace's interface so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "eth0":
            counts = [int(word) for word in rest.split()]
            return counts[0] + counts[8], counts[1] + counts[9]
    raise OSError("no eth0 here")


def lead(nodes: int, seconds: float, address: str) -> None:
    from multi_gpu_training.launch.elastic.rendezvous import Rendezvous

    node = Rendezvous(nodes, nodes, 0, 1, (address, PORT), address, PATIENCE_S, KEY)
    node.next_round()
    time.sleep(3.0)
    row: dict[str, Any] = {"nodes": nodes}
    spent, began, (sent, packets) = time.process_time(), time.monotonic(), traffic()
    time.sleep(seconds)
    took, (more, many) = time.monotonic() - began, traffic()
    row["cpu_ms_per_s"] = 1000 * (time.process_time() - spent) / took
    row["kb_per_s"], row["packets_per_s"] = (more - sent) / took / 1000, (many - packets) / took
    rounds = []
    for _ in range(3):
        spent, began, sent = time.process_time(), time.monotonic(), traffic()[0]
        node.next_round()
        time.sleep(2.0)  # until the last one has heard of it
        steady = row["kb_per_s"] * (time.monotonic() - began)
        cpu = 1000 * (time.process_time() - spent)
        idle = row["cpu_ms_per_s"] * (time.monotonic() - began)
        rounds.append(((traffic()[0] - sent) / 1000 - steady, cpu - idle))
    row["round_kb"], row["round_cpu_ms"] = (sorted(x[i] for x in rounds)[1] for i in range(2))
    Path("row.json").write_text(json.dumps(row))
    node.end(1, "measured")
    node.shutdown()


def follow(nodes: int, leader: str, address: str) -> None:
    from multi_gpu_training.launch.elastic.rendezvous import Ended, Rendezvous

    def one(rank: int) -> None:
        node = Rendezvous(nodes, nodes, rank, 1, (leader, PORT), address, PATIENCE_S, KEY)
        try:
            while True:
                node.next_round()
                while node.why_again() is None:
                    time.sleep(0.1)
        except Ended:
            node.shutdown()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(1, nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(nodes: int, seconds: float, source: str) -> dict[str, Any]:
    from nodes import Network

    with Network() as network:
        first, second = network.nodes
        env = {"PYTHONPATH": source}
        roles = [(first, "lead", first.address), (second, "follow", second.address)]
        for node, role, address in roles:
            words = [role, "--nodes", nodes, "--seconds", seconds]
            node.start(HERE, *words, "--leader", first.address, "--address", address, env=env)
        row = first.disk / "row.json"
        network.when(lambda: first.code is not None or row.exists(), PATIENCE_S, "a row")
        if not row.exists():
            raise AssertionError(network.said())
        found: dict[str, Any] = json.loads(row.read_text())
        return found


def fit(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """a + b * n by least squares, the exponent from 8 nodes on, and what 1,000 nodes would give."""
    xs, ys = [row["nodes"] for row in rows], [max(row[name], 1e-9) for row in rows]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    b = sum((p - x) * (q - y) for p, q in zip(xs, ys, strict=True)) / sum((p - x) ** 2 for p in xs)
    large = [(math.log(p), math.log(q)) for p, q in zip(xs, ys, strict=True) if p >= 8]
    u, v = sum(p for p, _ in large) / len(large), sum(q for _, q in large) / len(large)
    slope = sum((p - u) * (q - v) for p, q in large) / sum((p - u) ** 2 for p, _ in large)
    return {"a": y - b * x, "b": b, "exponent": slope, "at_1000": y - b * x + 1000 * b}


NAMES = ("cpu_ms_per_s", "kb_per_s", "packets_per_s", "round_cpu_ms", "round_kb")


def table(rows: list[dict[str, Any]], fits: dict[str, dict[str, float]]) -> str:
    lines = ["| nodes | CPU, ms/s | kB/s | packets/s | a new round: CPU, ms | kB |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row['nodes']} | " + " | ".join(f"{row[n]:.1f}" for n in NAMES) + " |")
    for what in ("a", "b", "exponent", "at_1000"):
        found = " | ".join(f"{fits[name][what]:.2f}" for name in NAMES)
        lines.append(f"| {what} | {found} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", choices=["lead", "follow"])
    parser.add_argument("--nodes", default="2,4,8,16,32,64")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--leader")
    parser.add_argument("--address")
    parser.add_argument("--source", default=str(HERE.parent.parent / "src"), help="of the package")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.role == "lead":
        lead(int(given.nodes), given.seconds, given.address)
    elif given.role == "follow":
        follow(int(given.nodes), given.leader, given.address)
    else:
        measure_all(given)


def measure_all(given: argparse.Namespace) -> None:
    from nodes import why_not

    reason = why_not()
    if reason is not None:
        sys.exit(reason)
    rows = []
    for nodes in map(int, given.nodes.split(",")):
        rows.append(measure(nodes, given.seconds, given.source))
        print(json.dumps(rows[-1]), flush=True)
    fits = {name: fit(rows, name) for name in NAMES}
    print(table(rows, fits))
    if given.out is not None:
        facts = {"machine": platform.platform(), "cpus": os.cpu_count()}
        given.out.write_text(json.dumps({**facts, "rows": rows, "fits": fits}, indent=1))


if __name__ == "__main__":
    main()
