"""The result of one turn of a configuration: the timings of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from llmrun.types import Timings


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn, in which a workload ran one or more times in sequence.

    requests  the timings of the requests, in the order in which they ended
    seconds   the time during which at least one request was running
    runs      the number of times that the workload ran
    cold      seconds from launching the process to its first token; None if the model was already open
    joules    the energy that the machine used; None if it cannot be measured
    """

    requests: tuple[Timings, ...]
    seconds: float
    runs: int = 1
    cold: float | None = None
    joules: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the timings as a JSON object that can be sent to another process."""
        return {"requests": [asdict(request) for request in self.requests], "seconds": self.seconds}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Sample:
        """Return the Sample that `to_json` encoded."""
        requests = (Timings(**{**request, "gaps_s": tuple(request["gaps_s"])}) for request in body["requests"])
        return cls(tuple(requests), body["seconds"])

    @property
    def generated(self) -> int:
        """The number of generated tokens of all requests."""
        return sum(request.generated_tokens for request in self.requests)

    def value(self, metric: str) -> float | None:
        """Return one value of a metric (metrics.py) for the whole turn, or None if it was not measured."""
        values = self.values(metric)
        match metric:
            case "prefill":
                return _rate((r.prompt_tokens - r.cached_tokens, r.prefill_s) for r in self._prefilled)
            case "decode":
                return _rate((r.generated_tokens - 1, r.decode_s) for r in self._decoded)
            case _:
                return sum(values) / len(values) if values else None

    def values(self, metric: str) -> list[float]:
        """Return all values of a metric in this turn, one per request or one per gap between tokens."""
        answered = [request for request in self.requests if request.generated_tokens]
        match metric:
            case "ttft":
                return [request.ttft_s for request in answered]
            case "prefill":
                return [request.prompt_per_second for request in self._prefilled]
            case "tpot":
                return [request.tpot_s for request in self._decoded]
            case "itl":
                return [gap for request in self.requests for gap in request.gaps_s]
            case "decode":
                return [request.decode_per_second for request in self._decoded]
            case "e2e":
                return [request.total_s for request in answered]
            case "throughput":
                return [self.generated / self.seconds] if self.generated else []
            case "requests":
                return [len(answered) / self.seconds] if answered else []
            case "cold":
                return [] if self.cold is None else [self.cold]
        return []

    @property
    def _prefilled(self) -> list[Timings]:
        """The requests with more than one uncached prompt token. A single token is processed like a decode step."""
        return [r for r in self.requests if r.prompt_tokens - r.cached_tokens > 1 and r.prefill_s > 0]

    @property
    def _decoded(self) -> list[Timings]:
        return [request for request in self.requests if request.generated_tokens > 1 and request.decode_s > 0]


def joined(samples: Iterable[Sample]) -> Sample:
    """Combine consecutive runs into one turn."""
    first, *others = samples
    for other in others:
        first = replace(
            first,
            requests=first.requests + other.requests,
            seconds=first.seconds + other.seconds,
            runs=first.runs + other.runs,
        )
    return first


def timeline(request: Timings) -> tuple[tuple[float, int], ...]:
    """Return (seconds since submission, tokens so far) for each piece of text that arrived.

    A piece may contain several tokens. Their number is unknown, so the tokens are spread evenly over the pieces.
    """
    if not request.generated_tokens:
        return ()
    moments = list(accumulate(request.gaps_s, initial=request.ttft_s))
    of_each = request.generated_tokens / len(moments)
    return tuple((moment, round(of_each * number)) for number, moment in enumerate(moments, 1))


def _rate(pairs: Iterable[tuple[int, float]]) -> float | None:
    counted = list(pairs)
    seconds = sum(pair[1] for pair in counted)
    return sum(pair[0] for pair in counted) / seconds if seconds > 0 else None
