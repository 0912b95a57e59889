"""The state that all routes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.serving.bodies import Bodies
from llmrun.serving.metrics import Metrics
from llmrun.serving.models.registry import Models
from llmrun.serving.options import ServingOptions
from llmrun.serving.prefix_log import PrefixLog

if TYPE_CHECKING:
    from llmrun.serving.upstreams.front import Upstreams


@dataclass(frozen=True, slots=True)
class Service:
    """The state of one server, apart from its connections. `upstreams` is None if the server has no upstreams."""

    models: Models
    options: ServingOptions
    bodies: Bodies
    metrics: Metrics = field(default_factory=Metrics)
    prefixes: PrefixLog = field(default_factory=PrefixLog)
    upstreams: Upstreams | None = None
