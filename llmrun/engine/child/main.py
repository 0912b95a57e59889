"""The process that runs an engine for the server: `python -m llmrun.engine.child.main`, with pipes as stdin and stdout.

The separate process keeps the server's Python threads from slowing down the steps, and keeps the server and its
connections alive if the engine crashes. messages.py describes the messages.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING

from llmrun.base.errors import LlmrunError, kernel_warnings_told
from llmrun.base.processes.frames import read_frame, write_frame
from llmrun.base.processes.worker import private_streams
from llmrun.engine.child.messages import (
    FROM_CHILD,
    LONGEST,
    TO_CHILD,
    CannotOpen,
    Crashed,
    FromChild,
    Note,
    Open,
    Opened,
    ToChild,
)
from llmrun.engine.child.serving import Heart

if TYPE_CHECKING:
    from llmrun.engine.child.serving import EngineServing


class Connection:
    """Sends and receives messages. Only `send` and `sent` are thread-safe."""

    def __init__(self, from_server: IO[bytes], to_server: IO[bytes]) -> None:
        self._from_server = from_server
        self._to_server = to_server
        self._lock = threading.Lock()

    @classmethod
    def on_standard_streams(cls) -> Connection:
        """Take over stdin and stdout, so children cannot inherit them and the server notices when this process ends."""
        requests, answers = private_streams()
        return cls(os.fdopen(requests, "rb"), os.fdopen(answers, "wb"))

    def send(self, message: FromChild) -> None:
        """Send a message. Ends the process if the server has ended."""
        if not self.sent(message):
            end_process(0)

    def sent(self, message: FromChild) -> bool:
        """Send a message, and return False if the server has ended."""
        data = FROM_CHILD.encode(message)
        with self._lock:
            try:
                write_frame(self._to_server, data)
            except OSError:
                return False
        return True

    def received(self) -> Iterator[ToChild]:
        """Yield messages until the server has ended. Raises BadMessage or FrameTooLong."""
        while (frame := self.frame()) is not None:
            yield TO_CHILD.decode(frame)

    def frame(self) -> bytes | None:
        """Return the next frame, or None if the server has ended. Raises FrameTooLong."""
        return read_frame(self._from_server, LONGEST)

    def close(self) -> None:
        """Close both streams."""
        self._from_server.close()
        self._to_server.close()


def end_process(status: int) -> None:
    """End the process immediately, from any thread. The operating system frees all resources."""
    sys.stderr.flush()
    os._exit(status)


# How long a Python thread waits before it interrupts another thread, in seconds. With the default of 5 ms, a thread
# that prepares a long prompt could delay every step of the answers in progress by 5 ms.
SWITCH_S = 0.0005


def main() -> None:
    """Serve one model until the server closes the model, the server ends, or the engine crashes."""
    sys.setswitchinterval(SWITCH_S)
    connection = Connection.on_standard_streams()
    heart = Heart(connection.send)
    received = connection.received()
    asked = next(received, None)
    if not isinstance(asked, Open):
        end_process(0)
        return
    opened: Future[EngineServing] = Future()
    threading.Thread(target=_read, args=(received, opened, connection), name="reading", daemon=True).start()
    with kernel_warnings_told(lambda words: connection.send(Note(words))):
        end_process(_serve(asked, opened, connection, heart))


def _serve(asked: Open, opened: Future[EngineServing], connection: Connection, heart: Heart) -> int:
    """Open the model, run it until it is closed, and return the exit status."""
    from llmrun.base.machine.memory import return_freed_memory
    from llmrun.engine.child.opening import describe, open_engine
    from llmrun.engine.child.serving import EngineServing

    try:
        engine = open_engine(asked, connection.send, lambda ids: opened.result().report_begun(ids))
        facts = describe(engine, asked)
        return_freed_memory()  # 16 MB after the header of a model with 49,152 tokens
        gc.freeze()  # otherwise, each full collection would visit the vocabulary in the middle of a step
    except Exception as error:  # noqa: BLE001 - reported to the server
        connection.send(CannotOpen(as_llmrun_error(error)))
        return 1
    serving = EngineServing(engine, connection.send, heart, asked.max_wait_s, explains_prefixes=asked.explains_prefixes)
    connection.send(Opened(facts))
    opened.set_result(serving)
    try:
        serving.run()
    except Exception as error:  # noqa: BLE001 - reported to the server
        connection.send(Crashed(as_llmrun_error(error)))
        return 1
    engine.close()
    return 0


def _read(received: Iterator[ToChild], opened: Future[EngineServing], connection: Connection) -> None:
    """Pass the server's messages to the engine. End the process when the server ends, even in the middle of a step."""
    try:
        for message in received:
            opened.result().take(message)
    except Exception as error:  # noqa: BLE001 - reported to the server
        connection.send(Crashed(as_llmrun_error(error)))
    end_process(0)


def as_llmrun_error(error: Exception) -> LlmrunError:
    """Return an LlmrunError unchanged. For a bug, print the traceback and return a matching LlmrunError."""
    if isinstance(error, LlmrunError):
        return error
    traceback.print_exception(error)
    return LlmrunError(f"bug in llmrun: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    main()
