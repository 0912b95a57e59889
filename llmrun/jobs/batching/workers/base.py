"""The interface between a batch and its workers: a local process, another machine or a server.

It includes the kinds of messages between the batch, the process that talks to Ray, and the workers on the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llmrun.base.errors import LlmrunError
from llmrun.engine.child.messages import error_from_json

CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"


class WorkerLost(LlmrunError):
    """The worker is gone. Its unfinished calls can be repeated by any worker, including this one after a restart."""


class RefusedWorker(LlmrunError):
    """The worker cannot be used, even if it is opened again, such as one whose answers may differ from the run's."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one call, as an HTTP response: a body of OpenAI's API, or its form of an error.

    ignored  the names of fields of the call that had no effect
    """

    status: int
    body: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


class Worker(Protocol):
    """Something that answers calls of OpenAI's API, several at a time.

    name   what messages call it, such as "http://10.0.0.7:8080/v1"
    slots  how many calls to give it at a time: as many as it runs, and some more, so that it never has to wait
    """

    name: str
    slots: int

    async def start(self) -> Mapping[str, Any]:
        """Open the worker, again if it was lost, and return its entry of /v1/models. Raises LlmrunError.

        Entries from llmrun have `system_fingerprint`, `default_sampling` and `batch_invariant`.
        """

    async def answer(self, url: str, body: Mapping[str, Any]) -> Reply:
        """Answer a call, such as of "/v1/chat/completions".

        Raises WorkerLost if there can be no answer now, and RefusedWorker if there will never be one.
        """

    async def close(self) -> None:
        """Free all resources. Unfinished calls raise WorkerLost. Idempotent."""


# answers to calls, with a value
OK: Final = "ok"
FAILED: Final = "failed"  # the JSON of an LlmrunError
LOST: Final = "lost"  # the reason why there can be no answer now

# what there is to show
LOADING: Final = "loading"  # a description and a fraction
NOTE: Final = "note"
DETAIL: Final = "detail"

# unasked messages from the process that talks to Ray
CONNECTED: Final = "connected"  # the nodes
NEWS: Final = "news"  # a worker's name, followed by one of the kinds above with its values
GONE: Final = "gone"  # the reason why the cluster cannot be used any more


def value_of(kind: str, value: Any) -> Any:
    """Return the value of an answer. Raises WorkerLost, or the error with which the call failed."""
    if kind == FAILED:
        raise error_from_json(value)
    if kind == LOST:
        raise WorkerLost(str(value))
    return value
