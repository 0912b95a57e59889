"""The messages between the server and the process that runs its engine.

The server chooses the ids of its requests, and all events in messages from the process contain these ids.

    to the process:   Open, then Ask, Cancel, Tokenize, Detokenize, Spell, CountPrompt, RenderPrompt, DescribeChat,
                      Embed, SavePrefix and Close in any order
    from the process: Loading and Note, then Opened or CannotOpen; after Opened, for each Ask Preparing, then either
                      Rejected or Taken, then Begun, perhaps PrefixExplained, and events; Tokenized, Detokenized,
                      Spelled, PromptCounted, PromptRendered, ChatDescribed, Embedded, PrefixSaved or Rejected;
                      Prefilling during steps; Beat and Note at any time; Crashed at the end

Decoding is strict: all other messages raise BadMessage, because the two processes run the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import field

from llmrun.base.errors import LlmrunError
from llmrun.base.processes.frames import Codec
from llmrun.base.types import FinishReason, Timings
from llmrun.engine.base import require_thinking
from llmrun.engine.requests import (
    Event,
    Finished,
    ModelFacts,
    Portable,
    PrefillProgress,
    PrefixReport,
    Request,
    SeenImage,
    StatePlace,
    TextPrompt,
    TokenPrompt,
)


class Open(Portable, frozen=True):
    """Open a model. This message is always sent first.

    path           the model file
    name           the name that clients use
    options        the fields of OpenOptions that are not callbacks
    chat_template, thinking_tags, speculate, draft  as in Engine.open
    catalogue      sampling parameters from models.toml, over which the model file's take precedence
    sampling       sampling parameters from the user's settings, which take precedence over both
    digest         identifies the contents of the model file; if empty, it is computed from samples of the file
    max_wait_s     the limit on a request's predicted wait in seconds
    overcommit, share_prefixes  as in Engine
    saved_prefixes  the folder in which to save prefixes; "" to save none
    state_bytes    the maximum size of all saved states
    explains_prefixes  report how much of each prompt was reused, and why not more
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
    explains_prefixes: bool = False


class Ask(Portable, frozen=True):
    """Run a request.

    received  when the server received the request, in seconds of `time.perf_counter`, which all processes share
    admitted  whether a process that has ended had accepted the request; such a request is never refused for its wait
    alone     whether the request's first step runs no other requests
    place     the file from which the request loads its state, and in which SavePrefix saves it, or None
    """

    id: int
    request: Request
    received: float
    admitted: bool = False
    alone: bool = False
    place: StatePlace | None = None


class Cancel(Portable, frozen=True):
    """Cancel requests. Unknown ids are ignored."""

    ids: tuple[int, ...]


class Tokenize(Portable, frozen=True):
    """Encode a text as tokens. No call has the same id as a request. `tenant` is the owner of the call."""

    id: int
    text: str
    add_special: bool
    parse_special: bool
    tenant: str = ""


class Detokenize(Portable, frozen=True):
    """Decode tokens to bytes. Control tokens appear as in the vocabulary."""

    id: int
    tokens: Sequence[int]
    tenant: str = ""


class Spell(Portable, frozen=True):
    """Return the bytes of each token. Control tokens appear as in the vocabulary."""

    id: int
    tokens: Sequence[int]
    tenant: str = ""


class CountPrompt(Portable, frozen=True):
    """Count the tokens of a request's prompt, without running the request."""

    id: int
    request: Request


class RenderPrompt(Portable, frozen=True):
    """Return the text of a conversation's prompt, without running the request."""

    id: int
    request: Request


class DescribeChat(Portable, frozen=True):
    """Describe how the model thinks and calls tools. The first description takes 20 to 200 ms."""

    id: int
    tenant: str = ""


class Embed(Portable, frozen=True):
    """Compute the vectors of texts or, if there is a query, the scores of documents.

    inputs      the texts or documents
    dimensions  the number of features to keep, or None for all
    truncate    leave out the end of inputs that are too long, instead of an error
    id          set when the message is sent
    """

    inputs: Sequence[TextPrompt | TokenPrompt]
    query: str | None = None
    dimensions: int | None = None
    normalize: bool = True
    truncate: bool = False
    tenant: str = ""
    id: int = 0


class SavePrefix(Portable, frozen=True):
    """Save the state of the last finished request with this place. `most` is the number of tokens, or None for all."""

    id: int
    place: StatePlace
    most: int | None = None


class Close(Portable, frozen=True):
    """End the process."""


ToChild = (
    Open
    | Ask
    | Cancel
    | Tokenize
    | Detokenize
    | Spell
    | CountPrompt
    | RenderPrompt
    | DescribeChat
    | Embed
    | SavePrefix
    | Close
)


class Loading(Portable, frozen=True):
    """The progress of opening the model: a description of the work, and the fraction completed."""

    work: str
    fraction: float


SAVE_S: Final = 10.0  # the time limit for saving prefixes after Close, in seconds; 1 GB takes about 2 s


class Note(Portable, frozen=True):
    """A message for the user. Details are shown only if the user asks for them. `id` is the client of a StatePlace."""

    text: str
    is_detail: bool = False
    id: int = 0


class Opened(Portable, frozen=True):
    """The model is open."""

    facts: ModelFacts


class Listening(Portable, frozen=True):
    """A background engine has opened the model, and listens on its socket. This is the last message on the pipe."""


class CannotOpen(Portable, frozen=True):
    """The model cannot be opened, and the process ends."""

    error: LlmrunError


