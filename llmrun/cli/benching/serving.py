"""Runs the serving benchmark on endpoints, and prints its results as tables, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from llmrun.base.amounts import counted
from llmrun.cli.benching.markdown_table import escaped, table_lines
from llmrun.cli.benching.table import table_of
from llmrun.cli.console.living import LiveReporter
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.jobs.bench.serving.plan import ServingPlan
from llmrun.jobs.bench.serving.report import to_row
from llmrun.jobs.bench.serving.runs import ServingResult, measure_serving
from llmrun.jobs.bench.serving.words import CONDITIONS_HEAD, TIMES_HEAD, condition_rows, heading, sentences, times_rows

INTERRUPTED = 130  # 128 + SIGINT
BROKEN_PROMISE = 1


def measure_servers(plans: Sequence[ServingPlan], endpoints: Sequence[str], kind: str, *, offline: bool) -> int:
    """Run each plan on each endpoint and print the results in the format `kind`. Return the exit code.

    The exit code is 1 if answers depend on the load, or if requests whose clients disconnected are still running.
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
    tables = [(TIMES_HEAD, times_rows(found)), (CONDITIONS_HEAD, condition_rows(found.conditions))]
    if kind == "md":
        _show_markdown(found, [(heads, rows) for heads, rows in tables if rows])
        return
    out.picture(Text(visible_line(heading(found)), style="bold"))
    for heads, rows in tables:
        if rows:
            out.picture(table_of(heads, _merged([[visible_line(cell) for cell in row] for row in rows])))
            out.picture(Text())
    out.lines(sentences(found))


def _merged(rows: Sequence[list[str]]) -> list[list[str]]:
    """Leave out the name of a row if it equals that of the row before."""
    before = ["", *(row[0] for row in rows)]
    return [["" if row[0] == name else row[0], *row[1:]] for row, name in zip(rows, before, strict=False)]


def _show_markdown(found: ServingResult, tables: Sequence[tuple[Sequence[str], list[list[str]]]]) -> None:
    lines = [f"**{escaped(heading(found))}**", ""]
    for heads, rows in tables:
        one_line = [head.replace("\n", ", ") for head in heads]
        lines += [*table_lines(one_line, [[escaped(cell) for cell in row] for row in rows], numbers_from=2), ""]
    out.answer("\n".join([*lines, *(f"- {escaped(sentence)}" for sentence in sentences(found))]))
    out.end_answer()


def _exit_code(results: Sequence[ServingResult]) -> int:
    if results[-1].interrupted:
        out.note("interrupted: showing the requests that had ended")
        return INTERRUPTED
    code = 0
    for found in results:
        if any(sum(condition.different.values()) for condition in found.conditions):
            out.error(f"{visible_line(found.host)}: answers depend on the server's load")
            code = BROKEN_PROMISE
        if found.cancelling is not None and found.cancelling.unfinished:
            still = counted(found.cancelling.unfinished, "request")
            out.error(f"{visible_line(found.host)}: still running {still} whose clients disconnected")
            code = BROKEN_PROMISE
    return code
