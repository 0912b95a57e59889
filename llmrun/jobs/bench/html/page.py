"""Renders a benchmark as one self-contained HTML page, without scripts, fonts, images or network access.

This file computes the tables, and charts.py computes the charts, both as plain values. The Jinja templates in this
folder draw the charts. The text in a document may come from a model file, an endpoint or another machine, so it is
untrusted. The templates escape all text and make unprintable characters visible. In addition, a Content-Security-Policy
prevents the browser from loading any resources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from llmrun.base.amounts import counted, format_mebibytes, format_number, format_percent, format_seconds
from llmrun.base.errors import shown
from llmrun.jobs.bench.documents.document import (
    METRICS,
    Distribution,
    Document,
    Failure,
    Result,
    answer_sentences,
    metric_number,
    metric_of,
    metric_unit,
    result_names,
    verdict_sentence,
)
from llmrun.jobs.bench.html.charts import (
    MOST_COLORS,
    color_of,
    gap_chart,
    roofline_charts,
    speed_charts,
)


@dataclass(frozen=True, slots=True)
class FigureRow:
    """The statistics of one metric of a configuration. A cell is empty if its statistic requires more values."""

    metric: str
    unit: str
    explanation: str
    count: str
    cells: tuple[str, ...]  # in the order of COLUMNS


COLUMNS = ("median", "mean", "stddev", "p95", "p99")


@dataclass(frozen=True, slots=True)
class ConfigurationRow:
    """One configuration with its settings and metrics, or its failure."""

    name: str
    color: int
    facts: tuple[str, ...]
    rows: tuple[FigureRow, ...]
    failure: Failure | None


def configurations(document: Document) -> list[ConfigurationRow]:
    """Return one row per configuration."""
    names = result_names(document)
    return [
        ConfigurationRow(names[index], color_of(document, index), _facts(one), _rows(one), one.failure)
        for index, one in enumerate(document.results)
    ]


def _facts(result: Result) -> tuple[str, ...]:
    subject, workload = result.subject, result.workload
    repetitions = max(map(len, result.samples.values()), default=0)
    facts = [subject.model, workload.label, subject.endpoint or subject.backend]
    if subject.threads:
        facts.append(counted(subject.threads, "thread"))
    if subject.gpu_layers:
        facts.append(f"GPU layers {subject.gpu_layers}")
    if subject.kv_type:
        facts.append(f"KV cache {subject.kv_type}")
    facts += _draft_facts(result)
    if workload.depth:
        facts.append(f"{workload.depth:,} tokens already in the cache")
    if workload.concurrency > 1:
        facts.append(f"{workload.concurrency} concurrent requests")
    if repetitions:
        facts.append(counted(repetitions, "repetition"))
    if result.peak_memory:
        facts.append(f"peak memory {format_mebibytes(result.peak_memory)}")
    return tuple(fact for fact in facts if fact)


def _draft_facts(result: Result) -> list[str]:
    totals = result.totals
    if totals is None or not totals.drafted_tokens or totals.tokens_per_step is None:
        return []
    accepted = format_percent(totals.accepted_tokens / totals.drafted_tokens)
    return [
        f"speculation {result.subject.speculate}",
        f"{totals.tokens_per_step:.2f} tokens per step, {accepted} of the drafts accepted",
    ]


def _rows(result: Result) -> tuple[FigureRow, ...]:
    known = [name for name in METRICS if name in result.figures]
    return tuple(_row(name, result.figures[name]) for name in [*known, *sorted(set(result.figures) - set(known))])


def _row(name: str, figure: Distribution) -> FigureRow:
    metric = metric_of(name)
    values = (figure.median, figure.mean, figure.stddev, figure.p95, figure.p99)
    cells = tuple("" if value is None else metric_number(name, value) for value in values)
    return FigureRow(metric.words, metric_unit(name), metric.explanation, f"{figure.count:,}", cells)


def explained_metrics(document: Document) -> list[tuple[str, str]]:
    """Return the name and explanation of each metric in the document."""
    used = {name for result in document.results for name in result.figures}
    return [(metric.words, metric.explanation) for metric in METRICS.values() if metric.name in used]


def subject_facts(document: Document) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each distinct subject of the benchmark with its metadata as (name, value) pairs."""
    found: dict[str, list[tuple[str, str]]] = {}
    for result in document.results:
        subject = result.subject
        if subject.facts:
            name = subject.name if subject.name == subject.model else f"{subject.name} · {subject.model}"
            found.setdefault(name, fact_words(subject.facts))
    return list(found.items())


def fact_words(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Format metadata as (name, value) pairs for display. Entries with unknown names are included."""
    return [(str(name).replace("_", " "), _value_words(str(name), value)) for name, value in facts.items()]


def _value_words(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "unknown"
    if isinstance(value, int | float):
        return _number_fact(name.lower(), value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_value_words(str(key), each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_value_words(name, each) for each in value) or "none"
    return str(value)


def _number_fact(name: str, value: float) -> str:
    """Format a number in the unit that its name implies: "bytes" for sizes, "_s" or "seconds" for times."""
    if isinstance(value, int) and abs(value) >= 2**63:  # Such numbers may overflow a float.
        return f"{value:,}"
    if name.endswith("bytes") or name == "memory_free":
        return format_mebibytes(value)
    if name.endswith(("_s", "seconds")):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def machine_line(system: Mapping[str, Any]) -> str:
    """Return a one-line summary of the machine. The page also has a table with all details."""
    words = [str(system["cpu"])] if system.get("cpu") else []
    cores = system.get("cores_physical")
    if isinstance(cores, int) and cores:
        words.append(counted(cores, "core"))
    if memory := system.get("memory_bytes"):
        words.append(_value_words("memory_bytes", memory))
    words += [_value_words(name, system[name]) for name in ("gpus", "os") if system.get(name)]
    return " · ".join(words)


_LONGEST_TEXT = 1000  # Names and lines longer than this are shortened in the middle.


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
        gaps=gap_chart(document),
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
