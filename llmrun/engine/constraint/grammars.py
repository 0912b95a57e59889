"""Checks response formats and turns them into grammars of llguidance.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes its Lark dialect and its JSON schemas.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.exact_formats import with_exact_formats
from llmrun.engine.constraint.limits import check_grammar_text, check_schema
from llmrun.formats.gguf.problems import shown

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# llguidance's converter from GBNF runs in this process. Its time is quadratic in the number of rules: 4 s for 5,000.
_MOST_GBNF_RULES: Final = 1_000
_MOST_GBNF_CHARACTERS: Final = 1 << 18
_LARK = re.compile(r"^[ \t]*(%llguidance\b|start\s*:)", re.MULTILINE)  # a line that only Lark grammars have

# Whitespace is fixed: models otherwise tend to add it without end, and fixed text need not be drawn. The separators are
# those of Python's json.dumps, which most training data uses. Each string has only one spelling, because llguidance
# compares keys by their spelling: with \u escapes, it would take "a\u0022b" for another key than "a\"b". Control
# characters that have no short escape are thus possible only in property names (see keywords.py).
_JSON_OPTIONS: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": '"\\bfnrt',  # the letters that may follow a backslash, without the u of \\u0022
}


def check_format(response_format: ResponseFormat) -> None:
    """Raise UsageError if a format is malformed or too large, as far as that can be told without compiling it."""
    if schema_of(response_format) is None:
        _lark_of(response_format)


def schema_of(response_format: ResponseFormat) -> dict[str, Any] | None:
    """Return the parsed JSON schema of a format, or None if it has none. Raises UsageError.

    The schema `true`, which allows all JSON values, becomes an empty object.
    """
    if response_format.schema is None:
        return None
    schema = check_schema(response_format.schema, response_format.origin)
    if schema is False:
        raise UsageError(f"{response_format.origin}: the schema is false, so no text can match it")
    return {} if schema is True else dict(schema)


def grammar_of(response_format: ResponseFormat, schema: dict[str, Any] | None) -> str:
    """Return the grammar of a response format. Raises UsageError if the format is malformed or too large.

    schema  the result of `schema_of`
    """
    from llguidance import LLMatcher

    if schema is not None:
        text = json.dumps(with_exact_formats(schema))  # llguidance reads larger integers in text than in Python objects
        try:
            return LLMatcher.grammar_from_json_schema(text, None, _JSON_OPTIONS)
        except ValueError as error:  # an integer is beyond all doubles
            raise UsageError(f"{response_format.origin}: {shown(str(error), 300)}") from None
    return LLMatcher.grammar_from_lark(_lark_of(response_format))


def _lark_of(response_format: ResponseFormat) -> str:
    """Return the Lark grammar of a format that is not JSON."""
    from llguidance import regex_to_lark

    if response_format.kind is FormatKind.CHOICE:
        lark = _lark_of_choices(response_format)
        check_grammar_text(lark, response_format.origin)
        return lark
    check_grammar_text(response_format.text, response_format.origin)
    if response_format.kind is FormatKind.REGEX:
        # As in PCRE and in most of its users, the classes of digits, word characters and spaces are ASCII.
        return f"start: /{regex_to_lark(response_format.text, 'dws')}/"
    return _lark_of_grammar(response_format)


def _lark_of_choices(response_format: ResponseFormat) -> str:
    if not response_format.choices or "" in response_format.choices:
        raise UsageError(f"{response_format.origin}: a choice is empty", hint="separate the choices by commas: yes,no")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in response_format.choices)


def _lark_of_grammar(response_format: ResponseFormat) -> str:
    """Return a grammar in Lark syntax, converted from GBNF if necessary."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = response_format.text
    if _LARK.search(text):
        return text
    if len(text) > _MOST_GBNF_CHARACTERS or text.count("::=") > _MOST_GBNF_RULES:
        raise UsageError(
            f"{response_format.origin}: too large: a GBNF grammar may have {_MOST_GBNF_RULES:,} rules and "
            f"{_MOST_GBNF_CHARACTERS:,} characters"
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001  (the converter raises Exception itself, IndexError and RecursionError)
        raise UsageError(
            f"{response_format.origin}: not a GBNF or Lark grammar: {shown(str(error), 300)}",
            hint="a GBNF grammar needs a rule `root ::= ...`, a Lark grammar a rule `start: ...`",
        ) from None
