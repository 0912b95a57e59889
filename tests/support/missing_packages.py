"""Makes installed packages look as if they were not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Hide packages whose modules have the same names. Modules that are already imported stay usable."""
    find, distribution = importlib.util.find_spec, importlib.metadata.distribution

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in names else find(name, package)

    def find_distribution(name: str) -> importlib.metadata.Distribution:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "distribution", find_distribution)
