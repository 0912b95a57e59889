"""Benchmark documents: a typical one, and a strategy for arbitrary ones."""

from __future__ import annotations

from hypothesis import strategies as st

from llmrun.jobs.bench.documents.document import (
    AnswerCheck,
    Distribution,
    Document,
    Failure,
    Result,
    Roofline,
    Subject,
    Totals,
    Verdict,
    WorkloadFacts,
)


def distribution(mean: float, count: int = 3, stddev: float = 0.0) -> Distribution:
    return Distribution(count=count, median=mean, mean=mean, stddev=stddev)


def subject(backend: str = "cpu", threads: int = 2) -> Subject:
    facts = {
        "file": "smollm2.gguf",
        "sha256": "ab" * 32,
        "parameters": 134_515_008,
        "bytes": 98_000_000,
        "type": "Q4_1",
        "architecture": "llama",
        "device": "2 threads, avx512vnni",
        "context_size": 4096,
    }
    return Subject(backend, "smollm2:135m", backend, threads=threads, kv_type="f16", facts=facts)


def result(backend: str = "cpu", speeds: tuple[float, ...] = (60.0, 62.0, 61.0)) -> Result:
    """Return a result for 512 tokens in and 128 out at depth 100. Prefill is ten times as fast as decode."""
    return Result(
        subject=subject(backend),
        workload=WorkloadFacts("synthetic", "512 in, 128 out", prompt=512, generate=128, depth=100),
        figures={
            "ttft": Distribution(count=3, median=0.8, mean=0.9, stddev=0.1),
            "tpot": distribution(0.016, stddev=0.001),
            "itl": Distribution(count=381, median=0.015, mean=0.016, stddev=0.002, p95=0.02, p99=0.03),
            "e2e": distribution(3.0),
            "prefill": distribution(610.0),
            "decode": distribution(61.0),
        },
        samples={"prefill": tuple(10 * speed for speed in speeds), "decode": speeds},
        gaps=(0.014, 0.015, 0.016),
        peak_memory=300 << 20,
        totals=Totals(requests=3, prompt_tokens=1536, output_tokens=384, seconds=9.6),
        roofline=Roofline(2e10, 5e11, 9e7, 1.3e8, decode_share=0.8, prefill_share=None),
    )


def document(*results: Result, identity: str = "20260101-120000-abcd") -> Document:
    """Return a document with these results, the second of which was compared with the first."""
    made = results or (result(), result("llama", (50.0, 51.0, 52.0)))
    verdicts = (Verdict("decode", of=1, against=0, ratio=0.836, low=0.81, high=0.87),) if len(made) > 1 else ()
    return Document(
        identity=identity,
        created="2026-01-01T12:00:00Z",
        command="llmrun bench -b all",
        system={"cpu": "AMD EPYC", "cores_physical": 2, "load_average": [0.1, 0.2, 0.3], "governor": None},
        results=made,
        verdicts=verdicts,
    )


_numbers = st.floats(-1e30, 1e30)
_counts = st.integers(0, 2**63 - 1)
_words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_facts = st.dictionaries(
    _words,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | _numbers | _words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
_some_numbers = st.lists(_numbers, max_size=3).map(tuple)
_distributions = st.builds(
    Distribution, _counts, _numbers, _numbers, _numbers, st.none() | _numbers, st.none() | _numbers
)
_results = st.builds(
    Result,
    subject=st.builds(Subject, _words, _words, _words, _counts, _words, _words, _words, _facts, _words),
    workload=st.builds(WorkloadFacts, _words, _words, _counts, _counts, _counts, _counts),
    figures=st.dictionaries(_words, _distributions, max_size=2),
    samples=st.dictionaries(_words, _some_numbers, max_size=2),
    gaps=_some_numbers,
    peak_memory=_counts,
    totals=st.none() | st.builds(Totals, _counts, _counts, _counts, _numbers, _counts, _counts, _counts),
    roofline=st.none() | st.builds(Roofline, _numbers, _numbers, _numbers, _numbers, st.none() | _numbers),
    failure=st.none() | st.builds(Failure, _words, _words, _counts),
)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    results = draw(st.lists(_results, min_size=1, max_size=3))
    indices = st.integers(0, len(results) - 1)
    verdict = st.builds(Verdict, _words, indices, indices, _numbers, _numbers, _numbers, _numbers)
    check = st.builds(AnswerCheck, indices, indices, _counts, _counts, st.booleans())
    return draw(
        st.builds(
            Document,
            _words,
            _words,
            _words,
            _facts,
            st.just(tuple(results)),
            st.lists(verdict, max_size=2).map(tuple),
            st.booleans(),
            st.lists(check, max_size=2).map(tuple),
        )
    )
