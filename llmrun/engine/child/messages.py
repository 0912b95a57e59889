"""The messages between the server and the process that runs its engine, as frames of JSON on pipes.

The server chooses the ids of its requests, and all events in messages from the process contain these ids.

    to the process:   Open, then Ask, Cancel, Tokenize, Detokenize, CountPrompt, Embed and Close in any order
    from the process: Loading and Note, then Opened or CannotOpen; after Opened, for each Ask Preparing, then either
                      Rejected or Taken, then Begun and events; Tokenized, Detokenized, PromptCounted, Embedded or
                      Rejected; Beat at any time; Crashed at the end

Messages are dataclasses. A Codec follows their type hints to convert them to JSON-compatible values and back:

    dataclass               an object of the fields whose values differ from their defaults
    union of dataclasses    [class name, object]
    bytes                   text with one character, chr(byte), for each byte
    Mapping[int, float]     a list of pairs
    LlmrunError             {"error": class name, "message", "hint", ...}
    float                   a number; Python's JSON also has NaN, Infinity and -Infinity

Decoding is strict: a value of the wrong type raises BadMessage, because the two processes must run the same code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from llmrun.base import errors
from llmrun.base.errors import LlmrunError
from llmrun.base.types import FinishReason, Timings
from llmrun.engine.constraint.base import ResponseFormat
from llmrun.engine.isolated_worker import decoded, encoded
from llmrun.engine.requests import Event, Finished, ModelFacts, Request, TextPrompt, TokenPrompt

# Modules import these classes only for type checkers, so get_type_hints would not find them.
_NAMES: Mapping[str, Any] = {"ResponseFormat": ResponseFormat}
_ERROR_FIELDS = ("retry_after", "state", "most_weights")


class BadMessage(Exception):
    """Raised for a message that does not have the form that this version of llmrun sends."""


class Codec(NamedTuple):
    """The functions that convert values to JSON and back. `decode` raises BadMessage."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def codec_of(hint: Any) -> Codec:
    """Return the codec of a type. Raises TypeError for types that no message contains."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (bool, int, str, type(None)):
        return Codec(_same, _checked(hint))
    if hint is float:
        return Codec(_same, _checked(int, float))
    if hint is Any:
        return Codec(_same, _same)
    if hint is bytes:
        return Codec(lambda value: value.decode("latin-1"), lambda value: _as(str, value).encode("latin-1"))
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple or origin is frozenset or origin is Sequence:
        return _many(origin, arguments)
    if origin is Mapping:
        return _mapping(*arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Codec(lambda value: value.value, lambda value: _member(hint, value))
    if isinstance(hint, type) and issubclass(hint, LlmrunError):
        return Codec(error_to_json, error_from_json)
    if is_dataclass(hint):
        return _dataclass(hint)
    raise TypeError(f"no codec for {hint}")


def error_to_json(error: LlmrunError) -> dict[str, Any]:
    """Convert an error. Classes outside llmrun.base.errors are sent as the nearest base class in that module."""
    known = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    details = {name: getattr(error, name) for name in _ERROR_FIELDS if hasattr(error, name)}
    return {"error": known.__name__, "message": str(error), "hint": error.hint, **details}


def error_from_json(value: Any) -> LlmrunError:
    """Convert JSON back to an error. Unknown classes become LlmrunError. Raises BadMessage."""
    found = _as(dict, value)
    kind = getattr(errors, str(found.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, LlmrunError)):
        kind = LlmrunError
    error = kind(str(found.get("message")), hint=str(found.get("hint", "")))
    for name in _ERROR_FIELDS:
        if name in found and hasattr(error, name):
            setattr(error, name, found[name])
    return error


def _dataclass(kind: Any) -> Codec:
    hints = get_type_hints(kind, localns=dict(_NAMES))
    codecs = {field.name: codec_of(hints[field.name]) for field in fields(kind)}
    encoders = [(field.name, _default(field), codecs[field.name].encode) for field in fields(kind)]
    decoders = {name: codec.decode for name, codec in codecs.items()}

    def encode(value: Any) -> dict[str, Any]:
        encoded = {}
        for name, default, encode_field in encoders:
            content = getattr(value, name)
            if content != default:
                encoded[name] = encode_field(content)
        return encoded

    def decode(value: Any) -> Any:
        try:
            return kind(**{name: decoders[name](content) for name, content in _as(dict, value).items()})
        except (KeyError, TypeError) as error:
            raise BadMessage(f"{kind.__name__}: {error}") from error

    return Codec(encode, decode)


def _default(field: Field[Any]) -> Any:
    """Return a field's default. MISSING differs from every value, so a field without a default is always encoded."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _union(options: Sequence[Any]) -> Codec:
    present = [option for option in options if option is not type(None)]
    if len(present) < len(options):
        codec = codec_of(present[0]) if len(present) == 1 else _union(present)
        return Codec(
            lambda value: None if value is None else codec.encode(value),
            lambda value: None if value is None else codec.decode(value),
        )
    if not all(is_dataclass(option) for option in present):
        raise TypeError(f"no codec for a union of {present}")
    codecs = {option.__name__: codec_of(option) for option in present}

    def encode(value: Any) -> list[Any]:
        name = type(value).__name__
        return [name, codecs[name].encode(value)]

    def decode(value: Any) -> Any:
        match value:
            case [str(name), content] if name in codecs:
                return codecs[name].decode(content)
        raise BadMessage(f"{value!r:.100} is not one of {', '.join(codecs)}")

    return Codec(encode, decode)


