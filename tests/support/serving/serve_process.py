"""Runs the real `llmrun serve` in a process of its own.

Tests with other programs' clients run in another environment, so this module imports nothing of llmrun.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.serving.prometheus import parsed_metrics

ROOT = Path(__file__).resolve().parents[3]
PYTHON = sys.executable if (Path(sys.prefix) / "bin" / "llmrun").exists() else str(ROOT / ".venv" / "bin" / "python")
TIMEOUT_S = 120.0  # for a stuck server; a normal one starts in a second
_PATIENCE_S = 0.5  # after the first signal, for a server without running requests


@dataclass
class Served:
    """A running server.

    url         of the API, as the banner says it, such as http://127.0.0.1:8080/v1
    model       the name of the model
    lines       what the server has written so far
    patience_s  how long to wait for an answer
    """

    process: subprocess.Popen[str]
    lines: list[str]
    url: str = ""
    model: str = ""
    sent: dict[str, str] = field(default_factory=dict)
    patience_s: float = TIMEOUT_S

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request, and return the status, the headers with names in lower case, and the body."""
        line = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=self.patience_s)
        data = None if body is None else json.dumps(body)
        line.request(method, path, data, {"content-type": "application/json", **self.sent, **headers})
        response = line.getresponse()
        received = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        line.close()
        return received

    def post(self, path: str, **body: Any) -> Any:
        """Send a request that must succeed, and return the body."""
        status, _, received = self.call("POST", path, body)
        assert status == 200, received
        return json.loads(received)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Send a request that must succeed, and return its chunks."""
        status, headers, received = self.call("POST", path, {**body, "stream": True})
        assert status == 200, received
        assert headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in received.decode().split("\n") if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [*map(json.loads, data)]

    def chat(self, question: str, **body: Any) -> Any:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": question}], **body)

    def metric(self, name: str) -> float:
        _, _, text = self.call("GET", "/metrics")
        return parsed_metrics(text)[name.removeprefix("llmrun_")]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.01)

    def is_idle(self) -> bool:
        return self.metric("llmrun_requests_running") == self.metric("llmrun_requests_waiting") == 0

    def stop(self) -> None:
        """Send the signal that stops a server."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def served(model: str, *flags: str, key: str | None = None) -> Iterator[Served]:
    """Start a server on a free port, and stop it when the block ends. `key` is the API key to send."""
    process = subprocess.Popen(
        [PYTHON, "-m", "llmrun", "serve", model, "--port", "0", *flags],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    running = Served(process, [])
    if key is not None:
        running.sent["authorization"] = f"Bearer {key}"
    banner: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, running.lines, banner), daemon=True)
    reader.start()
    try:
        while not running.url:
            line = banner.get(timeout=TIMEOUT_S)
            assert line is not None, "".join(running.lines)
            if line.startswith("ready: "):
                running.url = line.removeprefix("ready: ").strip()
            elif line.startswith("serving "):
                running.model = line.removeprefix("serving ").partition(": ")[0]
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # ends running requests
        process.wait(TIMEOUT_S)
        reader.join(TIMEOUT_S)
    assert process.returncode == 0, "".join(running.lines)
    assert "Traceback" not in "".join(running.lines)


def _read(process: subprocess.Popen[str], lines: list[str], banner: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        banner.put(line)
    banner.put(None)
