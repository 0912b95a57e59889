"""llmrun itself, with `logged_child.py` as the engine's process: `python logged_serve.py serve ...`.

It also logs when the server noticed that a connection was closed, as lines of `[time, the client's port]`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from llmrun.__main__ import main
from llmrun.base.processes import commands
from llmrun.serving.http_server import Connection

CLOSED_LOG_VARIABLE = "CLOSED_LOG_OF_TESTS"
COMMAND = (sys.executable, "-P", str(Path(__file__)))
_ordinary = commands.command


def _command(module: str, *arguments: str) -> list[str]:
    if module == "engine.child.main":
        return [sys.executable, "-P", str(Path(__file__).with_name("logged_child.py"))]
    return _ordinary(module, *arguments)


def log_closed(path: str) -> None:
    """Make the server append a line to a file when it notices that a connection was closed."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    lost = Connection.connection_lost

    def logged(self: Connection, exc: Exception | None) -> None:
        os.write(file, json.dumps([time.monotonic(), (self.client or ("", 0))[1]]).encode() + b"\n")
        lost(self, exc)

    Connection.connection_lost = logged  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    log_closed(os.environ[CLOSED_LOG_VARIABLE])
    commands.command = _command
    main()
