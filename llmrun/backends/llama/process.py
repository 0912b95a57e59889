"""Starts the child process that runs llama.cpp, sends requests to it, and explains its crashes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmrun.backends.llama.log import advice_for, gpu_error
from llmrun.backends.llama.memory_transfers import MemorySender
from llmrun.backends.llama.messages import FLAG_BYTES, SharedMemory, read_answer, request_line
from llmrun.base.errors import BackendCrashed, LlmrunError, shown
from llmrun.base.processes import commands
from llmrun.base.processes.child import Child

if TYPE_CHECKING:
    from llmrun.backends.llama.rpc_servers import RpcServer

_WORKER = "backends.llama.worker"
LIBRARY_FOLDER = "LLAMA_CPP_LIB_PATH"  # as in probe.py, which imports this module
_KEPT_BYTES = 64 << 10  # bytes to keep from the end of stderr, which contains the reason for a crash
CPU_ADVICE = "try the CPU engine, which may support this model: --backend cpu"
_EXIT_S = 5.0  # seconds to wait for the process to exit
_STOP_S = 20.0  # seconds to wait for the current work to stop; a GPU may be in the middle of a long prefill
_LOOK_MS = 500  # interval between checks of the stop flag while RPC servers compute
_PIECE_BYTES = 1 << 20  # maximum size of one write
# These patterns match the fatal errors that llama.cpp and the C++ library report.
_REASON = re.compile(
    r"GGML_ASSERT\(.*|[\w-]+\.(?:cpp|c|cu|m):\d+: (?!GGML_ASSERT).*|.*what\(\):.*|.*CUDA error.*|.*: error: .*"
)


class LlamaProcess:
    """A child process that runs llama.cpp with one model at a time.

    Only `ask`, `settle`, `stop` and `kill` are thread-safe.
    """

    def __init__(self, worker: str = _WORKER) -> None:
        """Start the process, which runs the module `llmrun.WORKER`. Raises LlmrunError if the start fails."""
        self.memory = SharedMemory.create()
        self.transfers = MemorySender()
        self._flag = self.memory.map(FLAG_BYTES)
        try:
            self._child = _start_worker(worker, self.memory, self.transfers)
        except LlmrunError:
            self.memory.close()
            self.transfers.close()
            raise
        self.transfers.child_started()
        self.rpc_servers: Sequence[RpcServer] = ()  # the servers to which llama.cpp is connected
        self._lost: str | None = None  # after a crash: a description of the RPC server that caused it, or ""
        self._requests = 0
        self._idle = True
        self._asking = threading.RLock()
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        return self._child.ended()

    @property
    def last_words(self) -> str:
        """The end of llama.cpp's output, which contains the reason for a crash."""
        return self._child.last_words

    def ask(self, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return its answer. Requests from other threads wait until the answer arrives.

        doing  a description of the work for error messages, such as "loading m.gguf"

        Raises BackendCrashed. After any other interruption, such as Ctrl-C, `ask` stops the work and raises once the
        work has stopped.
        """
        with self._asking:
            try:
                self._idle = False
                answer = self.answer(self.tell(operation, **fields), doing)
                self._idle = True
                return answer
            except LlmrunError:
                raise
            except BaseException:
                self._wait_until_idle(doing)
                raise

    def settle(self, doing: str) -> None:
        """Wait until no request is running.

        A request may still be running if the user pressed Ctrl-C twice: during the request, and while `ask` waited for
        the request to stop. `settle` never raises BackendCrashed, because the next request raises that error.
        """
        if not self._idle:
            with self._asking:
                if not self._idle:
                    self._wait_until_idle(doing)

    def tell(self, operation: str, **fields: Any) -> int:
        """Send a request and return its number, which `answer` needs.

        KeyboardInterrupt can truncate a request at any point. Each request therefore starts with a newline, so that the
        worker can skip an incomplete request before it. Answers that no caller is waiting for are also skipped.
        """
        self._requests += 1
        number = self._requests
        line = b"\n" + request_line(operation, number, fields)
        descriptor = _descriptor(self._child.stdin)
        with contextlib.suppress(BrokenPipeError):  # The process has died; `answer` will report the crash.
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written : written + _PIECE_BYTES])
        return number

    def answer(self, number: int, doing: str, progress: Callable[[float], None] | None = None) -> dict[str, Any]:
        """Wait for the answer to the request with this number. Raises BackendCrashed."""
        while True:
            answer = self._next_answer(doing)
            if answer.get("number") != number:
                continue
            if "wrong" in answer:
                raise _wrong_library(answer["wrong"])
            if "broken" in answer:
                raise _broken(answer["broken"])
            if "progress" not in answer:
                return answer
            if progress is not None:
                progress(answer["progress"])

    def stop(self) -> None:
        """Stop the running forward pass, or else the next pass. Any thread or signal handler can call `stop`."""
        self._flag[0] = 1

    @property
    def stopping(self) -> bool:
        return self._flag[0] != 0

    def clear_stop(self) -> None:
        self._flag[0] = 0

    def kill(self) -> None:
        """Kill the process. Any thread can call `kill`. Waiting calls of `answer` raise BackendCrashed."""
        self._child.kill()

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[threading.Event]:
        """Kill the process and set the event if the `with` block takes longer than `seconds`."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process. Calls after the first have no effect."""
        try:
            self.stop()
            self._child.stdin.close()
            self._child.wait(_EXIT_S)
        finally:
            self._child.end(0)
            self.memory.close()
            self.transfers.close()

    def _wait_until_idle(self, doing: str) -> None:
        """Stop the current work and wait until it has stopped. Kill the process if stopping takes longer than _STOP_S.

        If the wait itself is interrupted, the stop flag stays set, so the pass still ends.
        """
        self.stop()
        with self.limited(_STOP_S):
            with contextlib.suppress(BackendCrashed):  # The next request will report the crash.
                self.answer(self.tell("rest"), doing)
            self.clear_stop()
            self._idle = True

    def _next_answer(self, doing: str) -> dict[str, Any]:
        descriptor = _descriptor(self._child.stdout)
        while b"\n" not in self._unread:
            if self.rpc_servers:
                self._wait_for_servers(descriptor)
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._crashed(doing)
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return read_answer(line)

    def _wait_for_servers(self, descriptor: int) -> None:
        """Wait until the process has answered or ended. Kill the process if it does not stop within _STOP_S of `stop`.

        While llama.cpp waits for an RPC server, it does not check the stop flag, and a server can hang forever.
        On Windows, where a wait for a pipe cannot have a time limit, this method does nothing.
        """
        if sys.platform == "win32":
            return
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        since: float | None = None
        while not waiting.poll(_LOOK_MS):
            if not self.stopping:
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > _STOP_S:
                names = " and ".join(server.name for server in self.rpc_servers)
                self._lost = f"gave up waiting for the RPC server{'s' if len(self.rpc_servers) > 1 else ''} {names}"
                self.kill()

    def _crashed(self, doing: str) -> BackendCrashed:
        if not self._child.wait(_EXIT_S):
            self.kill()
            self._child.wait(_EXIT_S)
        reasons = _REASON.findall(self.last_words)
        if self.rpc_servers and (reasons or self._lost):
            from llmrun.backends.llama.rpc_servers import LOST_HINT, lost_connection

            if self._lost is None:
                self._lost = lost_connection(self.rpc_servers, reasons[-1])
            if self._lost:
                return BackendCrashed(f"{self._lost} while {doing}", hint=LOST_HINT)
        problem = gpu_error(self.last_words)
        reason = problem.cause or (reasons[-1].strip() if reasons else "")
        why = f": {shown(reason, 200)}" if reason else ""
        advice = named_library_advice() or CPU_ADVICE
        return BackendCrashed(
            f"llama.cpp died while {doing}: {commands.ending(self._child.status)}{why}", hint=problem.advice or advice
        )


def named_library_advice() -> str:
    """Return what to do if llama.cpp fails and a variable names its libraries, or "" if the variable is not set."""
    if LIBRARY_FOLDER not in os.environ:
        return ""
    return f"unset {LIBRARY_FOLDER}, or name libraries that match llama-cpp-python: see docs/gpus.md"


def _wrong_library(difference: str) -> LlmrunError:
    from importlib.metadata import version

    return LlmrunError(
        f"the llama.cpp library in {shown(os.environ.get(LIBRARY_FOLDER, ''), 200)} does not match "
        f"llama-cpp-python {version('llama-cpp-python')}: {shown(difference, 200)}",
        hint=named_library_advice(),
    )


def _broken(reason: str) -> LlmrunError:
    from llmrun.backends.llama.build_command import COMPILES, rebuild_command

    advice = advice_for(reason) or named_library_advice()
    return LlmrunError(
        f"llama-cpp-python does not work: {shown(reason, 300)}",
        hint=advice or f"reinstall it ({COMPILES}): {rebuild_command('')}",
    )


def _start_worker(worker: str, memory: SharedMemory, transfers: MemorySender) -> Child:
    """Start the worker in its own process group. Raises LlmrunError.

    The terminal sends Ctrl-C to all processes in the foreground group. If the worker were in the foreground group, it
    could be interrupted while it is starting.
    """
    return Child(
        commands.command(worker, memory.handle, transfers.handle),
        purpose="a process for llama.cpp",
        # Without GGML_NO_BACKTRACE, llama.cpp attaches a debugger to itself when it crashes.
        environment={**commands.environment(), "GGML_NO_BACKTRACE": "1"},
        group=commands.in_own_group,
        kept_stderr=_KEPT_BYTES,
        pass_fds=memory.inherited + transfers.inherited,
    )


def _descriptor(pipe: io.RawIOBase) -> int:
    if pipe.closed:
        raise LlmrunError("the process that runs llama.cpp has been closed")
    return pipe.fileno()
