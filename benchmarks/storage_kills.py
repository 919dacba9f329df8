"""Kill a training at random instants of its uploads to S3, and see where it resumes.

    python benchmarks/storage_kills.py --kills 40 --away 60 --out benchmarks/storage_kills.json

A real S3 server (moto) stands behind a slow TCP relay, so that something is being uploaded most
of the time. Each trial resumes with `auto`, trains, is killed with SIGKILL while bytes flow, and in
two of three trials its disk is wiped. An independent look at the bucket says which checkpoint is
the newest complete one; the next trial must resume from exactly that one, or from a newer one that
is still on its disk. In the middle the server is away for `--away` seconds, and earlier it answers
`503 SlowDown` to three of four requests for `--throttle` seconds: training must go on both times.
At the end the weights are compared with those of a run that nothing disturbed.

Needs `pip install s3fs 'moto[server]'` beside this package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BUCKET = "kills"
SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
STEPS_PER_EPOCH = 50


# The server, and what lies between it and the training


class Relay:
    """Passes bytes to a port, slowly; `cut` drops every connection and refuses new ones.

    throttling: three of four requests are answered with 503, as S3 does under load.
    """

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self.target = port
        self.pause_s = 65536 / bytes_per_s
        self.sent = 0  # from the training to the server
        self.throttling = False
        self.refused = 0  # requests answered with 503
        self.connections: list[socket.socket] = []
        self.listener: socket.socket | None = None
        self.port = free_port()
        self.open()

    def open(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        assert self.listener is not None
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.drop()

    def drop(self) -> None:
        for connection in self.connections:
            with_suppressed(lambda end=connection: end.shutdown(socket.SHUT_RDWR))
            with_suppressed(connection.close)
        self.connections.clear()

    def throttle(self, on: bool) -> None:
        self.throttling = on
        self.drop()  # connections are kept alive: those that pass must come again

    def _slow_down(self, asked: socket.socket) -> None:
        """Read one request whole, and refuse it."""
        head = b""
        with contextlib.suppress(OSError), asked:
            asked.settimeout(10)
            while b"\r\n\r\n" not in head and (data := asked.recv(65536)):
                head += data
            head, _, body = head.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            left = int(length[1]) - len(body) if length else 0
            if b"100-continue" not in head.lower():
                while left > 0 and (data := asked.recv(65536)):
                    left -= len(data)
            status = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close"
            asked.sendall(status + b"\r\nContent-Length: %d\r\n\r\n" % len(SLOW_DOWN) + SLOW_DOWN)
            self.refused += 1

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                ours, _ = listener.accept()
                if self.throttling and random.random() < 0.75:
                    threading.Thread(target=self._slow_down, args=(ours,), daemon=True).start()
                    continue
                theirs = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self.connections += [ours, theirs]
            for pair in ((ours, theirs, True), (theirs, ours, False)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(65536):
                if up:
                    self.sent += len(data)
                    time.sleep(self.pause_s * len(data) / 65536)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            with_suppressed(lambda end=end: end.shutdown(socket.SHUT_RDWR))


def with_suppressed(call: Any) -> None:
    with contextlib.suppress(OSError):
        call()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def start_server(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return server
        except OSError:
            time.sleep(0.1)
    raise SystemExit("moto did not start")


# The training


def work(folder: str, save_dir: str, steps: int) -> None:
    """Train in this process; every step says where it is."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

    class Tell(Callback):
        def on_step_end(self, run: Any, result: Any) -> None:
            print(f"step {result.step}", flush=True)
            time.sleep(0.05)

    torch.manual_seed(0)
    remote = "://" in save_dir
    config = MultiGPUConfig(
        training_mode="single",
        device="cpu",
        save_dir=save_dir,
        local_dir=folder if remote else None,
        run_name="killed",
        resume="auto",
        batch_size=4,
        epochs=100,
        max_steps=steps,
        checkpoint_frequency=7,
        keep_last=2,
        tensorboard=False,
        progress="off",
        upload_every=1.0,
        deterministic=True,
    )
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4 * STEPS_PER_EPOCH, 256, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1))
    manager = MultiGPUTrainingManager(config)
    manager.setup_training(
        model,
        data,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
        callbacks=[Tell()],
    )
    print(f"resumed {manager.step}", flush=True)
    try:
        manager.loop.run()
    finally:
        manager.finish()
    flat = torch.cat([p.detach().flatten() for p in manager.model.parameters()])
    print("weights", flat.double().sum().item().hex(), flat.double().abs().sum().item().hex())


