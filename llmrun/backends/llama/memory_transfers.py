"""Transfers memory for saved sequences between llmrun and the process that runs llama.cpp (worker.py).

A saved sequence can take gigabytes, so each transfer allocates its own memory. Unlike the memory of forward passes,
this memory is freed as soon as neither process maps it. The memory is created after the child was started, so the child
cannot inherit its file descriptor. A socket transfers the descriptor instead. On Windows, memory is shared by name.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from llmrun.backends.llama.messages import SharedMemory
from llmrun.base.errors import LlmrunError

if TYPE_CHECKING:
    import mmap
    import socket

_NUMBER_BYTES = 8


class MemorySender:
    """The parent's end of the transfers. The child passes `handle` to MemoryReceiver."""

    def __init__(self) -> None:
        self._sent = 0
        self.handle = ""
        if sys.platform != "win32":
            import socket

            self._ours, self._theirs = socket.socketpair()
            self.handle = str(self._theirs.fileno())

    @property
    def inherited(self) -> tuple[int, ...]:
        """The file descriptors that the child must inherit."""
        return (int(self.handle),) if self.handle else ()

    def child_started(self) -> None:
        """Close the child's end of the transfers in this process."""
        if sys.platform != "win32":
            self._theirs.close()

    def map(self, n_bytes: int) -> tuple[mmap.mmap, str]:
        """Map new memory. Returns the mapping and the name to pass to `MemoryReceiver.map`.

        The child must map regions in the order of their creation, but may skip some regions. Raises LlmrunError.
        """
        try:
            with contextlib.closing(SharedMemory.create()) as memory:
                mapping = memory.map(n_bytes)
                if sys.platform == "win32":
                    return mapping, memory.handle
                return mapping, self._send(int(memory.handle))
        except OSError as error:
            raise LlmrunError(f"cannot share {n_bytes:,} bytes of memory with llama.cpp: {error.strerror}") from error

    def close(self) -> None:
        """Close both ends. Calls after the first have no effect."""
        if sys.platform != "win32":
            self._ours.close()
            self._theirs.close()

    if sys.platform != "win32":

        def _send(self, descriptor: int) -> str:
            import socket

            self._sent += 1
            with contextlib.suppress(ConnectionError):  # The child has died; the next request will report the crash.
                socket.send_fds(self._ours, [self._sent.to_bytes(_NUMBER_BYTES)], [descriptor])
            return str(self._sent)


class MemoryReceiver:
    """The child's end of the transfers."""

    def __init__(self, handle: str) -> None:
        self._handle = handle
        self._socket: socket.socket | None = None

    def map(self, name: str, n_bytes: int) -> mmap.mmap:
        """Map the memory with this name, which the parent has created."""
        if sys.platform == "win32":
            return SharedMemory(name).map(n_bytes)
        import socket  # Most child processes need no transfer, and importing socket takes 2 ms.

        if self._socket is None:
            self._socket = socket.socket(fileno=int(self._handle))
        while True:
            number, descriptors, _, _ = socket.recv_fds(self._socket, _NUMBER_BYTES, 1)
            with contextlib.closing(SharedMemory(str(descriptors[0]))) as memory:
                # Memory with another number belongs to a request that Ctrl-C prevented from being sent.
                if number == int(name).to_bytes(_NUMBER_BYTES):
                    return memory.map(n_bytes)
