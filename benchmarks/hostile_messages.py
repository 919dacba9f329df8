"""Hostile messages to every open port of a running training.

    python benchmarks/hostile_messages.py --messages 1000 --out benchmarks/hostile_messages.md

One training runs on two network namespaces, each a machine with its own address and disk; the
attacker sits in a third on the same switch. Another training runs on one machine; there the
attacker is another user of it. Every port that listens gets its share of the messages: replayed
(recorded from real launchers where a port speaks our protocol), truncated, oversized, wrong HMAC,
wrong version, deep nesting, huge integers, ESC sequences, well-formed TCPStore requests, slow
connections. Each run must end with the bits of an undisturbed one; what was refused is read from
its log; folders outside the run are compared before and after. Root is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from node_run import TOKEN, TRAIN, Run
from nodes import Network, why_not

SOURCE = str(Path(__file__).parent.parent / "src")

# Runs in the attacker's namespace, or as another user, and knows no token.
ATTACKER = r"""
import json, os, random, socket, struct, sys, time
targets, count, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
def hello(version=1, purpose=b"m", when=None):
    return struct.pack("!3sBcd16s", b"MGT", version, purpose, when or time.time(), os.urandom(16))
KINDS = {
    "replayed handshake": lambda: RECORDED,
    "wrong HMAC": lambda: hello(purpose=chance.choice([b"m", b"s"])) + os.urandom(232),
    "wrong version": lambda: hello(chance.randrange(2, 256)) + os.urandom(64),
    "old time": lambda: hello(when=time.time() - 10**6) + os.urandom(64),
    "truncated": lambda: hello()[: chance.randrange(28)],
    "oversized": lambda: hello() + bytes(32) + b"\xff\xff\xff\xff" + bytes(1 << 20),
    "deep nesting": lambda: b"[" * 500_000 + b"\n",
    "huge integers": lambda: b'{"op": "beat", "port": ' + b"9" * 10_000 + b"}\n",
    "take-over": lambda: json.dumps({"op": "lead", "number": 10**6, "leader": {"name": "x",
        "node_rank": 0, "address": "10.77.0.9", "port": 9, "ranks": 1}}).encode() + b"\n",
    "end with 0": lambda: b'{"op": "end", "code": 0, "text": "", "title": "x", "name": "x"}\n',
    "ESC sequences": lambda: b"\x1b]0;owned\x07\x1b[2J\x1b[31m" * 50 + b"\n",
    # VALIDATE with torch's magic number, then SET of the key that ends a run.
    "TCPStore set": lambda: struct.pack("<BI", 0, 0x3C85F7CE) + b"\x01" + struct.pack("<Q", 5)
        + b"asked" + struct.pack("<Q", 2) + b"15",
    "gloo sequence numbers": lambda: struct.pack("<Q", chance.randrange(8)) * 4,
    "random bytes": lambda: os.urandom(chance.randrange(1, 3000)),
    "slow": lambda: b"M",
}
RECORDED = bytes.fromhex(sys.argv[4]) or hello() + os.urandom(32)
slow, sent, reached = [], {}, {}
for number in range(count):
    address, port = targets[number % len(targets)]
    kind = list(KINDS)[(number // len(targets)) % len(KINDS)]
    s = socket.socket(); s.settimeout(0.15)
    key = f"{address}:{port}"
    sent[kind] = sent.get(kind, 0) + 1
    try:
        s.connect((address, port))
        reached[key] = reached.get(key, 0) + 1
        s.sendall(KINDS[kind]())
        if kind == "slow":
            slow.append(s)
            continue
        s.settimeout(0.1)
        s.recv(1000)
    except OSError:
        pass
    s.close()
time.sleep(6)
print(json.dumps({"sent": sent, "reached": reached}))
"""


# A launcher that knows the token says something; what it sends is recorded.
RECORD = r"""
import socket, sys
sys.path.insert(0, sys.argv[1])
from multi_gpu_training.launch.elastic.messages import ask
said = []
class Recorded(socket.socket):
    def sendall(self, data, *flags):
        said.append(data)
        return super().sendall(data, *flags)
def connect(address, timeout):
    found = Recorded(socket.AF_INET)
    found.settimeout(timeout)
    found.connect(address)
    return found
socket.create_connection = connect
ask(sys.argv[2], int(sys.argv[3]), {"op": "ping"}, sys.argv[4].encode(), 10.0)
print(b"".join(said).hex())
"""


def listening(pids: list[int], namespace: str | None) -> list[tuple[str, int]]:
    """Address and port of every socket on which these processes listen."""
    words = [*(["ip", "netns", "exec", namespace] if namespace else []), "ss", "-Htlnp"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = []
    for line in said.splitlines():
        if any(f"pid={pid}," in line for pid in pids):
            address, _, port = line.split()[3].rpartition(":")
            found.append((address.strip("[]").split("%")[0].removeprefix("::ffff:"), int(port)))
    return sorted(set(found))


def refused(text: str) -> Counter[str]:
    """The newest count of each port and reason in a launcher's log."""
    newest: dict[str, dict[str, int]] = {}
    for where, reasons in re.findall(r"refused \d+ connections to (.*?) so far: (.*)", text):
        pairs = re.findall(r"(\d+) x (.*?)(?=, \d+ x |, the last from|$)", reasons)
        newest[where] = {reason: int(number) for number, reason in pairs}
    return sum((Counter(found) for found in newest.values()), Counter())


def state_of(folders: list[Path]) -> dict[str, tuple[int, int]]:
    """Size and time of every file, to see that nothing else was written."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def attack(
    words: list[str], targets: list[tuple[str, int]], count: int, recorded: str = ""
) -> dict[str, Any]:
    given = [json.dumps(targets), str(count), "1", recorded]
    command = [*words, "/usr/bin/python3", "-c", ATTACKER, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def two_nodes(count: int, epochs: int, hostile: bool) -> dict[str, Any]:
    with Network(nodes=3) as network:
        *trained, attacker = network.nodes
        network.nodes = trained
        try:
            run = Run(network, epochs, pause=0.3)
            victim = network.folder / "victim"
            victim.mkdir()
            (victim / "config.yaml").write_text("mine")
            for node in trained:
                run.start(node)
            run.reach(5, world=2)
            row: dict[str, Any] = {"where": "two machines, attacker on a third"}
            if hostile:
                ports = [p for n in trained for p in listening(n.pids(), n.name)]
                # From another machine loopback cannot be reached at all.
                targets = [p for p in ports if not p[0].startswith("127.")]
                before = state_of([victim])
                words = ["ip", "netns", "exec", attacker.name]
                place = [SOURCE, trained[0].address, "29500", TOKEN]
                recorded = subprocess.run(
                    [*words, sys.executable, "-c", RECORD, *place],
                    capture_output=True, text=True, check=True,
                ).stdout.strip()  # fmt: skip
                row |= attack(words, targets, count, recorded)
                row |= {"ports": targets, "all_ports": ports}
                row["elsewhere"] = state_of([victim]) == before
                row["outlived"] = all(node.code is None for node in trained)
            run.hurry()
            row["codes"] = run.end()
            row["weights"] = run.weights()
            row["attempts"] = len({line["attempt"] for line in run.lines()})
            said = "\n".join(node.said for node in trained)
            row["refused"] = dict(refused(said))
            row["escapes"] = "\x1b]0;owned" in said
            return row
        finally:
            network.nodes = [*trained, attacker]


def one_machine(count: int, epochs: int, hostile: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        settings = json.dumps({"epochs": epochs, "pause": 0.3})
        words = [sys.executable, "-m", "multi_gpu_training", "run", "--num-gpus", "2"]
        env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
        with (folder / "log.txt").open("wb") as log:
            program = subprocess.Popen(
                [*words, "train.py", settings], cwd=folder, env=env, stdout=log, stderr=log
            )
            while not (folder / "steps.txt").exists():
                assert program.poll() is None, (folder / "log.txt").read_text()
                time.sleep(0.2)
            time.sleep(2)
            row: dict[str, Any] = {"where": "one machine, attacker is another user (nobody)"}
            if hostile:
                children = subprocess.run(
                    ["pgrep", "-P", str(program.pid)], capture_output=True, text=True
                ).stdout.split()
                ports = listening([program.pid, *map(int, children)], None)
                before = state_of([Path(other)])
                who = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
                row |= attack(who, ports, count) | {"ports": ports, "all_ports": ports}
                row["elsewhere"] = state_of([Path(other)]) == before
                row["outlived"] = program.poll() is None
            (folder / "hurry").touch()
            row["codes"] = [program.wait(600)]
        said = (folder / "log.txt").read_text(errors="replace")
        lines = [json.loads(x) for x in (folder / "steps.txt").read_text().splitlines()]
        row["attempts"] = len({line["attempt"] for line in lines})
        row["weights"] = json.loads((folder / "weights.json").read_text())
        row["refused"], row["escapes"] = dict(refused(said)), "\x1b]0;owned" in said
        return row


def beats(count: int) -> str:
    """What a million beats leave behind in the store that ranks use."""
    from datetime import timedelta

    sys.path.insert(0, SOURCE)
    import psutil
    from torch._C._distributed_c10d import TCPStore

    from multi_gpu_training.distributed.store_relay import HostedStore

    hosted = HostedStore("127.0.0.1", 0, 60.0, None)
    store = TCPStore("127.0.0.1", hosted.port, is_master=False, timeout=timedelta(seconds=60))
    process = psutil.Process()
    sizes = []
    for number in range(count + 1):
        store.set("beat", f"{number:060d}")
        if number in (count // 10, count):
            store.get("beat")
            sizes.append(process.memory_info().rss)
    keys = store.num_keys()
    hosted.close()
    return (
        f"{count:,} beats of 60 bytes through the relay: {keys} keys in the store, memory of its "
        f"process {(sizes[1] - sizes[0]) / 2**20:+.1f} MiB between beat {count // 10:,} and the "
        "last, no file"
    )


def table(rows: list[dict[str, Any]], beat_line: str) -> str:
    model = next(
        (x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines()
         if x.startswith("model name")), platform.machine())  # fmt: skip
    lines = [
        "# Hostile messages", "",
        f"`python benchmarks/hostile_messages.py` on {platform.platform()}, {os.cpu_count()} cores "
        f"of {model}, CPU ranks, {time.strftime('%Y-%m-%d')}.", "",
        "| where | messages | ports | got a connection | counted as refused in the log "
        "| trained on | attempts | exit codes | same bits | written elsewhere | ESC in the log |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        elsewhere = "nothing" if row["elsewhere"] else "SOMETHING"
        lines.append(
            f"| {row['where']} | {sum(row['sent'].values()):,} | {len(row['ports'])} | "
            f"{sum(row['reached'].values()):,} | {sum(row['refused'].values()):,} | "
            f"{'yes' if row['outlived'] else 'NO'} | {row['attempts']} | {row['codes']} | "
            f"{'yes' if row['same'] else 'NO'} | "
            f"{elsewhere} | {'YES' if row['escapes'] else 'no'} |"
        )
    lines += ["", "What was refused, by the launchers' own logs:", ""]
    for row in rows:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(row["refused"].items()))
        lines.append(f"- {row['where']}: {reasons}")
    kinds = ", ".join(f"{kind} {n}" for kind, n in rows[0]["sent"].items())
    lines += ["", f"What was sent to the first: {kinds}.", "", f"The store: {beat_line}.", ""]
    lines += [
        "A message that got no connection met a port whose packets the kernel drops (the guarded "
        "store, and gloo's ports once the ranks are connected): nobody hears those, so nobody "
        "counts them."
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=80, help="of ten steps")
    parser.add_argument("--beats", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    reason = why_not()
    if reason is not None:
        sys.exit(reason)
    random.seed(0)
    rows = []
    for play in (two_nodes, one_machine):
        calm = play(0, given.epochs, False)
        row = play(given.messages, given.epochs, True)
        row["same"] = row.pop("weights") == calm.pop("weights")
        print(json.dumps(row), flush=True)
        rows.append(row)
    text = table(rows, beats(given.beats))
    print(text)
    if given.out is not None:
        given.out.write_text(text)
    fine = all(
        row["same"] and row["outlived"] and row["elsewhere"] and not row["escapes"]
        and set(row["codes"]) == {0} and row["attempts"] == 1
        for row in rows
    )  # fmt: skip
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
