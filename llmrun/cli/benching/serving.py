"""Runs the serving benchmark of `llmrun bench` on endpoints, and prints its results as tables, Markdown or JSON.

The flags that apply only to endpoints become one plan for each request rate.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from llmrun.base.errors import UsageError
from llmrun.cli.benching.run_output import escaped, table_lines, table_of
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import LiveReporter
from llmrun.cli.console.terminal import visible_line
from llmrun.jobs.bench.serving.plan import (
    CONCURRENCY,
    OVERLOAD,
    OVERLOAD_FACTOR,
    RANDOM,
    WORKLOADS,
    Rate,
    ServingPlan,
    parse_goodput,
)
from llmrun.jobs.bench.serving.runs import (
    TIMES_HEAD,
    ServingResult,
    heading,
    measure_serving,
    sentences,
    times_rows,
    to_row,
)

if TYPE_CHECKING:
    from llmrun.cli.benching.flags import BenchFlags

FORMATS = ("table", "md", "json", "jsonl")
_FASTEST = 100_000.0  # requests per second
_MOST_SECONDS = 86_400.0
_RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(x?)")


def serving_flag(flags: BenchFlags) -> str:
    """Return the first flag that asks for the serving benchmark, or "" if there is none."""
    given = (
        ("--rate", flags.rate),
        ("--requests", flags.requests),
        ("--duration", flags.duration),
        ("--burstiness", flags.burstiness),
        ("--workload", flags.workload),
        ("--same", flags.same or None),
        ("--goodput", flags.goodput),
        ("--seed", flags.seed),
    )
    return next((name for name, value in given if value is not None), "")


def serving_endpoints(flags: BenchFlags, models: Sequence[str], flag: str) -> list[str]:
    """Return the endpoints to measure, including the URLs among `models`. Raises UsageError if there are others."""
    from llmrun.engine.remote.request import is_endpoint, parse_endpoint

    local = [name for name in models if not is_endpoint(name)]
    endpoints = [*(flags.endpoint or ()), *(name for name in models if is_endpoint(name))]
    if local or not endpoints:
        raise UsageError(
            f"{flag}: works only for a server, not for models on this machine",
            hint="add --endpoint URL#MODEL, for example of a running `llmrun serve`",
        )
    for name in endpoints:
        parse_endpoint(name)
    return endpoints


def serving_plans(flags: BenchFlags, flag: str) -> list[ServingPlan]:
    """Return a plan for each rate. `flag` asks for the serving benchmark. Raises UsageError."""
    _refuse_other_flags(flags, flag)
    workload = _workload(flags)
    rates = _rates(flags, workload)
    if flags.burstiness is not None and rates == [None]:
        raise UsageError("--burstiness: needs --rate")
    if flags.concurrency is not None and any(rate and not rate.is_multiple for rate in rates):
        raise UsageError("--concurrency: cannot be combined with --rate")
    seed = secrets.randbits(32) if flags.seed is None else flags.seed
    return [
        ServingPlan(
            workload=workload,
            rate=rate,
            requests=flags.requests,
            duration=_positive(flags.duration, "--duration", _MOST_SECONDS),
            burstiness=_positive(flags.burstiness, "--burstiness", 1e6) or 1.0,
            concurrency=_one_number(flags.concurrency or str(CONCURRENCY), "--concurrency", 1),
            prompt=_one_number(flags.n_prompt, "--n-prompt", 1),
            generate=_one_number(flags.n_gen, "--n-gen", 1),
            depth=_one_number(flags.n_depth, "--n-depth", 0),
            limits=parse_goodput(flags.goodput) if flags.goodput else {},
            seed=seed,
        )
        for rate in rates
    ]


def _workload(flags: BenchFlags) -> str:
    if flags.same:
        hint = "to compare answers, send the same seeded requests alone and under load"
        raise UsageError("--same: no longer exists", hint=hint)
    if flags.workload is not None and flags.workload not in WORKLOADS:
        raise UsageError(f"--workload: {flags.workload!r} is not one of {', '.join(WORKLOADS)}")
    return flags.workload or RANDOM


def _refuse_other_flags(flags: BenchFlags, flag: str) -> None:
    for name, value in (
        ("--chat", flags.chat or None),
        ("--prompts", flags.prompts),
        ("--cold", flags.cold or None),
        ("--profile", flags.profile or None),
        ("--seconds", flags.seconds),
        ("--repetitions", flags.repetitions),
        ("--html", flags.html),
        ("--save", flags.save or None),
        ("--price-kwh", flags.price_kwh),
        ("--compare-price", flags.compare_price),
        ("--threads", flags.threads),
        ("--backend", flags.backend),
        ("--kv-type", flags.kv_type),
        ("--gpu-layers", flags.gpu_layers),
        ("--speculate", flags.speculate),
        ("--lora", flags.lora),
    ):
        if value is not None:
            raise UsageError(f"{name}: cannot be combined with {flag}")
    if flags.format not in FORMATS:
        raise UsageError(f"-o {flags.format}: not supported with {flag}: use one of {', '.join(FORMATS)}")


def _rates(flags: BenchFlags, workload: str) -> list[Rate | None]:
    """Return the rates of the open loops, or [None] for a closed loop."""
    if flags.rate is None:
        return [Rate(OVERLOAD_FACTOR, is_multiple=True) if workload == OVERLOAD else None]
    rates: list[Rate | None] = []
    for part in flags.rate.split(","):
        match = _RATE.fullmatch(part.strip())
        if match is None or not 0 < float(match[1]) <= _FASTEST:
            raise UsageError(
                f"--rate: {part!r} is not a number of requests per second between 0 and {_FASTEST:,.0f}",
                hint="examples: 2.5 or 1,2,4 or 2x (twice the measured capacity)",
            )
        rates.append(Rate(float(match[1]), is_multiple=match[2] == "x"))
    return list(dict.fromkeys(rates))


def _one_number(text: str, flag: str, minimum: int) -> int:
    from llmrun.jobs.bench.measuring.workload import numbers

    found = numbers(text, flag, minimum)
    if len(found) != 1:
        raise UsageError(f"{flag}: {text!r}: lists are not supported for a serving benchmark")
    return found[0]


def _positive(value: float | None, flag: str, most: float) -> float | None:
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise UsageError(f"{flag}: {value:g} is not between 0 and {most:,.0f}")
    return value


INTERRUPTED = 130  # 128 + SIGINT


def measure_servers(plans: Sequence[ServingPlan], endpoints: Sequence[str], kind: str, *, offline: bool) -> int:
    """Run each plan on each endpoint and print the results in the format `kind`. Return the exit code.

    Raises the errors of `measure_serving`; results of earlier runs have then been printed, unless `kind` is "json".
    """
    results = []
    for plan in plans:
        for endpoint in endpoints:
            with LiveReporter() as reporter:
                found = measure_serving(plan, endpoint, reporter, offline=offline)
            results.append(found)
            if kind != "json":
                _show(found, kind, is_first=len(results) == 1)
            for note in found.notes:
                out.note(note)
            if found.interrupted:
                break
    if kind == "json":
        out.json_list([to_row(found) for found in results])
    return _exit_code(results)


def _show(found: ServingResult, kind: str, *, is_first: bool) -> None:
    if kind == "jsonl":
        out.json(to_row(found))
        return
    if not is_first:
        out.lines([""])
    rows = times_rows(found)
    if kind == "md":
        _show_markdown(found, rows)
        return
    out.picture(Text(visible_line(heading(found)), style="bold"))
    if rows:
        out.picture(table_of(TIMES_HEAD, _merged([[visible_line(cell) for cell in row] for row in rows])))
        out.picture(Text())
    out.lines(sentences(found))


def _merged(rows: Sequence[list[str]]) -> list[list[str]]:
    """Leave out the name of a row if it equals that of the row before."""
    before = ["", *(row[0] for row in rows)]
    return [["" if row[0] == name else row[0], *row[1:]] for row, name in zip(rows, before, strict=False)]


def _show_markdown(found: ServingResult, rows: list[list[str]]) -> None:
    lines = [f"**{escaped(heading(found))}**", ""]
    if rows:
        lines += [*table_lines(TIMES_HEAD, [[escaped(cell) for cell in row] for row in rows], numbers_from=2), ""]
    out.answer("\n".join([*lines, *(f"- {escaped(sentence)}" for sentence in sentences(found))]))
    out.end_answer()


def _exit_code(results: Sequence[ServingResult]) -> int:
    if results[-1].interrupted:
        out.note("interrupted: showing the requests that had ended")
        return INTERRUPTED
    return 0
