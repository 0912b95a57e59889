"""Reads series of speeds from results files, and compares the series of two files.

A file may contain documents or rows written by `llmrun bench`, or the output of llama-bench (`-o json`, `jsonl` or
`csv`).
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.jobs.bench.documents import document as document_module
from llmrun.jobs.bench.documents.document import LARGEST, Document, from_json
from llmrun.jobs.bench.documents.rows import llama_bench_rows
from llmrun.jobs.bench.statistics import unpaired_ratio

_SPEEDS = (1e-9, 1e15)  # The range of valid speeds in tokens per second.


@dataclass(frozen=True, slots=True)
class Series:
    """The speeds of one test in tokens per second, one per repetition. `samples` is empty if the test failed.

    test     for example "pp512", "tg128 @ d512" or "chat: long document, decode"
    backend  for example "cpu" or "llama"; in llama-bench files, "CPU" or "CUDA"
    """

    test: str
    model: str
    backend: str
    threads: int
    kv_type: str
    samples: tuple[float, ...]
    speculate: str = "off"  # auto, off or the name of the draft model

    @property
    def setting(self) -> tuple[str, str, int, str, str]:
        """The settings that must be equal for a like-for-like comparison."""
        return self.model, self.backend, self.threads, self.kv_type, self.speculate


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two series.

    ratio      the speed of `b` divided by the speed of `a`; above 1 means that `b` is faster
    low, high  the confidence interval of the ratio; None if a side has a single sample
    note       the settings in which the two series differ; empty if the settings are equal
    """

    a: Series
    b: Series
    ratio: float
    low: float | None
    high: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparisons between two files, and the series without a counterpart."""

    comparisons: tuple[Comparison, ...]
    only_a: tuple[Series, ...]
    only_b: tuple[Series, ...]


def read_series(path: Path) -> list[Series]:
    """Read all series of a file. Raises UsageError, which names the file and the invalid line or key."""
    text = document_module.read_text(path)
    found = [series for value, where in _values(text, f"results: {path}") for series in _series_of_value(value, where)]
    if not found:
        raise UsageError(f"results: {path}: no results found")
    return found


def series_of(document: Document) -> list[Series]:
    """Return all series of a document. Raises UsageError if a speed is implausible."""
    rows = llama_bench_rows(document)
    return [_series(row, f"results: {document.identity}: row {number}") for number, row in enumerate(rows, 1)]


def _values(text: str, where: str) -> Iterator[tuple[object, str]]:
    """Yield the documents and rows of a file, each with a description of its location."""
    if text.startswith("build_commit,"):
        yield from _csv_rows(text, where)
        return
    lines = text.strip().split("\n")
    if len(lines) > 1 and lines[0].startswith("{") and lines[0].rstrip().endswith("}"):
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield document_module.parse(line, f"{where}: line {number}"), f"{where}: line {number}"
        return
    value = document_module.parse(text, where)
    if not isinstance(value, list):
        yield value, where
        return
    for number, row in enumerate(value, 1):
        yield row, f"{where}: row {number}"


def _csv_rows(text: str, where: str) -> Iterator[tuple[object, str]]:
    """Yield the rows of a CSV file. Numbers remain text, because _integer and _speed also parse text."""
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text, newline=""), strict=True), 2):
            yield (
                {key: value for key, value in row.items() if key not in ("samples_ns", "samples_ts")},
                (f"{where}: line {number}"),
            )
    except csv.Error as error:
        raise UsageError(f"{where}: not valid CSV: {error}") from error


def _series_of_value(value: object, where: str) -> list[Series]:
    if isinstance(value, dict) and "format" in value:
        return series_of(from_json(value, where))
    if not isinstance(value, dict) or "n_prompt" not in value:
        raise UsageError(
            f"{where}: not a result of llmrun bench or llama-bench",
            hint="write results with `llmrun bench -o json` or `llama-bench -o json`",
        )
    return [_series(value, where)]


def _series(row: Mapping[Any, Any], where: str) -> Series:
    keys, values = _text(row, "type_k", where), _text(row, "type_v", where)
    return Series(
        test=_test_name(row, where),
        model=_text(row, "model_type", where),
        backend=_text(row, "backend", where) or _text(row, "backends", where),
        threads=_integer(row, "n_threads", where),
        kv_type=keys if keys == values else f"{keys}:{values}",
        samples=_samples(row, where),
        speculate=_text(row, "speculate", where) or "off",
    )


def _test_name(row: Mapping[Any, Any], where: str) -> str:
    """Return the name of a test as in llama-bench's own table."""
    prompt, generate, depth = (_integer(row, key, where) for key in ("n_prompt", "n_gen", "n_depth"))
    at_once = max(1, _integer(row, "concurrency", where))
    suffix = f" × {at_once}" if at_once > 1 else ""
    if _text(row, "workload_kind", where) not in ("", "synthetic"):
        phase = _text(row, "phase", where)
        return _text(row, "workload", where) + (f", {phase}" if phase else "") + suffix
    parts = [f"{name}{count}" for name, count in (("pp", prompt), ("tg", generate)) if count]
    return ("+".join(parts) or "nothing") + (f" @ d{depth}" if depth else "") + suffix


