"""Tests that results of other programs and earlier days are read, matched and judged, or refused in one line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.jobs.bench.documents.document import to_json
from llmrun.jobs.bench.documents.foreign import (
    Comparison,
    Series,
    compare,
    parse_limit,
    read_series,
    series_of,
    worst_loss,
)
from llmrun.jobs.bench.documents.rows import csv_text, llama_bench_rows
from tests.support.bench.stored_documents import document, result

REAL = Path(__file__).parents[3] / "data" / "llama-bench.json"


def series(test: str = "tg128", *samples: float, backend: str = "cpu", threads: int = 2) -> Series:
    return Series(test, "llama 135M Q4_1", backend, threads, "f16", samples or (60.0, 61.0))


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_the_real_llama_bench_is_read() -> None:
    found = read_series(REAL)
    assert [one.test for one in found] == ["pp64", "tg16", "pp64 @ d128", "tg16 @ d128"]
    assert found[0].setting == ("llama 256M Q4_1", "CPU", 2, "f16", "off")
    assert found[0].samples == (331.332, 375.87, 361.7)


def test_its_lines_are_read_like_its_list(tmp_path: Path) -> None:
    rows = json.loads(REAL.read_text("utf-8"))
    path = write(tmp_path / "rows.jsonl", "\n".join(json.dumps(row) for row in rows) + "\n")
    assert read_series(path) == read_series(REAL)
    assert read_series(write(tmp_path / "row.jsonl", json.dumps(rows[0]) + "\n")) == read_series(REAL)[:1]
    rows[0]["model_filename"] = "a\u2028b"  # a line break to str.splitlines, but not in JSON
    path = write(tmp_path / "rows.jsonl", "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_series(path) == read_series(REAL)


def test_its_csv_tells_the_means(tmp_path: Path) -> None:
    rows = json.loads(REAL.read_text("utf-8"))
    rows[0]["model_filename"] = 'a "name",\nof two lines'
    told = [{key: value for key, value in row.items() if not key.startswith("samples")} for row in rows]
    found = read_series(write(tmp_path / "rows.csv", csv_text(told)))
    assert [one.test for one in found] == [one.test for one in read_series(REAL)]
    assert [one.samples for one in found] == [(row["avg_ts"],) for row in rows]
    assert found[0].setting == read_series(REAL)[0].setting


def test_our_documents_rows_and_history_are_read_alike(tmp_path: Path) -> None:
    made = document()
    expected = series_of(made)
    assert [(one.test, one.backend, one.samples) for one in expected] == [
        ("pp512 @ d100", "cpu", (600.0, 620.0, 610.0)),
        ("tg128 @ d612", "cpu", (60.0, 62.0, 61.0)),
        ("pp512 @ d100", "llama", (500.0, 510.0, 520.0)),
        ("tg128 @ d612", "llama", (50.0, 51.0, 52.0)),
    ]
    assert read_series(write(tmp_path / "document.json", json.dumps(to_json(made), indent=2))) == expected
    assert read_series(write(tmp_path / "rows.json", json.dumps(llama_bench_rows(made)))) == expected
    line = json.dumps(to_json(made)) + "\n"
    assert read_series(write(tmp_path / "history.jsonl", line + line)) == expected * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "no results found"),
        ("| model | size |", "not valid JSON"),
        ("[[1]]", "row 1: not a result of llmrun bench or llama-bench"),
        ('{"a": 1}', "not a result of llmrun bench or llama-bench"),
        ('{"n_prompt": 1}\n{"n_prompt": }', "line 2: not valid JSON"),
        ('{"format": 1}', "identity: missing"),
        ('[{"n_prompt": "many"}]', "row 1: n_prompt: not a valid count"),
        ('[{"n_prompt": 1e300}]', "row 1: n_prompt: not a valid count"),
        ('[{"n_prompt": 1, "model_type": 7}]', "row 1: model_type: not text"),
        ('[{"n_prompt": 1, "samples_ts": {"a": 1}}]', "row 1: samples_ts: not a list"),
        ('[{"n_prompt": 1, "samples_ts": [1, 0]}]', "row 1: speed: 0 is not a positive number of tokens per second"),
        ('[{"n_prompt": 1, "samples_ts": [NaN]}]', "NaN is not a finite number"),
        ('[{"n_prompt": 1, "avg_ts": true}]', "row 1: speed: True is not a positive number of tokens per second"),
        ('build_commit,n_prompt,avg_ts\n"a","1","fast"\n', "line 2: speed: 'fast' is not a positive number"),
        ('build_commit,n_prompt\n"a"b,1\n', "not valid CSV"),
    ],
)
def test_what_is_no_result_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "other.json", text)
    with pytest.raises(UsageError) as caught:
        read_series(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


ROW = json.loads(REAL.read_text("utf-8"))[0] | {"workload_kind": "chat", "concurrency": 2}


@given(
    st.sampled_from(sorted(ROW)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_leaves=6,
    ),
)
def test_a_row_with_any_value_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps([ROW | {key: value}]), "utf-8")
    try:
        (found,) = read_series(path)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 (either outcome is right)
    else:
        assert found.test.isprintable()
        assert all(speed > 0 for speed in found.samples)


def test_a_document_of_impossible_speeds_is_refused() -> None:
    with pytest.raises(UsageError, match=r"speed: 0\.0 is not"):
        series_of(document(result(speeds=(0.0,))))


def test_equal_settings_are_compared_whatever_their_order() -> None:
    a = [series("pp512", 10.0, 10.0), series("tg128", 5.0, 5.0), series("tg128", 4.0, 4.0, threads=1)]
    b = [series("tg128", 8.0, 8.0, threads=1), series("tg128", 6.0, 6.0), series("tg256")]
    done = compare(a, b)
    assert [(one.a, one.b) for one in done.comparisons] == [(a[1], b[1]), (a[2], b[0])]
    assert [one.ratio for one in done.comparisons] == pytest.approx([1.2, 2.0])
    assert (done.comparisons[0].low, done.comparisons[0].high) == (0.0, math.inf)
    assert (done.only_a, done.only_b) == ((a[0],), (b[2],))
    assert [one.note for one in done.comparisons] == ["", ""]


def test_the_only_ones_of_a_test_are_compared_though_they_differ() -> None:
    theirs = Series("tg128", "llama 256M Q4_1", "CPU", 4, "f16", (30.0, 30.0))
    (one,) = compare([series("tg128", 60.0, 60.0)], [theirs]).comparisons
    assert one.ratio == pytest.approx(0.5)
    assert one.note == "differs in model llama 135M Q4_1 / llama 256M Q4_1, backend cpu / CPU, threads 2 / 4"


def test_runs_with_and_without_speculation_are_not_alike() -> None:
    plain, drafting = series(), replace(series(), speculate="auto")
    (found,) = compare([plain], [drafting]).comparisons
    assert found.note == "differs in speculation off / auto"
    pairs = compare([plain, drafting], [drafting, plain]).comparisons
    assert [(one.a.speculate, one.b.speculate) for one in pairs] == [("off", "off"), ("auto", "auto")]


def test_two_of_a_test_are_not_guessed_at() -> None:
    a = [series("tg128"), series("tg128", backend="llama")]
    done = compare(a, [series("tg128", threads=8)])
    assert done.comparisons == ()
    assert done.only_a == tuple(a)


def test_repeated_settings_are_paired_in_order() -> None:
    a, b = [series("tg1", 1.0, 1.0), series("tg1", 2.0, 2.0)], [series("tg1", 1.0, 1.0), series("tg1", 4.0, 4.0)]
    assert [one.ratio for one in compare(a, b).comparisons] == pytest.approx([1.0, 2.0])


def test_a_test_that_failed_has_no_partner() -> None:
    failed = Series("tg128", "llama 135M Q4_1", "cpu", 2, "f16", ())
    done = compare([failed], [series()])
    assert (done.comparisons, done.only_a, done.only_b) == ((), (failed,), (series(),))


def test_a_single_sample_has_no_interval() -> None:
    (one,) = compare([series("tg128", 60.0)], [series("tg128", 54.0, 54.0)]).comparisons
    assert one.ratio == pytest.approx(0.9)
    assert one.low is one.high is None


def compared(ratio: float, low: float | None, high: float | None) -> Comparison:
    return Comparison(series(), series(), ratio, low, high)


@pytest.mark.parametrize(
    ("comparison", "sentence"),
    [
        (compared(0.93, 0.90, 0.96), "tg128: 7.0% slower, limit 5.0% (between 4.0% and 10.0%)"),
        (compared(0.93, 0.80, 1.04), None),  # within the noise
        (compared(0.96, 0.95, 0.97), None),  # significant, but within the limit
        (compared(1.10, 1.05, 1.15), None),
        (
            compared(0.90, None, None),
            "tg128: 10.0% slower, limit 5.0% (one side has a single sample, so the noise is unknown)",
        ),
        (compared(0.97, None, None), None),
    ],
)
def test_a_loss_counts_above_the_limit_and_outside_the_noise(comparison: Comparison, sentence: str | None) -> None:
    loss = worst_loss([comparison], 0.05)
    assert loss == sentence


def test_the_largest_loss_is_the_worst() -> None:
    loss = worst_loss([compared(0.9, 0.8, 0.95), compared(0.7, 0.6, 0.8), compared(0.8, 0.7, 0.9)], 0.05)
    assert loss is not None
    assert loss.startswith("tg128: 30.0% slower")
    assert worst_loss([], 0.05) is None


@pytest.mark.parametrize(
    ("text", "limit"), [("5%", 0.05), ("0.05", 0.05), (" 2.5 % ", 0.025), ("0", 0.0), ("0%", 0.0), ("99.9%", 0.999)]
)
def test_a_limit_is_a_percentage_or_a_share(text: str, limit: float) -> None:
    assert parse_limit(text) == pytest.approx(limit)


@pytest.mark.parametrize("text", ["", "%", "5", "100%", "1", "-1%", "nan", "inf%", "five", "5%%"])
def test_a_limit_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-above"):
        parse_limit(text)
