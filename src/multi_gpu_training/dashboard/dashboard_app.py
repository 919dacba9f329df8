"""The web app of `mgt dashboard`: one page, the runs as JSON, changes as server-sent events.

Everything but the page itself needs the token, which the page takes from its address and sends in a
header: another web site cannot send that header, and another user of this machine does not know it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from multi_gpu_training.dashboard import run_view
from multi_gpu_training.dashboard.live_runs import LiveRun, LiveRuns
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.monitoring.run_requests import checked, send_request
from multi_gpu_training.serving.http_limits import App, Gate, RequestLimits, RequestRefused

FILES = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
}
TICK_S = 0.25
BEAT_S = 10.0  # a page that hears nothing for longer connects again
MOST_SELECTED = 8
LIMITS = RequestLimits(max_body_bytes=4096, rate=50.0, burst=200.0)


class Dashboard:
    """The ASGI app. `hosts`: names by which it may be called, None for any."""

    def __init__(
        self, runs: LiveRuns, token: str, hosts: frozenset[str] | None, read_only: bool = False
    ) -> None:
        self.runs, self.read_only = runs, read_only
        self.draining = False  # ends the streams of pages that are open
        self._token = token.encode()
        self._summaries: dict[str, tuple[int, dict[str, Any]]] = {}
        routes = [
            Route("/", self.page),
            Route("/{name:str}", self.page),
            Route("/api/stream", self.stream),
            Route("/api/compare", self.compare),
            Route("/api/runs/{id:str}", self.show),
            Route("/api/runs/{id:str}/ask", self.ask, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={RequestRefused: _refused})
        self.app: App = Gate(app, LIMITS, hosts)

    async def page(self, request: Request) -> Response:
        """The page, its style and its script: nothing in them depends on the runs."""
        name = request.path_params.get("name") or "dashboard.html"
        if name not in ("dashboard.html", "dashboard.css", "dashboard.js"):
            raise RequestRefused(404, "there is no such page")
        path = FILES / name
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)

    async def show(self, request: Request) -> Response:
        """All about one run."""
        self._check(request)
        run = self._run(request.path_params["id"])
        return _json(await asyncio.to_thread(run_view.detail, run, time.monotonic()))

    async def compare(self, request: Request) -> Response:
        """Several runs side by side, and which of their settings differ."""
        self._check(request)
        chosen = [self._run(name) for name in _selected(request)]
        return _json(await asyncio.to_thread(run_view.compared, chosen))

    async def stream(self, request: Request) -> Response:
        """The list, then whatever changes in it and in the selected runs, until the page leaves."""
        self._check(request)
        events = self._changes(_selected(request))
        return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)

    async def ask(self, request: Request) -> Response:
        """Ask something of a run that trains."""
        self._check(request)
        run = self._run(request.path_params["id"])
        if self.read_only:
            raise RequestRefused(403, "this dashboard was started with --read-only")
        if run.url is not None:
            raise RequestRefused(409, f"{run.name} is read from a URL: ask where it trains")
        if run.state != "running":
            raise RequestRefused(409, f"{run.name} is not running: {run_view.STATES[run.state]}")
        try:
            asked = json.loads(await request.body())
            action, value = str(asked["action"]), asked.get("value")
            number = None if value is None else float(value)
            send_request(run.path, checked(action, number, "mgt dashboard"))
        except (KeyError, TypeError, ValueError):
            raise RequestRefused(400, 'send JSON like {"action": "save"}') from None
        except ConfigError as error:
            raise RequestRefused(422, error.problems[0]) from None
        return _json({"asked": action})

    # The stream

    async def _changes(self, selected: list[str]) -> AsyncIterator[bytes]:
        seen, beat = -1, time.monotonic()
        sent: dict[str, int] = {}
        shown: dict[str, int] = {}
        while not self.draining:
            if self.runs.version != seen:
                seen = self.runs.version
                runs = dict(self.runs.runs)
                told = await asyncio.to_thread(self._list, runs, sent)
                sent = {run.id: run.version for run in runs.values()}
                yield _event("runs", told)
                for name in selected:
                    run = runs.get(name)
                    if run is not None and shown.get(name) != run.version:
                        shown[name] = run.version
                        found = await asyncio.to_thread(run_view.detail, run, time.monotonic())
                        yield _event("run", found)
                beat = time.monotonic()
            elif time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                yield _event("beat", {})
            await asyncio.sleep(TICK_S)

    def _list(self, runs: dict[str, LiveRun], sent: dict[str, int]) -> dict[str, Any]:
        """The order of all runs, and the lines of those that differ from what was sent."""
        now = time.monotonic()
        lines = [
            self._summary(run, now) for run in runs.values() if sent.get(run.id) != run.version
        ]
        problems = [run_view.clean(problem) for problem in self.runs.problems]
        roots = [run_view.clean(root, 200) for root in (*self.runs.roots, *self.runs.urls)]
        facts = {"problems": problems, "roots": roots, "read_only": self.read_only}
        facts["reading"] = self.runs.reading
        return {"ids": list(runs), "changed": lines, **facts}

    def _summary(self, run: LiveRun, now: float) -> dict[str, Any]:
        """Kept for the next page that is opened: most of the runs have ended long ago."""
        version, line = self._summaries.get(run.id, (-1, {}))
        if version != run.version:
            version, line = run.version, run_view.summary(run, now)
            self._summaries[run.id] = version, line
        return {**line, "silent_s": None if line["silent_s"] is None else run.silent_s(now)}

    # Who may

    def _check(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token):
            raise RequestRefused(401, "the token is missing or wrong; open the printed address")

    def _run(self, name: str) -> LiveRun:
        run = self.runs.runs.get(name)
        if run is None:
            raise RequestRefused(404, "this run is not there any more")
        return run


def _selected(request: Request) -> list[str]:
    names = request.query_params.get("runs", "").split(",")
    return list(dict.fromkeys(filter(None, names)))[:MOST_SELECTED]


def _event(kind: str, data: object) -> bytes:
    return f"event: {kind}\ndata: {_text(data)}\n\n".encode()


def _text(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)


def _json(data: object) -> Response:
    return Response(_text(data), media_type="application/json", headers=HEADERS)


async def _refused(request: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, RequestRefused)
    return JSONResponse({"error": refusal.text}, refusal.status, {**HEADERS, **refusal.headers})
