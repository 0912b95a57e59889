"""The first messages between a client and a background engine. They never change, so that all versions understand them.

Each message is a frame with a JSON object. Unknown keys are ignored, and unknown messages get the answer `leaving`.
The client asks, and the engine answers:

    hello  what the client needs: `build`, `standing`, `keep_alive_s` (null for the engine's own)
           -> welcome (with `pid` and `first_id`), followed by a frame with BackgroundFacts and then by the messages of
              engine/child/messages.py; refused (with `reason`): the client must open the model itself; or leaving: the
              engine is out of date or about to end, and the client may start another one
    info   -> info: the fields of EngineState
    stop   `force` ends the engine even in the middle of an answer -> stopping, or busy (with `answers`)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.processes.frames import BadMessage, Codec, decoded, encoded
from llmrun.base.types import ModelInfo
from llmrun.engine.requests import Portable
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

HELLO: Final = "hello"
WELCOME: Final = "welcome"
REFUSED: Final = "refused"
LEAVING: Final = "leaving"
INFO: Final = "info"
STOP: Final = "stop"
STOPPING: Final = "stopping"
BUSY: Final = "busy"

LONGEST_GREETING: Final = 1 << 20  # bytes


def greeting(kind: str, **values: Any) -> bytes:
    """Return a message of the handshake."""
    return encoded({"message": kind, **values})


def read_greeting(data: bytes | None) -> tuple[str, Mapping[str, Any]]:
    """Return the kind and the values of a message. An ended connection counts as `leaving`. Raises BadMessage."""
    if data is None:
        return LEAVING, {}
    try:
        values = decoded(data)
        return str(values["message"]), values
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error


class Birth(Portable, frozen=True):
    """The facts that a background engine needs besides its model.

    socket        the name of its socket
    model         the model's name as its user typed it; a path is absolute
    files         the files that determine the answers: models, projector, adapters and the user's catalogue
    keep_alive_s  seconds to stay after an answer; negative to stay until it is stopped
    """

    socket: str
    model: str
    files: tuple[str, ...]
    keep_alive_s: float


BIRTH: Final[Codec[Birth]] = Codec(Birth)


class ShownTemplate(Portable, frozen=True):
    """The chat template of a model in another process, with the fields of ChatTemplate."""

    source: str
    name: str
    origin: str


class BackgroundFacts(Portable, frozen=True):
    """Facts about the model of a background engine, for clients with the same build.

    name              the name to display
    cache_tokens      the number of tokens that the KV cache holds for all requests together
    thinking_tags     the model's tags in the catalogue, if any
    default_sampling  the default sampling parameters, with seed 0
    load_s            seconds to open the model
    sees_images       True if the model was opened with its projector
    """

    name: str
    info: ModelInfo
    cache_tokens: int
    takes_chats: bool
    speculates: bool
    has_draft_head: bool
    default_sampling: SamplingParams
    load_s: float
    thinking_tags: tuple[str, ...] | None = None
    template: ShownTemplate | None = None
    sees_images: bool = False


FACTS: Final[Codec[BackgroundFacts]] = Codec(BackgroundFacts)


class EngineState(Portable, frozen=True):
    """The state of a background engine, as `llmrun ps` shows it.

    model         the model's name as its user typed it; a path is absolute
    name          the name to display
    path          the model's file
    answers       the number of unfinished requests and calls
    memory_bytes  the memory of the process now
    started       when the engine started, in seconds since 1970
    used          when its last answer ended, or when a client joined after that
    until         when the engine will leave if it is not used again; None while it answers
    """

    pid: int
    model: str
    name: str
    path: str
    version: str
    answers: int
    memory_bytes: int
    started: float
    used: float
    until: float | None


def build_id() -> str:
    """Return a text that changes whenever this installation changes: a file of llmrun, or any installed package.

    An installed package has a record of its files. In a source checkout, the sizes and times of all files count,
    which takes 3 ms.
    """
    import hashlib
    import os
    import sys

    import llmrun

    package = Path(llmrun.__file__).parent
    parts = [sys.version, llmrun.__version__, str(package)]
    if installed := sorted(package.parent.glob("llmrun_gguf-*.dist-info/RECORD")):
        for path in (package.parent, *installed):
            status = path.stat()
            parts.append(f"{path} {status.st_ino} {status.st_mtime_ns}")
    else:
        for folder, _, names in os.walk(package):
            for name in sorted(names):
                if name.endswith((".py", ".toml")):
                    status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118  (Path takes twice the time)
                    parts.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
