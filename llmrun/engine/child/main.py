"""The process that runs an engine for the server: `python -m llmrun.engine.child.main`, with pipes as stdin and stdout.

A process of its own keeps the server's Python threads from slowing down the steps, and keeps the server and its
connections alive if the engine crashes. messages.py describes the messages.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError
from llmrun.base.kernel_warnings import kernel_warnings_told
from llmrun.engine.child.connection import Connection, end_process
from llmrun.engine.child.heart import Heart
from llmrun.engine.child.messages import CannotOpen, Crashed, Note, Open, Opened, ToChild

if TYPE_CHECKING:
    from llmrun.engine.child.serving import EngineServing

# How long a Python thread waits before it interrupts another one, in seconds. With the default of 5 ms, a thread that
# prepares a long prompt could delay every step of the answers in progress by that much.
_SWITCH_S = 0.0005


def main() -> None:
    """Serve one model until the server closes it, ends, or the engine crashes."""
    sys.setswitchinterval(_SWITCH_S)
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
    from llmrun.base.machine.freed_memory import return_freed_memory
    from llmrun.engine.child.opening import describe, open_engine
    from llmrun.engine.child.serving import EngineServing

    try:
        engine = open_engine(asked, connection.send, lambda ids: opened.result().report_begun(ids))
        facts = describe(engine, asked)
        return_freed_memory()  # 16 MB after the header of a model with 49,152 tokens
        gc.freeze()  # else each full collection goes through the vocabulary, in the middle of a step
    except Exception as error:  # noqa: BLE001 - reported to the server
        connection.send(CannotOpen(_as_llmrun_error(error)))
        return 1
    serving = EngineServing(engine, connection.send, heart, asked.max_wait_s)
    connection.send(Opened(facts))
    opened.set_result(serving)
    try:
        serving.run()
    except Exception as error:  # noqa: BLE001 - reported to the server
        connection.send(Crashed(_as_llmrun_error(error)))
        return 1
    engine.close()
    return 0


def _read(received: Iterator[ToChild], opened: Future[EngineServing], connection: Connection) -> None:
    """Pass on the server's messages. End the process as soon as the server has gone, even in the middle of a step."""
    try:
        for message in received:
            opened.result().take(message)
    except Exception as error:  # noqa: BLE001 - reported to the server
        connection.send(Crashed(_as_llmrun_error(error)))
    end_process(0)


def _as_llmrun_error(error: Exception) -> LlmrunError:
    """Return the error itself or, for a bug, an error with its first line. The traceback goes to stderr."""
    if isinstance(error, LlmrunError):
        return error
    traceback.print_exception(error)
    return LlmrunError(f"bug in llmrun: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    main()
