"""The state that all routes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmrun.serving.bodies import Bodies
from llmrun.serving.metrics import Metrics
from llmrun.serving.models import Models
from llmrun.serving.options import ServingOptions


@dataclass(frozen=True, slots=True)
class Service:
    """The state of one server, apart from its connections."""

    models: Models
    options: ServingOptions
    bodies: Bodies
    metrics: Metrics = field(default_factory=Metrics)
