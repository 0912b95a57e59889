"""The interface between a batch and whatever answers its requests: a local process, another machine or a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llmrun.base.errors import LlmrunError

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
