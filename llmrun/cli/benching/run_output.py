"""Prints the results of a benchmark as terminal tables, Markdown, CSV or JSON, or writes them as an HTML page.

The tables show the metrics, the shares of the machine's limits and the verdicts. The Markdown is intended for issues
and READMEs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from llmrun.base.amounts import (
    counted,
    format_bandwidth,
    format_mebibytes,
    format_number,
    format_percent,
)
from llmrun.base.errors import LlmrunError
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import columns, visible_line
from llmrun.jobs.bench.documents.document import (
    Document,
    Result,
    Roofline,
    Verdict,
    answer_sentences,
    metric_number,
    metric_of,
    metric_unit,
    metric_words,
    result_names,
    verdict_sentence,
)
from llmrun.jobs.bench.statistics import MINIMUM_ROUNDS
from llmrun.options.settings import SPECULATE_OFF

_COLUMNS = ("load", "cold", "ttft", "prefill", "tpot", "decode", "e2e", "throughput", "requests")


def shown_metrics(document: Document) -> list[str]:
    """Return the metrics that were measured for at least one configuration. Throughput requires concurrent requests."""
    together = any(result.workload.concurrency > 1 for result in document.results)
    left_out = () if together else ("throughput", "requests")
    return [
        name for name in _COLUMNS if name not in left_out and any(name in result.figures for result in document.results)
    ]


def head_words(name: str) -> str:
    """Return the column heading of a metric, with the unit below it if the values are formatted without a unit."""
    return (
        f"{metric_of(name).words}\n{metric_unit(name)}"
        if name in ("prefill", "decode", "throughput")
        else metric_of(name).words
    )


def figure_words(result: Result, name: str) -> str:
    """Format the median of a metric, with a unit if the metric is a time. Returns "" if there is no median."""
    return metric_number(name, result.figures[name].median) if name in result.figures else ""


def draft_words(result: Result) -> tuple[str, str]:
    """Format the tokens per step and the share of drafted tokens that were accepted. Unknown values become ""."""
    totals = result.totals
    of_step = None if totals is None else totals.tokens_per_step
    accepted = None if totals is None else totals.acceptance
    return "" if of_step is None else f"{of_step:.2f}", "" if accepted is None else format_percent(accepted)


def show_tables(document: Document) -> None:
    """Print the tables of a document to stdout. With --verbose, include the statistics of all metrics."""
    out.picture(_heading(document))
    out.picture(_speeds(document))
    for part in (_speculation(document), _limits(document), _all_figures(document) if out.verbose else None):
        if part is not None:
            out.picture(Text())
            out.picture(part)
    lines = [verdict_sentence(document, verdict) for verdict in document.verdicts]
    lines += _unjudged(document)
    lines += answer_sentences(document)
    if lines:
        out.picture(Text())
        for line in lines:
            out.picture(Text(visible_line(line)))


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str | Text]], *, numbers_from: int = 1) -> Table:
    """Build a table without borders.

    Columns from `numbers_from` on are right-aligned. The caller must pass untrusted text through `visible_line` first.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, head in enumerate(heads):
        is_number = number >= numbers_from
        table.add_column(head, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        table.add_row(*row)
    return table


def _unjudged(document: Document) -> list[str]:
    """Return a line that explains a missing verdict, or [] if no verdict is missing."""
    labels = [result.workload.label for result in document.results if result.samples]
    if document.verdicts or len(labels) == len(set(labels)):
        return []
    return [f"no verdict: {_rounds(document)}, {MINIMUM_ROUNDS} are needed (raise --seconds, or lower -p and -n)"]


def _rounds(document: Document) -> str:
    count = max((len(values) for result in document.results for values in result.samples.values()), default=0)
    return counted(count, "round")


def _heading(document: Document) -> Text:
    models = ", ".join(dict.fromkeys(result.subject.model for result in document.results))
    labels = list(dict.fromkeys(result.workload.label for result in document.results))
    words = [models, labels[0] if len(labels) == 1 else f"{len(labels)} workloads"]
    words.append(_rounds(document) + (" in turns" if len(document.results) > 1 else ""))
    return Text(visible_line("  ".join(words)), style="bold")


def _speeds(document: Document) -> Table:
    """Return the table of medians, with fewer columns on a narrow terminal."""
    names = shown_metrics(document)
    with_memory = any(result.peak_memory for result in document.results)
    for left_out in (None, "load", "tpot", "e2e"):
        names = [name for name in names if name != left_out]
        table = _speeds_table(document, names, with_memory=with_memory and left_out is None)
        if out.width_of(table) <= columns():
            break
    return table


def _speeds_table(document: Document, names: Sequence[str], *, with_memory: bool) -> Table:
    rows = []
    for name, result in zip(result_names(document), document.results, strict=True):
        memory = [_memory(result)] if with_memory else []
        rows.append([visible_line(name), *(figure_words(result, metric) for metric in names), *memory])
    return table_of(["", *map(head_words, names), *(["memory"] if with_memory else [])], rows)


def _speculation(document: Document) -> Table | None:
    """Return a table of the gains of speculation, or None without speculation. Narrow terminals show fewer columns."""
    if not any(result.subject.speculate not in ("", SPECULATE_OFF) for result in document.results):
        return None
    ratios = {verdict.of: verdict for verdict in document.verdicts if verdict.metric == "decode"}
    rows = []
    for index, (name, result) in enumerate(zip(result_names(document), document.results, strict=True)):
        of_step, accepted = draft_words(result)
        rows.append([visible_line(name), figure_words(result, "decode"), _ratio(ratios.get(index)), of_step, accepted])
    heads = ["speculation", head_words("decode"), "ratio", "tokens\nper step", "drafts\naccepted"]
    for count in (len(heads), len(heads) - 1, len(heads) - 2):
        table = table_of(heads[:count], [row[:count] for row in rows])
        if out.width_of(table) <= columns():
            break
    return table


def _ratio(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"{verdict.ratio:.2f} ({verdict.low:.2f} to {verdict.high:.2f})"


def _limits(document: Document) -> Table | None:
    """Return the table with the shares of the machine's limits, or None if the limits were not measured."""
    found = [
        (name, result.roofline)
        for name, result in zip(result_names(document), document.results, strict=True)
        if result.roofline is not None and (result.roofline.decode_share, result.roofline.prefill_share) != (None, None)
    ]
    if not found:
        return None
    limits = found[0][1]
    rows = [[visible_line(name), *_shares(roofline)] for name, roofline in found]
    heads = [
        "share of limits",
        f"decode\nof {format_bandwidth(limits.read_bandwidth)} read",
        f"prefill\nof {format_number(limits.multiply_rate / 1e9)} G int8 products/s",
    ]
    return table_of(heads, rows)


def _all_figures(document: Document) -> Table:
    rows: list[list[str]] = []
    for name, result in zip(result_names(document), document.results, strict=True):
        for metric, figure in result.figures.items():
            values = (figure.median, figure.mean, figure.stddev, figure.p95, figure.p99)
            cells = ["" if value is None else metric_number(metric, value) for value in values]
            rows.append([visible_line(name), metric_of(metric).words, f"{figure.count:,}", *cells])
    return table_of(["", "figure", "count", "median", "mean", "stddev", "p95", "p99"], rows, numbers_from=2)


# Without escapes, these characters would end a cell or start markup or HTML.
_ESCAPED = str.maketrans({character: f"\\{character}" for character in "\\|`*_<>[]"})


def markdown(document: Document) -> str:
    """Return the medians, the shares of the machine's limits and the verdicts as Markdown."""
    names = shown_metrics(document)
    with_drafts = any(result.totals and result.totals.drafted_tokens for result in document.results)
    heads = [
        "model",
        "",
        *(head_words(name).replace("\n", ", ") for name in names),
        *(("tokens per step", "drafts accepted") if with_drafts else ()),
        "memory",
        "share of bandwidth",
        "share of int8 peak",
    ]
    rows = [
        [
            escaped(result.subject.model),
            escaped(name),
            *(figure_words(result, one) for one in names),
            *(draft_words(result) if with_drafts else ()),
            _memory(result),
            *_shares(result.roofline),
        ]
        for name, result in zip(result_names(document), document.results, strict=True)
    ]
    lines = table_lines(heads, rows, numbers_from=2)
    said = [*(verdict_sentence(document, verdict) for verdict in document.verdicts), *answer_sentences(document)]
    sentences = [f"- {escaped(sentence)}" for sentence in said]
    return "\n".join([*lines, *([""] if sentences else []), *sentences])


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int) -> list[str]:
    """Return the lines of a table of escaped cells. Columns from `numbers_from` on are right-aligned."""
    rule = ["---" if number < numbers_from else "---:" for number in range(len(heads))]
    return [_line(heads), _line(rule), *map(_line, rows)]


def escaped(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return visible_line(text).translate(_ESCAPED)


def _shares(roofline: Roofline | None) -> list[str]:
    """Format the shares of the machine's limits that decode and prefill reached. Unknown shares become ""."""
    shares = (None, None) if roofline is None else (roofline.decode_share, roofline.prefill_share)
    return ["" if share is None else format_percent(share) for share in shares]


def _memory(result: Result) -> str:
    return format_mebibytes(result.peak_memory) if result.peak_memory else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def show_document(document: Document, kind: str) -> None:
    """Print a document to stdout in a format of flags.FORMATS, and failures and notes to stderr."""
    if kind == "table":
        show_tables(document)
    elif kind == "md":
        out.answer(markdown(document))
        out.end_answer()
    else:
        _show_rows(document, kind)
    for result in document.results:
        if result.failure is not None:
            out.error(f"{visible_line(result.subject.name)}: {result.failure.message}", result.failure.hint)
    if document.interrupted:
        out.note("interrupted: showing the figures measured so far")


def _show_rows(document: Document, kind: str) -> None:
    from llmrun.jobs.bench.documents.rows import csv_text, llama_bench_rows

    rows = llama_bench_rows(document)
    if kind == "csv":
        out.answer(csv_text(rows).removesuffix("\n"))
        out.end_answer()
    else:
        show_json(rows, kind)


def show_json(bodies: Sequence[dict[str, Any]], kind: str) -> None:
    """Print JSON objects as a list, or one object per line if `kind` is jsonl."""
    if kind == "json":
        out.json_list(bodies)
    else:
        for body in bodies:
            out.json(body)


def write_page(document: Document, path: Path) -> None:
    """Write the HTML page of a document. Raises LlmrunError if the file cannot be written."""
    from llmrun.jobs.bench.html.page import page

    path = path.expanduser()
    try:
        path.write_text(page(document), encoding="utf-8")
    except OSError as error:
        raise LlmrunError(f"--html: {path}: cannot be written: {error.strerror}") from error
    out.note(f"page written: {path}")


def show_history(documents: Sequence[Document], kind: str) -> None:
    """Print one line per run, the oldest run first."""
    if kind != "table":
        from llmrun.jobs.bench.documents.document import to_json

        show_json([to_json(document) for document in documents], kind)
        return
    if not documents:
        out.note("no runs are saved yet: save one with llmrun bench --save")
        return

    rows = [_history_row(document) for document in documents]
    out.picture(table_of(["run", "when (UTC)", "configuration", "prefill", "decode"], rows, numbers_from=3))


def _history_row(document: Document) -> list[str]:
    first = document.results[0]
    more = f" and {len(document.results) - 1} more" if len(document.results) > 1 else ""
    speeds = (
        metric_words(name, first.figures[name].median) if name in first.figures else ""
        for name in ("prefill", "decode")
    )
    what = visible_line(f"{first.subject.model}, {first.subject.name}, {first.workload.label}{more}")
    return [document.identity, document.created[:16].replace("T", " "), what, *speeds]
