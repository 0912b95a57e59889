"""The server's metrics, in the text format of Prometheus.

The format takes twenty lines to write. `prometheus_client` would also bring a registry, an HTTP server and metrics of
the process, which nothing here needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from llmrun.engine_process.served_model import Load, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts observed values in buckets. `bounds` are the inclusive upper bounds."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float] = _SECONDS) -> None:
        self.name, self._help, self._bounds = name, help_text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        yield from _heading(self.name, "histogram", self._help)
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self._sum:.6f}"
        yield f"{self.name}_count {total}"


class Metrics:
    """The counts and histograms of the HTTP layer. `text` adds those of the model."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self.open_requests = 0
        self.first_token = Histogram(
            "llmrun_time_to_first_token_seconds", "Time from the end of a request's body to the first token."
        )
        self.between_tokens = Histogram(
            "llmrun_inter_token_latency_seconds",
            "Time between the tokens of an answer.",
        )
        self.waited = Histogram("llmrun_queue_wait_seconds", "Time in the queue until the first forward pass.")
        self.predicted = Histogram(
            "llmrun_predicted_queue_wait_seconds", "Predicted time in the queue, for the same requests."
        )
        self.mispredicted = Histogram(
            "llmrun_queue_wait_error_seconds", "Absolute difference between the predicted and the actual time."
        )

    def count_request(self, route: str, status: int) -> None:
        """Count a finished request. `route` is a fixed pattern, never a path that a client chose."""
        self._requests[route, status] += 1

    def count_wait(self, predicted_s: float, actual_s: float) -> None:
        self.predicted.observe(predicted_s)
        self.waited.observe(actual_s)
        self.mispredicted.observe(abs(predicted_s - actual_s))

    def text(self, version: str, model: str, kv_tokens: int, state: State, load: Load) -> str:
        """Return all metrics.

        model      the model's name
        kv_tokens  the size of its KV cache
        """
        return "\n".join(self._lines(version, model, kv_tokens, state, load)) + "\n"

    def _lines(self, version: str, model: str, kv_tokens: int, state: State, load: Load) -> Iterator[str]:
        yield from _one("llmrun_build_info", "gauge", "Version and model.", 1, {"version": version, "model": model})
        yield from _one("llmrun_up", "gauge", "Whether the model is ready.", int(state is State.READY))
        yield from _heading("llmrun_requests_total", "counter", "Finished HTTP requests.")
        for (route, status), count in sorted(self._requests.items()):
            yield f"llmrun_requests_total{_labels({'route': route, 'status': str(status)})} {count}"
        yield from _one("llmrun_open_requests", "gauge", "HTTP requests in progress.", self.open_requests)
        yield from _one("llmrun_requests_running", "gauge", "Requests that the engine is running.", load.running)
        yield from _one("llmrun_requests_waiting", "gauge", "Requests that wait for a place or for room.", load.waiting)
        yield from _one("llmrun_kv_tokens", "gauge", "Tokens that the KV cache can hold.", kv_tokens)
        yield from _one(
            "llmrun_kv_free_tokens", "gauge", "Tokens that fit if unused cached prefixes are dropped.", load.free_tokens
        )
        yield from _one("llmrun_steps_total", "counter", "Forward passes since the server started.", load.steps)
        yield from _one("llmrun_prompt_tokens_total", "counter", "Prompt tokens.", load.prompt_tokens)
        yield from _one(
            "llmrun_cached_tokens_total", "counter", "Prompt tokens reused from the KV cache.", load.cached_tokens
        )
        yield from _one("llmrun_generated_tokens_total", "counter", "Generated tokens.", load.generated_tokens)
        yield from _one(
            "llmrun_preemptions_total", "counter", "Returns of running sequences to the queue.", load.preemptions
        )
        yield from _one("llmrun_engine_restarts_total", "counter", "Restarts of the engine.", load.restarts)
        yield from _one(
            "llmrun_heartbeat_age_seconds", "gauge", "Seconds since the engine last made progress.", load.beat_age_s
        )
        yield from _one("llmrun_current_wait_seconds", "gauge", "Predicted wait of a new request.", load.wait_s)
        for histogram in (self.first_token, self.between_tokens, self.waited, self.predicted, self.mispredicted):
            yield from histogram.lines()


def _one(name: str, kind: str, help_text: str, value: float, labels: Mapping[str, str] | None = None) -> Iterator[str]:
    yield from _heading(name, kind, help_text)
    yield f"{name}{_labels(labels or {})} {value:.10g}"


def _heading(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {
        name: value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if escaped else ""
