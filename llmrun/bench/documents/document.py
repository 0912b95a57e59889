"""What a benchmark found, as values that any output is made from and that are kept as JSON.

A Document is one run of `llmrun bench`; a Result is one configuration of it. Times are seconds, sizes bytes, speeds
tokens a second, whatever the unit an output shows them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1  # of the JSON; a larger one is from a later llmrun


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is told of many numbers. The 95th percentile needs 20 of them, the 99th 100: None where there are fewer."""

    count: int
    median: float
    mean: float
    stddev: float  # of the sample; 0 for a single number
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What each repetition asked for. `kind`: synthetic, chat, prompts, cold. Token counts: 0 where prompts differ."""

    kind: str
    label: str  # "512 in, 128 out", "chat: long document"
    prompt: int = 0
    generate: int = 0
    depth: int = 0  # tokens in the KV cache before the prompt
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class Roofline:
    """The machine's limits, what a token needs of them, and the share that was reached.

    read_bandwidth        bytes a second, read from memory by all threads
    multiply_rate         int8 products a second, of all threads
    bytes_per_token       of weights and KV cache that one token's decode reads
    products_per_token    multiply-adds that one token's prefill makes
    decode_share          1.0: decode is as fast as memory is read; None: not measured, or not bound by this machine
    prefill_share         1.0: prefill keeps every integer unit busy
    """

    read_bandwidth: float
    multiply_rate: float
    bytes_per_token: float
    products_per_token: float
    decode_share: float | None = None
    prefill_share: float | None = None


@dataclass(frozen=True, slots=True)
class Energy:
    """What the machine drew while it answered. Cost is None without a price of electricity."""

    source: str  # "RAPL package", "NVML"
    watts: float
    joules_per_token: float  # of generated tokens
    cost_per_million: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What answered.

    name       short, tells it from the others of the run: "cpu", "llama, 4 threads"
    model      as it was asked for
    threads    0: not ours to say (an endpoint)
    facts      more of it: file name, sha256, parameters, bytes, type, device, versions
    """

    name: str
    model: str
    backend: str
    threads: int = 0
    kv_type: str = ""
    gpu_layers: str = ""
    endpoint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a configuration has no figures, or fewer than asked for."""

    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Totals:
    """All requests of all measured repetitions together. `seconds`: while at least one of them ran."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """One configuration.

    figures   by name (metrics.py): over all requests of all repetitions
    samples   by name: one number a repetition, in the order they were taken: what verdicts are made from
    timeline  of one typical request: (seconds since it was in hand, tokens out so far)
    gaps      inter-token latencies at 0, 1, ..., 100 percent, seconds; empty when there were none
    """

    subject: Subject
    workload: WorkloadFacts
    figures: Mapping[str, Distribution] = field(default_factory=dict)
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    timeline: tuple[tuple[float, int], ...] = ()
    gaps: tuple[float, ...] = ()
    peak_memory: int = 0  # bytes; 0: unknown
    totals: Totals | None = None
    roofline: Roofline | None = None
    energy: Energy | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One configuration beside another, in one metric.

    ratio         speed of `of` over speed of `against`: above 1 is faster, whatever the metric's unit
    low, high     the interval that holds the true ratio; those of a run's verdicts all do so at `level` (0.99)
    is_different  1 is outside the interval
    """

    metric: str
    of: int  # indices of Document.results
    against: int
    ratio: float
    low: float
    high: float
    level: float = 0.99

    @property
    def is_different(self) -> bool:
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True, slots=True)
class Document:
    """One run. `system`: what was true of the machine (system.py); `created`: ISO 8601, UTC."""

    identity: str
    created: str
    command: str
    system: Mapping[str, Any]
    results: tuple[Result, ...]
    verdicts: tuple[Verdict, ...] = ()
    interrupted: bool = False
