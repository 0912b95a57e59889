"""A program that stands in for coding agents: it writes what it was given, and does what a file tells it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python}
import json, os, signal, sys, time, urllib.request
folder = {folder!r}

def asked():
    base, key = os.environ["OPENAI_API_BASE"], os.environ["OPENAI_API_KEY"]
    model = sys.argv[sys.argv.index("--model") + 1].partition("/")[2]
    body = json.dumps({{"model": model, "messages": [{{"role": "user", "content": "Hello"}}]}}).encode()
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + key}}
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

told = json.loads(os.environ.get("FAKE_AGENT", "{{}}"))
name = told.get("name", "agent")
if "on_interrupt" in told:
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(told["on_interrupt"]))
file = os.path.join(folder, name + ".json")
with open(file + ".new", "w") as new:
    json.dump({{
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "answer": asked() if "OPENAI_API_BASE" in os.environ else None,
    }}, new)
os.replace(file + ".new", file)
print("agent runs", flush=True)
if "stops" in told:
    os.kill(os.getpid(), signal.SIGTSTP)
    print("agent continues", flush=True)
while told.get("waits") and not os.path.exists(os.path.join(folder, name + ".end")):
    time.sleep(0.02)
if "signal" in told:
    os.kill(os.getpid(), told["signal"])
sys.exit(told.get("code", 0))
"""


class FakeAgents:
    """Programs with the names of agents, in a folder for PATH."""

    def __init__(self, folder: Path, *programs: str) -> None:
        self._folder = folder
        self.path = folder / "bin"
        self.path.mkdir()
        for program in programs:
            file = self.path / program
            file.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
            file.chmod(0o755)

    def report(self, name: str = "agent", seconds: float = 60.0) -> dict[str, Any]:
        """Wait until an agent runs, and return its arguments, its environment, its process and an answer."""
        file = self._folder / f"{name}.json"
        wait_for(file.exists, seconds)
        return json.loads(file.read_text())  # type: ignore[no-any-return]

    def end(self, name: str = "agent") -> None:
        """Let a waiting agent end."""
        (self._folder / f"{name}.end").touch()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def told(**values: Any) -> dict[str, str]:
    """Return the environment that tells an agent what to do."""
    return {"FAKE_AGENT": json.dumps(values)}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
