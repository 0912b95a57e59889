"""The process's end of the pipes to the server."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import IO

from llmrun.base import child_processes
from llmrun.engine.child.messages import FromChild, ToChild, decode_to_child, encode_from_child
from llmrun.engine.isolation.frames import read_frame, write_frame


class Connection:
    """Sends and receives messages. Only `send` is thread-safe."""

    def __init__(self, from_server: IO[bytes], to_server: IO[bytes]) -> None:
        self._from_server = from_server
        self._to_server = to_server
        self._lock = threading.Lock()

    @classmethod
    def on_standard_streams(cls) -> Connection:
        """Take over stdin and stdout. No child process inherits them, so the server notices when this process ends."""
        requests, answers = child_processes.private_streams()
        return cls(os.fdopen(requests, "rb"), os.fdopen(answers, "wb"))

    def send(self, message: FromChild) -> None:
        """Send a message. Ends the process if the server has gone."""
        data = encode_from_child(message)
        with self._lock:
            try:
                write_frame(self._to_server, data)
            except OSError:
                end_process(0)

    def received(self) -> Iterator[ToChild]:
        """Yield messages until the server has gone. Raises BadMessage."""
        while (frame := read_frame(self._from_server)) is not None:
            yield decode_to_child(frame)


def end_process(status: int) -> None:
    """End the process at once, from any thread. The operating system frees everything."""
    sys.stderr.flush()
    os._exit(status)