class Rejected(Portable, frozen=True):
    """Reports that a message with an id is invalid, cannot be accepted now, or was cancelled early."""

    id: int
    error: LlmrunError


class Preparing(Portable, frozen=True):
    """The request's prompt is about to be prepared. A crash during the preparation may be the request's fault."""

    id: int


class Taken(Portable, frozen=True):
    """A request is in the queue.

    wait_s         the predicted time in the queue in seconds
    first_token_s  the predicted seconds until the first token, or None if the costs of prompts are unknown
    prefix         how much of the prompt will probably be reused, or None if prefixes are not explained
    images         the images of the prompt, in order
    """

    id: int
    prompt_tokens: int
    wait_s: float
    first_token_s: float | None = None
    prefix: PrefixReport | None = None
    images: tuple[SeenImage, ...] = ()


class PrefixExplained(Portable, frozen=True):
    """A request has begun, and has reused a different number of tokens than Taken predicted."""

    id: int
    prefix: PrefixReport


class Begun(Portable, frozen=True):
    """The requests with these ids begin in the step that is about to run."""

    ids: tuple[int, ...]


class Beat(Portable, frozen=True):
    """A heartbeat, sent after steps and twice a second, with the figures from the end of the last step.

    A process can send heartbeats even while its engine hangs. In that case, `busy` is True, but `steps` does not grow.

    busy            whether a request is waiting or running
    longest_step_s  the longest of the last steps in seconds
    wait_s          the predicted wait of a new request in seconds
    patience        how many times longer than others the step that is running may take; texts for an encoder can have
                    more rows than other steps
    steps           steps since the model was opened
    others          as in `Engine.status`
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


class Stepped(Portable, frozen=True):
    """The events of one step, in order. A step without events is reported only if a request began in that step."""

    events: tuple[Event, ...] = ()
    beat: Beat | None = None


class Prefilling(Portable, frozen=True):
    """The expected progress of prompts in the running step. A timer sends it, even if the engine hangs."""

    events: tuple[PrefillProgress, ...]


class Tokenized(Portable, frozen=True):
    """The answer to Tokenize."""

    id: int
    tokens: Sequence[int]


class Detokenized(Portable, frozen=True):
    """The answer to Detokenize."""

    id: int
    data: bytes


class Spelled(Portable, frozen=True):
    """The answer to Spell."""

    id: int
    pieces: Sequence[bytes]


class PromptCounted(Portable, frozen=True):
    """The answer to CountPrompt."""

    id: int
    tokens: int


class PromptRendered(Portable, frozen=True):
    """The answer to RenderPrompt."""

    id: int
    text: str


class Tags(Portable, frozen=True):
    """The tags that enclose a model's thinking, as in `ThinkingStyle`."""

    opening: str
    closing: tuple[str, ...]


class ThinkingFacts(Portable, frozen=True):
    """A model's thinking tags and switch: the ThinkingSupport of a model in another process."""

    style: Tags | None = None
    has_switch: bool = False

    @property
    def can_think(self) -> bool:
        """See ModelThinking."""
        return self.style is not None or self.has_switch

    def prepare(self) -> None:
        """Do nothing, because the facts are known."""

    def require(self) -> None:
        """Raise UsageError if the model does not support thinking."""
        require_thinking(self)


class ToolFacts(Portable, frozen=True):
    """A model's support for tool calls: the ToolSupport of a model in another process."""

    takes_tools: bool = False
    reads_calls: bool = False


class ChatDescribed(Portable, frozen=True):
    """The answer to DescribeChat."""

    id: int
    thinking: ThinkingFacts
    tools: ToolFacts


class Embedded(Portable, frozen=True):
    """The answer to Embed, or a part of the answer. Parts arrive in order, and each part contains some of the results.

    data     float32[inputs, features] as bytes in native order, or float32[inputs] for scores
    tokens   the number of tokens of each input
    is_last  True if no part follows
    """

    id: int
    data: bytes
    tokens: Sequence[int]
    is_last: bool = True


class PrefixSaved(Portable, frozen=True):
    """The answer to SavePrefix. If the state could not be saved, a Note precedes this message."""

    id: int


class Crashed(Portable, frozen=True):
    """The last message of a process that ends because of an error in a step."""

    error: LlmrunError


FromChild = (
    Loading
    | Note
    | Opened
    | Listening
    | CannotOpen
    | Rejected
    | Preparing
    | Taken
    | PrefixExplained
    | Begun
    | Beat
    | Stepped
    | Prefilling
    | Tokenized
    | Detokenized
    | Spelled
    | PromptCounted
    | PromptRendered
    | ChatDescribed
    | Embedded
    | PrefixSaved
    | Crashed
)


LONGEST: Final = 1 << 32  # bytes; a frame with a longer message is invalid
TO_CHILD: Final[Codec[ToChild]] = Codec(ToChild)
FROM_CHILD: Final[Codec[FromChild]] = Codec(FromChild)


def cancelled_unbegun(request_id: int) -> Finished:
    """Return the last event of a request that was cancelled before it reached the engine's queue."""
    nothing = Timings(
        load_s=0.0,
        prompt_tokens=0,
        cached_tokens=0,
        generated_tokens=0,
        prefill_s=0.0,
        ttft_s=0.0,
        decode_s=0.0,
        total_s=0.0,
    )
    return Finished(request_id, FinishReason.CANCELLED, None, 0, nothing)
