"""The result of parsing a call of any API, and the interface of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable

from llmrun.base.errors import Unavailable, shown
from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, Failed, Finished, PrefillProgress, PromptDelta, Request, TextDelta
from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.openai.objects import PromptProgress

_MOST_IGNORED: Final = 32  # field names in the header
_LONGEST_NAME: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The body of one call, converted to requests for the engine.

    requests  one request for each choice of the answer
    stream    True if the client wants a stream
    returns_progress  True if the stream reports the progress of the prompt
    seed      the seed of the first choice
    ignored   the paths of the body's ignored fields
    context   the size of the context in tokens if the client wants a larger context, or 0
    """

    requests: tuple[Request, ...]
    stream: bool
    returns_progress: bool = False
    seed: int = 0
    ignored: tuple[str, ...] = ()
    context: int = 0

    @property
    def request(self) -> Request:
        """The first request, which is the only one in most APIs."""
        return self.requests[0]


_LEFT_OUT: Final = "tools."


def left_out_paths(types: Iterable[str]) -> tuple[str, ...]:
    """Return the names under which tools of these types are listed as ignored fields."""
    return tuple(f"{_LEFT_OUT}{each}" for each in dict.fromkeys(types))


def left_out_tools(ignored: Sequence[str]) -> tuple[str, ...]:
    """Return the types of the tools in a list of ignored fields."""
    return tuple(name.removeprefix(_LEFT_OUT) for name in ignored if name.startswith(_LEFT_OUT))


def ignored_names(ignored: Sequence[str]) -> str:
    """Return the ignored fields as the value of the header x-llmrun-ignored, or "" if no field was ignored.

    The names come from the client, so all characters except printable ASCII are escaped. A header may not begin or end
    with spaces, so surrounding spaces are removed, and empty names are quoted.
    """
    names = [_in_header(name) for name in islice(ignored, _MOST_IGNORED)]
    more = len(ignored) - len(names)
    return ", ".join([*names, f"and {more} more"] if more else names)


def _in_header(name: str) -> str:
    return ascii(shown(name, _LONGEST_NAME))[1:-1][:_LONGEST_NAME].strip() or "''"


class ApiAnswer(Protocol):
    """The answer to one call, with one or more choices.

    The answer receives the events of all choices, in any interleaving, until every choice has finished. Then the client
    receives the chunks of `finish` in a stream, or the body of `whole` without a stream.
    """

    def feed(self, choice: int, event: Event) -> Sequence[Mapping[str, Any]]:
        """Add an event of a choice, and return the chunks to stream. Raises the errors of `checked`."""

    def finish(self) -> Sequence[Mapping[str, Any]]:
        """Return the last chunks of a stream, after all choices have finished."""

    def whole(self) -> Mapping[str, Any] | Sequence[Any]:
        """Return the body of an answer that is not a stream, after all choices have finished."""


@runtime_checkable
class FailingAnswer(ApiAnswer, Protocol):
    """An answer that reports failures with special events in its stream, instead of the error chunk of its API."""

    def failed(self, error: ApiError) -> Sequence[Mapping[str, Any]]:
        """Return the last chunks of a stream that failed."""


@runtime_checkable
class ProgressAnswer(ApiAnswer, Protocol):
    """An answer that can report the progress of its prompt. These chunks have no event IDs, as in PatientAnswer."""

    def progress(self, choice: int, told: PromptProgress) -> Sequence[Mapping[str, Any]]:
        """Return the chunks that report the progress of a choice's prompt."""


@runtime_checkable
class PatientAnswer(ApiAnswer, Protocol):
    """An answer whose clients give up if they receive only comments for a while.

    The chunks of `keep_alive` have no event IDs, because they depend on the time. A client that resumes the stream
    would otherwise receive other bytes.
    """

    def patience_s(self, client: str) -> float:
        """Return the longest time between two events in seconds. `client` is the client's User-Agent."""

    def begin(self, prompt_tokens: int) -> Sequence[Mapping[str, Any]]:
        """Return the first chunks of the stream if no chunk was sent yet."""

    def keep_alive(self) -> Sequence[Mapping[str, Any]]:
        """Return chunks that change nothing. The stream has begun."""


def checked(event: Event) -> PrefillProgress | TextDelta | Finished:
    """Return an event, unless it is a failure or a cancellation. The request must not have set `echo`.

    Raises the error in a Failed event, and Unavailable if the request was cancelled. While the client is connected,
    requests are cancelled only at shutdown.
    """
    if isinstance(event, Failed):
        raise event.error
    assert not isinstance(event, PromptDelta), "the request did not ask for its prompt"
    if isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
        raise Unavailable("the answer was cut off", state="draining")
    return event