class Trial:
    """One training process, and what it said."""

    def __init__(self, folder: Path, save_dir: str, steps: int, env: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--worker", str(folder), save_dir, str(steps)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
        )
        self.step, self.resumed = -1, -1
        self.weights = ""
        self.errors: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        threading.Thread(target=self._listen).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            word, _, rest = line.strip().partition(" ")
            if word == "step":
                self.step = int(rest)
            elif word == "resumed":
                self.resumed = self.step = int(rest)
            elif word == "weights":
                self.weights = rest

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            self.errors.append(line)

    def wait_for(self, condition: Any, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a trial ended or hung: {''.join(self.errors)[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.reader.join()


# What must be resumed from


def newest_there(endpoint: str) -> int:
    """The newest complete checkpoint in the bucket, seen without our own code; 0 if none.

    The run is only ever resumed from its newest checkpoint, so later steps of an earlier attempt
    are abandoned: a checkpoint counts if no later attempt started before it.
    """
    import s3fs

    fs = s3fs.S3FileSystem(
        endpoint_url=endpoint, use_listings_cache=False, skip_instance_cache=True
    )
    manifests = [path for path in fs.find(BUCKET) if path.endswith("/manifest.json")]
    facts = []
    for path in manifests:
        with suppress(FileNotFoundError):  # the run deletes old ones meanwhile
            facts.append(json.loads(fs.cat_file(path)))
    lineages = sorted(path for path in fs.find(BUCKET) if "/lineage-" in path)
    entries = json.loads(fs.cat_file(lineages[-1]))["entries"] if lineages else []
    counted = [
        one["step"]
        for one in facts
        if all(one["step"] <= e["from_step"] for e in entries if e["attempt"] > one["attempt"])
    ]
    return max(counted, default=0)


def newest_here(folder: Path) -> int:
    found = folder.glob("*/custom/killed/checkpoints/step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--away", type=float, default=60.0, help="seconds without a server")
    parser.add_argument("--throttle", type=float, default=30.0, help="seconds of 503 SlowDown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    parser.add_argument("--worker", nargs=3)
    given = parser.parse_args()
    if given.worker:
        work(given.worker[0], given.worker[1], int(given.worker[2]))
        return 0
    try:
        import moto.server  # noqa: F401
        import s3fs
    except ImportError as error:
        print(f"left out: {error}; pip install s3fs 'moto[server]'")
        return 2
    source = random.Random(given.seed)
    port = free_port()
    server = start_server(port)
    direct = f"http://127.0.0.1:{port}"
    relay = Relay(port, 6e6)
    keys = {"AWS_ACCESS_KEY_ID": "kills", "AWS_SECRET_ACCESS_KEY": "hush"}
    os.environ |= {**keys, "AWS_DEFAULT_REGION": "us-east-1", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}
    s3fs.S3FileSystem(endpoint_url=direct).mkdir(BUCKET)
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as place:
            folder, url = Path(place) / "disk", f"s3://{BUCKET}/runs"
            expected, steps = 0, 0
            for number in range(1, given.kills + 1):
                trial = Trial(folder, url, 10**6, env)
                trial.wait_for(lambda trial=trial: trial.resumed >= 0, 600)
                row: dict[str, Any] = {"kill": number, "resumed": trial.resumed}
                row |= {"expected": expected, "right": trial.resumed == expected}
                if number == max(given.kills // 4, 1) and given.throttle:
                    relay.throttle(True)
                    before, there = trial.step, newest_there(direct)
                    time.sleep(given.throttle)
                    row["steps_while_throttled"] = trial.step - before
                    row["uploaded_while_throttled"] = newest_there(direct) > there
                    row["answered_503"] = relay.refused
                    relay.throttle(False)
                    there = newest_there(direct)
                    trial.wait_for(lambda there=there: newest_there(direct) > there, 600)
                    row["throttling_told"] = sum("cannot upload" in e for e in trial.errors)
                if number == given.kills // 2 and given.away:
                    relay.cut()
                    before = trial.step
                    time.sleep(given.away)
                    row["steps_while_away"] = trial.step - before
                    relay.open()
                    there = newest_there(direct)
                    trial.wait_for(lambda there=there: newest_there(direct) > there, 600)
                    row["failed_uploads_told"] = sum("cannot upload" in e for e in trial.errors)
                time.sleep(source.uniform(0.5, 10.0))
                sent = relay.sent
                trial.wait_for(lambda sent=sent: relay.sent > sent + 2**17, 600)  # bytes flow
                time.sleep(source.uniform(0.0, 0.4))
                trial.kill()
                wiped = number % 3 != 0
                if wiped:
                    shutil.rmtree(folder)
                there, here = newest_there(direct), newest_here(folder)
                expected = max(there, here)
                row |= {"reached": trial.step, "wiped": wiped, "there": there, "here": here}
                rows.append(row)
                print(row, flush=True)
                steps = max(steps, trial.step)
            steps += 20
            last = Trial(folder, url, steps, env)
            last.process.wait()
            last.reader.join()
            plain = Trial(folder, str(Path(place) / "plain"), steps, env)
            plain.process.wait()
            plain.reader.join()
            result = {
                "kills": given.kills,
                "resumed_from_the_newest_complete": sum(row["right"] for row in rows),
                "wiped": sum(row["wiped"] for row in rows),
                "last_resumed_right": last.resumed == expected,
                "steps": steps,
                "same_weights_as_undisturbed": bool(last.weights) and last.weights == plain.weights,
                "at_the_end_there": newest_there(direct),
                "rows": rows,
            }
    finally:
        server.kill()
        server.wait()
    print({name: value for name, value in result.items() if name != "rows"})
    if given.out:
        Path(given.out).write_text(json.dumps(result, indent=1) + "\n")
    right = result["resumed_from_the_newest_complete"] == given.kills
    return 0 if right and result["same_weights_as_undisturbed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
