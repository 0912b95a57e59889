"""Prints a benchmark to the terminal: the metrics, the shares of the machine's limits, and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from llmrun.base.amounts import (
    counted,
    format_bandwidth,
    format_mebibytes,
    format_number,
    format_percent,
    format_seconds,
)
from llmrun.cli.benching.summary import draft_words, figure_words, head_words, shown_metrics
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import columns, visible_line
from llmrun.jobs.bench.analysis.statistics import MINIMUM_ROUNDS
from llmrun.jobs.bench.documents.document import Document, Verdict
from llmrun.jobs.bench.documents.words import answer_sentences, metric_of, result_names, verdict_sentence
from llmrun.jobs.bench.energy import beside_api
from llmrun.options.settings import SPECULATE_OFF

_BAR = 10  # the width of a bar in columns
_BARS_FROM = 96  # Bars are shown only on terminals with at least this many columns.
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_tables(document: Document, api_price: float | None) -> None:
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
    lines += _energy_lines(document, api_price)
    if out.verbose:
        lines += document.prefetching
    if lines:
        out.picture(Text())
        for line in lines:
            out.picture(Text(visible_line(line)))


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str | Text]], *, numbers_from: int = 1) -> Table:
    """Build a table without borders.

    Columns from `numbers_from` on are right-aligned, except bars, which have no heading. The caller must pass untrusted
    text through `visible_line` first.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, head in enumerate(heads):
        is_number = number >= numbers_from and head != ""
        table.add_column(head, justify="right" if is_number else "left", no_wrap=number >= numbers_from)
    for row in rows:
        table.add_row(*row)
    return table


def _unjudged(document: Document) -> list[str]:
    """Return an explanation if a verdict that the user would expect is missing."""
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
    with_bars = columns() >= _BARS_FROM and len(document.results) > 1
    with_memory = any(result.peak_memory for result in document.results)
    for left_out in (None, "load", "tpot", "e2e"):
        names = [name for name in names if name != left_out]
        table = _speeds_table(document, names, with_bars=with_bars, with_memory=with_memory and left_out is None)
        if out.width_of(table) <= columns():
            break
    return table


def _speeds_table(document: Document, names: Sequence[str], *, with_bars: bool, with_memory: bool) -> Table:
    heads, rows = [""], [[Text(visible_line(name))] for name in result_names(document)]
    for name in names:
        heads.append(head_words(name))
        for row, result in zip(rows, document.results, strict=True):
            row.append(Text(figure_words(result, name)))
        if with_bars and metric_of(name).is_speed:
            heads.append("")
            for row, share in zip(rows, _shares_of_the_largest(document, name), strict=True):
                row.append(Text(bar(share), style="cyan"))
    if with_memory:
        heads.append("memory")
        for row, result in zip(rows, document.results, strict=True):
            row.append(Text(format_mebibytes(result.peak_memory) if result.peak_memory else ""))
    return table_of(heads, rows)


def _speculation(document: Document) -> Table | None:
    """Return a table of the gains of speculation, or None if it was off. Narrow terminals get fewer columns."""
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


def _shares_of_the_largest(document: Document, name: str) -> list[float]:
    values = [result.figures[name].median if name in result.figures else 0.0 for result in document.results]
    return [value / max(values) if max(values) else 0.0 for value in values]


def bar(share: float, width: int = _BAR) -> str:
    """Return a bar that fills `share` of `width` columns, with a resolution of an eighth of a column."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8) if math.isfinite(share) else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _limits(document: Document) -> Table | None:
    """Return the table with the shares of the machine's limits, or None if they were not measured."""
    found = [
        (name, result.roofline)
        for name, result in zip(result_names(document), document.results, strict=True)
        if result.roofline is not None and (result.roofline.decode_share, result.roofline.prefill_share) != (None, None)
    ]
    if not found:
        return None
    limits = found[0][1]
    with_bars = columns() >= _BARS_FROM
    rows = []
    for name, roofline in found:
        row = [Text(visible_line(name))]
        for share in (roofline.decode_share, roofline.prefill_share):
            row.append(Text("" if share is None else format_percent(share)))
            row += [Text("" if share is None else bar(share), style="green")] if with_bars else []
        rows.append(row)
    bars = [""] if with_bars else []
    return table_of(
        [
            "share of limits",
            f"decode\nof {format_bandwidth(limits.read_bandwidth)} read",
            *bars,
            f"prefill\nof {format_number(limits.multiply_rate / 1e9)} G int8 products/s",
            *bars,
        ],
        rows,
    )


def _all_figures(document: Document) -> Table:
    rows: list[list[str]] = []
    for name, result in zip(result_names(document), document.results, strict=True):
        for metric, figure in result.figures.items():
            words = format_seconds if not metric_of(metric).is_speed else format_number
            tail = ["" if value is None else words(value) for value in (figure.p95, figure.p99)]
            spread = [words(value) for value in (figure.median, figure.mean, figure.stddev)]
            rows.append([visible_line(name), metric_of(metric).words, f"{figure.count:,}", *spread, *tail])
    return table_of(["", "figure", "count", "median", "mean", "stddev", "p95", "p99"], rows, numbers_from=2)


def _energy_lines(document: Document, api_price: float | None) -> list[str]:
    lines = []
    for name, result in zip(result_names(document), document.results, strict=True):
        energy = result.energy
        if energy is None:
            continue
        joules, watts = format_number(energy.joules_per_token), format_number(energy.watts)
        words = f"{name}: {joules} J per token, {watts} W ({energy.source})"
        if energy.cost_per_million is not None:
            words += f", {format_number(energy.cost_per_million)} per million tokens"
            if api_price:
                words += f". {beside_api(energy.cost_per_million, api_price)[1]}"
        lines.append(words)
    return lines
