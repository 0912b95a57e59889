"""Converts a document to rows in llama-bench's format, with additional fields for the metrics of vLLM and llmrun.

Tools that read the output of `llama-bench -o json` can read these rows. Each configuration has one row for prefill
("pp512": n_prompt tokens after n_depth tokens in the cache) and one row for decode ("tg128": n_gen tokens). In llmrun,
decode follows the prompt in the same request, so the n_depth of decode includes the prompt. Fields for llama.cpp's own
settings contain the values that the backend reported, or else llama-bench's defaults.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from llmrun.jobs.bench.documents.document import Document, Result

_SETTINGS: Mapping[str, Any] = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": -1,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "auto",
    "lazy_mode": "auto",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": True,
    "fit_target": 0,
    "fit_min_ctx": 0,
}
_LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e", "cold_ttft": "cold"}  # vLLM's names -> ours
_PHASES = ("prefill", "decode")
_SHORTEST, _SLOWEST = 1e-9, 1e-9  # Times (s) and speeds (tok/s) below these limits cannot be real.
_ROOFLINE = (
    "decode_share",
    "prefill_share",
    "read_bandwidth",
    "multiply_rate",
    "bytes_per_token",
    "products_per_token",
)
_VERDICT = ("ratio", "low", "high", "level", "is_different")


def llama_bench_rows(document: Document) -> list[dict[str, Any]]:
    """Return one row per configuration and phase. All rows have the same keys, with None for missing measurements.

    If the prompts of a workload differ in length, n_prompt and n_gen are mean lengths. If the mean lengths are unknown,
    both are 0 and `samples_ns` is empty. A configuration without any phase, such as a failed configuration or a cold
    start, has a single row, in which `phase` and the speeds are None.
    """
    return [
        _row(document, index, result, phase)
        for index, result in enumerate(document.results)
        for phase in _phases(result)
    ]


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as llama-bench's CSV: all fields are quoted, True is 1, lists are JSON, and None is empty."""
    if not rows:
        return ""
    text = io.StringIO()
    text.write(",".join(rows[0]) + "\n")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([_csv_field(value) for value in row.values()] for row in rows)
    return text.getvalue()


