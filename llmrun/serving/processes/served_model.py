"""The interface between the HTTP routes and a served model, whose engine runs in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from llmrun.engine.child.messages import Embed, Embedded, Taken
    from llmrun.engine.requests import Event, ModelFacts, Request


class State(StrEnum):
    """The state of a served model."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"  # its process ended or was stuck
    DRAINING = "draining"  # running requests finish, new ones are refused
    FAILED = "failed"  # it could not be opened


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a served model, as of its last heartbeat.

    beat_age_s     seconds since the last heartbeat that showed progress
    steps          forward passes since the server started
    free_tokens    tokens that fit in the KV cache if it drops all prefixes that no running request uses
    cached_tokens  prompt tokens that were not computed, because a prefix was cached, since the server started
    preemptions    how often a running request had to return to the queue, since the server started
    wait_s         the predicted wait of a new request in seconds
    restarts       how often the process was restarted
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


class Arrival(NamedTuple):
    """An event, and the time of its arrival in seconds of `time.perf_counter`."""

    at: float
    event: Event


class Asked(Protocol):
    """One request in progress."""

    async def accepted(self) -> Taken:
        """Wait until the engine has accepted the request, which may still wait in the queue.

        Raises its error if it is invalid, and Overloaded or Unavailable if the server cannot take it now.
        """

    def take(self) -> list[Arrival]:
        """Return the events that have arrived since the last call, in order. The last event of all is Finished.

        The error of a failed request is raised instead of returning Failed, after the events before it.
        """

    def cancel(self) -> None:
        """Stop the request, at the latest after the step that is running. Idempotent; does nothing after the end."""


class ServedModel(Protocol):
    """A model whose engine runs in a child process, which is restarted if it ends."""

    @property
    def facts(self) -> ModelFacts | None:
        """Facts about the model, or None until it has been opened for the first time."""

    @property
    def state(self) -> State: ...

    @property
    def load(self) -> Load: ...

    @property
    def most_requests(self) -> int:
        """The maximum number of requests that one tenant can have in the queue."""

    async def start(self) -> None:
        """Open the model. Raises its error, such as ModelFileError, if it cannot be opened."""

    async def drain(self, seconds: float) -> None:
        """Refuse new and waiting requests, let the others finish, and end those that still run after `seconds`."""

    async def close(self) -> None:
        """End all requests with an error, and free all resources. Idempotent."""

    def ask(self, request: Request, news: asyncio.Event) -> Asked:
        """Send a request to the engine. Raises Overloaded and Unavailable.

        news  set when the request is accepted, when events arrive and when it fails; several requests can share it
        """

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool, tenant: str = "") -> list[int]:
        """Return the token IDs of a text. `tenant` is whose call it is. Raises LlmrunError."""

    async def detokenize(self, tokens: Sequence[int], *, tenant: str = "") -> bytes:
        """Return the bytes of these tokens. Raises UsageError for IDs outside the vocabulary."""

    async def embed(self, wanted: Embed) -> Embedded:
        """Compute vectors or scores. Raises LlmrunError, such as ContextExceeded for inputs that are too long.

        The ID of `wanted` has no meaning. If the engine's process ends meanwhile, the error is Unavailable.
        """

    async def count_prompt(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt, without running the request. Raises LlmrunError."""
