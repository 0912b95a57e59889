"""Custom tools of OpenAI's APIs, whose input is a text instead of a JSON object.

The engine gets a function with the single argument `input`, and enforces the format of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from llmrun.engine.requests import CUSTOM, INPUT
from llmrun.engine.tool_calls.schemas import input_parameters
from llmrun.serving.protocol.openai.objects import CalledCustom, InputGrammar

_BEGINNING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Complete characters and escapes of a JSON string. The first half of a surrogate pair is incomplete without the second.
_COMPLETE: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*'
)


def custom_definition(name: str, description: str | None, grammar: InputGrammar | None) -> Mapping[str, Any]:
    """Return the definition of a custom tool, in the form of a ChatPrompt.

    grammar  the grammar of the input, or None if the input may be any text
    """
    schema, custom = {"type": "string"}, dict[str, str]()
    if grammar is not None:
        custom = {"syntax": grammar["syntax"], "definition": grammar["definition"]}
        kind = "regular expression" if grammar["syntax"] == "regex" else "Lark grammar"
        schema["description"] = f"A text that matches this {kind}:\n{grammar['definition']}"
    function = {"name": name, "description": description or "", "parameters": input_parameters(schema)}
    return {"type": "function", "function": function, CUSTOM: custom}


def custom_names(tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
    """Return the names of the custom tools among the tools of a ChatPrompt."""
    return frozenset(tool["function"]["name"] for tool in tools or () if CUSTOM in tool)


def custom_as_function(call: CalledCustom) -> dict[Literal["name", "arguments"], str]:
    """Convert the call of a custom tool to a call of the function that stands for the tool in the engine."""
    return {"name": call["name"], "arguments": custom_arguments(call["input"])}


def custom_arguments(text: str) -> str:
    """Return the arguments of the function, as JSON text, for the input of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the input of a custom tool from the JSON text of a call's arguments, piece by piece."""

    def __init__(self) -> None:
        self._rest = ""
        self._has_begun = False

    def add(self, arguments: str) -> str:
        """Add a piece of the arguments, and return the next piece of the input."""
        self._rest += arguments
        if not self._has_begun:
            found = _BEGINNING.match(self._rest)
            if found is None:
                return ""
            self._has_begun, self._rest = True, self._rest[found.end() :]
        complete = _COMPLETE.match(self._rest)
        text = complete[0] if complete else ""
        self._rest = self._rest[len(text) :]
        return str(json.loads(f'"{text}"', strict=False))