def _many(kind: Any, arguments: Sequence[Any]) -> Codec:
    item = codec_of(arguments[0])
    make = list if kind is Sequence else kind
    order = sorted if kind is frozenset else list

    def decode(value: Any) -> Any:
        return make(map(item.decode, _as(list, value)))

    return Codec(lambda value: order(map(item.encode, value)), decode)


def _mapping(key_type: Any, value_type: Any) -> Codec:
    key, item = codec_of(key_type), codec_of(value_type)
    if key_type is str:
        return Codec(
            lambda value: {name: item.encode(content) for name, content in value.items()},
            lambda value: {name: item.decode(content) for name, content in _as(dict, value).items()},
        )

    def decode(value: Any) -> Any:
        pairs = [_as(list, pair) for pair in _as(list, value)]
        if any(len(pair) != 2 for pair in pairs):
            raise BadMessage(f"{value!r:.100} is not a list of pairs")
        return {key.decode(name): item.decode(content) for name, content in pairs}

    return Codec(lambda value: [[key.encode(name), item.encode(content)] for name, content in value.items()], decode)


def _member(kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        raise BadMessage(str(error)) from error


def _checked(*kinds: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise BadMessage(f"{value!r:.100} is not of type {kinds[-1].__name__}")
        return value

    return check


def _as(kind: type, value: Any) -> Any:
    return _checked(kind)(value)


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Open:
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
    """Encode a text as tokens. No call has the same id as a request. `tenant` is the owner of the call."""

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
    id          set when the message is sent
    """

    inputs: Sequence[TextPrompt | TokenPrompt]
    query: str | None = None
    dimensions: int | None = None
    normalize: bool = True
    truncate: bool = False
    tenant: str = ""
    id: int = 0


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
    """Reports that a message with an id is invalid, cannot be accepted now, or was cancelled early."""

    id: int
    error: LlmrunError


@dataclass(frozen=True, slots=True)
class Preparing:
    """The request's prompt is about to be prepared. A crash during the preparation may be the request's fault."""

    id: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A request is in the queue. `wait_s` is the predicted time in the queue, in seconds."""

    id: int
    prompt_tokens: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Begun:
    """The requests with these ids begin in the step that is about to run."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Beat:
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


@dataclass(frozen=True, slots=True)
class Stepped:
    """The events of one step, in order. A step without events is reported only if a request began in that step."""

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
    """The answer to Embed, or a part of the answer. Parts arrive in order, and each part contains some of the results.

    data     float32[inputs, features] as bytes in native order, or float32[inputs] for scores
    tokens   the number of tokens of each input
    is_last  True if no part follows
    """

    id: int
    data: bytes
    tokens: Sequence[int]
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Crashed:
    """The last message of a process that ends because of an error in a step."""

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
    """Encode a message to the process. Raises TypeError, ValueError or RecursionError for invalid values."""
    return encoded(codec_of(ToChild).encode(message))


def decode_to_child(data: bytes) -> ToChild:
    """Decode a message that was sent to the process. Raises BadMessage, ValueError or RecursionError."""
    message: ToChild = codec_of(ToChild).decode(decoded(data))
    return message


def encode_from_child(message: FromChild) -> bytes:
    """Encode a message from the process."""
    return encoded(codec_of(FromChild).encode(message))


def decode_from_child(data: bytes) -> FromChild:
    """Decode a message that the process has sent. Raises BadMessage or ValueError."""
    message: FromChild = codec_of(FromChild).decode(decoded(data))
    return message


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
