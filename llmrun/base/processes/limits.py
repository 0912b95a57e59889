"""Isolated processes, which work on untrusted data within limits on time, memory and output.

Untrusted input can make a library run forever, allocate memory without limit, or crash. In a child process, the
operating system and a watchdog in the parent limit time and memory, and a crash only means that no answer arrives. The
child starts without the user's environment and open files, and calls `worker.serve_limited`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from llmrun.base.processes import commands
from llmrun.base.processes.child import Child
from llmrun.base.processes.frames import FrameTooLong, decoded, encoded

if TYPE_CHECKING:
    import psutil

_FIRST_LOOK_S = 0.05  # seconds before the first check; most requests end sooner, which saves 20 ms for importing psutil
_DYING_S = 1.0  # the longest wait for the end of a killed process, which takes milliseconds
_LOOK_S = 0.01
TOO_DEEP = "it is nested too deeply, or calls itself"
INVALID_ANSWER = "its process sent an invalid answer"


class ProcessLimits(Struct, frozen=True):
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

    module   the module below `llmrun` whose `main` calls `worker.serve_limited`
    purpose  the purpose of the process, for error messages
    decode   decodes answers, and raises ValueError, TypeError or RecursionError; by default, from JSON
    """

    def __init__(self, module: str, purpose: str, decode: Callable[[bytes], Any] = decoded) -> None:
        self._module = module
        self._purpose = purpose
        self._decode = decode
        self._child: Child | None = None
        self._asking = threading.RLock()
        self._memory = 0  # the process's memory limit, which cannot be raised; 0 before the first request

    def start(self) -> None:
        """Start the process, but do not wait the 60 ms until it is ready. Raises LlmrunError."""
        self._running()

    def close(self) -> None:
        """Kill the process, which starts again on the next use. Idempotent."""
        child, self._child = self._child, None
        self._memory = 0
        if child is not None:
            child.end(0)

    def kill(self) -> None:
        """Kill the process, so that a request in another thread ends soon, and later ones start it again.

        Returns once the process has ended. Otherwise, the next request might be sent to the dying process, and fail.
        """
        if (child := self._child) is not None:
            child.kill()
            child.wait(_DYING_S)

    def _running(self) -> Child:
        if self._child is not None and self._child.ended():
            self.close()  # another program or the system has killed the process
        if self._child is None:
            self._child = Child(
                commands.isolated_command(self._module),
                purpose=f"the process for {self._purpose}",
                environment=commands.isolated_environment(),
                kept_stderr=0,
            )
        return self._child

    def request(self, request: bytes, limits: ProcessLimits, kinds: Collection[str]) -> tuple[str, Any]:
        """Send a request and return the kind and the value of the answer.

        Unless an answer of one of these kinds arrives, closes the process and raises ProcessFailed.
        """
        with self._asking:
            answer = self._answer(request, limits)
        try:
            kind, value = self._decode(answer)
        except (ValueError, TypeError, RecursionError):
            kind = value = None
        if kind in kinds:
            return kind, value
        self.close()  # after running out of memory, the process may be in a bad state
        raise ProcessFailed({"memory": limits.out_of_memory, "depth": TOO_DEEP}.get(str(value), INVALID_ANSWER))

    def _answer(self, request: bytes, limits: ProcessLimits) -> bytes:
        if 0 < self._memory < limits.memory:
            self.close()
        child = self._running()
        if self._memory == 0:  # wait for a new process; there are no limits to enforce before the first request
            self._exchange(child, (), limits, unwatched_s=limits.wall_s)
        self._memory = limits.memory
        head = encoded({"cpu_s": limits.cpu_s, "memory": limits.memory})
        return self._exchange(child, (head, request), limits)

    def _exchange(
        self, child: Child, frames: Sequence[bytes], limits: ProcessLimits, unwatched_s: float = _FIRST_LOOK_S
    ) -> bytes:
        """Send frames and return the next one received. Raises ProcessFailed if no frame arrives within the limits."""
        exchange = _Exchange(child, frames, limits.output)
        too_much = ""
        try:
            exchange.start()
            too_much = _watch(exchange, child.pid, limits, unwatched_s)
        finally:  # also after Ctrl-C
            if exchange.answer is None:
                child.kill()
                if exchange.is_alive():
                    exchange.join()  # the thread must not use closed pipes
                self.close()
        if exchange.answer is not None:
            return exchange.answer
        if words := too_much or exchange.trouble:
            raise ProcessFailed(words)
        raise ProcessFailed(_exit_reason(child.status, limits), child.status)


class _Exchange(threading.Thread):
    """A thread that sends a request, receives the answer, and may block until the child process is killed.

    answer   the received frame, or None
    trouble  why the answer was rejected; empty if the process ended without an answer
    """

    def __init__(self, child: Child, frames: Sequence[bytes], longest: int) -> None:
        super().__init__(daemon=True)
        self._frames = frames
        self._child = child
        self._longest = longest
        self.answer: bytes | None = None
        self.trouble = ""

    def run(self) -> None:
        for frame in self._frames:
            self._child.send(frame)
        try:
            self.answer = self._child.receive(self._longest)
        except FrameTooLong:
            self.trouble = f"its output exceeds {self._longest:,} bytes"


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
    return f"its process ended: {commands.ending(status)}"
