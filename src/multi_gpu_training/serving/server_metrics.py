"""What /metrics tells, in the text format of Prometheus."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTES = ("/", "/predict", "/health", "/metrics")


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        found, total = [], 0
        for bound, count in zip([*self.bounds, "+Inf"], self.counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self.sum:.9g}", f"{name}_count {total}"]


class ServerMetrics:
    """Counters of one server. The batcher's thread and the event loop both write here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answers: Counter[tuple[str, int]] = Counter()
        self.accepted = self.answered = self.failed = 0
        self._latency, self._batch_time = Histogram(SECONDS), Histogram(SECONDS)
        self._batch_size = Histogram(SIZES)

    def request(self, path: str, status: int, seconds: float) -> None:
        # Paths come from outside: unknown ones share a label, so that nobody can fill memory.
        route = path if path in ROUTES else "other"
        with self._lock:
            self.answers[route, status] += 1
            if route == "/predict":
                self._latency.add(seconds)

    def batch(self, size: int, seconds: float) -> None:
        with self._lock:
            self._batch_size.add(size)
            self._batch_time.add(seconds)

    def inputs(self, accepted: int = 0, answered: int = 0, failed: int = 0) -> None:
        with self._lock:
            self.accepted += accepted
            self.answered += answered
            self.failed += failed

    def text(self, waiting: int) -> str:
        with self._lock:
            counts = {
                f'requests_total{{route="{route}",status="{status}"}}': count
                for (route, status), count in sorted(self.answers.items())
            }
            inputs = {
                "inputs_accepted_total": self.accepted,
                "inputs_answered_total": self.answered,
                "inputs_failed_total": self.failed,
            }
            lines = ["# TYPE mgt_requests_total counter"]
            lines += [f"mgt_{name} {count}" for name, count in counts.items()]
            for name, count in inputs.items():
                lines += [f"# TYPE mgt_{name} counter", f"mgt_{name} {count}"]
            lines += ["# TYPE mgt_inputs_waiting gauge", f"mgt_inputs_waiting {waiting}"]
            for name, histogram in (
                ("mgt_request_seconds", self._latency),
                ("mgt_batch_seconds", self._batch_time),
                ("mgt_batch_size", self._batch_size),
            ):
                lines += [f"# TYPE {name} histogram", *histogram.lines(name)]
        return "\n".join(lines) + "\n"
