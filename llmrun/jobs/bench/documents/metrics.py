"""Defines the metrics: their names and explanations, and whether higher is better. The terms are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `name` is its key in a document. Values are in seconds, or per second for speeds."""

    name: str
    words: str
    is_speed: bool  # True if higher is better
    explanation: str


METRICS = {
    metric.name: metric
    for metric in (
        Metric("load", "load", False, "opening the model: reading the file, packing weights, loading kernels"),
        Metric("ttft", "TTFT", False, "time to first token: from submitting a request to its first token"),
        Metric("prefill", "prefill", True, "prompt tokens per second, not counting those already in the cache"),
        Metric("tpot", "TPOT", False, "time per output token after the first, averaged over a request"),
        Metric("itl", "ITL", False, "inter-token latency: the time between two steps that delivered text"),
        Metric("decode", "decode", True, "output tokens per second of one request, after the first token"),
        Metric("e2e", "E2E", False, "end to end: from submitting a request to its last token"),
        Metric("throughput", "throughput", True, "output tokens per second of all requests together"),
        Metric("requests", "requests/s", True, "requests per second"),
        Metric(
            "cold", "cold TTFT", False, "from starting a new process to its first token, including loading the model"
        ),
    )
}
