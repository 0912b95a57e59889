"""The server's metrics, in the text format of Prometheus.

Writing the format takes only twenty lines of code. The package `prometheus_client` would add a registry, an HTTP server
and process metrics, which llmrun does not need.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from llmrun.engine.requests import PrefixCause, PrefixReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


Figures = Mapping[str, float]
# Metrics with a label. Each entry contains the name, the kind, the help text and the figure.
_Table = Sequence[tuple[str, str, str, str]]

# Metrics of each loaded model; most figures are fields of Load. Counters are reset to 0 when a model is loaded again.
_OF_MODELS: _Table = (
    ("llmrun_up", "gauge", "1 if the model is ready, otherwise 0.", "up"),
    ("llmrun_requests_running", "gauge", "Requests that the engine is running.", "running"),
    ("llmrun_requests_waiting", "gauge", "Requests that wait for a slot or for room in the KV cache.", "waiting"),
    ("llmrun_kv_tokens", "gauge", "Tokens that the KV cache can hold.", "kv_tokens"),
    ("llmrun_kv_free_tokens", "gauge", "Tokens that fit if unused cached prefixes are dropped.", "free_tokens"),
    ("llmrun_steps_total", "counter", "Forward passes.", "steps"),
    ("llmrun_processing_prompt_tokens", "gauge", "Tokens of prompts that are being processed.", "processing_tokens"),
    ("llmrun_remaining_prompt_tokens", "gauge", "Tokens left in prompts that are being processed.", "remaining_tokens"),
    ("llmrun_prompt_tokens_total", "counter", "Prompt tokens.", "prompt_tokens"),
    ("llmrun_cached_tokens_total", "counter", "Prompt tokens reused from the KV cache.", "cached_tokens"),
    ("llmrun_generated_tokens_total", "counter", "Generated tokens.", "generated_tokens"),
    ("llmrun_preemptions_total", "counter", "Returns of running sequences to the queue.", "preemptions"),
    ("llmrun_engine_restarts_total", "counter", "Restarts of the engine.", "restarts"),
    ("llmrun_heartbeat_age_seconds", "gauge", "Seconds since the engine last made progress.", "beat_age_s"),
    ("llmrun_current_wait_seconds", "gauge", "Predicted wait of a new request.", "wait_s"),
)
_OF_UPSTREAMS: _Table = (
    ("llmrun_upstream_up", "gauge", "1 if the upstream is up, otherwise 0.", "up"),
    ("llmrun_upstream_requests_in_flight", "gauge", "Requests that the upstream is working on.", "in_flight"),
    ("llmrun_upstream_requests_total", "counter", "Requests that were sent to the upstream.", "requests"),
    ("llmrun_upstream_moved_total", "counter", "Requests that moved from this upstream to another upstream.", "moved"),
    ("llmrun_upstream_resumed_total", "counter", "Streams of this upstream continued by another upstream.", "resumed"),
)


class Histogram:
    """Counts observed values in buckets. `bounds` are the inclusive upper bounds of the buckets."""

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
    """The counters and histograms of the HTTP layer. `text` adds the metrics of the models."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prefix_misses: Counter[tuple[str, str]] = Counter()
        self._lost_tokens: Counter[tuple[str, str]] = Counter()
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
            "llmrun_queue_wait_error_seconds", "Absolute difference between the predicted and the actual wait."
        )

        self.predicted_first_token = Histogram(
            "llmrun_predicted_first_token_seconds", "Predicted time from a request's acceptance to the first token."
        )
        self.mispredicted_first_token = Histogram(
            "llmrun_first_token_error_seconds",
            "Absolute difference between the predicted and the actual time to the first token.",
        )

    def count_request(self, route: str, status: int) -> None:
        """Count a finished request. `route` is a fixed pattern, never a path that a client chose."""
        self._requests[route, status] += 1

    def count_prefix(self, model: str, report: PrefixReport) -> None:
        """Count a request that did not reuse all of its prefix.

        Clients can read the metrics, and must not learn that another key has the same prefix.
        """
        cause = PrefixCause.FIRST if report.cause is PrefixCause.OTHER_KEY else report.cause
        if cause not in (PrefixCause.REUSED, PrefixCause.WAITED):
            self._prefix_misses[model, cause] += 1
            self._lost_tokens[model, cause] += 0 if cause is PrefixCause.FIRST else report.lost

    def count_wait(self, predicted_s: float, actual_s: float) -> None:
        self.predicted.observe(predicted_s)
        self.waited.observe(actual_s)
        self.mispredicted.observe(abs(predicted_s - actual_s))

    def count_first_token(self, predicted_s: float, actual_s: float) -> None:
        self.predicted_first_token.observe(predicted_s)
        self.mispredicted_first_token.observe(abs(predicted_s - actual_s))

    def text(self, version: str, models: Mapping[str, Figures], upstreams: Mapping[str, Figures] | None = None) -> str:
        """Return all metrics. `models` maps names to figures, and `upstreams` maps URLs to figures."""
        lines = [*self._lines(version, models)]
        if upstreams is not None:
            lines += _labelled(_OF_UPSTREAMS, "upstream", upstreams)
        return "\n".join(lines) + "\n"

    def _lines(self, version: str, models: Mapping[str, Figures]) -> Iterator[str]:
        yield from _one("llmrun_build_info", "gauge", "Version.", 1, {"version": version})
        yield from _heading("llmrun_requests_total", "counter", "Finished HTTP requests.")
        for (route, status), count in sorted(self._requests.items()):
            yield f"llmrun_requests_total{_labels({'route': route, 'status': str(status)})} {count}"
        for name, help_text, counts in (
            (
                "llmrun_prefix_misses_total",
                "Requests that did not reuse a whole prefix.",
                self._prefix_misses,
            ),
            ("llmrun_prefix_lost_tokens_total", "Prompt tokens that were computed again.", self._lost_tokens),
        ):
            yield from _heading(name, "counter", help_text)
            for (model, cause), count in sorted(counts.items()):
                yield f"{name}{_labels({'model': model, 'cause': cause})} {count}"
        yield from _one("llmrun_open_requests", "gauge", "HTTP requests in progress.", self.open_requests)
        yield from _labelled(_OF_MODELS, "model", models)
        for histogram in (
            self.first_token,
            self.predicted_first_token,
            self.mispredicted_first_token,
            self.between_tokens,
            self.waited,
            self.predicted,
            self.mispredicted,
        ):
            yield from histogram.lines()


def _labelled(table: _Table, label: str, owners: Mapping[str, Figures]) -> Iterator[str]:
    for name, kind, help_text, figure in table:
        yield from _heading(name, kind, help_text)
        for owner, figures in owners.items():
            yield f"{name}{_labels({label: owner})} {figures[figure]:.10g}"


def _one(
    name: str, kind: str, help_text: str, value: float, label_values: Mapping[str, str] | None = None
) -> Iterator[str]:
    yield from _heading(name, kind, help_text)
    yield f"{name}{_labels(label_values or {})} {value:.10g}"


def _heading(name: str, kind: str, help_text: str) -> tuple[str, str]:
    """Return the HELP and TYPE lines that precede the values of a metric."""
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def _labels(values: Mapping[str, str]) -> str:
    """Return labels in the notation that follows a metric's name."""
    escaped = {
        name: value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if escaped else ""
