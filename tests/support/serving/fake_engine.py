"""A background engine without a model, in a process of its own, which answers the handshake as a test wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from llmrun.base.errors import LlmrunError
from llmrun.base.processes.frames import framed, read_frame
from llmrun.serving.background.control import running, stop
from llmrun.serving.background.handshake import LONGEST_GREETING, greeting, read_greeting
from llmrun.serving.background.place import Listener, open_folder, socket_name
from tests.support.cli.commands import ROOT

STATE = {"pid": 1, "model": "/models/tiny.gguf", "name": "tiny", "path": "/models/tiny.gguf", "version": "9.9.9"}
STATE |= {"answers": 0, "memory_bytes": 123_000_000, "started": 1e9, "used": 1e9, "until": None}


def started(key: str, *, stop_takes: float = 0.0, **state: Any) -> subprocess.Popen[bytes]:
    """Start an engine whose socket belongs to this key.

    stop_takes  seconds from the answer to `stop` until the process ends
    state       fields of EngineState that differ from STATE; with `answers`, only force stops the engine
    """
    spec = json.dumps({"key": key, "stop_takes": stop_takes, "state": {**STATE, **state}})
    command = [sys.executable, "-m", __name__, spec]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listening\n"
    process.stdout.close()
    return process


def end_all() -> None:
    """End all background engines in this user's folder, which belongs to the test."""
    with suppress(LlmrunError):  # a test may have made the folder unusable
        for engine in running():
            stop(engine, force=True)


def _main(key: str, stop_takes: float, state: Mapping[str, Any]) -> None:
    folder = open_folder(create=True)
    assert folder is not None
    listener = Listener.open(folder, socket_name(key))
    os.write(1, b"listening\n")
    while (connection := listener.accept()) is not None:
        kind, values = read_greeting(read_frame(connection.makefile("rb"), LONGEST_GREETING))
        if kind == "info":
            connection.sendall(framed(greeting("info", **state)))
        elif state["answers"] and not values.get("force"):
            connection.sendall(framed(greeting("busy", answers=state["answers"])))
        else:
            connection.sendall(framed(greeting("stopping", pid=os.getpid())))
            listener.close()
            connection.close()
            time.sleep(stop_takes)
            return


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
