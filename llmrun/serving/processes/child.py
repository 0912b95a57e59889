"""The server's end of the pipes to the process that runs the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from llmrun.base import child_processes
from llmrun.base.errors import LlmrunError
from llmrun.engine.child.messages import FromChild, decode_from_child
from llmrun.engine.isolation.frames import HEADER_BYTES, frame_length, framed

_BUFFER_BYTES = 1 << 20


class ChildProcess:
    """One process that runs the engine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._reader, self._writer = process.stdout, process.stdin
        self._reading = asyncio.Lock()  # only one coroutine may read at a time, and `end` also does

    @classmethod
    async def start(cls, command: Sequence[str] | None = None) -> ChildProcess:
        """Start the process, or `command`, which must send the same messages. Raises LlmrunError.

        It has its own session, so that Ctrl-C in the terminal reaches only the server. It ends when the server ends,
        because the pipes are then closed.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(command or child_processes.command("engine.child.main")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_BUFFER_BYTES,
                env=child_processes.environment(),
                **child_processes.in_own_session(),
            )
        except OSError as error:
            raise LlmrunError(f"cannot start the engine's process: {sys.executable}: {error.strerror}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Send an encoded message without waiting. Nothing happens if the process has ended.

        The process reads messages at once, so few bytes are buffered here.
        """
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    async def receive(self) -> FromChild | None:
        """Return the next message, or None if the process has ended. Raises BadMessage or ValueError."""
        try:
            async with self._reading:
                header = await self._reader.readexactly(HEADER_BYTES)
                data = await self._reader.readexactly(frame_length(header))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return decode_from_child(data)

    def kill(self) -> None:
        """Kill the process. `receive` then returns None."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if sys.platform == "win32":
                self._process.kill()
            else:  # Process.kill() polls the process first. If it has just ended, asyncio misses its exit status.
                os.kill(self.pid, signal.SIGKILL)

    async def end(self, patience_s: float = 0.0) -> str:
        """Wait for the end of the process, kill it after `patience_s`, and return how it ended, such as "SIGKILL"."""
        try:
            async with asyncio.timeout(patience_s):
                await self._ended()
        except TimeoutError:
            self.kill()
        status = await self._ended()
        self._writer.close()
        return child_processes.ending(status)

    async def _ended(self) -> int:
        """Wait for the end of the process, and return its exit status.

        The rest of its output is discarded. Otherwise, a process could not end while the pipe is full, and `wait` of
        older Pythons, such as 3.11.7, returns only after the pipes are closed.
        """
        async with self._reading:
            with contextlib.suppress(OSError):
                while await self._reader.read(_BUFFER_BYTES):
                    pass
        return await self._process.wait()
