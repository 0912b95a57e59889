"""Run `llmrun` without waiting for imports: a server process imports all modules once and forks for each run.

A run behaves like a newly started process, with its own streams, environment and exit code, but begins after some
milliseconds instead of half a second.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import IO, Any, TextIO

ROOT = Path(__file__).resolve().parents[3]
is_enabled = sys.platform == "linux"  # at night, every run is a newly started process; see conftest.py
MOST_BYTES = 100_000  # in a request; the buffer of a socket holds twice as much
_MODES = ("wb", "rb", "rb", "rb")  # of our ends of the pipes for stdin, stdout, stderr, and the exit code


def run(
    arguments: Sequence[str | bytes], stdin: bytes, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[bytes]:
    """Run `llmrun`, with pipes for all three streams, like `subprocess.run`."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    words = [os.fsdecode(argument) for argument in arguments]
    ours: list[IO[bytes]] = []
    theirs: list[int] = []
    for mode in _MODES:
        pair = os.pipe()
        ours.append(os.fdopen(pair[mode == "wb"], mode, buffering=0 if mode == "wb" else -1))
        theirs.append(pair[mode == "rb"])
    socket.send_fds(_server(), [json.dumps({"arguments": words, "env": dict(env)}).encode()], theirs)
    for descriptor in theirs:
        os.close(descriptor)
    pid = int(ours[3].readline())
    with ThreadPoolExecutor(len(ours)) as pool:
        feeding = pool.submit(_feed, ours[0], stdin)
        reading = [pool.submit(file.read) for file in ours[1:]]
        try:
            stdout, stderr, code = (done.result(timeout) for done in reading)
        except Late:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout) from None
        feeding.result()
    for file in ours:
        file.close()
    return subprocess.CompletedProcess(words, int(code), stdout, stderr)


def _feed(file: IO[bytes], data: bytes) -> None:
    """Write to an unbuffered pipe, and stop quietly if the run ends before it has read everything."""
    rest = memoryview(data)
    with contextlib.suppress(BrokenPipeError):
        while rest:
            rest = rest[file.write(rest) :]
    file.close()


@functools.cache
def _server() -> socket.socket:
    """Start the server, once for each process that runs tests. The server ends when the socket is closed."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.cli.forking", str(theirs.fileno())]
    subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(ours.close)
    return ours


# --- the server


def _import_modules() -> None:
    """Import all modules, except those that only the compiler and the nodes of a Ray cluster import."""
    import llmrun

    for module in pkgutil.walk_packages(llmrun.__path__, "llmrun."):
        if not module.name.startswith(("llmrun.kernels.", "llmrun.batching.workers.ray", "llmrun.__main__")):
            importlib.import_module(module.name)


def _wait_for_request(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, and return in the child with the request and its descriptors."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2 * MOST_BYTES, len(_MODES))
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return json.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _split(report: int, descriptors: Sequence[int]) -> None:
    """Fork once more, and return in the child. The parent reports the child's id and exit code."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    os.write(report, b"%d\n" % pid)
    os.write(report, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


_streams: list[TextIO] = []  # kept until the end, as Python keeps its own first streams, because `main` replaces them


def _be_run(requests: socket.socket) -> None:
    request, (*descriptors, report) = _wait_for_request(requests)
    _split(report, descriptors)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["llmrun", *request["arguments"]]
    _streams.append(open(0, encoding="utf-8", closefd=False))  # noqa: SIM115
    _streams.append(open(1, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    _streams.append(open(2, "w", buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = _streams

    from llmrun.__main__ import main

    main()


if __name__ == "__main__":
    _import_modules()
    gc.freeze()  # otherwise, the collector of each run would copy the pages that all runs share
    _be_run(socket.socket(fileno=int(sys.argv[1])))
