"""A real server over a real socket: answers, refusals, the page, and a stop that loses nothing."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multi_gpu_training.extras import installed

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        not (installed("fastapi") and installed("uvicorn")), reason="the extra serve is missing"
    ),
]

# A model that takes a moment, so that requests wait while the server stops.
SERVER = """
import json, sys, time
from multi_gpu_training.serving.http_limits import RequestLimits
from multi_gpu_training.serving.http_server import allowed_hosts, listen, serve
from multi_gpu_training.serving.request_bodies import read_inputs
from multi_gpu_training.serving.web_app import Batching, ModelServer

class Doubling:
    facts = {"title": "Doubles </script> numbers", "draw": {"pen": 0.1, "box": None}}
    def decode(self, body, content_type, most):
        return read_inputs(body)
    def predict(self, items):
        time.sleep(0.05)
        if "crash" in items:
            raise RuntimeError("secret /path")
        return [float("nan") if item == "nan" else 2 * item for item in items]

limits = RequestLimits(max_body_bytes=2**20, rate=0)
server = ModelServer(Doubling(), limits, Batching(max_batch=4), allowed_hosts("127.0.0.1", []))
taken = listen("127.0.0.1", 0)
taken.listen(128)
print(taken.getsockname()[1], flush=True)
sys.exit(serve(server, taken, drain_s=0.5))
"""


class Server:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def ask(
        self, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET" if body is None else "POST", path, body, named)
            answer = connection.getresponse()
            lower = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, lower, answer.read()
        finally:
            connection.close()

    def predict(self, *inputs: Any) -> tuple[int, Any]:
        status, _, body = self.ask("/predict", json.dumps({"inputs": inputs}).encode())
        return status, json.loads(body)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.kill()
    made.process.communicate()


def test_answers_come_in_order_and_bad_requests_get_a_reason(server: Server) -> None:
    assert server.predict(1, 2, 3, 4, 5) == (200, {"results": [2, 4, 6, 8, 10]})
    assert server.predict("crash", 1) == (500, {"error": "the model failed: RuntimeError"})
    assert server.predict("nan") == (500, {"error": "the model gave NaN or infinite numbers"})
    for body in (b"", b"{", b"[]", b'{"inputs": []}', b'{"inputs": [NaN]}', b"[" * 200_000):
        status, _, told = server.ask("/predict", body)
        assert status in (400, 422) and json.loads(told)["error"], body[:20]
    status, _, told = server.ask("/predict", bytes(100 * 2**20))
    assert status == 413 and b"more than 1 MiB" in told
    assert server.ask("/predict", b"{}", origin="http://evil.example")[0] == 403
    assert server.ask("/predict", b"{}", host="evil.example")[0] == 421
    assert server.ask("/nothing")[0] == 404
    assert server.ask("/predict")[0] == 405
    assert server.ask("/health")[0] == 200
    metrics = server.ask("/metrics")[2].decode()
    assert "mgt_inputs_accepted_total 8" in metrics
    assert 'mgt_requests_total{route="/predict",status="413"} 1' in metrics
    assert re.search(r'mgt_batch_size_bucket\{le="4"\} \d', metrics)


def test_the_page_carries_no_foreign_script_and_cannot_be_framed(server: Server) -> None:
    status, headers, body = server.ask("/")
    policy, text = headers["content-security-policy"], body.decode()
    assert status == 200 and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    nonce = re.search(r"'nonce-([\w-]+)'", policy)
    assert nonce is not None and text.count(f'nonce="{nonce[1]}"') == 3
    assert "http" not in re.sub(r"https?://www\.w3\.org\S*", "", text)
    assert text.count("</script>") == 2  # that in the title is written differently


def test_sigterm_loses_no_request_that_was_accepted(server: Server) -> None:
    statuses: list[int] = []
    broken: list[BaseException] = []
    started = threading.Barrier(17)

    def client(number: int) -> None:
        started.wait()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            while True:
                connection.request("POST", "/predict", json.dumps({"inputs": [number]}))
                answer = connection.getresponse()
                told = json.loads(answer.read())
                statuses.append(answer.status)
                if answer.status != 200:
                    return
                assert told == {"results": [2 * number]}
        except (OSError, http.client.HTTPException) as error:
            broken.append(error)
        finally:
            connection.close()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in clients:
        thread.start()
    started.wait()
    time.sleep(1.0)
    server.process.send_signal(signal.SIGTERM)
    for thread in clients:
        thread.join(60)
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 0, errors
    counts = re.search(r"stopped: (\d+) inputs accepted, (\d+) answered, 0 failed", errors)
    assert counts is not None, errors
    assert counts[1] == counts[2] == str(statuses.count(200))
    assert set(statuses) <= {200, 503} and statuses.count(200) > 16
    assert "Traceback" not in errors


def test_the_command_says_what_is_wrong_before_it_loads_anything(tmp_path: Path) -> None:
    def serve(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "multi_gpu_training", "serve", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    found = serve(str(tmp_path), "--max-batch", "0", "--max-body-mib", "99999", "--port", "70000")
    assert found.returncode == 2
    for flag in ("--max-batch 0", "--max-body-mib 99999", "--port 70000"):
        assert flag in found.stderr
    assert "Traceback" not in found.stderr
