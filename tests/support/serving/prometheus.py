"""Reads the metrics of a server."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r'^llmrun_(\w+)(?:\{model="[^"]*"\})? (\S+)$', re.MULTILINE)


def parsed_metrics(text: bytes) -> Mapping[str, float]:
    """Return the metrics without labels, and those of the only model, without the prefix `llmrun_`."""
    return {name: float(value) for name, value in _SAMPLE.findall(text.decode())}