def _csv_field(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    return json.dumps(value) if isinstance(value, list | dict) else value


def _phases(result: Result) -> list[str]:
    return [phase for phase in _PHASES if result.samples.get(phase) or phase in result.figures] or [""]


def _row(document: Document, index: int, result: Result, phase: str) -> dict[str, Any]:
    prompt, generate = _lengths(result)
    tokens = {"prefill": prompt, "decode": generate}.get(phase, 0)
    depth = result.workload.depth + (prompt if phase == "decode" else 0)
    return {
        **_build(document),
        **_model(result),
        **_settings(result),
        "n_prompt": 0 if phase == "decode" else prompt,
        "n_gen": 0 if phase == "prefill" else generate,
        "n_depth": depth,
        "test_time": document.created,
        **_speeds(result, phase, tokens),
        **_vllm_figures(result),
        **_ours(document, index, result, phase),
        **{f"system_{name}": value for name, value in document.system.items()},
    }


def _lengths(result: Result) -> tuple[int, int]:
    """Return the token counts of a prompt and an answer, either as requested or as means of the measured counts."""
    if result.workload.kind == "synthetic":
        return result.workload.prompt, result.workload.generate
    totals = result.totals
    if totals is None or totals.requests == 0:
        return 0, 0
    return round(totals.prompt_tokens / totals.requests), round(totals.output_tokens / totals.requests)


def _build(document: Document) -> dict[str, Any]:
    return {
        "build_commit": f"llmrun-{document.system.get('llmrun', '')}",
        "build_number": 0,
        "cpu_info": document.system.get("cpu") or "",
        "gpu_info": ", ".join(map(str, document.system.get("gpus") or [])),
    }


def _model(result: Result) -> dict[str, Any]:
    subject, facts = result.subject, result.subject.facts
    words = (facts.get("architecture"), _rounded(facts.get("parameters")), facts.get("type"))
    on_gpu = bool(subject.gpu_layers)
    return {
        "backends": facts.get("backends") or (subject.endpoint or ("GPU" if on_gpu else "CPU")),
        "model_filename": facts.get("file") or subject.model,
        "model_type": " ".join(str(word) for word in words if word) or subject.model,
        "model_size": facts.get("bytes") or 0,
        "model_n_params": facts.get("parameters") or 0,
    }


def _rounded(parameters: object) -> str:
    if not isinstance(parameters, int) or parameters <= 0:
        return ""
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _settings(result: Result) -> dict[str, Any]:
    subject, facts = result.subject, result.subject.facts
    layers = subject.gpu_layers.partition("/")[0]
    keys, _, values = subject.kv_type.partition(":")
    return {
        "n_batch": facts.get("n_batch") or 0,
        "n_ubatch": facts.get("n_ubatch") or 0,
        "n_threads": subject.threads,
        "type_k": keys,
        "type_v": values or keys,
        "n_gpu_layers": int(layers) if layers.isdecimal() and len(layers) < 10 else 0,
        **{name: facts.get(name, value) for name, value in _SETTINGS.items()},
    }


def _speeds(result: Result, phase: str, tokens: int) -> dict[str, Any]:
    """Return the speeds and times of a phase.

    The times are computed from the speeds and `tokens`, so the times and the speeds agree, as in llama-bench.
    """
    speeds, figure = list(result.samples.get(phase, ())), result.figures.get(phase)
    times = [time for speed in speeds if (time := _nanoseconds(tokens, speed)) is not None]
    known: dict[str, Any] = {"avg_ns": None, "stddev_ns": None, "avg_ts": None, "stddev_ts": None}
    if speeds:
        known |= {"avg_ts": statistics.fmean(speeds), "stddev_ts": _stddev(speeds)}
    elif figure is not None:
        known |= {"avg_ts": figure.mean, "stddev_ts": figure.stddev, "avg_ns": _nanoseconds(tokens, figure.mean)}
    if times:
        known |= {"avg_ns": round(statistics.fmean(times)), "stddev_ns": round(_stddev(times))}
    return known | {"samples_ns": times, "samples_ts": speeds}


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _nanoseconds(tokens: int, speed: float) -> int | None:
    return round(1e9 * tokens / speed) if tokens and speed >= _SLOWEST else None


def _vllm_figures(result: Result) -> dict[str, Any]:
    """Return the metrics under the keys of `vllm bench serve --save-result`, with times in milliseconds."""
    totals = result.totals
    seconds = totals.seconds if totals is not None and totals.seconds >= _SHORTEST else None
    known: dict[str, Any] = {
        "duration": seconds,
        "completed": totals.requests if totals else None,
        "total_input_tokens": totals.prompt_tokens if totals else None,
        "total_output_tokens": totals.output_tokens if totals else None,
        "request_throughput": _figure(result, "requests"),
        "output_throughput": _figure(result, "throughput"),
        "total_token_throughput": None,
    }
    if totals and seconds:
        known["request_throughput"] = totals.requests / seconds
        known["output_throughput"] = totals.output_tokens / seconds
        known["total_token_throughput"] = (totals.prompt_tokens + totals.output_tokens) / seconds
    for theirs, ours in _LATENCIES.items():
        found = result.figures.get(ours)
        named = ("mean", "median", "std", "p95", "p99")
        values = (found.mean, found.median, found.stddev, found.p95, found.p99) if found else (None,) * 5
        known |= {
            f"{name}_{theirs}_ms": None if value is None else value * 1e3
            for name, value in zip(named, values, strict=True)
        }
    return known


def _figure(result: Result, name: str) -> float | None:
    return result.figures[name].mean if name in result.figures else None


def _ours(document: Document, index: int, result: Result, phase: str) -> dict[str, Any]:
    workload, roofline = result.workload, result.roofline
    verdict = next((one for one in document.verdicts if (one.of, one.metric) == (index, phase)), None)
    check = next((one for one in document.answer_checks if one.of == index), None)
    totals = result.totals
    return {
        "phase": phase or None,
        "configuration": result.subject.name,
        "backend": result.subject.backend,
        "model": result.subject.model,
        "model_sha256": result.subject.facts.get("sha256"),
        "device": result.subject.facts.get("device"),
        "gpu_layers": result.subject.gpu_layers or None,
        "workload": workload.label,
        "workload_kind": workload.kind,
        "concurrency": workload.concurrency,
        "speculate": result.subject.speculate or None,
        "tokens_per_step": totals.tokens_per_step if totals else None,
        "drafted_tokens": totals.drafted_tokens if totals else None,
        "accepted_tokens": totals.accepted_tokens if totals else None,
        "load_s": _figure(result, "load"),
        "peak_memory": result.peak_memory or None,
        **{f"roofline_{name}": getattr(roofline, name, None) for name in _ROOFLINE},
        "verdict_against": document.results[verdict.against].subject.name if verdict else None,
        **{f"verdict_{name}": getattr(verdict, name, None) for name in _VERDICT},
        "answers_compared": check.answers if check else None,
        "answers_different": check.different if check else None,
        "failure": result.failure.message if result.failure else None,
        "run": document.identity,
        "interrupted": document.interrupted,
    }
