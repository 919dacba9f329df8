"""Load a model server with 200 clients, bad requests and 100 MB bodies, then stop it in mid-load.

    python benchmarks/serving.py RUN --seconds 30 --clients 200 --out benchmarks/serving.json

Every client sends one request after the other over its own connection. Beside them, malformed and
oversized requests come in. Then SIGTERM: clients go on until their connection is closed. What
counts: no request that the server accepted is without an answer (its own counters and the clients'
must agree), bad requests get a 4xx that says why, and the process exits with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

MIB = 2**20


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: Any = None
        self.writer: Any = None

    async def ask(
        self,
        body: bytes,
        kind: str = "application/json",
        method: str = "POST /predict",
        **headers: str,
    ) -> tuple[int, bytes]:
        """Status and body; status 0 where the connection was refused before anything was sent,
        -1 where it broke off after that."""
        if self.writer is None:
            try:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return 0, b""
        lines = [f"{method} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if "Content_Length" not in headers:
            lines.append(f"Content-Length: {len(body)}")
        try:
            self.writer.write("\r\n".join([*lines, "", ""]).encode())
            sending = asyncio.ensure_future(self._send(body))
            status, answer, closes = await asyncio.wait_for(self._read(), 120)
            await sending
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            self.close()
            return -1, b""
        if closes:
            self.close()
        return status, answer

    async def _send(self, body: bytes) -> None:
        try:
            for start in range(0, len(body), MIB):
                self.writer.write(body[start : start + MIB])
                await self.writer.drain()
        except OSError:
            pass  # refused in the middle: the answer says why

    async def _read(self) -> tuple[int, bytes, bool]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
        body = await self.reader.readexactly(length)
        return int(head.split(" ", 2)[1]), body, "connection: close" in head

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


BAD: dict[str, tuple[bytes, str, dict[str, str]]] = {
    "no body": (b"", "application/json", {}),
    "not JSON": (b"{]", "application/json", {}),
    "not UTF-8": (b"{\xff\xfe", "application/json", {}),
    "no inputs": (b'{"a": 1}', "application/json", {}),
    "empty inputs": (b'{"inputs": []}', "application/json", {}),
    "ragged": (b'{"inputs": [[[1, 2], [3]]]}', "application/json", {}),
    "wrong shape": (b'{"inputs": [[[1, 2], [3, 4]]]}', "application/json", {}),
    "a path": (b'{"inputs": ["/etc/passwd"]}', "application/json", {}),
    "NaN": (b'{"inputs": [[[NaN]]]}', "application/json", {}),
    "huge number": (b'{"inputs": [[[1e999]]]}', "application/json", {}),
    "nested": (b'{"inputs": ' + b"[" * 100_000, "application/json", {}),
    "not an image": (os.urandom(2000), "image/png", {}),
    "cross-site": (b'{"inputs": []}', "text/plain", {"Origin": "http://evil.example"}),
    "1,000 inputs": (json.dumps({"inputs": [[[0]]] * 1000}).encode(), "application/json", {}),
    "bad length": (b"", "application/json", {"Content_Length": "-5"}),
}


async def load(port: int, body: bytes, clients: int, seconds: float, server: Any) -> dict[str, Any]:
    """Ordinary load and bad requests for `seconds`, then SIGTERM in the middle of it."""
    counts: Counter[int] = Counter()
    latencies: list[float] = []
    bad: dict[str, list[tuple[int, str]]] = {}
    stop_at = time.monotonic() + seconds
    told = asyncio.Event()

    async def ordinary() -> None:
        client = Client(port)
        while True:
            began = time.monotonic()
            status, _ = await client.ask(body)
            counts[status] += 1
            if status == 200:
                latencies.append(time.monotonic() - began)
            elif told.is_set():
                break  # 503 or a closed connection: the server is leaving
            elif status <= 0:
                await asyncio.sleep(0.05)
        client.close()

    async def hostile() -> None:
        large = bytes(100 * MIB)
        while time.monotonic() < stop_at - 1:
            for name, (sent, kind, headers) in BAD.items():
                client = Client(port)
                status, answer = await client.ask(sent, kind, **headers)
                if told.is_set():  # then it may be a 503
                    return
                bad.setdefault(name, []).append((status, answer.decode(errors="replace")[:120]))
                client.close()
            client = Client(port)
            status, answer = await client.ask(large)
            if told.is_set():
                return
            bad.setdefault("100 MB body", []).append(
                (status, answer.decode(errors="replace")[:120])
            )
            client.close()

    tasks = [asyncio.create_task(ordinary()) for _ in range(clients)]
    enemy = asyncio.create_task(hostile())
    await asyncio.sleep(seconds)
    alive = server.poll() is None
    server.send_signal(signal.SIGTERM)
    told.set()
    await asyncio.gather(*tasks, enemy)
    ordered = sorted(latencies)
    return {
        "alive_before_sigterm": alive,
        "answers": {str(status): count for status, count in sorted(counts.items())},
        "requests_per_s": len(latencies) / seconds,
        "latency_ms": {
            "median": 1000 * statistics.median(ordered),
            "p99": 1000 * ordered[int(0.99 * len(ordered))],
        },
        "bad": {
            name: {"statuses": dict(Counter(s for s, _ in found)), "says": found[0][1]}
            for name, found in bad.items()
        },
    }


def start(run: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "multi_gpu_training", "serve", run, "--port", str(port)]
    command += ["--rate", "0", "--device", "cpu"]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)


async def wait_until_up(port: int, server: Any, limit_s: float = 240.0) -> dict[str, Any]:
    until = time.monotonic() + limit_s
    while time.monotonic() < until and server.poll() is None:
        client = Client(port)
        # The port is open before the model is loaded; then the answer is late.
        status, body = await client.ask(b"", method="GET /health")
        client.close()
        if status == 200:
            found: dict[str, Any] = json.loads(body)
            return found
        await asyncio.sleep(0.5)
    raise SystemExit("the server did not start")


def example_body(run: str) -> bytes:
    """A real input of the run's validation data."""
    import multi_gpu_training as mgt

    raw = mgt.load(run, device="cpu").example_inputs(1)[0]
    return json.dumps({"inputs": [raw.tolist() if hasattr(raw, "tolist") else raw]}).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    body = example_body(asked.run)
    log = Path(f"/tmp/mgt-serving-{os.getpid()}.log")
    server = start(asked.run, asked.port, log)
    try:
        asyncio.run(wait_until_up(asked.port, server))
        found = asyncio.run(load(asked.port, body, asked.clients, asked.seconds, server))
        found["exit_code"] = server.wait(120)
    finally:
        if server.poll() is None:
            server.kill()
    last = log.read_text().strip().splitlines()[-1]
    words = last.replace(",", "").split()
    accepted, answered, failed = (int(word) for word in words if word.isdigit())
    ok = found["answers"].get("200", 0)
    found |= {
        "clients": asked.clients,
        "seconds": asked.seconds,
        "server_says": last,
        "accepted_without_answer": accepted - answered - failed,
        "answered_but_not_received": answered - ok,
        "traceback_in_log": "Traceback" in log.read_text(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.0f}",
    }
    print(json.dumps(found, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    well = (
        found["alive_before_sigterm"]
        and found["exit_code"] == 0
        and found["accepted_without_answer"] == 0
        and found["answered_but_not_received"] == 0
        and not found["traceback_in_log"]
        and all(400 <= s < 500 for f in found["bad"].values() for s in f["statuses"])
    )
    print("passed" if well else "FAILED")
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
