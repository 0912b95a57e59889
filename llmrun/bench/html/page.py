"""A benchmark as one HTML page that needs nothing else: no script, no font, no picture, no network.

The charts are values here (html/); the templates beside them draw. What a document holds was written by a model's
file, an endpoint or somebody else's machine: all of it is text, is escaped by the templates and has what does not
print made visible. A Content-Security-Policy keeps the browser from loading anything even so.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from llmrun.bench.documents.document import Document
from llmrun.bench.documents.words import verdict_sentence
from llmrun.bench.html.bars import MOST_COLORS, roofline_charts, speed_charts
from llmrun.bench.html.curves import first_token_chart, gap_chart, token_chart
from llmrun.bench.html.tables import (
    COLUMNS,
    configurations,
    explained_metrics,
    fact_words,
    machine_line,
    subject_facts,
)
from llmrun.gguf.problems import shown

_LONGEST_TEXT = 1000  # characters of one name or line; the middle of a longer one is left out


def page(document: Document) -> str:
    """The whole page. It is the same for the same document."""
    environment = Environment(
        loader=PackageLoader("llmrun.bench", "html"),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    roofline = roofline_charts(document)
    return environment.get_template("page.html").render(
        document=document,
        title=_title(document),
        date=_date(document.created),
        machine=machine_line(document.system),
        sentences=[(verdict_sentence(document, verdict), verdict.is_different) for verdict in document.verdicts],
        has_figures=any(result.figures for result in document.results),
        has_colors=1 < len(document.results) <= MOST_COLORS,
        speeds=speed_charts(document),
        distributions=[chart for chart in (gap_chart(document), first_token_chart(document)) if chart],
        tokens=token_chart(document),
        roofline=roofline,
        columns=COLUMNS,
        configurations=configurations(document),
        metrics=explained_metrics(document),
        subjects=subject_facts(document),
        system=fact_words(document.system),
    )


def _printable(value: Any) -> Any:
    """Text as it may stand in a page: no control characters, no marks that turn the writing direction."""
    return shown(value, _LONGEST_TEXT) if type(value) is str else value  # Markup is what the templates made


def _title(document: Document) -> str:
    models = list(dict.fromkeys(result.subject.model for result in document.results))
    if len(models) > 3:
        return f"{models[0]} and {len(models) - 1} other models"
    return " and ".join([", ".join(models[:-1]), models[-1]] if len(models) > 1 else models) or "nothing measured"


def _date(created: str) -> str:
    """`2 October 2026, 14:03 UTC`; as it is written where it is no date."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return created
    moment = moment.astimezone(UTC) if moment.tzinfo else moment
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
