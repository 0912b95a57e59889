"""The server's metrics, in the text format of Prometheus.

The format takes twenty lines to write. `prometheus_client` would also bring a registry, an HTTP server and metrics of
the process, which nothing here needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmrun.serving.processes.served_model import Load, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `kv_tokens` is the size of its KV cache."""

    name: str
    kv_tokens: int
    state: State
    load: Load


# The metrics of each loaded model: kind, help text and value. Counters begin again when a model is loaded again.
_OF_MODELS: Mapping[str, tuple[str, str, Callable[[LoadedModel], float]]] = {
    "llmrun_up": ("gauge", "Whether the model is ready.", lambda model: model.state is State.READY),
    "llmrun_requests_running": (
        *("gauge", "Requests that the engine is running."),
        lambda model: model.load.running,
    ),
    "llmrun_requests_waiting": (
        *("gauge", "Requests that wait for a place or for room."),
        lambda model: model.load.waiting,
    ),
    "llmrun_kv_tokens": ("gauge", "Tokens that the KV cache can hold.", lambda model: model.kv_tokens),
    "llmrun_kv_free_tokens": (
        *("gauge", "Tokens that fit if unused cached prefixes are dropped."),
        lambda model: model.load.free_tokens,
    ),
    "llmrun_steps_total": ("counter", "Forward passes.", lambda model: model.load.steps),
    "llmrun_prompt_tokens_total": ("counter", "Prompt tokens.", lambda model: model.load.prompt_tokens),
    "llmrun_cached_tokens_total": (
        *("counter", "Prompt tokens reused from the KV cache."),
        lambda model: model.load.cached_tokens,
    ),
    "llmrun_generated_tokens_total": ("counter", "Generated tokens.", lambda model: model.load.generated_tokens),
    "llmrun_preemptions_total": (
        *("counter", "Returns of running sequences to the queue."),
        lambda model: model.load.preemptions,
    ),
    "llmrun_engine_restarts_total": ("counter", "Restarts of the engine.", lambda model: model.load.restarts),
    "llmrun_heartbeat_age_seconds": (
        *("gauge", "Seconds since the engine last made progress."),
        lambda model: model.load.beat_age_s,
    ),
    "llmrun_current_wait_seconds": ("gauge", "Predicted wait of a new request.", lambda model: model.load.wait_s),
}


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
        yield from heading(self.name, "histogram", self._help)
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

    def text(self, version: str, models: Sequence[LoadedModel]) -> str:
        """Return all metrics. Those of models have a label with the model's name."""
        return "\n".join(self._lines(version, models)) + "\n"

    def _lines(self, version: str, models: Sequence[LoadedModel]) -> Iterator[str]:
        yield from _one("llmrun_build_info", "gauge", "Version.", 1, {"version": version})
        yield from heading("llmrun_requests_total", "counter", "Finished HTTP requests.")
        for (route, status), count in sorted(self._requests.items()):
            yield f"llmrun_requests_total{labels({'route': route, 'status': str(status)})} {count}"
        yield from _one("llmrun_open_requests", "gauge", "HTTP requests in progress.", self.open_requests)
        for name, (kind, help_text, value) in _OF_MODELS.items():
            yield from heading(name, kind, help_text)
            for model in models:
                yield f"{name}{labels({'model': model.name})} {value(model):.10g}"
        for histogram in (self.first_token, self.between_tokens, self.waited, self.predicted, self.mispredicted):
            yield from histogram.lines()


def _one(
    name: str, kind: str, help_text: str, value: float, label_values: Mapping[str, str] | None = None
) -> Iterator[str]:
    yield from heading(name, kind, help_text)
    yield f"{name}{labels(label_values or {})} {value:.10g}"


def heading(name: str, kind: str, help_text: str) -> tuple[str, str]:
    """Return the two lines before the values of a metric."""
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def labels(values: Mapping[str, str]) -> str:
    """Return labels after the name of a metric."""
    escaped = {
        name: value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if escaped else ""
