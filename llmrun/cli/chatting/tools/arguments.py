"""Parses the arguments of tool calls, which are untrusted text."""

from __future__ import annotations

import json
from typing import Any

from llmrun.engine.tools.limits import Limits
from llmrun.engine.tools.untrusted import decode_json


def parsed_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; an empty text means no arguments. Raises ValueError with the reason."""
    if not text.strip():
        return {}
    arguments = decode_json(text.encode(), Limits().depth)
    if not isinstance(arguments, dict):
        raise ValueError("the value has another type")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string contains a lone surrogate") from None
    return arguments
