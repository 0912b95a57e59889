"""The parent's side of child processes: `Child` for threads, and `AsyncChild` for event loops.

If the parent ends, a child process ends too, because the child's standard input is then closed (see worker.py). A child
that has been ended leaves no process, descriptor, file or thread behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import LlmrunError, shown
from llmrun.base.processes import commands
from llmrun.base.processes.frames import HEADER_BYTES, frame_length, framed, read_frame, write_frame

if TYPE_CHECKING:
    import asyncio

_PIECE_BYTES = 1 << 16
_LAST_WORDS_S = 1.0  # time limit for reading the rest of stderr, which an escaped descendant may hold open


class Child:
    """A running child process, which is killed when this object is garbage-collected or the parent exits.

    pid     the process ID, which is also the ID of the process's group
    stdin   unbuffered; must be used by only one thread
    stdout  unbuffered; must be used by only one thread
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        purpose: str = "",
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        group: Callable[[], dict[str, Any]] = commands.in_own_session,
        kept_stderr: int = 4096,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a process. Raises LlmrunError.

        purpose      the process in words, such as "the process for chat templates", for error messages
        environment  by default, `commands.environment()`
        folder       the working directory; by default, the working directory of this process
        group        `in_own_session` or `in_own_group`
        kept_stderr  the number of bytes to keep from the end of stderr; 0 discards stderr
        """
        pipes: Any = _start(
            purpose,
            command,
            stderr=subprocess.PIPE if kept_stderr else subprocess.DEVNULL,
            cwd=folder,
            env=commands.environment() if environment is None else environment,
            pass_fds=pass_fds,
            **group(),
        )
        self.pid: int = pipes.pid
        self.stdin: io.RawIOBase = pipes.stdin
        self.stdout: io.RawIOBase = pipes.stdout
        self._process: subprocess.Popen[bytes] = pipes
        self._lock = threading.Lock()
        self._swept = False
        self._destroy = weakref.finalize(self, _destroy, self._process)
        self._stderr = _Tail(pipes.stderr, kept_stderr)

    def send(self, data: bytes) -> None:
        """Send a frame. If the process has ended, the frame is dropped, because `receive` reports the end.

        If KeyboardInterrupt stops this method or `receive`, part of a frame may be lost, so the process must be ended.
        """
        with contextlib.suppress(OSError, ValueError):  # ValueError means that the pipe is closed
            write_frame(self.stdin, data)

    def receive(self, longest: int) -> bytes | None:
        """Return the next frame, or None if the process has closed its output. Raises FrameTooLong."""
        with contextlib.suppress(OSError, ValueError):
            return read_frame(self.stdout, longest)
        return None

    @property
    def status(self) -> int:
        """The exit status, which is negative for a signal. The process must have ended."""
        return self._process.returncode or 0

    @property
    def last_words(self) -> str:
        """The end of stderr, which is untrusted, and is complete if the process and its descendants have ended."""
        if self.ended():
            self._stderr.join()
        return self._stderr.tail.decode(errors="replace")

    def ended(self) -> bool:
        """Return True if the process has ended, and kill the descendants of an ended process."""
        with self._lock:
            ended = self._process.poll() is not None
            # Kill the descendants immediately and only once, because the system may reuse the process ID.
            if ended and not self._swept:
                self._swept = True
                _signal_group(self.pid, at_once=True)
            return ended

    def wait(self, seconds: float) -> bool:
        """Wait at most this long for the process to end. Returns True if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.ended()

    def kill(self) -> None:
        """Kill the process and its descendants immediately, from any thread. Idempotent."""
        if not self.ended():
            _signal_group(self.pid, at_once=True)
            self._process.kill()

    def end(self, seconds: float) -> None:
        """Close the process's input and wait, then send SIGTERM and wait, then kill the process, and close all pipes.

        Other threads must not use the pipes any more. Idempotent.

        seconds  how long to wait after each of the first two steps; 0 kills the process immediately
        """
        try:
            self.stdin.close()
            if seconds and not self.wait(seconds):
                _signal_group(self.pid, at_once=False)
                self.wait(seconds)
        finally:
            self.kill()
            self._destroy()
            self.ended()
            self._stderr.join()

    def release(self) -> None:
        """Let the process outlive this one, and close all pipes. Only `end` may be called afterwards."""
        self._destroy.detach()
        self._process.returncode = 0
        self._swept = True
        for pipe in (self.stdin, self.stdout):
            pipe.close()
        # Without a parent that waits for it, the process would remain as a zombie after its end.
        threading.Thread(target=_reap, args=(self.pid,), name="reaping", daemon=True).start()

    def ending(self) -> str:
        """Describe how the process ended, with the last line of its stderr, in one line that is safe to print.

        If the process has not ended, return only the last line of stderr. The result may be empty.
        """
        line = next((line for line in reversed(self.last_words.splitlines()) if line.strip()), "")
        how = [commands.ending(self.status)] if self.ended() else []
        return ": ".join([*how, *([shown(line.strip(), 200)] if line else [])])


