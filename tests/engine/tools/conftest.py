"""Fixtures for the tests of tools."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty data folder, so that no test finds the marks of another."""
    folder = tmp_path / "data"
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(folder))
    return folder
