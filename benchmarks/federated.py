"""Federated training: against central training, under kills, and what a SecAgg+ server receives.

    python benchmarks/federated.py fashion --data fashion-mnist --out benchmarks/federated.md
    python benchmarks/federated.py received
    python benchmarks/federated.py kills

fashion: the image recipe (--mode flatten, no augmentation), 10 clients, 20 rounds of one local
epoch, IID and dirichlet:0.3, beside 20 central epochs. received: one SecAgg+ round of 10 clients;
each array that reaches the server is correlated with each client's true update. kills: 10 clients
as processes, of which 3 are killed in round 2, and the server twice. Needs the environment of
`make test-federated`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).parent.parent
MGT = [sys.executable, "-m", "multi_gpu_training"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["fashion", "received", "kills"])
    parser.add_argument("--data", default="fashion-mnist", help="folder of the IDX files")
    parser.add_argument("--rounds", type=int, default=20)
    # A client has a tenth of the data: with the batch of central training, a tenth of the steps.
    parser.add_argument("--batch", type=int, default=32, help="of a client")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of a client")
    parser.add_argument("--work", help="folder to keep; default: a temporary one")
    parser.add_argument("--out", help="JSON of what was found")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mgt-fed-") as temporary:
        work = Path(asked.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        found = {"fashion": fashion, "received": received, "kills": kills}[asked.what](asked, work)
    print(json.dumps(found, indent=1))
    if asked.out:
        Path(asked.out).write_text(json.dumps(found, indent=1))
    return 0


def fashion(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    words = ["image", "--mode", "flatten", "--data-dir", asked.data, "--augment", "false"]
    words += ["--device", "cpu"]
    central = [*MGT, "train", *words, "--multi-gpu", "single", "--epochs", str(asked.rounds)]
    subprocess.run([*central, "--save-dir", str(work / "central")], check=True)
    found = {"central": central_accuracy(work / "central")}
    for how in ("iid", "dirichlet:0.3"):
        folder = work / how.replace(":", "-")
        command = [*MGT, "federated", "simulate", *words, "--clients", "10", "--partition", how]
        command += ["--rounds", str(asked.rounds), "--evaluate-every", "4"]
        command += ["--batch-size", str(asked.batch), "--learning-rate", str(asked.rate)]
        subprocess.run([*command, "--save-dir", str(folder)], check=True)
        found[how] = rounds_of(folder)[-1]["metrics"]["accuracy"]
    return found


def central_accuracy(folder: Path) -> float:
    """Of the last epoch, as federated rounds have it; not the best one."""
    lines = [
        json.loads(line)
        for file in folder.glob("image/*/events/rank-0.jsonl")
        for line in file.read_text().splitlines()
    ]
    found = [line for line in lines if line.get("event") == "validation"]
    return float(found[-1].get("accuracy", found[-1].get("val/accuracy", np.nan)))


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def received(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One SecAgg+ round of the image recipe on digits, in this process."""
    from multi_gpu_training.federated.federation_settings import FederatedSettings, require_flower

    require_flower()
    sys.path.insert(0, str(ROOT / "tests" / "federated"))
    from flwr.app import Context, RecordDict
    from flwr.common import bytes_to_ndarray
    from local_grid import LocalGrid
    from safetensors.numpy import load_file

    from multi_gpu_training.federated.flower_client import flatten, make_client_app
    from multi_gpu_training.federated.flower_server import FederatedServer
    from multi_gpu_training.federated.simulation import Simulation

    settings = FederatedSettings(clients=10, rounds=1, secure=True, max_samples=200)
    simulation = Simulation("image", work, settings, settings={"augment": False}, device="cpu")
    app = make_client_app(
        lambda context: simulation.client(int(context.node_config["partition-id"]))
    )
    grid = LocalGrid(app, 10)
    state = FederatedServer(settings, work).run(grid, Context(1, 0, {}, RecordDict(), {}))
    order = sorted(state.weights)
    before = load_file(next(work.glob("clients/*/*/round/incoming.safetensors")))
    start = flatten(before, order)
    updates = [
        flatten(load_file(file), order) - start
        for file in sorted(work.glob("clients/*/*/round/outgoing.safetensors"))
    ]
    arrays: list[np.ndarray[Any, Any]] = []
    clear: set[str] = set()
    for _, message in grid.received:
        if message.metadata.message_type == "query":
            continue  # the untrained model of one client, and names
        for record in message.content.array_records.values():
            arrays += [array.numpy().ravel().astype(float) for array in record.values()]
        for metrics in message.content.metric_records.values():
            clear |= set(metrics)
        for config in message.content.config_records.values():
            for name, value in config.items():
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, bytes) and name == "masked_params":
                        arrays.append(bytes_to_ndarray(item).ravel().astype(float))
                    elif not isinstance(item, bytes):
                        clear.add(name)
    largest, compared = 0.0, 0
    for array in arrays:
        for update in updates:
            if len(array) == len(update):
                largest = max(largest, abs(float(np.corrcoef(array, update)[0, 1])))
                compared += 1
    sizes = sorted({len(array) for array in arrays})
    return {
        "clients": len(updates),
        "arrays received": len(arrays),
        "sizes": sizes,
        "weights": len(start),
        "pairs compared": compared,
        "largest absolute correlation": largest,
        "in the clear": sorted(clear),
    }


def kills(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Digits, 10 clients in processes: 3 killed in round 2, the server killed twice."""
    rounds = min(asked.rounds, 6)
    words = ["image", "--augment", "false", "--device", "cpu", "--clients", "10", "--rounds"]
    words += [str(rounds), "--evaluate-every", str(rounds), "--round-timeout-s", "600"]
    command = [*MGT, "federated", "simulate", *words]
    subprocess.run([*command, "--save-dir", str(work / "quiet")], check=True)
    folder = work / "killed"
    disturbed = [*command, "--save-dir", str(folder), "--client-processes"]
    killed: list[str] = []
    ends = [f"{folder}/clients/{number}/" for number in (1, 4, 7)]

    def watch(process: subprocess.Popen[bytes], until: Any) -> None:
        while process.poll() is None and not until():
            time.sleep(0.2)
            if len(done(folder)) == 1:  # round 2 is under way
                for end in list(ends):
                    if kill_client(end):
                        killed.append(end)
                        ends.remove(end)

    for restart in range(3):
        resume = ["--resume"] if restart else []
        process = subprocess.Popen([*disturbed, *resume], start_new_session=True)
        if restart == 2:
            watch(process, lambda: False)
            break
        # Then in the middle of a round: some clients have answered.
        at = len(done(folder)) + 1 + (restart == 0)
        watch(process, lambda at=at: len(done(folder)) >= at)
        time.sleep(10)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(5)
    told = rounds_of(folder)
    return {
        "exit code": process.returncode,
        "clients killed": len(killed),
        "server killed": 2,
        "rounds": [entry["round"] for entry in told],
        "left out": {entry["round"]: list(entry["left_out"]) for entry in told},
        "accuracy": told[-1]["metrics"].get("accuracy"),
        "accuracy undisturbed": rounds_of(work / "quiet")[-1]["metrics"].get("accuracy"),
    }


def done(folder: Path) -> list[dict[str, Any]]:
    try:
        return rounds_of(folder)
    except (OSError, ValueError):
        return []


def kill_client(place: str) -> bool:
    """kill -9 a client's training, if it runs."""
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if place in command and re.search(r"rank_main", command) and "/round/" in command:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                return False
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
