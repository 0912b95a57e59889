"""Tests that templates behave as in Jinja2 with the setup of `transformers`: the same text, or both fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmrun.base.errors import TemplateRefused
from tests.support.templates.template_runs import PROCESS

pytestmark = pytest.mark.push


def plain() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **named: _json(value, **named)
    return environment


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **named: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **named)


PLAIN = plain()


def theirs(source: str, variables: dict[str, Any]) -> str | None:
    try:
        return PLAIN.from_string(source).render(variables)
    except Exception:  # noqa: BLE001 - whatever it is, ours must refuse too
        return None


def ours(source: str, variables: dict[str, Any]) -> tuple[str | None, str]:
    try:
        return PROCESS.render(source, "t.jinja", variables), ""
    except TemplateRefused as refused:
        return None, str(refused)


PEOPLE = [
    {"name": "Bo", "age": 7, "town": {"name": "Ulm"}},
    {"name": "al", "age": 9, "town": {"name": "Bonn"}},
    {"name": "Al", "town": {"name": "Ulm"}},
]
# One template per line; the first ones render, the last ones fail.
CASES = (Path(__file__).parent / "as_jinja.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("source", CASES)
def test_it_does_what_jinja_does(source: str) -> None:
    variables = {"people": PEOPLE, "d": {"b": 1, "c": "x"}, "x": 3}
    text, why = ours(source, variables)
    assert text == theirs(source, variables), why
