"""The events of a conversation, their encoding as lines of JSON, and the settings that a conversation may change.

A conversation is the result of applying its events in order (see `conversation.py`). Events are only appended to
the conversation's file, so a truncated file still contains everything up to the point of truncation.

The pieces of a streaming answer (`AnswerBegan`, `Thought`, `AnswerWent`, `WasThinking`) are in a separate file. When
the answer ends, the whole answer is appended to the conversation's file as one `Answered` line. Files in formats 1 and
2 contain the pieces themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.errors import UsageError
from llmrun.base.types import FinishReason
from llmrun.cli.arguments import options
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import NAMES_ELSEWHERE, RULES

if TYPE_CHECKING:
    from llmrun.engine.constraint.base import ResponseFormat

Value = int | float | str | list[str]

STOP = "stop"  # strings that end an answer; all other preferences are settings in `options/settings.py`
CONTEXT = "ctx_size"  # a change of this setting reopens the model
THINK = "think"
THINK_BUDGET = "think_budget"
ON_FULL = "on_full"
FORGET = "forget"  # the value of ON_FULL that drops the oldest turns
THINKING = (THINK, THINK_BUDGET, "hide_thinking")
_BASIC = ("temperature", "top_k", "top_p", "min_p")
_REPETITION = tuple(name for name in SAMPLING if name.startswith(("repeat_", "presence_", "frequency_", "dry_")))
GROUPS: Mapping[str, Sequence[str]] = {
    "Sampling": (*_BASIC, "seed"),
    "Repetition": _REPETITION,
    "More samplers": tuple(name for name in SAMPLING if name not in (*_BASIC, *_REPETITION)),
    "Limits": ("max_tokens", STOP, CONTEXT, ON_FULL),
    "Answer format": options.NAMES,
    "Thinking": THINKING,
}
NAMES = tuple(name for names in GROUPS.values() for name in names)

FORMAT_NAME = "format"  # Ollama's name for the answer's format: `json` or a JSON schema
_OTHER_NAMES = (
    {"schema": options.JSON_SCHEMA}
    | dict.fromkeys(("stop_sequence", "stop_sequences", "stop_strings", "stop_words"), STOP)
    | {flag: name for name, parameter in SAMPLING.items() for flag in parameter.flags}
    | {alias: name for alias, name in NAMES_ELSEWHERE.items() if name in NAMES}
)


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


_BY_LETTERS = {_letters(name): meaning for name, meaning in (_OTHER_NAMES | {name: name for name in NAMES}).items()}


def meant(typed: str, value: str) -> tuple[str, str]:
    """Return the preference with this name, flag or name in another program, and the value to parse.

    Hyphens and underscores do not matter. For an unknown name, raise UsageError with a suggestion.
    """
    letters = _letters(typed)
    if letters == FORMAT_NAME:
        return (options.JSON_OBJECT, options.ON) if value == "json" else (options.JSON_SCHEMA, value)
    if letters in _BY_LETTERS:
        return _BY_LETTERS[letters], value
    spelled = typed.lower().replace("-", "_")
    if NAMES_ELSEWHERE.get(spelled, spelled) in RULES:
        raise UsageError(
            f"/set: {typed}: cannot change during a chat", hint="use a flag of llmrun chat, or config.toml"
        )
    import difflib

    near = difflib.get_close_matches(letters, _BY_LETTERS, n=1)
    raise UsageError(
        f"/set: {typed:.80}: no such setting",
        hint=f"did you mean {_BY_LETTERS[near[0]]}?" if near else "/set lists the settings",
    )


def parse_value(name: str, text: str) -> Value:
    """Parse the value that the user gave for a preference. Raises UsageError.

    The value of `stop` is either a literal string or a JSON list of strings, in which "\\n" is a newline.
    """
    value: object = text
    if name == STOP:
        value = _stops(text)
    elif name in options.NAMES:
        value = options.checked_format(name, options.format_text(name, text, f"/set {name}"), f"/set {name}").text
    else:
        try:
            value = RULES[name].parse(text)
        except ValueError:
            value = text  # `checked_value` rejects this text with the usual message
    return checked_value(name, value)


def checked_value(name: str, value: object) -> Value:
    """Return the value if its type and range are valid for this preference. Raises UsageError otherwise."""
    if name == STOP:
        if isinstance(value, list) and value and all(isinstance(text, str) and text for text in value):
            return value
        raise UsageError(f"{name}: {value!r:.60} is not a list of strings")
    if name in options.NAMES:
        if isinstance(value, str) and value:
            return value
        raise UsageError(f"{name}: {value!r:.60} is not text")
    if name not in NAMES:
        raise UsageError(f"{name!r:.40}: no such setting")
    try:
        checked = RULES[name].check(value)
    except ValueError:
        raise UsageError(f"{name}: {value!r:.60} is not {RULES[name].words}", hint=RULES[name].advice(value)) from None
    assert isinstance(checked, int | float | str)  # the rules for NAMES allow only these types
    return checked


def chosen_format(preferences: Mapping[str, Value]) -> ResponseFormat | None:
    """Return the format of the answers, or None if answers may be any text."""
    for name in options.NAMES:
        if name in preferences:
            return options.response_format(name, str(preferences[name]), f"/set {name}")
    return None


def _stops(text: str) -> object:
    if not text.startswith("["):
        return [text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return [text]


FORMAT: Final = 5  # version of the file format, incremented when older versions of llmrun cannot read a new feature
# Format 1 has no thinking, formats 1 to 3 have no tool calls, and formats 1 to 4 have no images. Formats 1 and 2 save
# every token on its own line.
READABLE: Final = (1, 2, 3, 4, 5)
FAILED: Final = "failed"  # the finish reason if an answer ended with an error

Name = str  # a name may be a non-UTF-8 path, in which "\\udcff" represents byte 0xff, both in memory and in the file

_REASONS = frozenset([*FinishReason, FAILED])


@dataclass(frozen=True, slots=True)
class Began:
    """The first event of every conversation, which occurs only once.

    conversation  ID of the conversation; its copies have the same ID
    created       UTC time in ISO 8601
    """

    format: int
    conversation: str
    model: Name
    created: str
    version: str


@dataclass(frozen=True, slots=True)
class ModelChanged:
    model: Name


@dataclass(frozen=True, slots=True)
class SystemSet:
    """A change of the system prompt. None restores the chat template's default, and "" replaces the default."""

    text: str | None


