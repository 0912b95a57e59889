"""Run `llmrun` without waiting for imports: a server process imports all modules once and forks for each run.

A run behaves like a newly started process, with its own streams, environment, working directory and exit code, but
begins after some milliseconds instead of half a second. The processes in which runs render chat templates are forked as
well, from a second server.
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
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parents[3]
is_enabled = sys.platform == "linux"  # at night, every run is a newly started process; see conftest.py
MOST_BYTES = 100_000  # in a request; the buffer of a socket holds twice as much
_TEMPLATES = "engine.templates.worker"  # the module of the process that renders templates
_FLUSH_FAILED = 120  # Python's exit code if the last output cannot be written


class ForkedProcess:
    """A process that a server has forked, with the attributes of `subprocess.Popen` that tests and `Child` use.

    The process is not a child of this one, so its exit code arrives through a pipe.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr = None

    def __init__(self, pid: int, report: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._report = report
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        if self.returncode is None and self._waiting.acquire(blocking=False):
            try:
                has_ended = bool(select.select([self._report], [], [], 0)[0])
            finally:
                self._waiting.release()
            if has_ended:
                self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self.returncode is None and not select.select([self._report], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        with self._waiting:
            if self.returncode is None:
                with self._report:
                    self.returncode = int(self._report.read())
        return self.returncode

    def kill(self) -> None:
        if sys.platform != "linux":
            raise NotImplementedError(sys.platform)
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, but not been reported
                os.kill(self.pid, signal.SIGKILL)


def run(
    arguments: Sequence[str | bytes], stdin: bytes, env: Mapping[str, str], timeout: float, cwd: Path = ROOT
) -> subprocess.CompletedProcess[bytes]:
    """Run `llmrun`, with pipes for all three streams, like `subprocess.run`."""
    words = [os.fsdecode(argument) for argument in arguments]
    (to_stdin, their_stdin), (stdout, their_stdout), (stderr, their_stderr) = _pipe("wb"), _pipe("rb"), _pipe("rb")
    end = time.monotonic() + timeout
    process = _forked(_run_server(), _request(["llmrun", *words], env, cwd), their_stdin, their_stdout, their_stderr)
    with ThreadPoolExecutor() as pool:
        feeding = pool.submit(_feed, to_stdin, stdin)
        reading = [pool.submit(file.read) for file in (stdout, stderr)]
        ending = pool.submit(process.wait)
        try:
            output, errors = (done.result(end - time.monotonic()) for done in reading)
            code = ending.result(end - time.monotonic())
        except Late:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout) from None
        feeding.result()
    stdout.close()
    stderr.close()
    return subprocess.CompletedProcess(words, code, output, errors)


def start_on_terminal(words: Sequence[str], env: Mapping[str, str], cwd: Path, terminal: int) -> ForkedProcess:
    """Start `main()` of a module with a terminal as its three streams and its controlling terminal.

    The first word is the name of the module, "llmrun" or one of the tests' own. The descriptor is closed.
    """
    request = _request(words, env, cwd) | {"leads_session": True}
    return _forked(_run_server(), request, terminal, os.dup(terminal), os.dup(terminal))


def _request(words: Sequence[str], env: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    return {"words": [*words], "env": dict(env), "cwd": str(cwd)}


def _start_template_process() -> ForkedProcess:
    (stdin, their_stdin), (stdout, their_stdout) = _pipe("wb"), _pipe("rb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    process = _forked(_template_server(), {"leads_session": True}, their_stdin, their_stdout, nowhere)
    process.stdin, process.stdout = stdin.detach(), stdout.detach()  # type: ignore[attr-defined]  # unbuffered
    return process


def _pipe(mode: str) -> tuple[IO[bytes], int]:
    """Return one end of a new pipe as a file with this mode, and the descriptor of the other end."""
    reading, writing = os.pipe()
    return (os.fdopen(reading, mode), writing) if mode == "rb" else (os.fdopen(writing, mode), reading)


def _forked(server: socket.socket, request: Mapping[str, Any], *streams: int) -> ForkedProcess:
    """Make a server fork a process with these descriptors as its standard streams. Closes them in this process."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    report, theirs = _pipe("rb")
    socket.send_fds(server, [json.dumps(request).encode()], [*streams, theirs])
    for descriptor in (*streams, theirs):
        os.close(descriptor)
    return ForkedProcess(int(report.readline()), report)


def _feed(file: IO[bytes], data: bytes) -> None:
    """Write to a pipe, and stop quietly if the run ends before it has read everything."""
    with contextlib.suppress(BrokenPipeError), file:
        file.write(data)


@functools.cache
def _run_server() -> socket.socket:
    """Start the server of runs, once for each process that runs tests."""
    return _started([sys.executable, "-c", _program("serve_runs")], os.environ)


@functools.cache
def _template_server() -> socket.socket:
    """Start the server of template processes, with the options and the environment of an isolated process."""
    from llmrun.base.processes.commands import isolated_environment

    command = [sys.executable, "-I", "-S", "-c", _program("serve_template_processes")]
    return _started(command, isolated_environment())


def _program(function: str) -> str:
    return f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import {function}; {function}(int(sys.argv[1]))"


def _started(command: Sequence[str], env: Mapping[str, str]) -> socket.socket:
    """Start a server, which ends when the returned socket is closed."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folders = [str(ROOT), *filter(None, sys.path)]
    subprocess.Popen(
        [*command, str(theirs.fileno()), *folders],
        cwd=ROOT,
        env=env,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    atexit.register(ours.close)
    return ours


# --- the servers


def serve_runs(requests: int) -> None:
    """Import all modules, except those that only the compiler and the nodes of a Ray cluster import. Then fork."""
    import llmrun

    for module in pkgutil.walk_packages(llmrun.__path__, "llmrun."):
        if not module.name.startswith(("llmrun.kernels.", "llmrun.jobs.batching.workers.ray", "llmrun.__main__")):
            importlib.import_module(module.name)
    _fork_template_processes()
    gc.freeze()  # otherwise, the collector of each run would copy the pages that all runs share
    _become_run(_forked_for_request(socket.socket(fileno=requests)))


def serve_template_processes(requests: int) -> None:
    """Import what templates need, and fork."""
    from llmrun.engine.templates import probing  # noqa: F401  the worker imports it on first use
    from llmrun.engine.templates.worker import main

    gc.freeze()
    _forked_for_request(socket.socket(fileno=requests))
    _exit_after(main)


def _fork_template_processes() -> None:
    """Let runs fork the processes that render templates instead of starting them."""
    from llmrun.base.processes import child

    start = child._start
    _template_server()

    def start_or_fork(purpose: str, command: Sequence[str], **options: Any) -> Any:
        is_template = any(f"llmrun.{_TEMPLATES} " in word for word in command)
        return _start_template_process() if is_template else start(purpose, command, **options)

    child._start = start_or_fork


def _forked_for_request(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request, and return in the child with the request, after replacing its standard streams."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    import fcntl
    import termios

    request, (*streams, report) = _wait_for_request(requests)
    _split(report, streams)
    for standard, descriptor in enumerate(streams):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    if "leads_session" in request:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # it becomes the controlling terminal
    return request


def _wait_for_request(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, and return in the child with the request and its descriptors."""
    if sys.platform != "linux":
        raise NotImplementedError(sys.platform)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2 * MOST_BYTES, 4)
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


def _become_run(request: Mapping[str, Any]) -> None:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["words"]
    _streams.append(open(0, encoding="utf-8", closefd=False))  # noqa: SIM115
    _streams.append(open(1, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    _streams.append(open(2, "w", buffering=1, encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = _streams

    module = sys.argv[0]
    _exit_after(importlib.import_module("llmrun.__main__" if module == "llmrun" else module).main)


def _exit_after(main: Callable[[], object]) -> NoReturn:
    """Call `main`, and end the process without Python's finalization.

    Finalization would copy all pages that the runs share, and cost more than most runs. Faults in finalizers and in the
    exit handlers of libraries are therefore found only at night.
    """
    code = 0
    try:
        main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001  as in any Python program
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = _FLUSH_FAILED
    os._exit(code)
