"""Reads a model's answers: their text, blocks of code and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

Choice = Mapping[str, Any]  # a choice of a chat completion or of a text completion

_FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)  # the last fence may be missing


def text_of(choice: Choice) -> str:
    return str(choice["text"] if "text" in choice else choice["message"].get("content") or "")


def code_of(choice: Choice) -> str:
    """Return the first fenced block of an answer, or the whole answer if there is no such block."""
    text = text_of(choice)
    found = _FENCED.search(text)
    return found[1] if found else text


def calls_of(choice: Choice) -> list[tuple[str, Any]]:
    """Return the name and the arguments of each tool call. Arguments that are not JSON stay text."""
    found = []
    for call in choice["message"].get("tool_calls") or ():
        function = call["function"]
        try:
            found.append((function["name"], json.loads(function["arguments"])))
        except ValueError:
            found.append((function["name"], function["arguments"]))
    return found
