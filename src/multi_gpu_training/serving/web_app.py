"""The app: a page to try the model by hand, /predict, /health and /metrics."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.serving.batching import Batcher, Closed, QueueFull
from multi_gpu_training.serving.http_limits import App, Gate, RequestLimits, RequestRefused
from multi_gpu_training.serving.server_metrics import ServerMetrics

PAGE = Path(__file__).parent / "page.html"


class Served(Protocol):
    """What the app needs of a model.

    `facts` go to the page and to /health. `decode` raises a ValueError that says what is wrong
    with a request, and RequestRefused if it has more than `most` inputs; its items are what
    `predict` takes. Results must be plain JSON values.
    """

    facts: dict[str, Any]

    def decode(self, body: bytes, content_type: str, most: int) -> list[Any]: ...

    def predict(self, items: list[Any]) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Batching:
    """How inputs become batches: see `Batcher`."""

    max_batch: int = 32
    max_delay_s: float = 0.005
    max_waiting: int = 1024


class ModelServer:
    """The ASGI app of one model, and what must be closed after it."""

    def __init__(
        self,
        model: Served,
        limits: RequestLimits,
        batching: Batching,
        hosts: frozenset[str] | None = None,
    ) -> None:
        self.model, self.limits = model, limits
        self.metrics = ServerMetrics()
        self.batcher = Batcher(
            model.predict,
            batching.max_batch,
            batching.max_delay_s,
            batching.max_waiting,
            self.metrics.batch,
        )
        self.draining = False
        self.app: App = Gate(self._routes(), limits, hosts, self.metrics.request)

    def close(self, timeout_s: float | None = None) -> bool:
        """Answer what was accepted, then stop the model's thread."""
        return self.batcher.close(timeout_s)

    def _routes(self) -> FastAPI:
        # No /docs: its scripts come from elsewhere.
        app = FastAPI(title="multi-gpu-training", docs_url=None, redoc_url=None)
        app.get("/", response_class=HTMLResponse)(self.page)
        app.get("/health")(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.show_metrics)
        app.post("/predict")(self.predict)
        app.exception_handler(RequestRefused)(_refused)
        return app

    async def page(self) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        facts = json.dumps(self.model.facts).replace("<", "\\u003c")  # else </script> would end it
        text = PAGE.read_text().replace("NONCE", nonce).replace('"FACTS"', facts)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'; img-src 'self' blob: data:; media-src blob:; "
            "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        return HTMLResponse(text, headers={"content-security-policy": policy})

    async def health(self) -> JSONResponse:
        """200 while requests are taken, 503 as soon as the server is asked to stop."""
        state = "draining" if self.draining else "ok"
        told = {"status": state, "waiting": self.batcher.waiting, **self.model.facts}
        return JSONResponse(told, 503 if self.draining else 200)

    async def show_metrics(self) -> PlainTextResponse:
        return PlainTextResponse(
            self.metrics.text(self.batcher.waiting), media_type="text/plain; version=0.0.4"
        )

    async def predict(self, request: Request) -> JSONResponse:
        """Results in the order of the inputs. All inputs of a request are taken, or none."""
        if self.draining:
            raise RequestRefused(503, "the server is shutting down", 5)
        body = await request.body()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Decoding an image takes milliseconds: in a thread, so that others are served meanwhile.
        items = await asyncio.to_thread(self._decode, body, kind)
        try:
            answers = self.batcher.submit(items)
        except QueueFull as error:
            raise RequestRefused(503, f"{error}; try again", 1) from None
        except Closed as error:
            raise RequestRefused(503, str(error), 5) from None
        self.metrics.inputs(accepted=len(items))
        results = await asyncio.gather(*map(asyncio.wrap_future, answers), return_exceptions=True)
        failed = [one for one in results if isinstance(one, BaseException)]
        self.metrics.inputs(answered=len(results) - len(failed), failed=len(failed))
        if failed:
            raise _as_refusal(failed[0])
        try:
            return JSONResponse({"results": results})
        except ValueError:
            raise RequestRefused(500, "the model gave NaN or infinite numbers") from None

    def _decode(self, body: bytes, content_type: str) -> list[Any]:
        if not body:
            raise RequestRefused(400, "the request has no body; send a file or JSON")
        try:
            items = self.model.decode(body, content_type, self.limits.max_items)
        except (ValueError, ConfigError) as error:
            raise RequestRefused(422, _text(error)) from None
        if not items:
            raise RequestRefused(422, "the request has no inputs")
        return items


def _as_refusal(error: BaseException) -> RequestRefused:
    """What the model objects to is the client's fault; anything else is ours."""
    if isinstance(error, ValueError | ConfigError):
        return RequestRefused(422, _text(error))
    return RequestRefused(500, f"the model failed: {type(error).__name__}")


def _text(error: BaseException) -> str:
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    # Libraries name the object that they read from, with its address in memory.
    return re.sub(r"<[\w.]+ object at 0x[0-9a-f]+>", "the body", "; ".join(problems))[:1000]


async def _refused(request: Request, refusal: Exception) -> JSONResponse:
    assert isinstance(refusal, RequestRefused)
    return JSONResponse({"error": refusal.text}, refusal.status, refusal.headers)
