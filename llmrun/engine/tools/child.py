"""A child process in a session of its own, which is killed together with its descendants.

Because the session has no terminal, tools cannot write to the user's screen, and Ctrl-C does not reach them. Threads
read the pipes, because `select` does not work with pipes on Windows.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrun.base import child_processes
from llmrun.engine.tools.tool import ToolFailed
from llmrun.formats.gguf.problems import shown

_TAIL = 4096  # bytes of standard error that are kept for messages
_PIECE = 1 << 16
_LAST_WORDS_S = 1.0  # for reading the rest of standard error, which a descendant that escaped may hold open


class Child:
    """A running process.

    stdin   unbuffered; only one thread may use it
    stdout  buffered; only one thread may use it
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> None:
        """Start the process. Raises ToolFailed."""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=folder,
                env=environment,
                **child_processes.in_own_session(),
            )
        except (OSError, ValueError) as error:  # ValueError means that an argument contains a NUL character
            reason = error.strerror if isinstance(error, OSError) else error
            raise ToolFailed(f"cannot start {shown(command[0])}: {reason}") from error
        pipes: Any = self._process
        self.stdin: io.RawIOBase = pipes.stdin
        self.stdout = io.BufferedReader(pipes.stdout)
        self._lock = threading.Lock()
        self._swept = False
        self._tail = b""
        self._stderr_reader = threading.Thread(target=self._read_stderr, args=(pipes.stderr,), daemon=True)
        self._stderr_reader.start()

    @property
    def status(self) -> int:
        """The exit status, which is negative for a signal. The process must have ended."""
        return self._process.returncode or 0

    @property
    def stderr(self) -> str:
        """The last few thousand characters of standard error, which are untrusted."""
        return self._tail.decode(errors="replace")

    def ended(self) -> bool:
        """Return whether the process has ended. If it has, kill its descendants."""
        with self._lock:
            ended = self._process.poll() is not None
            # Do this immediately and only once, because the system may give the process ID to another process.
            if ended and not self._swept:
                self._swept = True
                self._end_all(at_once=True)
            return ended

    def wait(self, seconds: float) -> bool:
        """Wait at most this long for the process to end. Returns whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.ended()

    def kill(self) -> None:
        """Kill the process and its descendants immediately. Idempotent."""
        if not self.ended():
            self._end_all(at_once=True)

    def end(self, seconds: float) -> None:
        """End the process, whose standard input has been closed: wait, then SIGTERM, then SIGKILL.

        seconds  how long to wait after each of the three steps
        """
        if self.wait(seconds):
            return
        self._end_all(at_once=False)
        if self.wait(seconds):
            return
        self.kill()
        self.wait(seconds)

    def ending(self) -> str:
        """Describe how the process ended, with the last line of its standard error, in one line that is safe to print.

        If the process has not ended, return only that last line. The result may be empty.
        """
        if self.ended():
            self._stderr_reader.join(_LAST_WORDS_S)
        line = next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")
        how = [child_processes.ending(self.status)] if self.ended() else []
        return ": ".join([*how, *([shown(line.strip(), 200)] if line else [])])

    def _end_all(self, *, at_once: bool) -> None:
        """Send SIGKILL or SIGTERM to the process and its descendants. On Windows, kill them in both cases."""
        if sys.platform == "win32":
            command = ["taskkill", "/T", "/F", "/PID", str(self._process.pid)]
            subprocess.run(command, capture_output=True, check=False)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS forbids signals to dead processes
            os.killpg(self._process.pid, signal.SIGKILL if at_once else signal.SIGTERM)

    def _read_stderr(self, stream: io.RawIOBase) -> None:
        with contextlib.suppress(OSError), stream:
            while piece := stream.read(_PIECE):
                self._tail = (self._tail + piece)[-_TAIL:]
