"""The interface between the HTTP routes and a served model, whose engine runs in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmrun.engine.child.messages import Embed, Embedded
    from llmrun.engine.requests import ModelFacts, Request
    from llmrun.serving.processes.request import ServedRequest


class State(StrEnum):
    """The state of a served model."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"  # the process ended or was stuck
    DRAINING = "draining"  # running requests finish, and new requests are refused
    FAILED = "failed"  # the model could not be opened


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a served model, as of its last heartbeat. All counts start at 0 when the server starts.

    beat_age_s     the seconds since the last heartbeat that showed progress
    steps          the number of forward passes
    processing_tokens  the number of tokens of the prompts that are being processed
    remaining_tokens   the number of these tokens that have not been processed
    free_tokens    the number of tokens that fit in the KV cache if all unused prefixes are dropped
    cached_tokens  the number of prompt tokens that were read from cached prefixes
    preemptions    the number of times that a running request returned to the queue
    wait_s         the predicted wait of a new request in seconds
    restarts       the number of restarts of the process
    """

    beat_age_s: float
    steps: int
    running: int
    waiting: int
    free_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    wait_s: float
    restarts: int
    processing_tokens: int = 0
    remaining_tokens: int = 0


class ServedModel(Protocol):
    """A model whose engine runs in a child process. A process that ends is restarted."""

    @property
    def facts(self) -> ModelFacts | None:
        """Facts about the model, or None until the model has been opened for the first time."""

    @property
    def state(self) -> State: ...

    @property
    def load(self) -> Load: ...

    @property
    def most_requests(self) -> int:
        """The maximum number of requests that one tenant can have in the queue."""

    @property
    def most_bytes(self) -> int:
        """The maximum size of the requests that one tenant can have in the queue. A single request may be larger."""

    async def start(self) -> None:
        """Open the model. Raises an error such as ModelFileError if the model cannot be opened."""

    async def drain(self, seconds: float) -> None:
        """Refuse new and waiting requests, let running requests finish, and end the rest after `seconds`."""

    async def close(self) -> None:
        """End all requests with an error, and free all resources. Idempotent."""

    def ask(self, request: Request, news: asyncio.Event) -> ServedRequest:
        """Send a request to the engine. Raises Overloaded and Unavailable.

        news  an event that is set when a request is accepted, receives events or fails; requests can share one event
        """

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool, tenant: str = "") -> list[int]:
        """Return the token IDs of a text. `tenant` is the owner of the call. Raises LlmrunError."""

    async def detokenize(self, tokens: Sequence[int], *, tenant: str = "") -> bytes:
        """Return the bytes of the given tokens. Raises UsageError for IDs outside the vocabulary."""

    async def spell(self, tokens: Sequence[int], *, tenant: str = "") -> Sequence[bytes]:
        """Return the bytes of each of the given tokens. Raises UsageError for IDs outside the vocabulary."""

    async def embed(self, wanted: Embed) -> Embedded:
        """Compute vectors or scores. Raises LlmrunError, such as ContextExceeded for inputs that are too long.

        The ID of `wanted` is ignored. If the engine's process ends during the call, Unavailable is raised.
        """

    async def count_prompt(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt, without running the request. Raises LlmrunError."""

    async def render_prompt(self, request: Request) -> str:
        """Return the text of a conversation's prompt, without running the request. Raises LlmrunError."""
