"""Parses a stream of Server-Sent Events that contain OpenAI's completion chunks.

The server is not trusted. The length of every line is limited, the type of every value is checked, and every problem
raises a NetworkError with sanitized text from the server.

The events of llmrun's own servers have IDs, with which a client can check that a stream really continues.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from llmrun.base.errors import NetworkError, shown
from llmrun.base.types import TokenLogprob
from llmrun.engine.requests import ImageProgress, ToolCallDelta

FORM: Final = re.compile(r"(?P<answer>[0-9a-f]{24})-(?P<check>[0-9a-f]{8})-(?P<number>[0-9]{1,9})", re.ASCII)


def is_event_id(text: str) -> bool:
    """Return whether a text has the form of llmrun's event IDs."""
    return FORM.fullmatch(text) is not None


def follows(event_id: str, last_id: str) -> bool:
    """Return whether an event directly follows another event of the same answer."""
    found, last = FORM.fullmatch(event_id), FORM.fullmatch(last_id)
    if found is None or last is None:
        return False
    same_answer = found.group("answer", "check") == last.group("answer", "check")
    return same_answer and int(found["number"]) == int(last["number"]) + 1


_COMMENT: Final = re.compile(rb": ?([ -~]{1,80})")
_PROMPT: Final = re.compile("processing prompt ([0-9]{1,9})/([0-9]{1,9})")


class PromptState(NamedTuple):
    """The progress of a prompt, as a server has reported it.

    done, total  how many of the prompt's tokens the server has processed, and how many there are; 0 if unknown
    image        the progress of an image, or None
    """

    done: int = 0
    total: int = 0
    image: ImageProgress | None = None


def prompt_state(line: bytes) -> tuple[str, PromptState] | None:
    """Return the text and the meaning of a comment in which llmrun reports the progress of a prompt, or None."""
    if (comment := _COMMENT.fullmatch(line)) is None:
        return None
    words = comment[1].decode("ascii")
    if (counts := _PROMPT.fullmatch(words)) is not None:
        return words, PromptState(int(counts[1]), int(counts[2]))
    image = ImageProgress.parse(words)
    return None if image is None else (words, PromptState(image=image))


LONGEST_LINE = 1 << 20  # bytes
_MOST_CALLS = 128  # tool calls in an answer
UNKNOWN_TOKEN = -1  # Servers send the text of a token but not its ID.

