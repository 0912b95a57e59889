"""The metrics of a benchmark: their names and explanations, and whether more is better. The terms are those of vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `name` is its key in a document. Values are in seconds, or per second for speeds."""

    name: str
    words: str
    is_speed: bool  # more is better
    explanation: str


METRICS = {
    metric.name: metric
    for metric in (
        Metric("load", "load", False, "opening the model: file read, weights packed, kernels loaded"),
        Metric("ttft", "TTFT", False, "time to first token: request in hand to first token out"),
        Metric("prefill", "prefill", True, "prompt tokens a second, those already in the cache left out"),
        Metric("tpot", "TPOT", False, "time per output token after the first, a mean over a request"),
        Metric("itl", "ITL", False, "inter-token latency: each gap between two tokens"),
        Metric("decode", "decode", True, "output tokens a second of one request, after the first"),
        Metric("e2e", "E2E", False, "end to end: request in hand to last token out"),
        Metric("throughput", "throughput", True, "output tokens a second of all requests together"),
        Metric("requests", "requests/s", True, "requests a second"),
        Metric(
            "cold", "cold TTFT", False, "start of a new process to its first token out, the model's loading included"
        ),
    )
}
