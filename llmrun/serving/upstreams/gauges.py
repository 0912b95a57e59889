"""The metrics of upstreams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from llmrun.serving.metrics import heading, labels

if TYPE_CHECKING:
    from llmrun.serving.upstreams.upstream import Upstream

_METRICS: Final[Sequence[tuple[str, str, str, Callable[[Upstream], int]]]] = (
    ("up", "gauge", "Whether the upstream is up.", lambda one: int(one.is_up)),
    ("requests_in_flight", "gauge", "Requests that the upstream is working on.", lambda one: one.in_flight),
    ("requests_total", "counter", "Requests that were sent to the upstream.", lambda one: one.counts.requests),
    (
        "moved_total",
        "counter",
        "Requests that moved from this upstream to another one.",
        lambda one: one.counts.moved,
    ),
    (
        "resumed_total",
        "counter",
        "Streams of this upstream that another one continued.",
        lambda one: one.counts.resumed,
    ),
)


def upstream_lines(upstreams: Sequence[Upstream]) -> Iterator[str]:
    """Yield the metrics of upstreams in the format of Prometheus. URLs of upstreams never contain keys."""
    for name, kind, help_text, value in _METRICS:
        full = f"llmrun_upstream_{name}"
        yield from heading(full, kind, help_text)
        for upstream in upstreams:
            yield f"{full}{labels({'upstream': upstream.endpoint.base})} {value(upstream)}"
