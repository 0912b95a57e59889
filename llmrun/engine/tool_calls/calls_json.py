"""Describes calls that are written as one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmrun.engine.templates.tool_format import CALL_ID, INDEX, NAME, ToolCallFormat


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A call that is one JSON object.

    head           the text before the object: "<tool_call>\\n"
    tail           the text after it: "\\n</tool_call>"
    name_key       the key of the tool's name; None if the name itself is the key of the arguments
    arguments_key  the key of the arguments; None if the name is their key
    id_key         the key of the call's id, or None
    wrapper        the key of an inner object that holds name and arguments ("function"), or None
    """

    head: str
    tail: str
    name_key: str | None
    arguments_key: str | None
    id_key: str | None
    wrapper: str | None


def json_call(found: ToolCallFormat) -> JsonCall | None:
    """Return the description of a format whose calls are JSON objects, or None if they are not."""
    text = (found.call_start + "{}" + found.call_end).replace(INDEX, "0")
    name_at = text.find(NAME)
    for start in (at for at in range(name_at) if text[at] == "{"):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        keys: dict[str, str | None] = {}
        _find_keys(value, keys)
        if "arguments" in keys:
            return JsonCall(
                text[:start],
                text[end:],
                keys.get("name"),
                keys["arguments"],
                keys.get("id"),
                keys.get("wrapper"),
            )
    return None


def _find_keys(value: Mapping[str, Any], keys: dict[str, str | None]) -> None:
    for key, item in value.items():
        if key == NAME and isinstance(item, dict):
            keys["name"] = keys["arguments"] = None
        elif item == NAME:
            keys["name"] = key
        elif item == CALL_ID:
            keys["id"] = key
        elif item == {}:
            keys["arguments"] = key
        elif isinstance(item, dict) and "wrapper" not in keys:
            keys["wrapper"] = key
            _find_keys(item, keys)
