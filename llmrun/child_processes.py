"""Python processes that do for this one what it must not do itself: import Numba, run what may end it, be measured."""

from __future__ import annotations

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """`python -m llmrun.MODULE ...`; "" is llmrun itself."""
    # -P: modules are searched where this process does, not also in the folder it happens to stand in.
    return [sys.executable, "-P", "-m", f"llmrun.{module}" if module else "llmrun", *arguments]


def environment() -> dict[str, str]:
    """This process's, with its path of modules. The user's own NUMBA_* would change machine code, or switch the
    compiler off, unseen by any key."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}  # noqa: PTH109