def _samples(row: Mapping[Any, Any], where: str) -> tuple[float, ...]:
    """Return the samples of a row, or the mean as a single sample if the row has no samples, as in CSV files."""
    listed = row.get("samples_ts") or []
    if not isinstance(listed, list):
        raise UsageError(f"{where}: samples_ts: not a list")
    if not listed and row.get("avg_ts") not in (None, ""):
        listed = [row["avg_ts"]]
    return tuple(_speed(value, where) for value in listed)


def _speed(value: object, where: str) -> float:
    try:
        speed = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        speed = math.nan
    if not _SPEEDS[0] <= speed <= _SPEEDS[1]:
        raise UsageError(f"{where}: speed: {ascii(value)[:40]} is not a positive number of tokens per second")
    return speed


def _text(row: Mapping[Any, Any], key: str, where: str) -> str:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{where}: {key}: not text")
    return "".join(character if character.isprintable() else "?" for character in value or "")


def _integer(row: Mapping[Any, Any], key: str, where: str) -> int:
    """Return a count, or 0 if the field is missing, as in the output of older versions of llama-bench."""
    value = row.get(key)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if value in (None, ""):
        return 0
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise UsageError(f"{where}: {key}: not a valid count")
    return value


def compare(a: Sequence[Series], b: Sequence[Series]) -> Compared:
    """Compare each series of `a` with the series of `b` that ran the same test with the same settings.

    A test that each side ran exactly once is compared even if the settings differ, and a note lists the differences.
    """
    left, right = [one for one in a if one.samples], [one for one in b if one.samples]
    pairs = _same_settings(left, right)
    counts = Counter(one.test for one in left), Counter(one.test for one in right)
    matched = {id(one) for pair in pairs for one in pair}
    for one in left:
        if id(one) not in matched and counts[0][one.test] == counts[1][one.test] == 1:
            pairs.append((one, next(other for other in right if other.test == one.test)))
    matched = {id(one) for pair in pairs for one in pair}
    order = {id(one): index for index, one in enumerate(a)}
    pairs.sort(key=lambda pair: order[id(pair[0])])
    return Compared(
        tuple(_compared(one, other) for one, other in pairs),
        tuple(one for one in a if id(one) not in matched),
        tuple(one for one in b if id(one) not in matched),
    )


def _same_settings(left: Sequence[Series], right: Sequence[Series]) -> list[tuple[Series, Series]]:
    """Pair the series with the same test and settings. Repeated series are paired in file order."""
    waiting: defaultdict[object, list[Series]] = defaultdict(list)
    for other in right:
        waiting[other.test, other.setting].append(other)
    pairs = []
    for one in left:
        found = waiting[one.test, one.setting]
        if found:
            pairs.append((one, found.pop(0)))
    return pairs


def _compared(a: Series, b: Series) -> Comparison:
    names = ("model", "backend", "threads", "KV type", "speculation")
    differing = [
        f"{name} {one or 'unknown'} / {other or 'unknown'}"
        for name, one, other in zip(names, a.setting, b.setting, strict=True)
        if one != other
    ]
    note = f"differs in {', '.join(differing)}" if differing else ""
    if min(len(a.samples), len(b.samples)) < 2:
        bare = (sum(b.samples) / len(b.samples)) / (sum(a.samples) / len(a.samples))
        return Comparison(a, b, bare, None, None, note)
    ratio, low, high = unpaired_ratio(b.samples, a.samples, is_speed=True)
    return Comparison(a, b, ratio, low, high, note)


def parse_limit(text: str) -> float:
    """Parse the slowdown that is allowed for a test, such as `5%` or `0.05`. Raises UsageError."""
    number = text.strip().removesuffix("%")
    try:
        limit = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < 1:
        raise UsageError(
            f"--fail-above: {text!r} is not a percentage below 100% or a share below 1",
            hint="for example --fail-above 5%",
        )
    return limit


def worst_loss(comparisons: Sequence[Comparison], limit: float) -> str | None:
    """Describe the largest loss above `limit`, or return None.

    A loss whose interval includes 1 is within the noise and does not count. If a side has a single sample and thus no
    interval, the ratio itself counts, and the sentence mentions the single sample.
    """
    lost = [one for one in comparisons if one.ratio < 1 - limit and (one.high is None or one.high < 1)]
    if not lost:
        return None
    worst = min(lost, key=lambda one: one.ratio)
    lost_words = f"{worst.b.test}: {1 - worst.ratio:.1%} slower, limit {limit:.1%}"
    if worst.low is None or worst.high is None:
        return f"{lost_words} (one side has a single sample, so the noise is unknown)"
    return f"{lost_words} (between {1 - worst.high:.1%} and {1 - worst.low:.1%})"
