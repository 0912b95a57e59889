"""The parent's side of an isolated process: starts it, sends it requests and enforces its limits.

Untrusted input can make a library run forever, allocate memory without limit, or crash. In a child process, the
operating system and a watchdog in the parent limit time and memory, and a crash only means that no answer arrives. The
child starts with an empty environment and no open files.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from llmrun.base import child_processes
from llmrun.base.errors import LlmrunError
from llmrun.engine.isolated_worker import FrameTooLong, decoded, encoded, read_frame, write_frame

if TYPE_CHECKING:
    import psutil

_FIRST_LOOK_S = 0.05  # seconds before the first check; most requests end sooner, which saves 20 ms for importing psutil
_LOOK_S = 0.01
TOO_DEEP = "it is nested too deeply, or calls itself"
INVALID_ANSWER = "its process sent an invalid answer"


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The resource limits for one request.

    cpu_s   seconds of CPU time, which does not depend on how busy the machine is
    wall_s  seconds of wall-clock time
    memory  bytes of memory for the whole process, including about 30 MB for Python itself
    output  bytes of the answer
    """

    cpu_s: float
    wall_s: float
    memory: int
    output: int

    @property
    def out_of_time(self) -> str:
        return f"it takes longer than {self.cpu_s:.1f} s"

    @property
    def out_of_memory(self) -> str:
        return f"it needs more than {self.memory / 1e6:.0f} MB of memory"


class ProcessFailed(Exception):
    """Raised if a request receives no answer. The message is a short reason; `status` is the exit status, or None."""

    def __init__(self, words: str, status: int | None = None) -> None:
        super().__init__(words)
        self.status = status


class IsolatedProcess:
    """A child process that answers one request at a time, started by `start` or on first use. Thread-safe.

    The process ends with `close`, or when this object is garbage-collected.

    module   the module below `llmrun` whose `main` calls `isolated_worker.serve`
    purpose  the purpose of the process, for error messages
    """

    def __init__(self, module: str, purpose: str) -> None:
        self._module = module
        self._purpose = purpose
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process
        self._asking = threading.RLock()
        self._memory = 0  # the process's memory limit, which cannot be raised; 0 before the first request

    def start(self) -> None:
        """Start the process, but do not wait the 60 ms until it is ready. Raises LlmrunError."""
        self._running()

    def close(self) -> None:
        """Kill the process, which starts again on the next use. Idempotent."""
        self._process = None
        self._memory = 0
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # another program or the system has killed the process
        if self._process is None:
            try:
                self._process = _start_process(self._module)
                self._end = weakref.finalize(self, _end_process, self._process)
            except OSError as error:
                raise LlmrunError(
                    f"cannot start the process for {self._purpose}: {sys.executable}: {error.strerror}"
                ) from error
        return self._process

    def request(self, request: bytes, limits: ProcessLimits, kinds: Collection[str]) -> tuple[str, Any]:
        """Send a request and return the kind and the value of the answer.

        Unless an answer of one of these kinds arrives, closes the process and raises ProcessFailed.
        """
        with self._asking:
            answer = self._answer(request, limits)
        try:
            kind, value = decoded(answer)
        except (ValueError, TypeError, RecursionError):
            kind = value = None
        if kind in kinds:
            return kind, value
        self.close()  # after running out of memory, the process may be in a bad state
        raise ProcessFailed({"memory": limits.out_of_memory, "depth": TOO_DEEP}.get(str(value), INVALID_ANSWER))

    def _answer(self, request: bytes, limits: ProcessLimits) -> bytes:
        if 0 < self._memory < limits.memory:
            self.close()
        process = self._running()
        if self._memory == 0:  # wait for a new process; there are no limits to enforce before the first request
            self._exchange(process, (), limits, unwatched_s=limits.wall_s)
        self._memory = limits.memory
        head = encoded({"cpu_s": limits.cpu_s, "memory": limits.memory})
        return self._exchange(process, (head, request), limits)

    def _exchange(
        self,
        process: subprocess.Popen[bytes],
        frames: Sequence[bytes],
        limits: ProcessLimits,
        unwatched_s: float = _FIRST_LOOK_S,
    ) -> bytes:
        """Send frames and return the next one received. Raises ProcessFailed if no frame arrives within the limits."""
        exchange = _Exchange(process, frames, limits.output)
        try:
            exchange.start()
            too_much = _watch(exchange, process.pid, limits, unwatched_s)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if exchange.answer is not None:
            return exchange.answer
        self.close()
        if words := too_much or exchange.trouble:
            raise ProcessFailed(words)
        raise ProcessFailed(_exit_reason(process.returncode, limits), process.returncode)


class _Exchange(threading.Thread):
    """A thread that sends a request, receives the answer, and may block until the child process is killed.

    answer   the received frame, or None
    trouble  why the answer was rejected; empty if the process ended without an answer
    """

    def __init__(self, process: subprocess.Popen[bytes], frames: Sequence[bytes], longest: int) -> None:
        super().__init__(daemon=True)
        self._frames = frames
        self._to, self._from = _pipes(process)
        self._longest = longest
        self.answer: bytes | None = None
        self.trouble = ""

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            try:
                for frame in self._frames:
                    write_frame(self._to, frame)
                self.answer = read_frame(self._from, self._longest)
            except FrameTooLong:
                self.trouble = f"its output exceeds {self._longest:,} bytes"


def _start_process(module: str) -> subprocess.Popen[bytes]:
    """Start the process in its own session, so that Ctrl-C reaches only the parent."""
    return subprocess.Popen(
        child_processes.isolated_command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **child_processes.in_own_session(),
        env=child_processes.isolated_environment(),
    )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):  # part of a request may be left in the buffer
            pipe.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    return cast("tuple[IO[bytes], IO[bytes]]", (process.stdin, process.stdout))


def _watch(exchange: threading.Thread, pid: int, limits: ProcessLimits, unwatched_s: float) -> str:
    """Wait until the exchange ends or exceeds a limit. Returns a description of that limit, or ""."""
    deadline = time.monotonic() + limits.wall_s
    exchange.join(unwatched_s)
    if not exchange.is_alive():
        return ""
    import psutil

    most_cpu_s = limits.cpu_s
    with contextlib.suppress(psutil.Error):  # the process has ended
        watched = psutil.Process(pid)
        most_cpu_s += _cpu_s(watched)
        while exchange.is_alive() and time.monotonic() < deadline:
            if watched.memory_info().rss > limits.memory:
                return limits.out_of_memory
            if _cpu_s(watched) > most_cpu_s:
                return limits.out_of_time
            exchange.join(_LOOK_S)
    exchange.join(max(0.0, deadline - time.monotonic()))
    return f"it did not finish within {limits.wall_s:g} s" if exchange.is_alive() else ""


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def _exit_reason(status: int, limits: ProcessLimits) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return limits.out_of_time
    return f"its process ended: {child_processes.ending(status)}"
