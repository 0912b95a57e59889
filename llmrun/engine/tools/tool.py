"""The data types and limits of tools, and functions that clean untrusted JSON and text from tools.

The limits keep a tool from exhausting the memory, the context or the user's time.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.base.errors import LlmrunError, shown


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits for each tool server and each command.

    line        bytes of one message from or to a server
    unasked     bytes that a server may send without answering a request, and bytes that a command may write to stdout
    result      characters of a result that are passed to the model
    depth       levels of nested arrays and objects in a message
    tools       number of tools of one server
    definition  characters of one tool's definition as JSON
    end_s       seconds that a process has to end after each step: closing its input, SIGTERM, SIGKILL
    """

    line: int = 4 << 20
    unasked: int = 16 << 20
    result: int = 100_000
    depth: int = 64
    tools: int = 500
    definition: int = 65_536
    end_s: float = 1.0


Cancelled = Callable[[], bool]  # returns True if the user wants to stop waiting
Validator = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]  # returns the problem with the arguments


class ToolFailed(LlmrunError):
    """A tool or its server could not be started, broke the protocol, died or took too long.

    The message is one line and safe to print. A chat may pass the message to the model as the call's result.
    """


@dataclass(frozen=True, slots=True)
class Definition:
    """A tool as its server or the user's file defines it.

    server       the server's name in the user's file; "" for a command
    name         the tool's own name, which is untrusted text
    description  untrusted text without control characters, except newlines and tabs
    schema       the JSON schema of the arguments; its strings are as safe as the description
    digest       the sha256 of the definition as it was received, in hexadecimal
    """

    server: str
    name: str
    description: str
    schema: Mapping[str, Any] = field(repr=False)
    digest: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolInfo:
    """A tool as the chat shows it.

    name      the name that the model uses, made of the characters a-z, A-Z, 0-9, _ and -
    server    the server's name in the user's file; "" for a command
    original  the tool's own name
    is_safe   True if the user allows calls without confirmation
    why_not   the reason why the tool is not safe although the user marked it as safe; "" without such a mark
    """

    name: str
    server: str
    original: str
    description: str
    schema: Mapping[str, Any]
    is_safe: bool
    why_not: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call.

    text       untrusted text without control characters, except newlines and tabs
    is_error   True if the tool reports an error; the model should see the text of the error
    truncated  True if the text is only the beginning of the result; the last line of the text then says so
    seconds    duration of the call
    """

    text: str
    is_error: bool = False
    truncated: bool = False
    seconds: float = 0.0


def digest_of(value: Any) -> str:
    """Return the sha256 of a JSON value in hexadecimal. The result does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Control characters except newline and tab, the characters that change the order of displayed text, the invisible "tag"
# characters, which can hide instructions from the user but not from the model, and lone surrogates.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f\ud800-\udfff]")


class RefusedJson(ValueError):
    """The text can be parsed as JSON, but the value exceeds the limits for tools."""


def decode_json(data: bytes, depth: int) -> Any:
    """Parse JSON with at most `depth` nested arrays and objects.

    NaN and infinite numbers are refused too, because JSON does not allow them. Raises RefusedJson, or
    ValueError if the data is not JSON. The message of either error is a one-line reason.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_int=_integer, parse_float=_finite, parse_constant=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x}") from None
    except RecursionError:
        raise RefusedJson("nested too deeply") from None
    level = [value]
    for _ in range(depth + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise RefusedJson(f"nested more than {depth} levels deep")


def cleaned(text: str) -> str:
    r"""Return the text with normalized newlines, and with other control characters as escapes such as \x1b."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def cleaned_json(value: Any) -> Any:
    """Return a copy of a JSON value with `cleaned` strings and keys. The caller must have checked the depth."""
    if isinstance(value, str):
        return cleaned(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned_json(inner) for key, inner in value.items()}
    return [cleaned_json(inner) for inner in value] if isinstance(value, list) else value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise RefusedJson(f"{text[:20]} is not a finite number")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python refuses more than 4,300 digits
        raise RefusedJson(f"an integer of {len(text.lstrip('-')):,} digits") from None


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


_LONGEST_WORD = 200  # characters of a name, type or URI inside a description


def result_of(value: object, limit: int) -> ToolResult:
    """Convert the result of `tools/call`. Raises ToolFailed if the result breaks the protocol.

    limit  maximum number of characters
    """
    if not isinstance(value, dict) or not isinstance(content := value.get("content", []), list):
        raise ToolFailed("the result is not an object with a list `content`")
    texts = [_text(block) for block in content]
    # A server should repeat structured content as text for clients that do not read structured content.
    if not texts and "structuredContent" in value:
        texts = [json.dumps(value["structuredContent"], ensure_ascii=False)]
    text, truncated = shortened("\n".join(texts), limit)
    return ToolResult(text, is_error=value.get("isError") is True, truncated=truncated)


def shortened(text: str, limit: int) -> tuple[str, bool]:
    """Clean a text and cut it after `limit` characters. Returns the text, and True if the text was cut.

    The last line of a cut text informs the model of the cut. The limit applies to the cleaned text, because an escape
    such as \\U000e0041 is ten times as long as the character.
    """
    text = cleaned(text)
    if len(text) <= limit:
        return text, False
    return f"{text[:limit]}\n[cut: these are the first {limit:,} of {len(text):,} characters]", True


def _text(block: object) -> str:
    """Return a block's text, or one line that describes a block of another type."""
    table: Mapping[str, Any] = block if isinstance(block, dict) else {}
    kind = table.get("type")
    if kind == "text" and isinstance(table.get("text"), str):
        return str(table["text"])
    if kind in ("image", "audio") and isinstance(data := table.get("data"), str):
        return _line(f"{kind}: {_word(table, 'mimeType')}, {len(data) * 3 // 4:,} bytes")
    if kind == "resource_link":
        return _line(f"link to a resource: {_word(table, 'uri')}, {_word(table, 'name')}")
    if kind == "resource" and isinstance(inner := table.get("resource"), dict):
        return _line(f"resource: {_word(inner, 'uri')}, {_word(inner, 'mimeType')}")
    return _line(f"content of type {shown(str(kind), _LONGEST_WORD)}")


def _line(description: str) -> str:
    return f"[{description}; not shown]"


def _word(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    return shown(value, _LONGEST_WORD) if isinstance(value, str) else f"unknown {key}"
