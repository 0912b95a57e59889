"""Turns the untrusted result of an MCP tool into text for the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmrun.engine.tools.tool import ToolFailed, ToolResult
from llmrun.engine.tools.untrusted import cleaned
from llmrun.formats.gguf.problems import shown

_LONGEST_WORD = 200  # characters of a name, type or URI inside a description


def result_of(value: object, limit: int) -> ToolResult:
    """Convert the result of `engine/tools/call`. Raises ToolFailed if it breaks the protocol.

    limit  maximum number of characters
    """
    if not isinstance(value, dict) or not isinstance(content := value.get("content", []), list):
        raise ToolFailed("its result is not an object with a list `content`")
    texts = [_text(block) for block in content]
    # A server should repeat structured content as text, for clients that do not read it.
    if not texts and "structuredContent" in value:
        texts = [json.dumps(value["structuredContent"], ensure_ascii=False)]
    text, truncated = shortened("\n".join(texts), limit)
    return ToolResult(text, is_error=value.get("isError") is True, truncated=truncated)


def shortened(text: str, limit: int) -> tuple[str, bool]:
    """Return the text `cleaned` and cut after `limit` characters, and whether it was cut.

    If it was cut, a line at the end tells the model so. The limit applies to the cleaned text, because an escape such
    as \\U000e0041 is ten times as long as its character.
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