@dataclass(frozen=True, slots=True)
class PreferenceSet:
    """A change of one setting. None restores the default."""

    name: str
    value: Value | None


@dataclass(frozen=True, slots=True)
class ImageShown:
    """An image in a question. Its file is among the images of the store (image_files.py).

    at      how many characters of the question precede the image
    sha256  the SHA-256 of the file in hexadecimal
    name    the name of the file that the user gave
    format  the format of the file, such as "PNG"
    width, height  the size in pixels, as shown
    """

    at: int
    sha256: str
    name: Name
    format: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class QuestionAsked:
    """A question, which is saved before it is sent to the model. Its images are in the order of their places."""

    text: str
    time: str
    images: tuple[ImageShown, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """The beginning of an answer to the last question. The new answer replaces any earlier answer.

    seed  the seed of the answer, or None if the server chose the seed
    """

    seed: int | None


@dataclass(frozen=True, slots=True)
class AnswerWent:
    """The next piece of the answer, which is saved before it is shown."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """The next piece of the model's thinking, which is saved only after the answer has begun."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The end of an answer. The counts and times are defined in Timings.

    reason  a FinishReason ("cancelled" if the user stopped the answer) or "failed"
    """

    reason: str
    context_used: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WasThinking:
    """Marks the text of the answer so far as thinking."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The complete answer to the last question, which replaces any earlier answer.

    thinking  the model's thinking, or None if the model did not think
    reason    the reason as in AnswerEnded, or None if the process died during the answer; all numbers are then 0
    """

    text: str
    thinking: str | None
    seed: int | None
    reason: str | None = None
    context_used: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A tool call of the last answer, which is saved before the tool runs.

    An answer with a call is part of a round of calls, and another answer follows the results of the round. `arguments`
    is the JSON text that the model wrote.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolAnswered:
    """The result of the tool call with this id, or a text that explains why the call has no result."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Undone:
    """The removal of the last question and of its answer, if any."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """The removal of all questions and answers in formats 1 and 2. In newer formats, /clear starts a new file."""


Event = (
    Began
    | ModelChanged
    | SystemSet
    | PreferenceSet
    | QuestionAsked
    | AnswerBegan
    | Thought
    | AnswerWent
    | AnswerEnded
    | WasThinking
    | Answered
    | ToolCalled
    | ToolAnswered
    | Undone
    | Cleared
)
Piece = AnswerBegan | Thought | AnswerWent | WasThinking  # a part of a streaming answer

_KINDS: Mapping[str, type[Event]] = {
    "began": Began,
    "model": ModelChanged,
    "system": SystemSet,
    "set": PreferenceSet,
    "question": QuestionAsked,
    "answer": AnswerBegan,
    "thought": Thought,
    "text": AnswerWent,
    "end": AnswerEnded,
    "was-thinking": WasThinking,
    "answered": Answered,
    "call": ToolCalled,
    "result": ToolAnswered,
    "undo": Undone,
    "clear": Cleared,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(event: Event) -> bytes:
    """Encode an event as a line of JSON in UTF-8, including the newline."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    if isinstance(event, QuestionAsked):
        images = [asdict(image) for image in values.pop("images")]
        values |= {"images": images} if images else {}
    text = json.dumps({"event": _NAMES[type(event)], **values}, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def from_line(line: bytes) -> Event:
    """Decode an event from a line. Raises ValueError with a short explanation if the line is not a valid event."""
    try:
        values = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON in UTF-8: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    name = values.pop("event", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown event {name!r:.40}")
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if kind is QuestionAsked:
        values.setdefault("images", [])
    if values.keys() != wanted.keys():
        raise ValueError(f"{name}: keys {', '.join(map(repr, values))!s:.80}, not {', '.join(wanted)}")
    for key, value in values.items():
        if not _FITS[wanted[key]](value):
            raise ValueError(f"{name}: {key}: {value!r:.40} is not a {wanted[key].lower()}")
    if kind is QuestionAsked:
        values["images"] = _images(values["images"], len(values["text"]))
    return _meant(kind(**values))


def _images(listed: Sequence[Mapping[str, Any]], most: int) -> tuple[ImageShown, ...]:
    """Return the images of a question. Raises ValueError if a value is wrong. `most` is the length of the question."""
    images = tuple(ImageShown(**values) for values in listed)
    places = [image.at for image in images]
    if places != sorted(places) or max(places, default=0) > most:
        raise ValueError("question: images: the images are not in the order of their places")
    if not all(re.fullmatch("[0-9a-f]{64}", image.sha256) for image in images):
        raise ValueError("question: images: a SHA-256 is not 64 hexadecimal digits")
    return images


def _meant(event: Event) -> Event:
    """Return the event if its values are valid. Raises ValueError otherwise."""
    if isinstance(event, PreferenceSet) and event.value is not None:
        try:
            return PreferenceSet(event.name, checked_value(event.name, event.value))
        except UsageError as error:
            raise ValueError(str(error)) from None
    unended = isinstance(event, Answered) and event.reason is None
    if isinstance(event, AnswerEnded | Answered) and event.reason not in _REASONS and not unended:
        raise ValueError(
            f"{_NAMES[type(event)]}: reason: {event.reason!r:.40} is not one of {', '.join(sorted(_REASONS))}"
        )
    if isinstance(event, Began) and event.format not in READABLE:
        raise ValueError(f"began: format {event.format}: this llmrun reads format {FORMAT}")
    return event


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _is_text(value: Any) -> bool:
    """Return whether a value is a string that UTF-8 can encode. JSON strings may contain lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_preference(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_text, value))
    return value is None or _is_text(value) or type(value) in (int, float, bool)


def _is_images(value: Any) -> bool:
    wanted = {field.name: str(field.type) for field in fields(ImageShown)}
    return isinstance(value, list) and all(
        isinstance(image, dict)
        and image.keys() == wanted.keys()
        and all(_FITS[wanted[key]](image[key]) for key in wanted)
        for image in value
    )


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "Name": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or _is_text(value),
    "int": _is_count,
    "int | None": lambda value: value is None or _is_count(value),
    "float": _is_seconds,
    "Value | None": _is_preference,
    "tuple[ImageShown, ...]": _is_images,
}
