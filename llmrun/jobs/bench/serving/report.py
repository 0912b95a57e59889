"""The results of the serving benchmark as JSON, with the names of `vllm bench serve` where it has them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmrun.jobs.bench.serving.figures import Figures
from llmrun.jobs.bench.serving.runs import ServingResult

_VLLM_NAMES = {"e2e": "e2el"}


def to_row(result: ServingResult) -> dict[str, Any]:
    """Return a run as a JSON object. Times whose names end in `_ms` are in milliseconds, all others in seconds."""
    plan, late = result.plan, result.lateness
    first = next(iter(result.groups.values()), None)
    return {
        "backend": "openai",
        "model_id": result.model,
        "host": result.host,
        "workload": plan.workload,
        "seed": plan.seed,
        "n_prompt": plan.prompt,
        "n_gen": plan.generate,
        "n_prefix": plan.prefix,
        "request_rate": result.rate,
        "burstiness": plan.burstiness,
        "capacity": None if result.capacity is None else asdict(result.capacity),
        "concurrency": plan.concurrency if result.rate is None else None,
        "goodput_slo_ms": {name: limit * 1e3 for name, limit in plan.limits.items()},
        **({} if first is None else _figures(first)),
        "groups": {name: _figures(found) for name, found in result.groups.items()},
        "messages": dict(result.messages),
        "idle_ttft_ms": result.probe.ttft * 1e3,
        "idle_tpot_ms": result.probe.tpot * 1e3,
        "late_ms": None if late is None else {"p50": late.p50 * 1e3, "p99": late.p99 * 1e3},
        "retry_after": None if result.retry_after is None else asdict(result.retry_after),
        "predicted_waits": None if result.predicted_waits is None else asdict(result.predicted_waits),
        "same": [asdict(condition) for condition in result.conditions],
        "cancel": None if result.cancelling is None else asdict(result.cancelling),
        "notes": result.notes,
        "interrupted": result.interrupted,
    }


def _figures(found: Figures) -> dict[str, Any]:
    row: dict[str, Any] = {
        "duration": found.seconds,
        "completed": found.completed,
        "failed": found.rejected + sum(found.failed.values()),
        "rejected": found.rejected,
        "failures": dict(found.failed),
        "total_input_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "total_output_tokens": found.output_tokens,
        "request_throughput": found.per_second(found.completed),
        "output_throughput": found.per_second(found.output_tokens),
        "total_token_throughput": found.per_second(found.prompt_tokens + found.output_tokens),
        "request_goodput": None if found.good is None else found.per_second(found.good),
        "good": found.good,
    }
    for metric, spread in found.times.items():
        name = _VLLM_NAMES.get(metric, metric)
        row |= {
            f"mean_{name}_ms": spread.mean * 1e3,
            f"median_{name}_ms": spread.p50 * 1e3,
            f"std_{name}_ms": spread.stddev * 1e3,
            f"p90_{name}_ms": spread.p90 * 1e3,
            f"p99_{name}_ms": spread.p99 * 1e3,
        }
    return row
