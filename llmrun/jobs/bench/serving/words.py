"""Formats the results of the serving benchmark as text, for both the terminal and Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.base.amounts import counted, format_number, format_percent, format_seconds, format_seconds_briefly
from llmrun.jobs.bench.serving.cancelling import GRACE_S, Cancelling
from llmrun.jobs.bench.serving.figures import Figures, Spread
from llmrun.jobs.bench.serving.goodput import METRICS, goodput_words
from llmrun.jobs.bench.serving.plan import CANCEL, MIXED, OVERLOAD, SAME
from llmrun.jobs.bench.serving.promises import SHORTEST_WAIT_S, PredictedWaits, RetryAfter
from llmrun.jobs.bench.serving.runs import ServingResult
from llmrun.jobs.bench.serving.sameness import Condition

TIMES_HEAD = ("", "time", "count", "mean", "p50", "p90", "p99")
CONDITIONS_HEAD = ("condition", "greedy answers\nthat differ", "seeded answers\nthat differ")


def heading(result: ServingResult) -> str:
    """Return a line that says what ran."""
    plan = result.plan
    words = [f"{result.model} @ {result.host}", plan.workload, f"{plan.prompt} in, {plan.generate} out"]
    if plan.prefix:
        long = f"long prompts {plan.prompt + plan.prefix}"
        words.append(long if plan.workload == MIXED else f"prefix {plan.prefix}")
    if result.rate is not None:
        words.append(f"open loop at {format_number(result.rate)} requests/s")
    elif plan.workload not in (CANCEL, SAME):
        words.append(f"{counted(plan.concurrency, 'client')}")
    return "  ".join([*words, f"seed {plan.seed}"])


def times_rows(result: ServingResult) -> list[list[str]]:
    """Return a row of TIMES_HEAD for each metric of each group."""
    return [
        [name, metric.upper(), f"{spread.count:,}", *map(format_seconds_briefly, _columns(spread))]
        for name, found in result.groups.items()
        for metric in METRICS
        if (spread := found.times.get(metric)) is not None
    ]


def condition_rows(conditions: Sequence[Condition]) -> list[list[str]]:
    """Return rows for the columns: condition, differing greedy answers, differing seeded answers."""
    return [
        [one.name, *(f"{one.different[kind]:,} of {one.compared[kind]:,}" for kind in one.compared)]
        for one in conditions
    ]


def sentences(result: ServingResult) -> list[str]:
    """Return the results that have no column."""
    found = next(iter(result.groups.values()), None)
    lines = [] if found is None else [_throughput(found), *_outcome(result, found)]
    if found is not None and found.good is not None:
        share = format_percent(found.good / found.total)
        rate = format_number(found.per_second(found.good))
        lines.append(f"goodput: {rate} requests/s, {share} of requests ({goodput_words(result.plan.limits)})")
    if result.capacity is not None:
        clients = counted(result.capacity.clients, "client")
        lines.append(f"capacity: {format_number(result.capacity.rate)} requests/s with {clients}")
    if result.retry_after is not None and (result.retry_after.rejections or result.plan.workload == OVERLOAD):
        lines += _retry_after(result.retry_after)
    if result.predicted_waits is not None:
        lines.append(_predicted(result.predicted_waits))
    if result.cancelling is not None:
        lines += _cancelling(result.cancelling)
    return [*lines, *_sameness(result.conditions)]


def _columns(spread: Spread) -> tuple[float, ...]:
    return spread.mean, spread.p50, spread.p90, spread.p99


def _throughput(found: Figures) -> str:
    requests, tokens = found.per_second(found.completed), found.per_second(found.output_tokens)
    words = f"throughput: {format_number(requests)} requests/s, {format_number(tokens)} output tok/s"
    if found.cached_tokens and found.prompt_tokens:
        words += f"; {format_percent(found.cached_tokens / found.prompt_tokens)} of prompt tokens were cached"
    return words


def _outcome(result: ServingResult, found: Figures) -> list[str]:
    if found.completed == found.total:
        return []
    parts = [f"{found.completed:,} ok", f"{found.rejected:,} rejected (429)"]
    for kind, number in sorted(found.failed.items()):
        said = result.messages.get(kind, "")
        parts.append(f"{number:,} {kind}" + (f" ({said})" if said else ""))
    return [f"requests: {', '.join(parts)}"]


def _retry_after(found: RetryAfter) -> list[str]:
    if not found.rejections:
        return ["no 429: the server queued all requests"]
    if found.promised is None:
        return [f"{counted(found.rejections, 'response')} with status 429, none with Retry-After"]
    median, least, most = (format_seconds(seconds) for seconds in found.promised)
    lines = [
        f"Retry-After: {found.with_time:,} of {found.rejections:,} 429s, {median} (median, {least} to {most}); "
        f"{found.accepted:,} of {counted(found.obeyed, 'request')} accepted at the first retry"
    ]
    errors = [
        f"{format_percent(error)} against {what}"
        for error, what in (
            (found.error, "the wait until the first text"),
            (found.newcomer_error, "the first text of a later request"),
        )
        if error is not None
    ]
    return [*lines, f"Retry-After, median error: {', '.join(errors)}"] if errors else lines


def _predicted(found: PredictedWaits) -> str:
    if found.error is None or found.within_2x is None:
        return f"x-llmrun-wait: no request waited for {SHORTEST_WAIT_S:g} s"
    return (
        f"x-llmrun-wait: median error {format_percent(found.error)}, {format_percent(found.within_2x)} within a factor "
        f"of 2 ({counted(found.compared, 'request')} that waited for at least {SHORTEST_WAIT_S:g} s)"
    )


def _cancelling(found: Cancelling) -> list[str]:
    lines = []
    for phase in found.phases:
        mode = "streaming" if phase.streams else "not streaming"
        ended = f", {phase.ended:,} ended first" if phase.ended else ""
        lines.append(f"left in {phase.name}, {mode}: {phase.left:,}{ended}")
    if found.unfinished is None:
        lines.append("the server does not report its running requests (/metrics, /slots or /health)")
    elif found.unfinished:
        still = counted(found.unfinished, "request")
        lines.append(f"still on the server after {GRACE_S:g} s: {still} whose clients disconnected ({found.source})")
    else:
        lines.append(f"server idle after {format_seconds(found.idle_after)} ({found.source})")
    after = "no answer" if found.ttft_after is None else format_seconds(found.ttft_after)
    return [*lines, f"TTFT of a single request: {format_seconds(found.ttft_before)} before, {after} afterwards"]


def _sameness(conditions: Sequence[Condition]) -> list[str]:
    if not conditions:
        return []
    compared = sum(sum(one.compared.values()) for one in conditions)
    different = sum(sum(one.different.values()) for one in conditions)
    failed = sum(one.failed for one in conditions)
    words = f"{different:,} of {counted(compared, 'answer')} differ from the answers of requests that ran alone"
    return [f"{words}; {counted(failed, 'request')} failed" if failed else words]
