"""llmrun itself, with `logged_child.py` as the engine's process: `python logged_serve.py serve ...`."""

from __future__ import annotations

import sys
from pathlib import Path

from llmrun import child_processes
from llmrun.__main__ import main

COMMAND = (sys.executable, "-P", str(Path(__file__)))
_ordinary = child_processes.command


def _command(module: str, *arguments: str) -> list[str]:
    if module == "engine.child.main":
        return [sys.executable, "-P", str(Path(__file__).with_name("logged_child.py"))]
    return _ordinary(module, *arguments)


if __name__ == "__main__":
    child_processes.command = _command
    sys.exit(main())
