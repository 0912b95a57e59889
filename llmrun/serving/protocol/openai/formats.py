"""Reads the format that an answer must have, in the notations of OpenAI, llama.cpp and vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen

_TYPES: Final = ("text", "json_object", "json_schema")
# vLLM's fields, of which the older ones begin with "guided_" and the newer ones are in an object
_OLD, _NEW = "guided_", "structured_outputs"


def read_format(fields: Fields) -> ResponseFormat | None:
    """Return the format of the answer, or None for any text. Raises InvalidField, also for several formats."""
    return _only([*_openai(fields.fields("response_format")), *_others(fields)])


def read_text_format(fields: Fields, text: Fields) -> ResponseFormat | None:
    """Return the format in `text.format` of the Responses API, or None for any text. Raises InvalidField."""
    return _only([*_openai(text.fields("format"), flat=True), *_others(fields)])


def _only(found: list[ResponseFormat]) -> ResponseFormat | None:
    """Return the only format, or None. Raises InvalidField if there are several."""
    if len(found) > 1:
        raise InvalidField(found[1].origin, f"cannot be combined with {found[0].origin}", hint="send only one format")
    return found[0] if found else None


def _others(fields: Fields) -> Iterator[ResponseFormat]:
    """Yield the formats in the notations of llama.cpp and vLLM."""
    yield from _llama(fields)
    yield from _vllm(fields, _OLD)
    structured = fields.fields(_NEW)
    if structured is not None:
        yield from _vllm(structured, "")
        if structured.boolean("json_object"):
            yield ResponseFormat(FormatKind.JSON_OBJECT, origin=structured.path("json_object"))


def _openai(wanted: Fields | None, *, flat: bool = False) -> Iterator[ResponseFormat]:
    """Yield a format in OpenAI's notation. With `flat`, its schema is not inside an object `json_schema`."""
    if wanted is None:
        return
    kind = wanted.text("type")
    if kind is None:
        raise missing(wanted.path("type"))
    if kind not in _TYPES:
        raise unsupported(wanted.path("type"), f"expected one of {', '.join(_TYPES)}, got {seen(kind)}")
    if kind == "json_object":
        # llama.cpp's servers also take a schema here.
        schema = wanted.value("schema")
        if schema is None:
            yield ResponseFormat(FormatKind.JSON_OBJECT, origin=wanted.place)
        else:
            yield json_schema_format(schema, wanted.path("schema"))
    elif kind == "json_schema":
        described = wanted if flat else wanted.fields("json_schema")
        if described is None:
            raise missing(wanted.path("json_schema"))
        described.text("name")
        described.text("description")
        described.boolean("strict")  # every schema is enforced
        if described.peek("schema") is None:
            raise missing(described.path("schema"))
        yield json_schema_format(described.value("schema"), described.path("schema"))


def _llama(fields: Fields) -> Iterator[ResponseFormat]:
    if grammar := fields.text("grammar"):
        yield ResponseFormat(FormatKind.GRAMMAR, grammar, origin="grammar")
    schema = fields.value("json_schema")
    if schema is not None:
        yield json_schema_format(schema, "json_schema")


def _vllm(fields: Fields, prefix: str) -> Iterator[ResponseFormat]:
    json_name, choice_name = f"{prefix}json", f"{prefix}choice"
    schema = fields.value(json_name)
    if schema is not None:
        yield json_schema_format(schema, fields.path(json_name))
    for name, kind in ((f"{prefix}regex", FormatKind.REGEX), (f"{prefix}grammar", FormatKind.GRAMMAR)):
        if text := fields.text(name):
            yield ResponseFormat(kind, text, origin=fields.path(name))
    choices = fields.items(choice_name)
    if choices is not None:
        yield _choice(choices, fields.path(choice_name))


def json_schema_format(schema: Any, origin: str) -> ResponseFormat:
    """Return the format for a schema, which may also be given as JSON text."""
    if type(schema) is str:
        return ResponseFormat(FormatKind.JSON_SCHEMA, schema, origin=origin)
    if type(schema) not in (dict, bool):
        raise InvalidField(origin, f"expected a JSON schema, got {seen(schema)}", code="invalid_type")
    return ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), origin=origin)


def _choice(choices: list[Any], origin: str) -> ResponseFormat:
    if not choices:
        raise InvalidField(origin, "expected at least one choice, got an empty list")
    for number, choice in enumerate(choices):
        if type(choice) is not str or not choice:
            raise InvalidField(f"{origin}[{number}]", f"expected a string that is not empty, got {seen(choice)}")
    return ResponseFormat(FormatKind.CHOICE, choices=tuple(choices), origin=origin)
