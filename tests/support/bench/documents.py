"""Benchmark documents: realistic ones, and malicious ones that try to attack the reader."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from llmrun.jobs.bench.documents.document import (
    METRICS,
    Distribution,
    Document,
    Failure,
    Result,
    Roofline,
    Subject,
    Verdict,
    WorkloadFacts,
)

SYSTEM = {
    "cpu": "Intel Xeon Platinum 8488C",
    "cores_physical": 2,
    "instructions": ["avx2", "avx512f", "avx512_vnni"],
    "memory_bytes": 8_200_000_000,
    "gpus": [],
    "governor": None,
    "load_average": 0.12,
    "os": "Linux 6.1, glibc 2.36",
    "python": "3.12.4",
    "turbo": True,
}
COMMAND = "llmrun bench smollm2:135m --prompt-tokens 512 --generate 128 --html report.html"
HOSTILE = (
    "</title></style></svg><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "&lt;b&gt; {{ 7*7 }} ]]> \x00\x1b[31m\u202egpj.exe \ud800 \"'` https://example.com/x.png"
)


def distribution(values: list[float]) -> Distribution:
    ordered = sorted(values)

    def at(percent: int) -> float:
        return ordered[round((len(ordered) - 1) * percent / 100)]

    return Distribution(
        count=len(values),
        median=statistics.median(values),
        mean=statistics.fmean(values),
        stddev=statistics.stdev(values) if len(values) > 1 else 0.0,
        p95=at(95) if len(values) >= 20 else None,
        p99=at(99) if len(values) >= 100 else None,
    )


def measured(
    name: str,
    decode: float,
    prefill: float,
    *,
    model: str = "smollm2:135m",
    backend: str = "cpu",
    prompt: int = 512,
    generate: int = 128,
    concurrency: int = 1,
    repetitions: int = 10,
    roofline: bool = True,
) -> Result:
    """Return a result with about these decode and prefill speeds in tokens per second. Equal arguments give equal
    results."""
    noise = random.Random(f"{name} {decode} {prompt} {concurrency}")
    decodes = [decode * noise.gauss(1, 0.015) for _ in range(repetitions)]
    prefills = [prefill * noise.gauss(1, 0.02) for _ in range(repetitions)]
    first = [prompt / speed + 1 / decode for speed in prefills]
    gaps = [noise.lognormvariate(math.log(1 / decode), 0.06) * (6 if noise.random() < 0.01 else 1) for _ in range(1270)]
    whole = [wait + (generate - 1) / speed for wait, speed in zip(first, decodes, strict=True)]
    samples = {"ttft": first, "prefill": prefills, "decode": decodes, "e2e": whole, "tpot": [1 / x for x in decodes]}
    if concurrency > 1:
        samples["throughput"] = [concurrency * speed * 0.8 for speed in decodes]
        samples["requests"] = [concurrency / wait for wait in whole]
    figures = {"load": distribution([0.41]), **{key: distribution(each) for key, each in samples.items()}}
    ordered = sorted(gaps)
    at_once = f", {concurrency} at once" if concurrency > 1 else ""
    return Result(
        subject=Subject(
            name=name,
            model=model,
            backend=backend,
            threads=2 if roofline else 0,
            kv_type="f16",
            facts={"file": "SmolLM2-135M-Instruct.Q4_1.gguf", "sha256": "4c9f" * 16, "file_bytes": 98_000_000},
        ),
        workload=WorkloadFacts("synthetic", f"{prompt} in, {generate} out{at_once}", prompt, generate, 0, concurrency),
        figures={**figures, "itl": distribution(gaps)},
        samples={key: tuple(each) for key, each in samples.items()},
        gaps=tuple(ordered[round((len(ordered) - 1) * percent / 100)] for percent in range(101)),
        peak_memory=312 << 20,
        roofline=Roofline(19.4e9, 412e9, 9.4e7, 1.35e8, decode * 9.4e7 / 19.4e9, prefill * 1.35e8 / 412e9)
        if roofline
        else None,
    )


def document(*results: Result, **fields: Any) -> Document:
    return (
        Document(
            identity="3f9a1c", created="2026-10-02T14:03:11+00:00", command=COMMAND, system=SYSTEM, results=results
        )
        if not fields
        else replace(document(*results), **fields)
    )


def failed(name: str, message: str = "does not fit: KV cache: 5,120 MiB wanted, 2,100 MiB free") -> Result:
    return Result(
        Subject(name, "smollm2:135m", "cpu", 2),
        WorkloadFacts("synthetic", "512 in, 128 out", 512, 128),
        failure=Failure(message, "try a smaller -c", 7),
    )


def single() -> Document:
    return document(measured("cpu", 152.0, 2210.0))


def two_backends() -> Document:
    return document(
        measured("cpu", 152.0, 2210.0),
        measured("llama", 82.6, 2190.0, backend="llama"),
        verdicts=(Verdict("decode", 0, 1, 1.84, 1.79, 1.90), Verdict("prefill", 0, 1, 1.01, 0.97, 1.04)),
    )


def sweep() -> Document:
    """Return twelve configurations: four prompt lengths, each run in three ways."""
    results = [
        measured(name, decode / (1 + prompt / 20_000), prefill / (1 + prompt / 30_000), prompt=prompt, backend=backend)
        for prompt in (128, 512, 2048, 8192)
        for name, backend, decode, prefill in (
            ("cpu, 2 threads", "cpu", 152.0, 2210.0),
            ("cpu, 1 thread", "cpu", 88.0, 1130.0),
            ("llama, 2 threads", "llama", 82.6, 1800.0),
        )
    ]
    verdicts = [Verdict("decode", at, at + 2, 1.84, 1.79, 1.90) for at in range(0, 12, 3)]
    verdicts += [Verdict("prefill", at, at + 2, 1.22, 1.18, 1.27) for at in range(0, 12, 3)]
    return document(*results, verdicts=tuple(verdicts))


def large_sweep() -> Document:
    """Return 24 configurations, the largest number that is compared."""
    results = [
        measured(f"cpu, {threads} threads", 40.0 * threads**0.7, 500.0 * threads, prompt=prompt, concurrency=at_once)
        for threads in (1, 2, 4, 8)
        for prompt in (128, 512, 2048)
        for at_once in (1, 4)
    ]
    return document(*results)


def endpoint() -> Document:
    remote = measured("http://127.0.0.1:8080/v1", 61.0, 950.0, backend="endpoint", concurrency=8, roofline=False)
    subject = replace(remote.subject, endpoint="http://127.0.0.1:8080/v1", kv_type="")
    return document(replace(remote, subject=subject, peak_memory=0), measured("cpu", 152.0, 2210.0, concurrency=8))


def all_failed() -> Document:
    return document(failed("cpu"), failed("llama", "llama.cpp ended: signal 11"), interrupted=True)


def without_samples() -> Document:
    """Return a document of a run interrupted before the end of its first repetition."""
    return document(replace(measured("cpu", 152.0, 2210.0), figures={}, samples={}, gaps=()), interrupted=True)


def hostile() -> Document:
    """Return a document in which every text tries to inject markup."""
    subject = Subject(HOSTILE, HOSTILE, HOSTILE, 2, HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE, "list": [HOSTILE]})
    good = measured("cpu", 152.0, 2210.0)
    workload = replace(good.workload, kind=HOSTILE, label=HOSTILE)
    figures = {**good.figures, HOSTILE: distribution([1.0])}
    one = replace(good, subject=subject, workload=workload, figures=figures)
    return Document(
        identity=HOSTILE,
        created=HOSTILE,
        command=HOSTILE,
        system={HOSTILE: HOSTILE, "cpu": HOSTILE},
        results=(one, replace(one, failure=Failure(HOSTILE, HOSTILE, 1)), good),
        verdicts=(Verdict(HOSTILE, 0, 1, 1.84, 1.79, 1.90), Verdict("decode", 0, 2, 1.0, 0.9, 1.1)),
    )


REALISTIC = {
    "single": single,
    "two_backends": two_backends,
    "sweep": sweep,
    "large_sweep": large_sweep,
    "endpoint": endpoint,
    "all_failed": all_failed,
    "without_samples": without_samples,
}


def documents() -> st.SearchStrategy[Document]:
    """Generate arbitrary documents, including those that no benchmark would produce."""
    text = st.text(max_size=30)
    number = st.floats() | st.floats(min_value=0, max_value=1e4)
    maybe = st.none() | number
    metric = st.sampled_from(sorted(METRICS)) | text
    facts = st.dictionaries(
        text, st.none() | st.booleans() | st.integers() | number | text | st.lists(text), max_size=4
    )
    result = st.builds(
        Result,
        subject=st.builds(Subject, text, text, text, st.integers(0, 64), text, text, text, facts),
        workload=st.builds(WorkloadFacts, text, text, concurrency=st.integers(1, 8)),
        figures=st.dictionaries(
            metric, st.builds(Distribution, st.integers(0, 10**6), number, number, number, maybe, maybe), max_size=5
        ),
        samples=st.dictionaries(metric, st.lists(number, max_size=14).map(tuple), max_size=5),
        gaps=st.lists(number, max_size=12).map(tuple),
        peak_memory=st.integers(0, 2**50),
        roofline=st.none() | st.builds(Roofline, number, number, number, number, maybe, maybe),
        failure=st.none() | st.builds(Failure, text, text, st.integers(0, 255)),
    )
    return st.lists(result, max_size=8).flatmap(
        lambda results: st.builds(
            Document,
            identity=text,
            created=text,
            command=text,
            system=facts,
            results=st.just(tuple(results)),
            verdicts=_verdicts(len(results), metric, number),
            interrupted=st.booleans(),
        )
    )


def _verdicts(
    n_results: int, metric: st.SearchStrategy[str], number: st.SearchStrategy[float]
) -> st.SearchStrategy[tuple[Verdict, ...]]:
    if not n_results:
        return st.just(())
    index = st.integers(0, n_results - 1)
    return st.lists(st.builds(Verdict, metric, index, index, number, number, number, number), max_size=4).map(tuple)
