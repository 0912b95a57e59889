"""Checks schemas and grammars before llguidance compiles them in this process.

Schemas and grammars may come from anywhere, and llguidance is a library in llmrun's process: if llguidance crashes or
hangs, llmrun does too. This module refuses texts that are too large or too deep, and texts that llguidance would ignore
in part. Every other text is compiled in a child process first.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import UsageError, shown
from llmrun.base.processes.limits import ProcessFailed, ProcessLimits
from llmrun.engine.constraint.keywords import ignored, place_of
from llmrun.engine.constraint.process import ConstraintProcess, one_line
from llmrun.engine.constraint.strict_json import parse_unique

MOST_SCHEMA_BYTES = 2 << 20
MOST_GRAMMAR_BYTES = 1 << 20
MOST_DEPTH = 100  # llguidance's own limit is 124; the deepest of 3,900 schemas from PyPI has 20 levels
# The largest schema from PyPI compiles in 0.15 s and 100 MB.
_COMPILE = ProcessLimits(cpu_s=1.2, wall_s=15.0, memory=512_000_000, output=1 << 20)
# llguidance recurses for each rule and `$ref`. LARGE_STACK is eight times the stack of the trial (parser.py). On some
# systems, the main thread has a smaller stack.
LARGE_STACK = 16 << 20

# Maps the beginnings of llguidance's messages that users would not understand to replacements.
_NO_TEXT = "no text can match it"
_MEANINGS = {
    "NoExtension": _NO_TEXT,
    "oneOf constraints are not supported": (
        '"oneOf" is supported only if the options have different types or different constants in a required property'
    ),
}
_BEGINNINGS = {  # the rest of the message is kept
    "Unsatisfiable schema: ": f"{_NO_TEXT}: ",
    "Resource '": "a $ref may not point to another document: '",
}
_KEYS = re.compile(r'Unimplemented keys: \["([^"]+)"')
_FORMAT = re.compile(r"Unknown format: (.*)", re.DOTALL)


def check_schema(text: str, where: str = "JSON Schema") -> Any:
    """Parse a JSON Schema and return it. Raises UsageError, whose message begins with `where`.

    The schema is refused if it is too large or too deep, if it is not strict JSON, or if llguidance would silently
    ignore one of its keywords.
    """
    _check_size(text, MOST_SCHEMA_BYTES, where)
    try:
        schema = parse_unique(text)
        if not isinstance(schema, dict | bool):
            raise UsageError(f"{where}: a schema is an object, true or false, not {type(schema).__name__}")
        if _depth(schema) > MOST_DEPTH:
            raise RecursionError
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise UsageError(f"{where}: nested more than {MOST_DEPTH} levels deep") from None
    except UnicodeEncodeError:
        raise UsageError(f"{where}: a string has an unpaired surrogate") from None
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {one_line(str(error))}") from None
    for place, why in ignored(schema):
        raise UsageError(f"{where}: {shown(place)}: {why}")
    return schema


def check_grammar_text(text: str, where: str = "grammar") -> None:
    """Check the size and the encoding of a grammar or a regular expression. Raises UsageError."""
    _check_size(text, MOST_GRAMMAR_BYTES, where)
    if not text:
        raise UsageError(f"{where}: empty")


def compile_probe(grammar: str, schema: Any = None, *, process: ConstraintProcess) -> str | None:
    """Compile a grammar in an isolated process. Returns the reason for a refusal in one line, or None on success.

    grammar  the input of LLMatcher: a Lark grammar, or the JSON that `LLMatcher.grammar_from_json_schema` returns
    schema   the JSON Schema from which the grammar was made, if any; also checked against its metaschema

    Raises LlmrunError if the process cannot be started.
    """
    content = {"grammar": grammar} if schema is None else {"grammar": grammar, "schema": schema}
    try:
        problem = process.value(content, "problem", _COMPILE)
    except ProcessFailed as failure:
        problem = f"too complex: {failure}"
    return _explained(problem, schema) if problem else None


def _check_size(text: str, most: int, where: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"{where}: not UTF-8 text") from None
    if size > most:
        raise UsageError(f"{where}: too large: {format_bytes(size)}, limit {format_bytes(most)}")


def _depth(value: Any) -> int:
    """Return the number of nested levels of objects and lists. Counting stops one level beyond the limit."""
    level, depth = [value], 0
    while level and depth <= MOST_DEPTH:
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [part for each in containers for part in (each.values() if isinstance(each, dict) else each)]
        depth += bool(containers)
    return depth


def _explained(message: str, schema: Any) -> str:
    """Turn llguidance's message into one line, with the place of the problem if the place can be found."""
    from llmrun.engine.constraint.rewriting import enforceable  # most runs have no schema

    for pattern, keyword in ((_KEYS, None), (_FORMAT, "format")):
        if found := pattern.search(message):
            name = found[1]
            place = place_of(enforceable(schema or {}), keyword or name, name if keyword else ...)
            what = f'"{shown(name)}" is not supported' if keyword is None else f"unknown format: {shown(name)}"
            return f"{shown(place)}: {what}" if place else what
    for start, meaning in _MEANINGS.items():
        if message.startswith(start):
            return meaning
    for start, beginning in _BEGINNINGS.items():
        if message.startswith(start):
            message = beginning + message.removeprefix(start)
    return one_line(message)