Logprobs = tuple[TokenLogprob, tuple[TokenLogprob, ...]]  # the chosen token and the most likely tokens


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts that the server reports.

    `prompt_tokens` includes `cached_tokens`, which the server took from its prefix cache. `completion_tokens` includes
    `reasoning_tokens`.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream.

    arrived    the arrival time of its last byte, from time.perf_counter
    event_id   the event's ID, from which a server can continue a broken stream; "" if it cannot
    text       text of the answer, which may be several tokens or none
    reasoning  text of the model's thinking before the answer
    tool_calls pieces of tool calls
    finish     the server's reason for ending the answer, such as "stop" or "length"; None while the answer continues
    """

    arrived: float
    event_id: str = ""
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish: str | None = None
    usage: Usage | None = None
    logprobs: tuple[Logprobs, ...] = ()


class ConnectionLost(NetworkError):
    """Raised if a connection could not be opened, or was closed in the middle of an answer."""


class Teller:
    """Creates errors that name the server, and redacts the key in text from the server."""

    def __init__(self, host: str, key: str | None) -> None:
        self.host = host
        self._key = key

    def shown(self, words: str | bytes, limit: int = 200) -> str:
        """Return untrusted text on one line, without control characters and without the key."""
        text = words if isinstance(words, str) else words.decode(errors="backslashreplace")
        text = " ".join(text.split())
        return shown(text.replace(self._key, "(the key)") if self._key else text, limit)

    def is_harmless(self, error: BaseException) -> bool:
        """Return whether an error and all errors that caused it do not contain the key."""
        import traceback

        return not self._key or self._key not in "".join(traceback.format_exception(error))

    def fault(self, what: str, seen: str, hint: str = "") -> NetworkError:
        """Return an error that names the server."""
        return NetworkError(f"{what}: {self.host}: {seen}", hint=hint)

    def lost(self, what: str, seen: str, hint: str = "") -> ConnectionLost:
        """Return an error that names the server, for a connection that failed."""
        return ConnectionLost(f"{what}: {self.host}: {seen}", hint=hint)


class _Unexpected(ValueError):
    """Raised for a field that does not match the API."""


def read_chunks(
    pieces: Iterable[tuple[float, bytes]],
    teller: Teller,
    on_prompt: Callable[[PromptState], None] = lambda state: None,
) -> Iterator[Chunk]:
    """Yield the chunks of a stream until `[DONE]` or the end of the stream. `pieces` yields (time of arrival, bytes).

    on_prompt  called with the progress of the prompt in llmrun's comments

    Raises NetworkError if the stream is malformed or reports an error.
    """
    count, finished = 0, False
    for arrived, data, event_id in _events(_lines(pieces, teller), teller, on_prompt):
        if data.strip() == b"[DONE]":
            return
        try:
            event = json.loads(data)
            said = server_words(event)
        except (ValueError, RecursionError):  # The JSON is invalid or too deeply nested, or an integer is too long.
            seen = f"an event of {len(data):,} bytes: {teller.shown(data, 60)}"
            raise teller.fault("answer is not valid JSON", seen) from None
        if said:
            raise teller.fault("the server reported an error", teller.shown(said))
        try:
            chunk = replace(_chunk(arrived, event), event_id=event_id)
        except _Unexpected as wrong:
            raise teller.fault("answer does not match the API", str(wrong)) from None
        count, finished = count + 1, finished or chunk.finish is not None
        yield chunk
    if not finished:
        raise teller.lost("answer was cut off", f"the stream ended after {count:,} events without a finish reason")


def server_words(body: object) -> str:
    """Return the error message from a body in any of the formats that servers use, or "" if there is none."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body.get("detail"))
    if error is None and body.get("object") == "error":  # This is the format of older vLLM versions.
        error = body.get("message")
    if isinstance(error, list):
        error = next(iter(error), None)
    if isinstance(error, dict):
        error = error.get("message") or error.get("msg") or error
    return "" if error is None else str(error) or "no reason given"


def _lines(pieces: Iterable[tuple[float, bytes]], teller: Teller) -> Iterator[tuple[float, bytes]]:
    """Yield each line with the time when it was complete, including an unterminated last line."""
    held = bytearray(b"")
    arrived = 0.0
    for arrived, data in pieces:
        start = 0
        searched = len(held)
        held += data
        while (end := held.find(b"\n", max(start, searched))) >= 0:
            yield arrived, bytes(held[start:end])
            start = end + 1
        del held[:start]
        if len(held) > LONGEST_LINE:
            raise teller.fault("answer is not an event stream", f"a line of more than {LONGEST_LINE:,} bytes")
    if held:
        yield arrived, bytes(held)


def _events(
    lines: Iterable[tuple[float, bytes]], teller: Teller, on_prompt: Callable[[PromptState], None]
) -> Iterator[tuple[float, bytes, str]]:
    """Yield each complete event's data and time of arrival, and the latest event ID in the stream so far.

    The last event is yielded even without a final empty line, because some servers leave this line out.
    """
    data: list[bytes] = []
    event_id = ""
    size = 0
    arrived = 0.0
    for arrived, line in lines:
        line = line.removesuffix(b"\r")
        if not line and data:
            yield arrived, b"\n".join(data), event_id
            data, size = [], 0
        name, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
        if name in (b"data", b"error"):  # "error" is specific to llama-server.
            data.append(value.removeprefix(b" "))
            size += len(line)
            if size > LONGEST_LINE:
                raise teller.fault("answer is not an event stream", f"an event of more than {LONGEST_LINE:,} bytes")
        elif name == b"id":
            event_id = _event_id(value.removeprefix(b" "))
        elif not name and (found := prompt_state(line)) is not None:
            on_prompt(found[1])
    if data:
        yield arrived, b"\n".join(data), event_id


def _event_id(value: bytes) -> str:
    """Return the ID of an event, or "" if the server is not llmrun and may not be able to continue streams."""
    text = value.decode("latin-1")
    return text if FORM.fullmatch(text) else ""


