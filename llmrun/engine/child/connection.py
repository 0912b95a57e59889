"""The process's end of the socket pair."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import IO

from llmrun.engine.child.messages import FromChild, ToChild, decode_to_child, encode_from_child
from llmrun.engine.isolation.frames import framed, read_frame


class Connection:
    """Sends and receives messages. Only `send` is thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    @classmethod
    def on_stdin(cls) -> Connection:
        """Take over the socket that is this process's stdin. Other code then finds stdin empty, and stdout is stderr.

        The processes that the engine starts do not inherit the socket. Otherwise, the server would not see this process
        end.
        """
        connection = socket.socket(fileno=os.dup(0))
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        os.dup2(2, 1)
        return cls(connection)

    def send(self, message: FromChild) -> None:
        """Send a message. Ends the process if the server has gone."""
        frame = framed(encode_from_child(message))
        with self._lock:
            try:
                self._socket.sendall(frame)
            except OSError:
                end_process(0)

    def received(self) -> Iterator[ToChild]:
        """Yield messages until the server has gone. Raises BadMessage."""
        with self._socket.makefile("rb") as stream:
            while (frame := _frame_or_end(stream)) is not None:
                yield decode_to_child(frame)


def _frame_or_end(stream: IO[bytes]) -> bytes | None:
    """Return the next frame, or None if the server has gone."""
    try:
        return read_frame(stream)
    except ConnectionResetError:  # it was killed, and had not read everything
        return None


def end_process(status: int) -> None:
    """End the process at once, from any thread. The operating system frees everything."""
    sys.stderr.flush()
    os._exit(status)
