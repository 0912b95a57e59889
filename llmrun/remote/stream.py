"""From the bytes of a stream to pieces of an answer: Server-Sent Events that hold OpenAI's completion chunks.

The other side may be anybody: every line is bounded, every value's type is looked at, and whatever is wrong becomes one
NetworkError in which the server's own words are harmless.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from llmrun.errors import NetworkError
from llmrun.gguf.problems import shown
from llmrun.types import TokenLogprob

LONGEST_LINE = 1 << 20  # bytes
UNKNOWN_TOKEN = -1  # a server tells a token's text, not its id

Logprobs = tuple[TokenLogprob, tuple[TokenLogprob, ...]]  # the chosen token, and the likeliest ones


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted. A `cached` token of the prompt was not computed again; `reasoning` ones are among those
    of the completion."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream.

    arrived    when its last byte was there, by time.perf_counter
    text       of the answer; may be several tokens, or none
    reasoning  text the model thinks with before it answers
    finish     the server's reason for the end: "stop", "length", ...; None: it goes on
    """

    arrived: float
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: Usage | None = None
    logprobs: tuple[Logprobs, ...] = ()


class Teller:
    """Says what is wrong with a server: names it, and keeps the key out of its words."""

    def __init__(self, host: str, key: str | None) -> None:
        self.host = host
        self._key = key

    def shown(self, words: str | bytes, limit: int = 200) -> str:
        """Foreign words, on one line, without control characters and without the key."""
        text = words if isinstance(words, str) else words.decode(errors="backslashreplace")
        text = " ".join(text.split())
        return shown(text.replace(self._key, "(the key)") if self._key else text, limit)

    def is_harmless(self, error: BaseException) -> bool:
        """Whether the key is nowhere in an error of another library, nor in those it came from."""
        import traceback

        return not self._key or self._key not in "".join(traceback.format_exception(error))

    def fault(self, what: str, seen: str, hint: str = "") -> NetworkError:
        return NetworkError(f"{what}: {self.host}: {seen}", hint=hint)


class _Unexpected(ValueError):
    """A value of a type that the API does not have there."""


def read_chunks(pieces: Iterable[tuple[float, bytes]], teller: Teller) -> Iterator[Chunk]:
    """The events of a stream to its `[DONE]`, or to its end. `pieces`: moment of arrival, bytes.

    Raises NetworkError for what is no such stream, or says that something went wrong.
    """
    count, finished = 0, False
    for arrived, data in _events(_lines(pieces, teller), teller):
        if data.strip() == b"[DONE]":
            return
        try:
            event = json.loads(data)
            said = server_words(event)
        except (ValueError, RecursionError):  # also a number of thousands of digits, lists in lists in lists
            seen = f"an event of {len(data):,} bytes: {teller.shown(data, 60)}"
            raise teller.fault("answer is not JSON", seen) from None
        if said:
            raise teller.fault("the server broke off", teller.shown(said))
        try:
            chunk = _chunk(arrived, event)
        except _Unexpected as wrong:
            raise teller.fault("answer is not what the API says", str(wrong)) from None
        count, finished = count + 1, finished or chunk.finish is not None
        yield chunk
    if not finished:
        raise teller.fault("answer was cut", f"the stream ended after {count:,} events, without its end")


def server_words(body: object) -> str:
    """What a server says went wrong, in any of the ways servers say it; "" when the body says no such thing."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body.get("detail"))
    if error is None and body.get("object") == "error":  # vLLM's, before it had an `error`
        error = body.get("message")
    if isinstance(error, list):
        error = next(iter(error), None)
    if isinstance(error, dict):
        error = error.get("message") or error.get("msg") or error
    return "" if error is None else str(error) or "it does not say what"


def _lines(pieces: Iterable[tuple[float, bytes]], teller: Teller) -> Iterator[tuple[float, bytes]]:
    """Each line with the moment it was whole. What is left at the end counts as one."""
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
            raise teller.fault("answer is no event stream", f"a line of more than {LONGEST_LINE:,} bytes")
    if held:
        yield arrived, bytes(held)


def _events(lines: Iterable[tuple[float, bytes]], teller: Teller) -> Iterator[tuple[float, bytes]]:
    """The data of each event, with the moment it was whole."""
    data: list[bytes] = []
    size = 0
    arrived = 0.0
    for arrived, line in lines:
        line = line.removesuffix(b"\r")
        if not line and data:
            yield arrived, b"\n".join(data)
            data, size = [], 0
        name, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
        if name in (b"data", b"error"):  # the latter is llama-server's own
            data.append(value.removeprefix(b" "))
            size += len(line)
            if size > LONGEST_LINE:
                raise teller.fault("answer is no event stream", f"an event of more than {LONGEST_LINE:,} bytes")
    if data:
        yield arrived, b"\n".join(data)


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
        finish=_value(choice, "finish_reason", str),
        usage=usage,
        logprobs=tuple(_logprobs(_value(choice, "logprobs", dict) or {})),
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
    """Both ways of saying it: the list of chat completions, and the columns of completions."""
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
    if value is None:  # as completions say it of the first token of a prompt
        return 0.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (-1e30 < value < 1e-3 or value == -math.inf)
    ):
        raise _Unexpected(f"logprob: {type(value).__name__} seen, a number of at most 0 expected")
    return float(value)


def _count(table: object, name: str) -> int:
    value = _value(table, name, int) or 0
    if not 0 <= value < 1 << 31:
        raise _Unexpected(f"{name}: a count of tokens expected")
    return int(value)


def _value(table: object, name: str, kind: type) -> Any:
    """A field of a JSON object: of this kind, or None when it is missing or null."""
    if not isinstance(table, dict):
        raise _Unexpected(f"{type(table).__name__} where the object with {name} is expected")
    value = table.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise _Unexpected(f"{name}: {type(value).__name__} seen, {kind.__name__} expected")


def _whole(text: str) -> str:
    """JSON can spell half of a UTF-16 pair, which no text holds."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
