"""Dataclasses for the results of a benchmark. Every output format is generated from these dataclasses, and they can be
saved as JSON.

A Document is one run of `llmrun bench`, and a Result is one configuration of that run. Times are in seconds, sizes in
bytes and speeds in tokens per second, regardless of the units that an output shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 3  # The version of the JSON format. A file with a larger number was written by a newer version of llmrun.


def _since(version: int, default: Any) -> Any:
    """Declare a field that earlier formats do not have. It gets its default value when such documents are read."""
    return field(default=default, metadata={"since": version})


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary statistics of a set of values. `p95` is None for fewer than 20 values, and `p99` for fewer than 100."""

    count: int
    median: float
    mean: float
    stddev: float  # the sample standard deviation; 0 for a single value
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """A description of a workload.

    `kind` is synthetic, chat, prompts or cold. Token counts are 0 if the prompts differ in length.
    """

    kind: str
    label: str  # such as "512 in, 128 out" or "chat: long document"
    prompt: int = 0
    generate: int = 0
    depth: int = 0  # the number of tokens in the KV cache before the prompt
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Roofline:
    """The machine's limits, the work per token, and the share of each limit that was reached.

    read_bandwidth        bytes per second that all threads together read from memory
    multiply_rate         int8 multiply-adds per second of all threads together
    bytes_per_token       bytes of weights and KV cache that decoding one token reads
    products_per_token    multiply-adds to prefill one token
    decode_share          the share of the read bandwidth that decode reached; 1.0 is the limit, None means unknown
    prefill_share         the share of the multiply rate that prefill reached; 1.0 is the limit, None means unknown
    """

    read_bandwidth: float
    multiply_rate: float
    bytes_per_token: float
    products_per_token: float
    decode_share: float | None = None
    prefill_share: float | None = None


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy that the machine used during the requests. The cost is None if no electricity price was given."""

    source: str  # such as "RAPL package" or "NVML"
    watts: float
    joules_per_token: float  # per generated token
    cost_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and the engine that were measured.

    name       a short name that is unique within the run, such as "cpu" or "llama, 4 threads"
    model      the model's name as the user gave it
    threads    the number of threads; 0 if unknown, as for endpoints
    speculate  auto, off or the name of the draft model; empty if unknown, as for endpoints
    facts      other metadata: file name, sha256, parameters, bytes, type, device, versions
    """

    name: str
    model: str
    backend: str
    threads: int = 0
    kv_type: str = ""
    gpu_layers: str = ""
    endpoint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    speculate: str = _since(2, "")


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended the measurement of a configuration. There may still be partial results."""

    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over all measured requests.

    seconds          the time during which at least one request was running
    steps            forward passes that generated tokens, counted for each request; 0 if unknown, as for endpoints
    drafted_tokens   tokens that were predicted and then verified in a step
    accepted_tokens  drafted tokens that were right
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    steps: int = _since(2, 0)
    drafted_tokens: int = _since(2, 0)
    accepted_tokens: int = _since(2, 0)

    @property
    def tokens_per_step(self) -> float | None:
        """Generated tokens per step, or None if the number of steps is unknown."""
        return self.output_tokens / self.steps if self.steps else None

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were right, or None if nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one configuration.

    figures   the distribution of each metric (metrics.py) over all requests of all repetitions
    samples   the values of each metric, one per repetition in order; verdicts are computed from them
    timeline  (seconds since submission, tokens so far) of a typical request
    gaps      the inter-token latencies in seconds at the percentiles 0, 1, ..., 100; empty if there were none
    """

    subject: Subject
    workload: WorkloadFacts
    figures: Mapping[str, Distribution] = field(default_factory=dict)
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    timeline: tuple[tuple[float, int], ...] = ()
    gaps: tuple[float, ...] = ()
    peak_memory: int = 0  # bytes; 0 if unknown
    totals: Totals | None = None
    roofline: Roofline | None = None
    energy: Energy | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison of two configurations by one metric.

    ratio         the speed of `of` divided by the speed of `against`; if the metric is a time, the time of `against`
                  divided by the time of `of`; above 1 means that `of` is faster
    low, high     the confidence interval of the ratio at `level`
    level         the confidence level, chosen so that all verdicts of a run hold together in 99 % of runs
    """

    metric: str
    of: int  # `of` and `against` are the indices of the two configurations in Document.results.
    against: int
    ratio: float
    low: float
    high: float
    level: float = 0.99

    @property
    def is_different(self) -> bool:
        """True if the interval excludes 1."""
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """A comparison of the answers of two configurations that differ only in speculation.

    answers    the number of pairs of answers to the same prompt
    different  the number of pairs whose tokens or texts differ
    is_exact   True if the backend guarantees that none of them differ
    """

    of: int  # `of` and `against` are the indices of the two configurations in Document.results.
    against: int
    answers: int
    different: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Document:
    """The results of one run.

    created      an ISO 8601 UTC time
    system       the machine's state (system.py)
    prefetching  how our engine prefetched weights, one line per number of threads
    """

    identity: str
    created: str
    command: str
    system: Mapping[str, Any]
    results: tuple[Result, ...]
    verdicts: tuple[Verdict, ...] = ()
    interrupted: bool = False
    answer_checks: tuple[AnswerCheck, ...] = _since(2, ())
    prefetching: tuple[str, ...] = _since(3, ())
