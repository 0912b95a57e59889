"""Implements `bench --profile`, which shows where the CPU engine spends its time, op by op."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmrun.backends.base import AUTO, beyond_training
from llmrun.backends.cpu.kind import KIND as CPU_ENGINE
from llmrun.backends.registry import backend_named
from llmrun.base.amounts import format_bandwidth, format_number, format_percent, format_seconds
from llmrun.base.errors import UsageError, kernel_warnings_told
from llmrun.cli.answers.loading import ModelLoading
from llmrun.cli.benching.flags import LISTS
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.jobs.bench.measuring.workload import BenchTarget, Workload
from llmrun.jobs.bench.profiling import KindProfile, OpProfile, Profile, Spent, StepProfile, profile

_HEADS = [
    "op",
    "count",
    "time",
    "% of\nstep",
    "%\nwaiting",
    "reads",
    "GB/s",
    "% of\nlimit",
    "G int8\nproducts/s",
    "% of\nlimit",
]


def check_profile(backends: Sequence[str], workloads: Sequence[Workload], kind: str) -> None:
    """Raise UsageError for flags and values that --profile does not support."""
    if kind not in LISTS:
        raise UsageError(f"--profile: -o {kind} is not supported: use one of {', '.join(LISTS)}")
    if any(name != AUTO and not _is_cpu_engine(name) for name in backends):
        raise UsageError("--profile: only the CPU engine can be profiled", hint="use --backend cpu")
    if any(workload.facts.kind != "synthetic" or workload.facts.concurrency > 1 for workload in workloads):
        raise UsageError("--profile: supports no workload flags except -p and -d")


def _is_cpu_engine(name: str) -> bool:
    entry = backend_named(name)
    return entry is not None and entry.kind() is CPU_ENGINE


def profile_all(targets: Sequence[BenchTarget], workloads: Sequence[Workload], kind: str, seconds: float) -> int:
    """Profile each model with each combination of depth and prompt, and print the results. Returns the exit code."""
    shapes = dict.fromkeys((workload.facts.prompt, workload.facts.depth) for workload in workloads)
    bodies = []
    for target in targets:
        for prompt, depth in shapes:
            loading = ModelLoading(target.model, Path(target.path))
            loading.begin()
            with kernel_warnings_told(out.note):
                found = profile(
                    Path(target.path),
                    threads=target.threads,
                    kv_type=target.kv_type,
                    prompt=max(1, prompt),
                    depth=depth,
                    seconds=seconds / 2,
                    progress=loading,
                )
            out.clear_progress()
            if words := beyond_training(target.model, depth + prompt, found.train_context):
                out.note(words)
            if kind == "table":
                _show(target.model, found)
            bodies.append({"model": target.model, **_body(found)})
    if kind != "table":
        from llmrun.cli.benching.run_output import show_json

        show_json(bodies, kind)
    return 0


def _show(model: str, found: Profile) -> None:
    from rich.text import Text

    from llmrun.cli.benching.run_output import table_of

    limits = found.limits
    out.picture(
        Text(
            visible_line(
                f"{model}  {found.threads} threads, {found.kv_type}  machine limits: "
                f"{format_bandwidth(limits.read_bandwidth)}, {format_number(limits.multiply_rate / 1e9)}"
                " G int8 products/s"
            ),
            style="bold",
        )
    )
    for name, step in (("decode", found.decode), (f"prefill of {found.prefill.rows}", found.prefill)):
        out.picture(Text())
        depth = f" after {step.depth:,} tokens" if step.depth else ""
        out.picture(
            Text(
                f"{name}{depth}: {format_seconds(step.step_seconds)},"
                f" {format_number(step.rows / step.step_seconds)} tok/s"
                f"  (timing the ops changes this by {step.timing_cost:+.1%})"
            )
        )
        lines = step.ops if out.verbose else step.kinds
        rows = [[_name(one), _count(one), *_cells(one.spent, step)] for one in lines]
        rows.append(["all ops", "", *_cells(step.total, step)])
        out.picture(table_of(_HEADS, rows))


def _name(one: KindProfile | OpProfile) -> str:
    parts = [one.kind, one.weight_type]
    if isinstance(one, OpProfile):
        parts.append(one.name or ("" if one.layer is None else f"layer {one.layer}"))
    return visible_line("  ".join(filter(None, parts)))


def _count(one: KindProfile | OpProfile) -> str:
    return str(one.count) if isinstance(one, KindProfile) else ""


def _cells(spent: Spent, step: StepProfile) -> list[str]:
    cells = [
        format_seconds(spent.seconds),
        format_percent(spent.seconds / step.timed_step_seconds),
        format_percent(spent.waiting / spent.seconds) if spent.seconds else "",
    ]
    has_bytes, has_products = spent.needs.memory_bytes, spent.needs.products
    cells.append(f"{format_number(has_bytes / 1e6)} MB" if has_bytes else "")
    cells += (
        [format_number(spent.bytes_per_second / 1e9), format_percent(spent.bandwidth_share)] if has_bytes else ["", ""]
    )
    cells += (
        [format_number(spent.products_per_second / 1e9), format_percent(spent.multiply_share)]
        if has_products
        else ["", ""]
    )
    return cells


def _body(found: Profile) -> dict[str, Any]:
    return {
        "path": found.path,
        "threads": found.threads,
        "kv_type": found.kv_type,
        "read_bandwidth": found.limits.read_bandwidth,
        "multiply_rate": found.limits.multiply_rate,
        "decode": _step(found.decode),
        "prefill": _step(found.prefill),
    }


def _step(step: StepProfile) -> dict[str, Any]:
    times = ("rows", "depth", "repetitions", "step_seconds", "timed_step_seconds", "outside_seconds")
    return {
        **{name: getattr(step, name) for name in times},
        "ops": [_part(one, "kind", "layer", "name", "weight_type") for one in step.ops],
        "kinds": [_part(one, "kind", "weight_type", "count") for one in step.kinds],
        "total": _spent(step.total),
    }


def _part(one: OpProfile | KindProfile, *names: str) -> dict[str, Any]:
    return {**{name: getattr(one, name) for name in names}, **_spent(one.spent)}


def _spent(spent: Spent) -> dict[str, Any]:
    return {
        "seconds": spent.seconds,
        "waiting_seconds": spent.waiting,
        "memory_bytes": spent.needs.memory_bytes,
        "int8_products": spent.needs.products,
        "bytes_per_second": spent.bytes_per_second,
        "products_per_second": spent.products_per_second,
        "float_products_per_second": spent.float_products_per_second,
        "bandwidth_share": spent.bandwidth_share,
        "multiply_share": spent.multiply_share,
    }
