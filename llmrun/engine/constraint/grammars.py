"""Turns response formats into grammars in the format of llguidance.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes its Lark dialect and its JSON schemas.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.errors import UsageError
from llmrun.gguf.problems import shown

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Whitespace is fixed: models otherwise tend to add it without end, and fixed text need not be drawn. The separators are
# those of Python's json.dumps, which most training data uses.
_JSON_OPTIONS: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}


def grammar_of(response_format: ResponseFormat) -> str:
    """Return the grammar of a response format. Raises UsageError if the format is malformed."""
    from llguidance import LLMatcher, regex_to_lark

    if (schema := response_format.schema) is not None:
        return LLMatcher.grammar_from_json_schema(schema_object(schema, response_format.origin), None, _JSON_OPTIONS)
    if response_format.kind is FormatKind.REGEX:
        # As in PCRE and in most of its users, the classes of digits, word characters and spaces are ASCII.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(response_format.text, 'dws')}/")
    if response_format.kind is FormatKind.CHOICE:
        return LLMatcher.grammar_from_lark(_lark_of_choices(response_format))
    return LLMatcher.grammar_from_lark(_lark_of(response_format))


def schema_object(text: str, origin: str) -> dict[str, Any]:
    """Parse a JSON schema. The schema `true` allows all JSON values, like an empty object. Raises UsageError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: not a JSON schema: {shown(str(error))}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise UsageError(f"{origin}: not a JSON schema: a JSON object is needed, not {shown(text, 40)}")
    return schema


def _lark_of_choices(response_format: ResponseFormat) -> str:
    if not response_format.choices or "" in response_format.choices:
        raise UsageError(f"{response_format.origin}: a choice is empty", hint="separate the choices by commas: yes,no")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in response_format.choices)


def _lark_of(response_format: ResponseFormat) -> str:
    """Return a grammar in Lark syntax, converted from GBNF if necessary."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(response_format.text)
    except Exception as error:  # noqa: BLE001  (the converter raises Exception itself, and IndexError)
        raise UsageError(
            f"{response_format.origin}: not a GBNF or Lark grammar: {shown(str(error), 300)}",
            hint="a GBNF grammar needs a rule `root ::= ...`, a Lark grammar a rule `start: ...`",
        ) from None
