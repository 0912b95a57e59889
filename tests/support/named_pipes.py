"""Creates named pipes, which some tests use in place of files. On Windows, they are not in folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def named_pipe(path: Path) -> None:
    """Create a named pipe, or skip the test on Windows."""
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    os.mkfifo(path)
