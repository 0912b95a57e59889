"""Tests that rows have llama-bench's keys, types and consistent numbers, plus keys of our own."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from llmrun.jobs.bench.documents.document import AnswerCheck, Document, Failure, Result, Verdict, WorkloadFacts
from llmrun.jobs.bench.documents.rows import csv_text, llama_bench_rows
from tests.support.bench.stored_documents import distribution, document, documents, result, subject

REAL = json.loads((Path(__file__).parents[3] / "data" / "llama-bench.json").read_text("utf-8"))


def test_a_row_has_every_key_of_llama_bench_with_a_value_of_its_type() -> None:
    for row in llama_bench_rows(document()):
        for key, theirs in REAL[0].items():
            assert key in row
            allowed = (float, int) if isinstance(theirs, float) else (type(theirs),)
            assert type(row[key]) in allowed, key


def test_a_configuration_is_a_row_for_its_prefill_and_one_for_its_decode() -> None:
    rows = llama_bench_rows(document(result()))
    assert [(row["phase"], row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows] == [
        ("prefill", 512, 0, 100),
        ("decode", 0, 128, 612),
    ]
    assert [row["samples_ts"] for row in rows] == [[600.0, 620.0, 610.0], [60.0, 62.0, 61.0]]


def _agrees(row: dict[str, Any]) -> None:
    """Assert that means and deviations follow from the samples, and times from tokens and speed, as in llama-bench."""
    tokens = row["n_prompt"] + row["n_gen"]
    for time, speed in zip(row["samples_ns"], row["samples_ts"], strict=True):
        assert speed == pytest.approx(1e9 * tokens / time, rel=1e-5)
    for unit in ("ns", "ts"):
        assert row[f"avg_{unit}"] == pytest.approx(statistics.fmean(row[f"samples_{unit}"]), rel=1e-5)
        deviation = statistics.stdev(row[f"samples_{unit}"])
        assert row[f"stddev_{unit}"] == pytest.approx(deviation, rel=1e-3, abs=1)


def test_means_times_and_speeds_agree_as_in_the_real_ones() -> None:
    for row in [*REAL, *llama_bench_rows(document())]:
        _agrees(row)


def test_a_row_tells_the_figures_in_the_words_of_vllm() -> None:
    row = llama_bench_rows(document())[0]
    expected = {
        "mean_ttft_ms": 900.0,
        "median_ttft_ms": 800.0,
        "std_ttft_ms": 100.0,
        "p95_ttft_ms": None,
        "p99_itl_ms": 30.0,
        "mean_tpot_ms": 16.0,
        "mean_e2el_ms": 3000.0,
        "completed": 3,
        "total_input_tokens": 1536,
        "total_output_tokens": 384,
        "duration": 9.6,
        "request_throughput": 3 / 9.6,
        "output_throughput": 40.0,
        "total_token_throughput": 200.0,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_a_row_tells_what_is_ours() -> None:
    rows = llama_bench_rows(document())
    expected = {
        "configuration": "llama",
        "model_sha256": "ab" * 32,
        "peak_memory": 300 << 20,
        "roofline_decode_share": 0.8,
        "roofline_prefill_share": None,
        "verdict_against": "cpu",
        "verdict_ratio": 0.836,
        "verdict_is_different": True,
        "system_load_average": [0.1, 0.2, 0.3],
        "system_governor": None,
        "cpu_info": "AMD EPYC",
        "model_type": "llama 135M Q4_1",
        "model_filename": "smollm2.gguf",
        "run": document().identity,
    }
    assert {key: rows[3][key] for key in expected} == expected
    assert rows[2]["verdict_ratio"] is None  # prefill has no verdict
    assert rows[0]["verdict_against"] is None


def test_what_a_backend_told_replaces_what_llama_bench_takes_for_granted() -> None:
    of = result()
    facts = {**of.subject.facts, "flash_attn": 1, "n_batch": 2048, "backends": "CUDA"}
    changed = dataclasses.replace(of, subject=dataclasses.replace(of.subject, facts=facts, gpu_layers="20/33"))
    row = llama_bench_rows(document(changed))[0]
    assert (row["flash_attn"], row["n_batch"], row["backends"], row["n_gpu_layers"]) == (1, 2048, "CUDA", 20)


def test_a_workload_of_many_lengths_has_their_means_and_says_what_it_is() -> None:
    chat = dataclasses.replace(result(), workload=WorkloadFacts("chat", "chat: long document", concurrency=2))
    prefill, decode = llama_bench_rows(document(chat))
    assert (prefill["n_prompt"], decode["n_gen"], decode["n_depth"]) == (512, 128, 512)
    assert (prefill["workload"], prefill["workload_kind"], prefill["concurrency"]) == ("chat: long document", "chat", 2)
    unknown = llama_bench_rows(document(dataclasses.replace(chat, totals=None)))[0]
    assert (unknown["n_prompt"], unknown["samples_ns"], unknown["avg_ns"], unknown["avg_ts"]) == (0, [], None, 610.0)


def test_a_configuration_that_failed_is_a_row_that_says_so() -> None:
    failed = Result(subject(), WorkloadFacts("synthetic", "512 in", 512, 128), failure=Failure("too big", "", 7))
    rows = llama_bench_rows(document(result(), failed))
    assert len(rows) == 3
    assert (rows[2]["failure"], rows[2]["phase"], rows[2]["avg_ts"], rows[2]["samples_ts"]) == (
        "too big",
        None,
        None,
        [],
    )
    assert set(rows[2]) == set(rows[0])


def test_a_figure_without_samples_is_told_by_its_mean() -> None:
    only = Result(subject(), WorkloadFacts("synthetic", "8 in", 8, 0), figures={"prefill": distribution(100.0)})
    (row,) = llama_bench_rows(document(only))
    assert (row["avg_ts"], row["avg_ns"], row["samples_ts"]) == (100.0, 80_000_000, [])


@pytest.mark.push
@given(documents())
def test_any_document_has_rows_that_are_strict_json_and_csv(made: Document) -> None:
    rows = llama_bench_rows(made)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert csv_text(rows)


def test_csv_quotes_every_field_as_llama_bench_does() -> None:
    of = result()
    named = dataclasses.replace(of, subject=dataclasses.replace(of.subject, name='a "b", c'))
    text = csv_text(llama_bench_rows(document(named)))
    header, *lines = text.splitlines()
    assert header.startswith("build_commit,build_number,cpu_info,gpu_info,backends,model_filename,model_type,")
    assert all(line.startswith('"llmrun-","0","AMD EPYC",') for line in lines)
    (prefill, _) = csv.DictReader(io.StringIO(text), strict=True)
    assert prefill["configuration"] == 'a "b", c'
    assert (prefill["repack"], prefill["embeddings"], prefill["verdict_ratio"]) == ("1", "0", "")
    assert json.loads(prefill["samples_ts"]) == [600.0, 620.0, 610.0]
    assert csv_text([]) == ""


def test_a_row_tells_steps_drafts_and_the_check_of_the_answers() -> None:
    off, auto = result(), result()
    assert auto.totals is not None
    totals = dataclasses.replace(auto.totals, steps=96, drafted_tokens=400, accepted_tokens=288)
    subject_of = dataclasses.replace(auto.subject, speculate="auto")
    made = document(off, dataclasses.replace(auto, totals=totals, subject=subject_of))
    made = dataclasses.replace(made, answer_checks=(AnswerCheck(1, 0, answers=12, different=0, is_exact=True),))
    before, *_, row = llama_bench_rows(made)
    names = ("speculate", "tokens_per_step", "drafted_tokens", "accepted_tokens")
    assert [row[name] for name in names] == ["auto", 4.0, 400, 288]
    assert (row["answers_compared"], row["answers_different"]) == (12, 0)
    assert [before[name] for name in names] == [None, None, 0, 0]


def test_a_verdict_of_a_later_workload_names_its_own_baseline() -> None:
    made = document(result(), result(), result("llama"), result("cpu"))
    made = dataclasses.replace(made, verdicts=(Verdict("decode", of=3, against=2, ratio=2.0, low=1.9, high=2.1),))
    assert llama_bench_rows(made)[-1]["verdict_against"] == "llama"
