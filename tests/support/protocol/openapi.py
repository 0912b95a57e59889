"""Validates bodies with the server's OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import pytest
from jsonschema.exceptions import best_match

from llmrun.serving.protocol import declarations
from llmrun.serving.protocol.declarations import kind_of
from llmrun.serving.protocol.openapi import document
from tests.support.protocol.answers import as_json

DOCUMENT = document("1.2.3")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
_LARGEST = 1 << 20  # bytes; validating a larger body takes seconds


def validate(body: Any, declared: Any) -> None:
    """Check a body against a declared type. The body may have no undeclared fields at any depth."""
    _check(as_json(body), kind_of(declared).schema({}))


@cache
def _validator(schema: str) -> jsonschema.Draft202012Validator:
    whole = {**closed(json.loads(schema)), "components": {"schemas": closed(SCHEMAS)}}
    return jsonschema.Draft202012Validator(whole)


def closed(schema: Any) -> Any:
    """Return a schema whose objects may have no other properties than those it declares."""
    if isinstance(schema, list):
        return [*map(closed, schema)]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    if "properties" in schema and isinstance(schema.get("type"), str):
        found["additionalProperties"] = False
    return found


class _Watched(dict[str, Any]):
    """The fields of a request. `used` collects the names of fields that code looks up."""

    used: set[str]

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.used.add(str(name))
        return super().__contains__(name)


def forgotten_fields(name: str, parse: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the fields of the request `name` that a parser never looks up after the check against the declaration.

    Fields that routes look up, that have one possible value or that are documented to have no effect are left out.
    """
    used, known = set[str](), declarations.Kind.read

    def watched(kind: declarations.Kind, value: Any, place: str, ignored: list[str]) -> Any:
        found = known(kind, value, place, ignored)
        if place:
            return found
        watched = _Watched(found)
        watched.used = used
        for group in {each.inline for each in kind.fields.values()} - {""}:
            watched[group] = _Watched(found[group])
            watched[group].used = used
        return watched

    with monkeypatch.context() as patch:
        patch.setattr(declarations.Kind, "read", watched)
        parse()
    fields = SCHEMAS[name]["properties"].items()
    return {field for field, schema in fields if not _has_no_effect(schema)} - used - {"model", "keep_alive"}


def _has_no_effect(schema: Any) -> bool:
    return "const" in schema or schema.get("maxItems") == 0 or "has no effect" in schema.get("description", "")


def check_reply(method: str, path: str, status: int, media_type: str, body: bytes) -> None:
    """Check the response of a route against the document, including each event of a stream.

    Requests with paths or methods that the document lacks, and bodies of more than a MiB, are not checked.
    """
    route = _routes().get((method, re.sub("^/v1/models/.+", "/v1/models/{id}", path.partition("?")[0])))
    if route is None or len(body) > _LARGEST:
        return
    described = route["responses"].get(str(status)) or route["responses"].get("default")
    assert described is not None, f"{method} {path} does not describe the status {status}"
    kind = media_type.partition(";")[0]
    assert kind in described["content"], f"{method} {path} with status {status} does not describe {kind}"
    schema = described["content"][kind]["schema"]
    if kind == "application/json":
        _check(json.loads(body), schema)
    elif "contentSchema" in schema:
        for line in body.decode().splitlines():
            event = line.removeprefix("data: ") if line.startswith(("data: ", "{")) else ""
            if event not in ("", "[DONE]"):
                _check(json.loads(event), schema["contentSchema"])


def _check(body: Any, schema: Any) -> None:
    """Assert that a body matches a schema, with a message that does not contain the whole schema."""
    error = best_match(_validator(json.dumps(schema)).iter_errors(body))
    assert error is None, f"{error.json_path}: {error.message}"


@cache
def _routes() -> dict[tuple[str, str], Any]:
    """Return the descriptions of routes by method and path. OpenAI's routes also work without the prefix /v1."""
    found = {(method.upper(), path): each for path, of in DOCUMENT["paths"].items() for method, each in of.items()}
    shorter = {(method, path.removeprefix("/v1")): each for (method, path), each in found.items() if "{" not in path}
    return {**shorter, **found}