def _chunk(arrived: float, event: object) -> Chunk:
    choices = _value(event, "choices", list) or []
    usage = _usage(_value(event, "usage", dict))
    if not choices:
        return Chunk(arrived, usage=usage)
    choice = choices[0]
    delta = _value(choice, "delta", dict) or {}
    reasoning = _value(delta, "reasoning_content", str) or _value(delta, "reasoning", str) or ""
    return Chunk(
        arrived,
        text=_whole(_value(delta, "content", str) or _value(choice, "text", str) or ""),
        reasoning=_whole(reasoning),
        tool_calls=tuple(itertools.starmap(_tool_call, enumerate(_value(delta, "tool_calls", list) or []))),
        finish=_value(choice, "finish_reason", str),
        usage=usage,
        logprobs=tuple(_logprobs(_value(choice, "logprobs", dict) or {})),
    )


def _tool_call(place: int, call: object) -> ToolCallDelta:
    """Return a piece of a call. If the server leaves out the index, use the piece's position in its list."""
    function = _value(call, "function", dict) or {}
    index = place if _value(call, "index", int) is None else _count(call, "index")
    if index >= _MOST_CALLS:
        raise _Unexpected(f"tool_calls: index {index} is too large")
    return ToolCallDelta(
        index,
        id=_whole(_value(call, "id", str) or ""),
        name=_whole(_value(function, "name", str) or ""),
        arguments=_whole(_value(function, "arguments", str) or ""),
    )


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    details = _value(usage, "prompt_tokens_details", dict) or {}
    prompt, cached = _count(usage, "prompt_tokens"), _count(details, "cached_tokens")
    written = _count(usage, "completion_tokens")
    reasoning = _count(_value(usage, "completion_tokens_details", dict) or {}, "reasoning_tokens")
    return Usage(prompt, min(cached, prompt), written, min(reasoning, written))


def _logprobs(table: dict[str, Any]) -> Iterator[Logprobs]:
    """Yield logprobs from the list in chat completions or from the parallel lists in completions."""
    for entry in _value(table, "content", list) or []:
        yield _logprob(entry), tuple(map(_logprob, _value(entry, "top_logprobs", list) or []))
    tokens, chosen = _value(table, "tokens", list) or [], _value(table, "token_logprobs", list) or []
    tops = _value(table, "top_logprobs", list) or [None] * len(tokens)
    for token, logprob, top in zip(tokens, chosen, tops, strict=False):
        likeliest = [] if not isinstance(top, dict) else sorted(top.items(), key=lambda one: -_number(one[1]))
        pairs = [{"token": text, "logprob": value} for text, value in [(token, logprob), *likeliest]]
        first, *rest = map(_logprob, pairs)
        yield first, tuple(rest)


def _logprob(entry: object) -> TokenLogprob:
    spelled = _value(entry, "bytes", list)
    try:
        text = (_value(entry, "token", str) or "").encode("utf-8", "replace") if spelled is None else bytes(spelled)
    except (TypeError, ValueError):
        raise _Unexpected("bytes: not a list of bytes") from None
    return TokenLogprob(UNKNOWN_TOKEN, text, _number(entry.get("logprob") if isinstance(entry, dict) else None))


def _number(value: object) -> float:
    if value is None:  # /completions sends null for the first token of a prompt.
        return 0.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (-1e30 < value < 1e-3 or value == -math.inf)
    ):
        raise _Unexpected(f"logprob: expected a number of at most 0, got {type(value).__name__}")
    return float(value)


def _count(table: object, name: str) -> int:
    value = _value(table, name, int) or 0
    if not 0 <= value < 1 << 31:
        raise _Unexpected(f"{name}: expected a token count")
    return int(value)


def _value(table: object, name: str, kind: type) -> Any:
    """Return a field of a JSON object, which must be of type `kind`, or None if it is missing or null."""
    if not isinstance(table, dict):
        raise _Unexpected(f"expected an object with {name}, got {type(table).__name__}")
    value = table.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise _Unexpected(f"{name}: expected {kind.__name__}, got {type(value).__name__}")


def _whole(text: str) -> str:
    """Replace lone surrogates, which JSON can contain but UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
