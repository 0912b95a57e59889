"""Runs a command as a tool: from a list of arguments, without a shell, and with limits on time and output.

The child process runs in a session of its own, and is killed together with its descendants. The session has no
terminal, so tools cannot write to the user's screen, and Ctrl-C does not reach the tools. Threads read the pipes,
because `select` does not work with pipes on Windows.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrun.base import child_processes
from llmrun.base.errors import Cancelled, shown
from llmrun.engine.tools import tool
from llmrun.engine.tools.tool import Definition, Limits, ToolFailed, ToolResult, digest_of, shortened
from llmrun.engine.tools.tools_file import CommandDeclaration, environment, filled_command

_TAIL = 4096  # number of bytes of standard error that are kept for messages
_PIECE = 1 << 16
_LAST_WORDS_S = 1.0  # time limit for reading the rest of standard error, which an escaped descendant may hold open


class Child:
    """A running process.

    stdin   unbuffered; must be used by only one thread
    stdout  buffered; must be used by only one thread
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
        """Return True if the process has ended, and kill the descendants of an ended process."""
        with self._lock:
            ended = self._process.poll() is not None
            # Kill the descendants immediately and only once, because the system may reuse the process ID.
            if ended and not self._swept:
                self._swept = True
                self._end_all(at_once=True)
            return ended

    def wait(self, seconds: float) -> bool:
        """Wait at most this long for the process to end. Returns True if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.ended()

    def kill(self) -> None:
        """Kill the process and its descendants immediately. Idempotent."""
        if not self.ended():
            self._end_all(at_once=True)

    def end(self, seconds: float) -> None:
        """End the process after its standard input has been closed: wait, then send SIGTERM, then SIGKILL.

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

        If the process has not ended, return only the last line of standard error. The result may be empty.
        """
        if self.ended():
            self._stderr_reader.join(_LAST_WORDS_S)
        line = next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")
        how = [child_processes.ending(self.status)] if self.ended() else []
        return ": ".join([*how, *([shown(line.strip(), 200)] if line else [])])

    def _end_all(self, *, at_once: bool) -> None:
        """Send SIGKILL or SIGTERM to the process and its descendants. On Windows, always kill all of the processes."""
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


def write_all(stream: io.RawIOBase, data: bytes) -> None:
    """Write to an unbuffered stream, which may accept only part of the data at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) or 0 :]


_LOOK_S = 0.05  # how often to check on a running command
_BYTES_PER_CHARACTER = 4  # the maximum number of bytes per character in UTF-8


def command_definition(declared: CommandDeclaration) -> Definition:
    """Return the definition of a command as a tool."""
    raw = {
        "command": declared.command,
        "description": declared.description,
        "parameters": declared.parameters,
        "stdin": declared.json_stdin,
    }
    return Definition("", declared.name, declared.description, declared.parameters, digest_of(raw))


def run_command(
    declared: CommandDeclaration, arguments: Mapping[str, Any], limits: Limits, cancelled: tool.Cancelled
) -> ToolResult:
    """Run a command and return its standard output.

    If the exit status is not 0, the result is marked as an error and also contains the end of standard error.
    Raises ToolFailed if the command cannot be started or runs too long, and Cancelled if the user stops it.
    """
    try:
        command = filled_command(declared.command, declared.parameters, arguments)
    except ValueError as error:
        return ToolResult(f"invalid arguments: {error}", is_error=True)
    child = Child(command, environment(declared.environment), declared.folder)
    output = _Output(child.stdout, limits)
    threads = [
        threading.Thread(target=output.read, daemon=True),
        threading.Thread(
            target=_write, args=(child.stdin, json.dumps(arguments) if declared.json_stdin else ""), daemon=True
        ),
    ]
    try:
        for thread in threads:
            thread.start()
        _wait(child, output, declared.timeout_s, cancelled)
    finally:
        child.kill()
        child.wait(limits.end_s)
        for thread in threads:
            thread.join(limits.end_s)
    return _result(child, output, limits)


class _Output:
    """Reads standard output and keeps the beginning.

    size      bytes read so far
    too_long  True if the output exceeds the limit for commands
    """

    def __init__(self, stream: io.BufferedReader, limits: Limits) -> None:
        self.size = 0
        self.kept = b""
        self._stream = stream
        self._most_kept = limits.result * _BYTES_PER_CHARACTER
        self._most = limits.unasked

    @property
    def too_long(self) -> bool:
        return self.size > self._most

    def read(self) -> None:
        with contextlib.suppress(OSError), self._stream:
            while not self.too_long and (piece := self._stream.read1(_PIECE)):
                self.kept += piece[: self._most_kept - len(self.kept)]
                self.size += len(piece)


def _write(stream: io.RawIOBase, text: str) -> None:
    with contextlib.suppress(OSError), stream:  # the command has ended, or does not read standard input
        write_all(stream, text.encode())


def _wait(child: Child, output: _Output, timeout_s: float, cancelled: tool.Cancelled) -> None:
    """Wait until the command ends or writes too much. Raises ToolFailed and Cancelled."""
    deadline = time.monotonic() + timeout_s
    while not (child.wait(_LOOK_S) or output.too_long):
        if cancelled():
            raise Cancelled("cancelled")
        if time.monotonic() >= deadline:
            raise ToolFailed(f"the command did not end within {timeout_s:.3g} s")


def _result(child: Child, output: _Output, limits: Limits) -> ToolResult:
    text, truncated = shortened(output.kept.decode(errors="replace"), limits.result)
    if output.too_long:
        words = f"[the command was stopped because it wrote more than {limits.unasked:,} bytes]"
        return ToolResult(f"{text}\n{words}", is_error=True, truncated=True)
    if child.status == 0:
        return ToolResult(text, truncated=truncated)
    stderr, _ = shortened(child.stderr, limits.result)
    parts = [text.rstrip("\n"), stderr.rstrip("\n"), f"[{child_processes.ending(child.status)}]"]
    return ToolResult("\n".join(part for part in parts if part), is_error=True, truncated=truncated)
