"""Runs a command as a tool: from a list of arguments, without a shell, and with limits on time and output.

The child process runs in a session of its own, and is killed together with its descendants. The session has no
terminal, so tools cannot write to the user's screen, and Ctrl-C does not reach the tools. Threads read the pipes,
because `select` does not work with pipes on Windows.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.base.processes.child import Child
from llmrun.base.processes.commands import ending
from llmrun.base.processes.frames import write_all
from llmrun.engine.tools import tool
from llmrun.engine.tools.tool import Definition, Limits, ToolFailed, ToolResult, digest_of, shortened
from llmrun.engine.tools.tools_file import CommandDeclaration, environment, filled_command

_PIECE = 1 << 16


def start(command: Sequence[str], environment: Mapping[str, str], folder: Path | None) -> Child:
    """Start the process of a tool. Raises ToolFailed."""
    try:
        return Child(command, environment=environment, folder=folder)
    except LlmrunError as error:
        raise ToolFailed(str(error)) from error


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
    child = start(command, environment(declared.environment), declared.folder)
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
        for thread in threads:
            thread.join(limits.end_s)
        child.end(0)
    return _result(child, output, limits)


class _Output:
    """Reads standard output and keeps the beginning.

    size      bytes read so far
    too_long  True if the output exceeds the limit for commands
    """

    def __init__(self, stream: io.RawIOBase, limits: Limits) -> None:
        self.size = 0
        self.kept = b""
        self._stream = stream
        self._most_kept = limits.result * _BYTES_PER_CHARACTER
        self._most = limits.unasked

    @property
    def too_long(self) -> bool:
        return self.size > self._most

    def read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._stream:  # closed while a descendant holds the stream open
            while not self.too_long and (piece := self._stream.read(_PIECE)):
                self.kept += piece[: self._most_kept - len(self.kept)]
                self.size += len(piece)


def _write(stream: io.RawIOBase, text: str) -> None:
    with contextlib.suppress(OSError, ValueError), stream:  # the command has ended, or does not read standard input
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
    stderr, _ = shortened(child.last_words, limits.result)
    parts = [text.rstrip("\n"), stderr.rstrip("\n"), f"[{ending(child.status)}]"]
    return ToolResult("\n".join(part for part in parts if part), is_error=True, truncated=truncated)
