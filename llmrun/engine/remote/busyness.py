"""Reads from a server's metrics how many requests it is working on."""

from __future__ import annotations

import re

# llmrun: llmrun_requests_running; vLLM: vllm:num_requests_running; llama-server: llamacpp:requests_processing;
# SGLang: sglang:num_running_reqs
_GAUGE = re.compile(
    r"^[a-z]+[:_](?:num_)?(?:requests_(?:running|waiting|processing|deferred)|running_reqs|queue_reqs)"
    r"(?:\{.*\})? ([\d.e+]+)",
    re.MULTILINE,
)


def unfinished_in_metrics(text: str) -> int | None:
    """Return how many requests run or wait according to metrics in Prometheus's format, or None if they do not tell."""
    values = [float(value) for value in _GAUGE.findall(text)]
    return round(sum(values)) if values else None
