"""The page in a real browser, beside a real training; and who is not let in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, TOKEN, DashboardProcess, chromium_page, serious_findings
from processes import Program
from recorded import Folder, healthy

from multi_gpu_training.checkpoint.run_lock import RunLock
from multi_gpu_training.extras import installed
from multi_gpu_training.monitoring.report import write_report

PICTURES = os.environ.get("MGT_PICTURES")  # a folder to write screenshots to
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (installed("starlette") and installed("uvicorn")),
        reason="the extra dashboard is missing",
    ),
]
in_browser = pytest.mark.skipif(
    not (installed("playwright") and installed("axe_playwright_python") and CHROMIUM),
    reason="playwright, axe or Chromium is missing",
)

TRAINING = """
import sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

class Pace(Callback):
    def on_step_end(self, run, result):
        time.sleep(0.03)

def main():
    config = MultiGPUConfig(
        device="cpu", save_dir=sys.argv[1], recipe="image", run_name=sys.argv[2], epochs=200,
        global_batch_size=64, log_every=5, progress="off", tensorboard=False, grace_s=120,
        resume="auto", checkpoint_frequency=100000, monitor_interval_s=1.0, schedule="cosine")
    manager = MultiGPUTrainingManager(config)
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    y = (x[:, :4].sum(1) > 0).long() + (x[:, 4:8].sum(1) > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 3))
    train, val = TensorDataset(x[:3584], y[:3584]), TensorDataset(x[3584:], y[3584:])
    manager.fit(model, train, val, callbacks=[Pace()],
                optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))

if __name__ == "__main__":
    main()