class _Tail:
    """The last bytes of a stream, which a thread reads until the stream ends."""

    def __init__(self, stream: io.RawIOBase | None, most: int) -> None:
        self.tail = b""
        self._most = most
        self._thread: threading.Thread | None = None
        if stream is not None:
            self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
            self._thread.start()

    def _read(self, stream: io.RawIOBase) -> None:
        with contextlib.suppress(OSError), stream:
            while piece := stream.read(_PIECE_BYTES):
                self.tail = (self.tail + piece)[-self._most :]

    def join(self) -> None:
        """Wait for the end of the stream, for at most _LAST_WORDS_S seconds."""
        if self._thread is not None:
            self._thread.join(_LAST_WORDS_S)


def _start(purpose: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process whose pipes are unbuffered, because closing a pipe with a full buffer may block."""
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **options)
    except (OSError, ValueError) as error:  # ValueError means that an argument contains a NUL character
        raise LlmrunError(f"cannot start {_names(purpose, command)}: {_reason(error)}") from error


def _reap(pid: int) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _destroy(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, wait for the end of the process, and close all pipes except stderr."""
    if process.poll() is None:
        _signal_group(process.pid, at_once=True)
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _signal_group(group: int, *, at_once: bool) -> None:
    """Send SIGKILL or SIGTERM to the processes of a group. On Windows, always kill all of the processes."""
    if sys.platform == "win32":
        command = ["taskkill", "/T", "/F", "/PID", str(group)]
        subprocess.run(command, capture_output=True, check=False)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids signals to dead processes
        os.killpg(group, signal.SIGKILL if at_once else signal.SIGTERM)


def _names(purpose: str, command: Sequence[str]) -> str:
    return f"{purpose}: {command[0]}" if purpose else shown(command[0])


def _reason(error: OSError | ValueError) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


class AsyncChild:
    """A running child process that shares this process's stderr, and whose pipes an event loop reads and writes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        import asyncio

        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._process = process
        self._reader, self._writer = process.stdout, process.stdin
        self._reading = asyncio.Lock()  # only one coroutine may read at a time, and `end` also reads

    @classmethod
    async def start(
        cls, command: Sequence[str], *, purpose: str = "", environment: Mapping[str, str] | None = None
    ) -> AsyncChild:
        """Start a process in its own session, as `Child` does. Raises LlmrunError."""
        import asyncio

        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=16 * _PIECE_BYTES,
                env=commands.environment() if environment is None else environment,
                **commands.in_own_session(),
            )
        except (OSError, ValueError) as error:
            raise LlmrunError(f"cannot start {_names(purpose, command)}: {_reason(error)}") from error
        return cls(process)

    def send(self, data: bytes) -> None:
        """Send a frame without waiting. If the process has ended, the frame is dropped."""
        if not self._writer.is_closing():
            self._writer.write(framed(data))

    async def receive(self, longest: int) -> bytes | None:
        """Return the next frame, or None if the process has closed its output. Raises FrameTooLong."""
        import asyncio

        try:
            async with self._reading:
                header = await self._reader.readexactly(HEADER_BYTES)
                return await self._reader.readexactly(frame_length(header, longest))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def kill(self) -> None:
        """Kill the process and its descendants, after which `receive` returns None. Idempotent."""
        if self._process.returncode is not None:
            return
        # Process.kill() polls the process first, and asyncio would miss the exit status of an ended process.
        _signal_group(self.pid, at_once=True)

    async def end(self, seconds: float = 0.0) -> str:
        """Kill the process unless it ends within `seconds`. Returns how the process ended, such as "SIGKILL"."""
        import asyncio

        try:
            async with asyncio.timeout(seconds):
                await self._ended()
        except TimeoutError:
            self.kill()
        status = await self._ended()
        self._writer.close()
        return commands.ending(status)

    async def _ended(self) -> int:
        """Wait for the process to end, and return its exit status.

        The rest of the output is discarded, because a process cannot end while its pipe is full. Moreover, `wait` in
        older versions of Python, such as 3.11.7, returns only after the pipes are closed.
        """
        async with self._reading:
            with contextlib.suppress(OSError):
                while await self._reader.read(_PIECE_BYTES):
                    pass
        return await self._process.wait()
