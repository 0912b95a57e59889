"""Formats a benchmark as a Markdown table for an issue or a README."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.base.amounts import format_mebibytes, format_percent
from llmrun.cli.benching.summary import draft_words, figure_words, head_words, shown_metrics
from llmrun.cli.console.terminal import visible_line
from llmrun.jobs.bench.documents.document import Document, Result
from llmrun.jobs.bench.documents.words import answer_sentences, result_names, verdict_sentence

# Unescaped, these characters would end a cell or start markup or HTML.
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
            *_machine(result),
        ]
        for name, result in zip(result_names(document), document.results, strict=True)
    ]
    lines = table_lines(heads, rows, numbers_from=2)
    said = [*(verdict_sentence(document, verdict) for verdict in document.verdicts), *answer_sentences(document)]
    sentences = [f"- {escaped(sentence)}" for sentence in said]
    return "\n".join([*lines, *([""] if sentences else []), *sentences])


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int) -> list[str]:
    """Return the lines of a table. Columns from `numbers_from` on are right-aligned. Cells must have been escaped."""
    rule = ["---" if number < numbers_from else "---:" for number in range(len(heads))]
    return [_line(heads), _line(rule), *map(_line, rows)]


def escaped(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return visible_line(text).translate(_ESCAPED)


def _machine(result: Result) -> list[str]:
    roofline = result.roofline
    shares = (None, None) if roofline is None else (roofline.decode_share, roofline.prefill_share)
    memory = format_mebibytes(result.peak_memory) if result.peak_memory else ""
    return [memory, *("" if share is None else format_percent(share) for share in shares)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
