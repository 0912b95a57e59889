"""Implements `bench compare`, which compares two runs and can fail if the second run is slower."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from llmrun.base.amounts import format_number
from llmrun.base.errors import UsageError
from llmrun.cli.benching.run_output import table_of
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.jobs.bench.documents.foreign import (
    Compared,
    Comparison,
    Series,
    compare,
    parse_limit,
    read_series,
    series_of,
    worst_loss,
)
from llmrun.jobs.bench.documents.history import find, load_history

_LOST = 1
_NO_INTERVAL = "one sample"
_TOO_FEW = "too few samples"
# On a shared host, the speed of one engine differed by 10 % between sessions minutes apart (median of 40 comparisons).
_CAVEAT = (
    "the intervals reflect only the noise within each run, not changes of the machine between runs: for a reliable"
    " comparison, measure both in one run"
)


def compare_runs(before: str, after: str, fail_above: str | None, *, as_json: bool) -> int:
    """Print the ratios. Return 1 if a test slowed down by more than `fail_above`, or else 0. Raises UsageError."""
    limit = None if fail_above is None else parse_limit(fail_above)
    found = compare(_series(before), _series(after))
    if not found.comparisons:
        raise UsageError(
            f"nothing to compare: {before} and {after} have no test in common",
            hint=f"{before} has {_tests(found.only_a)}; {after} has {_tests(found.only_b)}",
        )
    if as_json:
        out.json_list([_body(one) for one in found.comparisons])
    else:
        _show(found)
    loss = None if limit is None else worst_loss(found.comparisons, limit)
    if loss is None:
        return 0
    out.error(f"slower than allowed: {loss}")
    return _LOST


def _series(reference: str) -> list[Series]:
    """Read the series in a results file or in a run of the history."""
    path = Path(reference).expanduser()
    if path.suffix or path.exists() or len(path.parts) > 1:
        return read_series(path)
    return series_of(find(reference, load_history().documents))


def _tests(series: tuple[Series, ...]) -> str:
    return ", ".join(dict.fromkeys(one.test for one in series)) or "none"


def _show(found: Compared) -> None:
    rows: list[list[str | Text]] = [
        [
            visible_line(one.b.test),
            visible_line(f"{one.b.model}, {one.b.backend}"),
            _speed(one.a),
            _speed(one.b),
            Text(f"{one.ratio:.2f}x", style=_style(one)),
            _interval(one),
        ]
        for one in found.comparisons
    ]
    out.picture(table_of(["test", "model", "before", "after", "ratio", "99%"], rows, numbers_from=2))
    out.note(_CAVEAT)
    for one in found.comparisons:
        if one.note:
            out.note(f"{one.b.test}: {one.note}")
    for name, series in (("BEFORE", found.only_a), ("AFTER", found.only_b)):
        if series:
            out.note(f"only in {name}: {_tests(series)}")


def _speed(series: Series) -> str:
    return f"{format_number(sum(series.samples) / len(series.samples))} tok/s"


def _style(one: Comparison) -> str:
    if one.low is None or one.high is None or one.low <= 1 <= one.high:
        return ""
    return "green" if one.ratio > 1 else "red"


def _interval(one: Comparison) -> str:
    if one.low is None or one.high is None:
        return _NO_INTERVAL
    if one.low == 0:
        return _TOO_FEW
    shown = f"{one.low:.2f} to {one.high:.2f}"
    return f"{shown}, no significant difference" if one.low <= 1 <= one.high else shown


def _body(one: Comparison) -> dict[str, Any]:
    """Return a comparison as a JSON object. The ends of an infinite interval are null, because JSON has no infinity."""
    is_known = one.low is not None and one.low > 0
    return {
        "test": one.b.test,
        "ratio": one.ratio,
        "low": one.low if is_known else None,
        "high": one.high if is_known else None,
        "note": one.note,
        "before": asdict(one.a),
        "after": asdict(one.b),
    }
