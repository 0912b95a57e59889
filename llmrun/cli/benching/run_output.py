"""Prints a benchmark's document in the chosen format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmrun.base.errors import LlmrunError
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.jobs.bench.documents.document import Document
from llmrun.jobs.bench.documents.words import metric_words


def show(document: Document, kind: str, *, api_price: float | None = None) -> None:
    """Print a document to stdout in the format `kind` (see flags.FORMATS), and failures and notes to stderr."""
    if kind == "table":
        from llmrun.cli.benching.table import show_tables

        show_tables(document, api_price)
    elif kind == "md":
        from llmrun.cli.benching.markdown_table import markdown

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
    if kind == "json":
        out.json_list(rows)
    elif kind == "jsonl":
        for row in rows:
            out.json(row)
    else:
        out.answer(csv_text(rows).removesuffix("\n"))
        out.end_answer()


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
    """Print one line per run, oldest first."""
    if kind != "table":
        from llmrun.jobs.bench.documents.document_json import to_json

        bodies = [to_json(document) for document in documents]
        if kind == "jsonl":
            for body in bodies:
                out.json(body)
        else:
            out.json_list(bodies)
        return
    if not documents:
        out.note("no runs are saved yet: save one with llmrun bench --save")
        return
    from llmrun.cli.benching.table import table_of

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
