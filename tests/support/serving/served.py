"""A real `llmrun serve` in a process of its own, seen from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.serving.prometheus import parsed_metrics

START_S = 120.0
_READY = re.compile(rb"ready: http://127\.0\.0\.1:(\d+)/v1")
_ENGINE = "engine.child.main"


@dataclass(frozen=True, slots=True)
class Resources:
    """What the server's processes use. `memory` is the resident memory of the engine's process, in bytes.

    front_memory  the resident memory of the server itself
    helpers       processes that the engine has started, such as the one that renders templates
    connections   TCP connections of the server
    """

    memory: int
    front_memory: int
    files: int
    front_files: int
    helpers: int
    connections: int


class Served:
    """A running server. `log` is the file with everything that it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self._front = psutil.Process(process.pid)

    @property
    def engine(self) -> psutil.Process:
        """The process that runs the engine. Raises LookupError while there is none."""
        for child in self._front.children():
            try:
                if any(_ENGINE in word or "logged_child" in word for word in child.cmdline()):
                    return child
            except psutil.NoSuchProcess:
                continue
        raise LookupError("the server has no engine at the moment")

    @property
    def has_ended(self) -> bool:
        """Whether the server itself has ended, which must not happen before `stop`."""
        return self.process.poll() is not None

    def kill_engine(self) -> bool:
        """Send SIGKILL to the engine's process. Returns whether there was one."""
        if sys.platform == "win32":
            pytest.skip("needs POSIX signals")
        try:
            self.engine.send_signal(signal.SIGKILL)
        except (LookupError, psutil.NoSuchProcess):
            return False
        return True

    def resources(self) -> Resources:
        """Measure the processes."""
        if sys.platform == "win32":
            pytest.skip("needs file descriptors")
        engine = self.engine
        connections = [one for one in self._front.net_connections("tcp") if one.status != psutil.CONN_LISTEN]
        return Resources(
            memory=engine.memory_info().rss,
            front_memory=self._front.memory_info().rss,
            files=engine.num_fds(),
            front_files=self._front.num_fds(),
            helpers=len(engine.children(recursive=True)),
            connections=len(connections),
        )

    def get(self, path: str) -> tuple[int, bytes]:
        """Send a GET request. Returns the status and the body."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            line.request("GET", path)
            response = line.getresponse()
            return response.status, response.read()
        finally:
            line.close()

    def metrics(self) -> Mapping[str, float]:
        """See `parsed_metrics`."""
        return parsed_metrics(self.get("/metrics")[1])

    def wait_until_ready(self) -> None:
        """Wait until the engine is running, such as after a restart."""
        deadline = time.monotonic() + START_S
        while self.get("/health")[0] != 200:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {START_S:.0f} s: {self.get('/health')}")
            time.sleep(0.02)


@contextmanager
def serve(
    *arguments: str, log: Path, command: Sequence[str] = LLMRUN, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Run `llmrun serve` with these arguments on a free port while the block runs.

    command      starts llmrun
    environment  variables to add to this process's environment
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "serve", "--port", "0", "--drain", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield Served(process, _port_of(process, log), log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(START_S)
        finally:
            process.kill()


def scripted_arguments(folder: Path, *, step_seconds: float = 0.0) -> list[str]:
    """Return the arguments for a server with the scripted backend, whose answers are noise at high temperatures."""
    script = folder / "scripted.json"
    script.write_text(json.dumps({"step_seconds": step_seconds}))
    return ["--backend", "scripted", "--speculate", "off", str(script)]


def _port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_S
    while (found := _READY.search(log.read_bytes())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the server did not start: {log.read_text()}")
        time.sleep(0.01)
    return int(found[1])
