"""The command that starts headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

# CI installs Chromium, and fails if a test is skipped.
NEEDS_CHROMIUM = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="chromium is missing: sudo apt-get install chromium"
)


def chromium(home: Path, *options: str) -> list[str]:
    """Return a command that runs headless Chromium with a new profile in the folder `home`."""
    return [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={home / 'profile'}",
        *options,
    ]


def chromium_environment(home: Path) -> Mapping[str, str]:
    return {**os.environ, "HOME": str(home)}
