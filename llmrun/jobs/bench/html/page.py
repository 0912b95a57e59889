"""Renders a benchmark as one self-contained HTML page, without scripts, fonts, images or network access.

The modules in this folder compute the charts as plain values, and the Jinja templates next to them draw the charts.
The text in a document may come from a model file, an endpoint or another machine, so it is untrusted. The templates
escape all text and make unprintable characters visible. In addition, a Content-Security-Policy prevents the browser
from loading anything.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from llmrun.formats.gguf.problems import shown
from llmrun.jobs.bench.documents.document import Document
from llmrun.jobs.bench.documents.words import answer_sentences, verdict_sentence
from llmrun.jobs.bench.html.bars import MOST_COLORS, roofline_charts, speed_charts
from llmrun.jobs.bench.html.curves import first_token_chart, gap_chart, token_chart
from llmrun.jobs.bench.html.tables import (
    COLUMNS,
    configurations,
    explained_metrics,
    fact_words,
    machine_line,
    subject_facts,
)

_LONGEST_TEXT = 1000  # Names and lines with more characters are shortened in the middle.


def page(document: Document) -> str:
    """Return the HTML page of a document. The same document always yields the same page."""
    environment = Environment(
        loader=PackageLoader("llmrun.jobs.bench", "html"),
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
        sentences=[
            *((verdict_sentence(document, verdict), verdict.is_different) for verdict in document.verdicts),
            *((sentence, False) for sentence in answer_sentences(document)),
        ],
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
    """Make control characters and bidirectional formatting characters visible in a string."""
    return shown(value, _LONGEST_TEXT) if type(value) is str else value  # Only templates create markup.


def _title(document: Document) -> str:
    models = list(dict.fromkeys(result.subject.model for result in document.results))
    if len(models) > 3:
        return f"{models[0]} and {len(models) - 1} other models"
    return " and ".join([", ".join(models[:-1]), models[-1]] if len(models) > 1 else models) or "nothing measured"


def _date(created: str) -> str:
    """Return a date like `2 October 2026, 14:03 UTC`, or the text itself if it is not a date."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return created
    moment = moment.astimezone(UTC) if moment.tzinfo else moment
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"