"""


def picture(page: Any, name: str, **how: Any) -> None:
    if PICTURES:
        page.screenshot(path=f"{PICTURES}/{name}.png", **how)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., DashboardProcess]]:
    there: list[DashboardProcess] = []

    def serve(root: Path, *flags: str, cwd: Path | None = None) -> DashboardProcess:
        there.append(DashboardProcess(root, *flags, cwd=cwd))
        return there[-1]

    yield serve
    for one in there:
        one.close()


def finished_run(root: Path, name: str, **settings: Any) -> Folder:
    folder = Folder(root / "image" / name, epochs=10, log_every=20, **settings)
    folder.start(epoch_steps=100, epoch_samples=6400, host="node-1")
    rate = settings.get("learning_rate", 0.1)
    for step in range(20, 1001, 20):
        folder.log(step, at=step / 8, loss=2.2 * (step / 20) ** (-2 * rate) + 0.05, lr=rate)
        folder.add(0, "device", step / 8, gpu_utilization=91.0, gpu_memory_bytes=31e9)
        folder.add(1, "device", step / 8, gpu_utilization=84.0, gpu_memory_bytes=30e9)
    folder.time_steps([healthy(), healthy(input=3.0)], noise=0.1)
    for epoch in range(10):
        val = {"loss": 1.4 / (epoch + 1) ** rate, "accuracy": 0.9 - 0.4 / (epoch + 1)}
        at, step = (epoch + 1) * 12.5, (epoch + 1) * 100
        folder.add(0, "epoch", at, epoch=epoch, step=step, train={"loss": 1.0}, val=val)
        folder.add(0, "checkpoint", at, step=step, bytes=48_000_000, stall_s=0.004)
    folder.end(1000, at=125.0)
    return folder


@in_browser
def test_a_run_is_watched_compared_changed_and_stopped_in_the_page(
    tmp_path: Path, served: Callable[..., DashboardProcess]
) -> None:
    root = tmp_path / "runs"
    finished_run(root, "baseline", learning_rate=0.1)
    finished_run(root, "higher-rate", learning_rate=0.3)
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    command = ["-m", "multi_gpu_training", "run", "--num-gpus", "2", script]
    dashboard = served(Path("runs"), cwd=tmp_path)
    with (
        Program(*command, root, "live", cwd=tmp_path) as training,
        chromium_page() as (page, said),
    ):
        page.goto(dashboard.address)
        page.wait_for_selector(".row")
        # The new run appears by itself.
        page.wait_for_selector(".row:has-text('image/live') .state.running")
        page.click(".row button:has-text('image/live')")
        page.wait_for_selector("figure:has-text('loss') path.line")
        page.wait_for_selector("#ranks tr:has-text('rank 1')")
        first = page.inner_text("#advance")
        page.wait_for_selector(f"#advance:not(:has-text('{first}'))")
        assert serious_findings(page) == []
        picture(page, "dashboard")
        # Another rate, after a question that can be answered with no.
        page.click("#do-set_lr")
        page.keyboard.press("Escape")
        page.click("#do-set_lr")
        page.fill("#ask-value", "nonsense")
        page.click("#ask-confirm")
        assert "above 0" in page.inner_text("#ask-problem")
        page.fill("#ask-value", "0.0004")
        assert serious_findings(page) == []
        picture(page, "dashboard-ask")
        page.click("#ask-confirm")
        page.wait_for_selector("#events tr:has-text('set lr 0.0004 at step')")
        # Overlay with the finished ones, by keyboard.
        page.keyboard.press("/")
        page.keyboard.press("ArrowDown")
        for _ in range(3):
            if "live" not in (page.evaluate("document.activeElement.innerText") or ""):
                page.keyboard.press("c")
            page.keyboard.press("ArrowDown")
        page.wait_for_selector("h2:has-text('3 runs side by side')")
        page.wait_for_selector("#differences tr:has-text('learning_rate')")
        page.select_option("#x-axis", "time")
        page.wait_for_function("document.querySelectorAll('path.line.s2').length")
        assert serious_findings(page) == []
        picture(page, "dashboard-compare")
        # Stop it.
        page.click(".row button:has-text('image/live')")
        page.click("#do-stop")
        page.click("#ask-confirm")
        page.wait_for_selector(".head .state.stopped")
        assert training.end_of_run() == 143
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_timeout(500)
        assert serious_findings(page) == []
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, "the page does not fit a phone"
        small = page.evaluate(
            "[...document.querySelectorAll('body *')].filter(e => e.offsetParent && "
            "e.childNodes.length && parseFloat(getComputedStyle(e).fontSize) < 12).length"
        )
        assert small == 0
        picture(page, "dashboard-phone")
        assert said == []
    requests = []
    for rank in (0, 1):
        lines = (root / "image" / "live" / "events" / f"rank-{rank}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        requests.append([(e["step"], e["value"]) for e in events if e["event"] == "request"])
    assert requests[0] == requests[1] and requests[0][0][1] == 0.0004
    assert dashboard.close() == 0


@in_browser
def test_the_report_can_be_read_by_everyone(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "runs", "one")
    folder.add(0, "fault", 50.0, step=5, kind="nonfinite", action="skip", message="a\n  b")
    report = write_report([folder.path])
    with chromium_page() as (page, said):
        page.goto(report.as_uri())
        for width, scheme in ((1360, "light"), (390, "dark")):
            page.set_viewport_size({"width": width, "height": 844})
            page.emulate_media(color_scheme=scheme)
            assert serious_findings(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        # A picture shrinks with the page: what counts is the height of its letters on the screen.
        small = page.evaluate(
            "[...document.querySelectorAll('svg text')].filter(e => parseFloat("
            "getComputedStyle(e).fontSize) * e.getCTM().a < 11.9).map(e => e.textContent)"
        )
        assert small == []
        page.focus(".heat .scroll")
        page.keyboard.press("ArrowRight")
        assert "rank 0, step" in page.inner_text(".words")
        assert said == []


@in_browser
def test_the_page_stays_right_when_runs_die_resume_vanish_or_are_hostile(
    tmp_path: Path, served: Callable[..., DashboardProcess]
) -> None:
    root = tmp_path / "runs"
    evil = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
    hostile = Folder(root / "image" / evil.replace("/", "\\"))
    hostile.start()
    hostile.log(5, **{evil: 1.0, "\x1b[2J": 2.0})
    hostile.log(10, **{evil: 2.0})
    hostile.end(10, error=f"ValueError: {evil}" + "x" * 200_000)
    with (hostile.path / "events" / "rank-0.jsonl").open("a") as file:
        file.write("y" * 10_000_000)
    folder = Folder(root / "image" / "mortal")
    folder.start(at=-1e7)  # its clock is four months behind
    folder.log(5, at=-1e7 + 1)
    lock = RunLock(folder.path)
    dashboard = served(root)
    with chromium_page() as (page, said):
        page.goto(dashboard.address)
        page.wait_for_selector(".row:has-text('mortal') .state.running")
        page.click(".row button:has-text('<script>')")
        page.wait_for_selector(".notice.failed:has-text('ValueError: <script>')")
        page.wait_for_selector(f'figcaption:has-text("{evil[:20]}")')
        assert page.title() != "owned" and serious_findings(page) == []
        picture(page, "dashboard-hostile")
        page.click(".row button:has-text('mortal')")
        page.wait_for_selector("#advance:has-text('step 5')")
        with (folder.path / "events" / "rank-0.jsonl").open("a") as file:
            file.write('{"v": 2, "event": "st')  # torn
        page.wait_for_selector("p:has-text('the last line is torn')")
        with (folder.path / "events" / "rank-0.jsonl").open("a") as file:
            file.write("\n")
        folder.log(20, at=-1e7 + 2)
        page.wait_for_selector("#advance:has-text('step 20')")
        lock.release()
        (folder.path / "environment.json").write_text(json.dumps({"host": _host(), "gpus": []}))
        page.wait_for_selector(".head .state.killed")
        lock = RunLock(folder.path)
        folder.start(step=20, at=-1e7 + 9, attempt=0)
        folder.log(25, at=-1e7 + 10)
        page.wait_for_selector(".head .state.running")
        page.wait_for_selector("#advance:has-text('step 25')")
        lock.release()
        shutil.rmtree(folder.path)
        page.wait_for_selector(".notice:has-text('deleted or moved')")
        assert page.locator(".row:has-text('mortal')").count() == 0
        # The server goes away and comes back.
        assert said == []
        dashboard.process.send_signal(signal.SIGTERM)
        page.wait_for_selector("#status.lost")
    assert dashboard.process.wait(60) == 0


def _host() -> str:
    import socket

    return socket.gethostname()


def test_only_who_has_the_token_and_comes_from_the_page_itself_is_let_in(
    tmp_path: Path, served: Callable[..., DashboardProcess]
) -> None:
    folder = Folder(tmp_path / "r" / "run")
    folder.start()
    folder.log(5)
    lock = RunLock(folder.path)
    dashboard, viewing = served(tmp_path), served(tmp_path, "--read-only")
    bearer = f"Bearer {TOKEN}"
    status, headers, text = dashboard.ask("GET", "/")
    assert status == 200 and TOKEN not in text
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert dashboard.ask("GET", "/", host="evil.example")[0] == 421
    assert dashboard.ask("GET", "/..%2f..%2fetc%2fpasswd")[0] == 404
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
        assert dashboard.ask("GET", "/api/stream", **given)[0] == 401
    found = next(name for name in _ids(dashboard))
    path, save = f"/api/runs/{found}/ask", json.dumps({"action": "save"})
    assert dashboard.ask("POST", path, save)[0] == 401
    for header in ({"origin": "http://evil.example"}, {"sec_fetch_site": "cross-site"}):
        assert dashboard.ask("POST", path, save, authorization=bearer, **header)[0] == 403
    assert viewing.ask("POST", path, save, authorization=bearer)[0] == 403
    for body in ("", "[]", "{}", '{"action": "save", "value": [1]}'):
        assert dashboard.ask("POST", path, body, authorization=bearer)[0] == 400
    bad = json.dumps({"action": "set_lr", "value": -1})
    status, _, text = dashboard.ask("POST", path, bad, authorization=bearer)
    assert status == 422 and "above 0" in text
    assert dashboard.ask("POST", path, "x" * 5000, authorization=bearer)[0] == 413
    assert not (folder.path / "requests").exists()
    origin = {"origin": f"http://127.0.0.1:{dashboard.port}"}
    assert dashboard.ask("POST", path, save, authorization=bearer, **origin)[0] == 200
    assert len(list((folder.path / "requests").glob("*.json"))) == 1
    lock.release()
    time.sleep(2.5)
    status, _, text = dashboard.ask("POST", path, save, authorization=bearer)
    assert status == 409 and "not running" in text


def _ids(dashboard: DashboardProcess) -> list[str]:
    """The runs of the stream's first list that has any."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=60)
    connection.request("GET", "/api/stream", headers={"authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    while True:
        line = answer.fp.readline().decode()
        if line.startswith("data: ") and (ids := json.loads(line[6:]).get("ids")):
            connection.close()
            return list(ids)
