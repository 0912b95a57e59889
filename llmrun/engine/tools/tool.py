"""The data types of tools, and the error for a call that fails."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmrun.base.errors import LlmrunError

Cancelled = Callable[[], bool]  # returns whether the user wants to stop waiting
Validator = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]  # returns what is wrong with the arguments


class ToolFailed(LlmrunError):
    """A tool or its server could not be started, broke the protocol, died or took too long.

    The message is one line and safe to print. A chat may pass it to the model as the result of the call.
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
    is_safe   whether the user allows calls without confirmation
    why_not   why the tool is not safe although the user marked it; "" if there is no mark
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
    is_error   whether the tool reports an error; the model should see its text
    truncated  whether the text is only the beginning of the result; its last line then says so
    seconds    duration of the call
    """

    text: str
    is_error: bool = False
    truncated: bool = False
    seconds: float = 0.0


def digest_of(value: Any) -> str:
    """Return the sha256 of a JSON value in hexadecimal. It does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
