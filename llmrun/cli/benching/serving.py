"""Runs the serving benchmark of `llmrun bench` on endpoints, and prints its results as tables, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from rich.text import Text

from llmrun.cli.benching.run_output import escaped, table_lines, table_of
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import LiveReporter
from llmrun.cli.console.terminal import visible_line
from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.runs import (
    TIMES_HEAD,
    ServingResult,
    heading,
    measure_serving,
    sentences,
    times_rows,
    to_row,
)

INTERRUPTED = 130  # 128 + SIGINT


def measure_servers(plans: Sequence[ServingPlan], endpoints: Sequence[str], kind: str, *, offline: bool) -> int:
    """Run each plan on each endpoint and print the results in the format `kind`. Return the exit code.

    Raises the errors of `measure_serving`. Earlier results are printed before the error, unless `kind` is "json".
    """
    results = []
    for plan, endpoint in product(plans, endpoints):
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
    if results[-1].interrupted:
        out.note("interrupted: showing the requests that had ended")
        return INTERRUPTED
    return 0


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
        out.picture(table_of(TIMES_HEAD, rows))
        out.picture(Text())
    out.lines(sentences(found))


def _show_markdown(found: ServingResult, rows: Sequence[Sequence[str]]) -> None:
    lines = [f"**{escaped(heading(found))}**", ""]
    if rows:
        lines += [*table_lines(TIMES_HEAD, rows, numbers_from=1), ""]
    out.answer("\n".join([*lines, *(f"- {escaped(sentence)}" for sentence in sentences(found))]))
    out.end_answer()
