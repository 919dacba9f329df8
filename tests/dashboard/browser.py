"""A dashboard and a Chromium that looks at it, for tests and benchmarks."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKEN = "a-token-for-tests"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class DashboardProcess:
    """`mgt dashboard` as users start it."""

    def __init__(self, root: Path, *flags: str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-m", "multi_gpu_training", "dashboard", str(root)]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--token", TOKEN, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
        if found is None:
            raise AssertionError(f"{said}{self.process.communicate()[1]}")
        self.port = int(found[1])
        self.address = f"http://127.0.0.1:{self.port}/#token={TOKEN}"

    def ask(
        self, method: str, path: str, body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            lower = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, lower, answer.read().decode()
        finally:
            connection.close()

    def close(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def chromium_page(**how: Any) -> Iterator[tuple[Any, list[str]]]:
    """A page, and the list of everything that the browser complained about."""
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        page = browser.new_page(**{"viewport": {"width": 1360, "height": 1000}, **how})
        page.set_default_timeout(120_000)
        page.on("console", lambda m: said.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        try:
            yield page, said
        finally:
            browser.close()


def serious_findings(page: Any) -> list[str]:
    """What axe calls serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:5]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
