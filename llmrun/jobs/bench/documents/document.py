"""The results of a benchmark: the dataclasses, the metrics, and the conversion to and from JSON and to text.

A Document is one run of `llmrun bench`, and a Result is one configuration of that run. Times are in seconds, sizes in
bytes and speeds in tokens per second, regardless of the units that an output shows. The names of metrics are vLLM's.

Every output format is generated from these dataclasses. All outputs format values with the functions in this file, so
that the table in the terminal and the HTML page agree.

The JSON mirrors the dataclasses: each object has exactly the keys that its dataclass has in the document's `format`.
Decoding validates everything, because a file may be damaged or written by another program. Any problem with a file
raises UsageError.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from llmrun.base.amounts import counted, format_number, format_seconds
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import decoded_text

MOST_BYTES = 256 << 20  # The size limit of a results file. A million samples take 20 MB.


def read_text(path: Path) -> str:
    """Return the text of a results file. Raises UsageError."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UsageError(f"results: {path}: too large: {size:,} bytes, limit {MOST_BYTES:,}")
        return decoded_text(path.read_bytes(), f"results: {path}")
    except OSError as error:
        raise UsageError(f"results: {path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # the path contains a NUL
        raise UsageError(f"results: {path}: {error}") from error


def parse(text: str, where: str) -> Any:
    """Parse JSON and reject numbers that are not finite. Raises UsageError, whose message begins with `where`."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply") from None
    except ValueError as error:  # The JSON is invalid, or an integer has too many digits.
        raise UsageError(f"{where}: not valid JSON: {error}") from error


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a finite number")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `name` is the metric's key in a document. Times are in seconds, and speeds are per second."""

    name: str
    words: str
    is_speed: bool  # True if higher is better
    explanation: str


METRICS = {
    metric.name: metric
    for metric in (
        Metric("load", "load", False, "opening the model: reading the file, packing weights, loading kernels"),
        Metric("ttft", "TTFT", False, "time to first token: from submitting a request to its first token"),
        Metric("prefill", "prefill", True, "prompt tokens per second, not counting those already in the cache"),
        Metric("tpot", "TPOT", False, "time per output token after the first, averaged over a request"),
        Metric("itl", "ITL", False, "inter-token latency: the time between two steps that delivered text"),
        Metric("decode", "decode", True, "output tokens per second of one request, after the first token"),
        Metric("e2e", "E2E", False, "end to end: from submitting a request to its last token"),
        Metric("throughput", "throughput", True, "output tokens per second of all requests together"),
        Metric("requests", "requests/s", True, "requests per second"),
        Metric(
            "cold", "cold TTFT", False, "from starting a new process to its first token, including loading the model"
        ),
    )
}


FORMAT = 4  # The version of the JSON format. A file with a larger number was written by a newer version of llmrun.


def _since(version: int, default: Any) -> Any:
    """Declare a field that earlier formats lack. In documents of earlier formats, the field has its default value."""
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
    label: str  # for example "512 in, 128 out" or "chat: long document"
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
    """The error that ended the measurement of a configuration. Partial results may still exist."""

    message: str
    hint: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over all measured requests.

    seconds          the time during which at least one request was running
    steps            forward passes that generated tokens, counted for each request; 0 if unknown, as for endpoints
    drafted_tokens   tokens that were predicted and then verified in a step
    accepted_tokens  drafted tokens that were correct
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
        """The share of drafted tokens that were correct, or None if nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one configuration.

    figures   the distribution of each metric (METRICS) over all requests of all repetitions
    samples   the values of each metric, one per repetition in order; verdicts are computed from them
    gaps      the inter-token latencies in seconds at the percentiles 0, 1, ..., 100; empty without gaps
    """

    subject: Subject
    workload: WorkloadFacts
    figures: Mapping[str, Distribution] = field(default_factory=dict)
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    gaps: tuple[float, ...] = ()
    peak_memory: int = 0  # bytes; 0 if unknown
    totals: Totals | None = None
    roofline: Roofline | None = None
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
    is_exact   True if the backend guarantees that all pairs are equal
    """

    of: int  # `of` and `against` are the indices of the two configurations in Document.results.
    against: int
    answers: int
    different: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Document:
    """The results of one run.

    created  an ISO 8601 UTC time
    system   the machine's state (system.py)
    """

    identity: str
    created: str
    command: str
    system: Mapping[str, Any]
    results: tuple[Result, ...]
    verdicts: tuple[Verdict, ...] = ()
    interrupted: bool = False
    answer_checks: tuple[AnswerCheck, ...] = _since(2, ())


# Fields of documents before format 4, which are ignored when such documents are read.
_BEFORE_4 = {Document: ("prefetching",), Result: ("timeline", "energy")}

DEEPEST = 16  # The maximum nesting depth of a value.
LARGEST = 2**63 - 1  # The largest integer that other programs can be expected to read.
FARTHEST = 1e30  # The largest magnitude of a number. No measurement exceeds 1e30, and sums of squares stay finite.


def to_json(document: Document) -> dict[str, Any]:
    """Return a document as a value for `json.dumps`, in field order. Raises LlmrunError for non-JSON values."""
    return {"format": FORMAT, **_encoded(document, "document", 0)}


def from_json(value: object, where: str) -> Document:
    """Return the Document that `to_json` encoded. `where` names the file in error messages.

    Raises only UsageError, which names the key of the invalid value.
    """
    if not isinstance(value, dict):
        _refuse(where, "document", value, "an object")
    found = value.get("format")
    if type(found) is not int or found < 1:
        _refuse(where, "format", found, f"an integer from 1 to {FORMAT}")
    if found > FORMAT:
        raise UsageError(
            f"{where}: format: {found if found <= LARGEST else 'a huge one'} is from a newer llmrun; this version "
            f"reads formats up to {FORMAT}",
            hint="update llmrun: git pull in its clone, or install a newer wheel",
        )
    fields = {key: item for key, item in value.items() if key != "format"}
    document: Document = _Decoder(where, found).dataclass(Document, fields, "")
    _check_indices(document, where)
    return document


def _check_indices(document: Document, where: str) -> None:
    for name in ("verdicts", "answer_checks"):
        for number, pair in enumerate(getattr(document, name)):
            for key in ("of", "against"):
                index = getattr(pair, key)
                if index >= len(document.results):
                    _refuse(where, f"{name}[{number}].{key}", index, f"an index of {len(document.results)} results")


def _encoded(value: Any, key: str, depth: int) -> Any:
    if depth > 2 * DEEPEST:
        raise LlmrunError(f"results: {key}: nested too deeply to be saved")
    if dataclasses.is_dataclass(value):
        return {
            field.name: _encoded(getattr(value, field.name), f"{key}.{field.name}", depth + 1)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {_text(str(name)): _encoded(item, f"{key}.{name}", depth + 1) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_encoded(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise LlmrunError(f"results: {key}: {value!r} cannot be saved as JSON")


def _text(text: str) -> str:
    """Escape lone surrogates, which JSON does not allow. Python uses surrogates in file names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


class _Decoder:
    """Decodes JSON of one format into this module's dataclasses.

    The `key` argument of each method is the path of the value in the document.
    """

    def __init__(self, where: str, version: int) -> None:
        self._where = where
        self._version = version

    def dataclass(self, kind: type, value: object, key: str) -> Any:
        if not isinstance(value, dict):
            self.refuse(key, value, "an object")
        fields = {name: hint for name, hint in _fields(kind).items() if self._knows(kind, name)}
        before = f"{key}." if key else ""
        for name in fields:
            if name not in value:
                raise UsageError(f"{self._where}: {before}{name}: missing")
        ignored = _BEFORE_4.get(kind, ()) if self._version < 4 else ()
        for name in value:
            if name not in fields and name not in ignored:
                raise UsageError(f"{self._where}: {before}{_shown(name)}: unknown key")
        return kind(**{name: self.value(hint, value[name], before + name) for name, hint in fields.items()})

    def _knows(self, kind: type, name: str) -> bool:
        """Return whether the document's format has this field of a dataclass."""
        field = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]  # `kind` is a dataclass
        return bool(field.metadata.get("since", 1) <= self._version)

    def value(self, kind: Any, value: object, key: str) -> Any:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is types.UnionType:  # The only unions in the dataclasses are `X | None`.
            return None if value is None else self.value(arguments[0], value, key)
        if origin is tuple:
            return self.row(arguments[0], value, key)
        if origin is Mapping:
            if not isinstance(value, dict):
                self.refuse(key, value, "an object")
            return {
                self.text(name, key): self.value(arguments[1], item, f"{key}.{_shown(name)}")
                for name, item in value.items()
            }
        if kind is Any:
            return self.anything(value, key, 0)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self.dataclass(kind, value, key)
        simple = {str: self.text, bool: self.truth, int: self.integer, float: self.number}
        return simple[kind](value, key)

    def row(self, kind: Any, value: object, key: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            self.refuse(key, value, "a list")
        return tuple(self.value(kind, item, f"{key}[{index}]") for index, item in enumerate(value))

    def anything(self, value: object, key: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise UsageError(f"{self._where}: {key}: nested too deeply, limit {DEEPEST}")
        if isinstance(value, dict):
            return {
                self.text(name, key): self.anything(item, f"{key}.{_shown(name)}", depth + 1)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self.anything(item, f"{key}[{index}]", depth + 1) for index, item in enumerate(value)]
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value, key)
        if isinstance(value, int):
            if abs(value) > LARGEST:
                self.refuse(key, value, f"an integer of at most {LARGEST}")
            return value
        return self.number(value, key)

    def text(self, value: object, key: str) -> str:
        if not isinstance(value, str):
            self.refuse(key, value, "text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.refuse(key, value, "text that UTF-8 can encode")
        return value

    def truth(self, value: object, key: str) -> bool:
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def integer(self, value: object, key: str) -> int:
        if type(value) is not int or not 0 <= value <= LARGEST:
            self.refuse(key, value, f"an integer from 0 to {LARGEST}")
        return value

    def number(self, value: object, key: str) -> float:
        if type(value) is int and abs(value) <= LARGEST:
            return float(value)
        if type(value) is not float or not abs(value) <= FARTHEST:  # This condition also rejects NaN.
            self.refuse(key, value, f"a number of at most {FARTHEST:g}")
        return value

    def refuse(self, key: str, value: object, rule: str) -> NoReturn:
        _refuse(self._where, key, value, rule)


def _refuse(where: str, key: str, value: object, rule: str) -> NoReturn:
    raise UsageError(f"{where}: {key or 'document'}: {_shown(value)} is not {rule}")


def _shown(value: object) -> str:
    """Describe a value in at most 40 characters: printable ASCII, and "…" at the end if the text was shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return "a huge integer"
    text = ascii(value) if not isinstance(value, str) or not value.isidentifier() else value
    return text if len(text) <= 40 else text[:39] + "…"


def metric_of(name: str) -> Metric:
    """Return the metric with this name. If the name is unknown, return a metric that contains only the name."""
    return METRICS.get(name) or Metric(name, name, False, "")


def metric_unit(name: str) -> str:
    """Return `tok/s` or `requests/s`, or "" for unknown metrics and for times, whose values include the unit."""
    if name == "requests":
        return "requests/s"
    return "tok/s" if metric_of(name).is_speed else ""


def metric_words(name: str, value: float) -> str:
    """Format a value with its unit, such as `92.0 tok/s` or `8.30 ms`."""
    if name in METRICS and not METRICS[name].is_speed:
        return format_seconds(value)
    return f"{format_number(value)} {metric_unit(name)}".rstrip()


def metric_number(name: str, value: float) -> str:
    """Format a value for a table. Times include their unit; the unit of a speed is shown next to the metric's name."""
    return format_number(value) if metric_unit(name) else metric_words(name, value)


def result_names(document: Document) -> tuple[str, ...]:
    """Return a unique name for each result, such as `cpu · 512 in, 128 out`."""
    varies = _workloads_vary(document)
    return tuple(
        f"{one.subject.name} · {one.workload.label}" if varies else one.subject.name for one in document.results
    )


def verdict_sentence(document: Document, verdict: Verdict) -> str:
    """Format a verdict: `cpu is 1.84x as fast as llama in decode (99%: 1.79 to 1.90)`. The faster side comes first."""
    verdict = _faster_first(verdict)
    first, second = document.results[verdict.of], document.results[verdict.against]
    one, other = first.subject.name, second.subject.name
    common = []
    if first.workload != second.workload:
        one, other = f"{one} · {first.workload.label}", f"{other} · {second.workload.label}"
    elif _workloads_vary(document):
        common = [first.workload.label]
    metric = metric_of(verdict.metric).words
    digits = _digits_that_show_it(verdict)
    interval = f"{verdict.level * 100:g}%: {verdict.low:,.{digits}f} to {verdict.high:,.{digits}f}"
    said = f"({'; '.join([*common, interval])})"
    if verdict.is_different:
        return f"{one} is {verdict.ratio:,.{digits}f}x as fast as {other} in {metric} {said}"
    return f"no significant difference between {one} and {other} in {metric} {said}"


def answer_sentences(document: Document) -> list[str]:
    """Format the comparisons of answers with and without speculation, combined over all workloads."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for check in document.answer_checks:
        names = document.results[check.of].subject.name, document.results[check.against].subject.name
        answers, different = totals.get(names, (0, 0))
        totals[names] = answers + check.answers, different + check.different
    return [_answer_sentence(*names, *counts) for names, counts in totals.items()]


def _answer_sentence(one: str, other: str, answers: int, different: int) -> str:
    if answers == 1:
        return f"{one}: the answer {'differs from' if different else 'equals'} that of {other}"
    if different:
        return f"{one}: {different:,} of {counted(answers, 'answer')} differ from those of {other}"
    return f"{one}: all {counted(answers, 'answer')} equal those of {other}"


def _faster_first(verdict: Verdict) -> Verdict:
    """Swap the two sides of a verdict if the first side is slower.

    If a value has no finite inverse, return the verdict unchanged. No benchmark produces such values.
    """
    values = (verdict.high, verdict.ratio, verdict.low)
    if not verdict.is_different or verdict.ratio >= 1 or not all(1e-9 < value < 1e9 for value in values):
        return verdict
    low, ratio, high = (1 / value for value in values)
    return replace(verdict, of=verdict.against, against=verdict.of, low=low, ratio=ratio, high=high)


def _workloads_vary(document: Document) -> bool:
    return len({one.workload.label for one in document.results}) > 1


def _digits_that_show_it(verdict: Verdict) -> int:
    """Return the number of decimals to show: 2, or more if a bound other than 1 would otherwise be rounded to 1.00."""
    for digits in (2, 3, 4):
        if not verdict.is_different or 1.0 not in (round(verdict.low, digits), round(verdict.high, digits)):
            return digits
    return 5
