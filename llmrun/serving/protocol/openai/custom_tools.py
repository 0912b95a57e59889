"""Custom tools of OpenAI's APIs, whose input is a text instead of a JSON object.

The engine gets a function with the single argument `input`, and enforces the format of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from llmrun.engine.requests import ENFORCED
from llmrun.engine.tool_calls.lark_regex import lark_regex
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.openai.objects import CalledCustom, InputGrammar

_INPUT: Final = "input"
_BEGINNING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters and escapes of a JSON string; the second half of a surrogate pair must have arrived
_COMPLETE: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*'
)


def custom_definition(name: str, description: str | None, grammar: InputGrammar | None, path: str) -> Mapping[str, Any]:
    """Return the definition of a custom tool, in the form of a ChatPrompt. Raises InvalidField for invalid grammars.

    grammar  the grammar of the input, or None if the input may be any text
    path     the path of the grammar's definition
    """
    shown, enforced = {"type": "string"}, {"type": "string"}
    if grammar is not None:
        kind = "regular expression" if grammar["syntax"] == "regex" else "Lark grammar"
        shown["description"] = f"A text that matches this {kind}:\n{grammar['definition']}"
        enforced["pattern"] = _pattern(grammar, path)
    function = {"name": name, "description": description or "", "parameters": _parameters(shown)}
    return {"type": "function", "function": function, ENFORCED: _parameters(enforced)}


def _parameters(of_input: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = {_INPUT: of_input}
    return {"type": "object", "properties": properties, "required": [_INPUT], "additionalProperties": False}


def _pattern(grammar: InputGrammar, path: str) -> str:
    definition = grammar["definition"]
    if grammar["syntax"] == "lark":
        try:
            definition = lark_regex(definition)
        except ValueError as error:
            raise InvalidField(path, f"this grammar cannot be enforced: {error}") from None
    return f"^(?:{definition})$"


def custom_names(tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
    """Return the names of the custom tools among the tools of a ChatPrompt."""
    return frozenset(tool["function"]["name"] for tool in tools or () if ENFORCED in tool)


def custom_as_function(call: CalledCustom) -> dict[Literal["name", "arguments"], str]:
    """Return the call of a custom tool as a call of the function that the engine knows."""
    return {"name": call["name"], "arguments": custom_arguments(call["input"])}


def custom_arguments(text: str) -> str:
    """Return the arguments of a call whose input is the given text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


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
