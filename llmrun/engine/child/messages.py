"""The messages between the server and the process that runs its engine, as frames of JSON on pipes.

The server's requests have ids that the server chooses. All events in these messages carry these ids.

    to the process:   Open, then Ask, Cancel, Tokenize, Detokenize, CountPrompt, Embed and Close in any order
    from the process: Loading and Note, then Opened or CannotOpen; after Opened, for each Ask Preparing, then either
                      Rejected or Taken, then Begun and events; Tokenized, Detokenized, PromptCounted, Embedded or
                      Rejected; Beat at any time; Crashed at the end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmrun.base.errors import LlmrunError
from llmrun.base.types import FinishReason, Timings
from llmrun.engine.child.codec import codec_of
from llmrun.engine.facts import ModelFacts
from llmrun.engine.isolation.frames import decoded, encoded
from llmrun.engine.requests import Event, Finished, Request, TextPrompt, TokenPrompt


@dataclass(frozen=True, slots=True)
class Open:
    """Open a model. It is the first message.

    path           the model file
    name           the name that clients use
    options        the fields of OpenOptions that are not callbacks
    chat_template, thinking_tags, speculate, draft  see Engine.open
    catalogue      sampling parameters from models.toml, over which the model file's take precedence
    sampling       sampling parameters from the user's settings, which take precedence over both
    digest         identifies the contents of the model file; if empty, it is computed from samples of the file
    max_wait_s     the limit on a request's predicted wait in seconds
    overcommit, share_prefixes  see Engine
    saved_prefixes  the folder in which to save prefixes; "" to save none
    state_bytes    the maximum size of all saved states
    """

    path: str
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    thinking_tags: tuple[str, ...] | None = None
    speculate: bool | None = None
    draft: str | None = None
    catalogue: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    max_wait_s: float | None = None
    overcommit: bool = False
    share_prefixes: bool = False
    saved_prefixes: str = ""
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """Run a request.

    received  when the server received the request, in seconds of `time.perf_counter`, which all processes share
    admitted  whether a process that has ended had accepted the request; such a request is never refused for its wait
    alone     whether the request's first step runs no other requests
    """

    id: int
    request: Request
    received: float
    admitted: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel requests. Unknown ids are ignored."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Encode a text as tokens. The ids of these calls and of requests differ. `tenant` is whose call it is."""

    id: int
    text: str
    add_special: bool
    parse_special: bool
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Decode tokens to bytes."""

    id: int
    tokens: Sequence[int]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class CountPrompt:
    """Count the tokens of a request's prompt, without running the request."""

    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class Embed:
    """Compute the vectors of texts or, if there is a query, the scores of documents.

    inputs      the texts or documents
    dimensions  the number of features to keep, or None for all
    truncate    leave out the end of inputs that are too long, instead of an error
    """

    id: int
    inputs: Sequence[TextPrompt | TokenPrompt]
    query: str | None = None
    dimensions: int | None = None
    normalize: bool = True
    truncate: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """End the process."""


ToChild = Open | Ask | Cancel | Tokenize | Detokenize | CountPrompt | Embed | Close


@dataclass(frozen=True, slots=True)
class Loading:
    """The progress of opening the model: a description of the work, and the fraction completed."""

    work: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Note:
    """A message for the user. Details are shown only if the user asks for them."""

    text: str
    is_detail: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """The model is open."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class CannotOpen:
    """The model cannot be opened, and the process ends."""

    error: LlmrunError


@dataclass(frozen=True, slots=True)
class Rejected:
    """The answer to a message with an id if it is invalid, cannot be accepted now, or was cancelled early."""

    id: int
    error: LlmrunError


@dataclass(frozen=True, slots=True)
class Preparing:
    """The request's prompt is about to be prepared. If the process ends now, this request may be the reason."""

    id: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A request is in the queue. `wait_s` is its predicted time there in seconds."""

    id: int
    prompt_tokens: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Begun:
    """These requests get their first rows in the step that is about to run."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat, sent after steps and twice a second. It has the figures of the last step's end.

    A process can beat although its engine hangs. Then it is busy, but `steps` does not grow.

    busy            whether a request is waiting or running
    longest_step_s  the longest of the last steps in seconds
    wait_s          the predicted wait of a new request in seconds
    patience        how many times longer than others the step that is running may take; texts for an encoder can have
                    more rows than other steps
    steps           steps since the model was opened
    others          see `Engine.status`
    """

    busy: bool
    longest_step_s: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    free_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    patience: float = 1.0


@dataclass(frozen=True, slots=True)
class Stepped:
    """The events of one step, in order. Steps without events are reported only if they were a request's first."""

    events: tuple[Event, ...] = ()
    beat: Beat | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The answer to Tokenize."""

    id: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The answer to Detokenize."""

    id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PromptCounted:
    """The answer to CountPrompt."""

    id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to Embed, or a part of it. Parts follow each other, and each has the results of some of the inputs.

    data     float32[inputs, features] as bytes in native order, or float32[inputs] for scores
    tokens   the number of tokens of each input
    is_last  whether no part follows
    """

    id: int
    data: bytes
    tokens: Sequence[int]
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process ends because of an error in a step. It is the last message."""

    error: LlmrunError


FromChild = (
    Loading
    | Note
    | Opened
    | CannotOpen
    | Rejected
    | Preparing
    | Taken
    | Begun
    | Beat
    | Stepped
    | Tokenized
    | Detokenized
    | PromptCounted
    | Embedded
    | Crashed
)


def encode_to_child(message: ToChild) -> bytes:
    """Encode a message to the process. Raises TypeError, ValueError or RecursionError if JSON cannot represent it."""
    return encoded(codec_of(ToChild).encode(message))


def decode_to_child(data: bytes) -> ToChild:
    """Decode a message to the process. Raises BadMessage, ValueError or RecursionError."""
    message: ToChild = codec_of(ToChild).decode(decoded(data))
    return message


def encode_from_child(message: FromChild) -> bytes:
    """Encode a message from the process."""
    return encoded(codec_of(FromChild).encode(message))


def decode_from_child(data: bytes) -> FromChild:
    """Decode a message from the process. Raises BadMessage or ValueError."""
    message: FromChild = codec_of(FromChild).decode(decoded(data))
    return message


def cancelled_unbegun(request_id: int) -> Finished:
    """Return the last event of a request that was cancelled before it reached the engine's queue."""
    nothing = Timings(0.0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return Finished(request_id, FinishReason.CANCELLED, None, 0, nothing)
