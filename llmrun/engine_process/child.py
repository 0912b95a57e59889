"""The server's end of the socket pair to the process that runs the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from llmrun import child_processes
from llmrun.engine.child.messages import FromChild, decode_from_child
from llmrun.engine.isolation.frames import HEADER_BYTES, frame_length, framed
from llmrun.errors import LlmrunError

_BUFFER_BYTES = 1 << 20


class ChildProcess:
    """One process that runs the engine."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, command: Sequence[str] | None = None) -> ChildProcess:
        """Start the process, or `command`, which must send the same messages. Raises LlmrunError.

        It has its own session, so that Ctrl-C in the terminal reaches only the server. It ends when the server ends,
        because the socket is then closed.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(command or child_processes.command("engine.child.main")),
                stdin=theirs.fileno(),
                start_new_session=True,
                env=child_processes.environment(),
            )
        except OSError as error:
            ours.close()
            raise LlmrunError(f"cannot start the engine's process: {sys.executable}: {error.strerror}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=_BUFFER_BYTES)
        return cls(process, reader, writer)

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
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode_from_child(await self._reader.readexactly(frame_length(header)))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def kill(self) -> None:
        """Kill the process. `receive` then returns None."""
        # Process.kill() polls the process first. If it has just ended, asyncio then misses its exit status and warns.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def end(self, patience_s: float = 0.0) -> str:
        """Wait for the end of the process, kill it after `patience_s`, and return how it ended, such as "SIGKILL"."""
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
        status = await self._process.wait()
        self._writer.close()
        return child_processes.ending(status)
