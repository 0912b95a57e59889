"""The interface between a batch and its workers. A worker is a local process, another machine or a server.

The interface includes the messages between the batch, the process that talks to Ray, and the workers on the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llmrun.base.errors import LlmrunError
from llmrun.base.processes.frames import error_from_json

CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"


class WorkerLost(LlmrunError):
    """The worker is gone. Any worker can repeat the unfinished calls, including the lost worker after a restart."""


class RefusedWorker(LlmrunError):
    """The worker cannot be used, even after reopening, for example because its answers may differ from the run's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one call, as an HTTP response: the body of a response or of an error, as in OpenAI's API.

    ignored  the names of the call's fields that had no effect
    """

    status: int
    body: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


class Worker(Protocol):
    """A worker that answers calls of OpenAI's API, several at a time.

    name   the worker's name in messages, such as "http://10.0.0.7:8080/v1"
    slots  the number of calls to send at a time: slightly more than the worker runs, so that the worker is never idle
    """

    name: str
    slots: int

    async def start(self) -> Mapping[str, Any]:
        """Open or reopen the worker, and return its entry of /v1/models. Raises LlmrunError.

        Entries from llmrun contain `system_fingerprint`, `default_sampling` and `batch_invariant`.
        """

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        """Answer a call, such as a call of "/v1/chat/completions".

        Raises WorkerLost if an answer is not possible now, and RefusedWorker if an answer will never be possible.
        """

    async def close(self) -> None:
        """Free all resources. Unfinished calls raise WorkerLost. This method is idempotent."""


LONGEST: Final = 1 << 32  # bytes; a longer message is invalid

# The kinds of answers to calls. Each answer also contains a value.
OK: Final = "ok"
FAILED: Final = "failed"  # The value is the JSON of an LlmrunError.
LOST: Final = "lost"  # The value is the reason why an answer is not possible now.

# The kinds of news to show.
LOADING: Final = "loading"  # The values are a description and a fraction.
NOTE: Final = "note"
DETAIL: Final = "detail"

# Unsolicited messages from the process that talks to Ray.
CONNECTED: Final = "connected"  # The value is the list of nodes.
NEWS: Final = "news"  # The values are a worker's name, one of the kinds above and its values.
GONE: Final = "gone"  # The value is the reason why the cluster can no longer be used.


def value_of(kind: str, value: Any) -> Any:
    """Return the value of an answer. Raises WorkerLost, or the error that ended the call."""
    if kind == FAILED:
        raise error_from_json(value)
    if kind == LOST:
        raise WorkerLost(str(value))
    return value
