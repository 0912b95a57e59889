"""Tests of the final validation: every text and every schema ends in a verdict, and nothing outside is touched."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.processes import commands
from llmrun.engine.constraint import process as module
from llmrun.engine.constraint import process as process_module
from llmrun.engine.constraint.process import ConstraintProcess, Verdict, validate
from tests.support.tiers import examples

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020_12 = "https://json-schema.org/draft/2020-12/schema"
PEOPLE = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": {"properties": {"a/b": {"type": "integer", "maximum": 120}}}}},
    "required": ["people"],
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@pytest.fixture(scope="module")
def process() -> Iterator[ConstraintProcess]:
    made = ConstraintProcess()
    yield made
    made.close()


def line(verdict: Verdict) -> str:
    assert verdict.reason.isprintable()
    assert len(verdict.reason) < 330
    return str(verdict)


@pytest.mark.push
@pytest.mark.parametrize(
    ("text", "schema", "said"),
    [
        ('{"people": [{"a/b": 3}]}', PEOPLE, "valid"),
        ('{"people": [{}, {"a/b": 130}]}', PEOPLE, "invalid: /people/1/a~1b: 130 is greater than the maximum of 120"),
        ("{}", PEOPLE, "invalid: top level: 'people' is a required property (required)"),
        ("1", '{"type": "integer"}', "valid"),
        ("1.5", '{"type": "integer"}', "invalid: top level: 1.5 is not of type 'integer' (type)"),
        ("1", False, "invalid: within top level: False schema does not allow 1 (false)"),
        ("true", True, "valid"),
        ("[1, NaN]", {}, "invalid: not JSON: NaN is not a JSON number"),
        ("{} {}", {}, "invalid: not JSON: Extra data"),
        ("", {}, "invalid: not JSON: "),
        ('{"a": "x", "a": 2}', {"properties": {"a": {"type": "integer"}}}, "valid"),
        ('{"a": 2, "a": "x"}', {"properties": {"a": {"type": "integer"}}}, "invalid: /a: 'x' is not of type 'integer'"),
        ('{"a": 1, "a": 2}', {"minProperties": 2}, "invalid: top level: {'a': 2} does not have enough properties"),
        ('"\\ud800"', {"type": "integer"}, "invalid: top level: '\\ud800' is not of type 'integer'"),
        ("\ud800", {}, "invalid: not JSON: "),
        ('"\x1b[31m"', {}, "invalid: not JSON: "),
        ('"\\u001b[31m\\u202e"', {"const": 1}, "invalid: top level: 1 was expected (const)"),
        ('{"\\u001b": 1}', {"additionalProperties": False}, "invalid: top level: Additional properties"),
        ("1" * 5000, {}, "not validated: an integer has 5,000 digits"),
        ("[" * 10_000 + "]" * 10_000, {}, "not validated: it is nested too deeply"),
        ("[" * 300 + "]" * 300, {"items": {"$ref": "#"}}, "not validated: it is nested too deeply"),
        ("[" * 90 + "]" * 90, {"items": {"$ref": "#"}}, "valid"),
        ("1", {"$ref": "#"}, "not validated: it is nested too deeply"),
        ("1", {"$ref": "#/$defs/none"}, "not validated: $ref cannot be resolved: /$defs/none"),
        ("1", {"type": "strng"}, "not validated: the schema is invalid: /type: "),
        ("1", {"$schema": DRAFT_2020_12, "items": [{}]}, "not validated: the schema is invalid: /items: "),
        ("[1, 2]", {"items": [{}], "additionalItems": False}, "invalid: top level: Expected at most 1 item"),
        (
            "2",
            {"maximum": 2, "exclusiveMaximum": True},
            "invalid: top level: 2 is greater than or equal to the maximum",
        ),
        ("1", {"properties": 1}, "not validated: the schema is invalid: /properties: "),
        ("1", "{", "not validated: the schema is not JSON: "),
        ("1", "[" * 100_000, "not validated: the schema is not JSON: "),
        (
            "[1]",
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [False]},
            "invalid: within top level: False schema",
        ),
        (
            "[1]",
            {"$schema": "https://json-schema.org/draft/2020-12/schema", "prefixItems": [False]},
            "invalid: within ",
        ),
        ("[1]", {"$schema": "http://example.com/my-dialect", "prefixItems": [False]}, "invalid: within "),
        ('"é"', {"pattern": r"^[^\w]$"}, "valid"),
        ('"x"', {"pattern": r"^[^\w]$"}, "invalid: top level: 'x' does not match"),
        ('"é"', {"pattern": r"^\p{L}$"}, "valid"),
        ('"x"', {"pattern": r"^\p{Greek}$"}, "not validated: a pattern is not supported: bad escape"),
        ("19.99", {"multipleOf": 0.01}, "valid"),
        ("19.995", {"multipleOf": 0.01}, "invalid: top level: 19.995 is not a multiple of 0.01 (multipleOf)"),
        ("1e999", {"multipleOf": 3}, "invalid: top level: inf is not a multiple of 3"),
        ("true", {"multipleOf": 3}, "valid"),
        ('"2023-02-29"', {"format": "date"}, "invalid: top level: '2023-02-29' is not a 'date' (format)"),
        ('"2024-02-29"', {"format": "date"}, "valid"),
        ('"x"', {"format": "email"}, "valid"),
    ],
)
def test_every_answer_gets_a_verdict(text: str, schema: Any, said: str, process: ConstraintProcess) -> None:
    assert line(validate(text, schema, process=process)).startswith(said)


@pytest.mark.push
def test_an_endless_pattern_ends_at_the_time_limit(process: ConstraintProcess) -> None:
    verdict = validate(f'"{"a" * 40}!"', {"pattern": "^(a+)+$"}, timeout_s=0.5, process=process)
    assert line(verdict) == "not validated: it takes longer than 0.5 s"
    assert line(validate("1", {}, process=process)) == "valid"  # by the next process


@pytest.mark.push
def test_memory_is_limited(process: ConstraintProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_MEMORY", 100_000_000)
    monkeypatch.setattr(module, "_MEMORY_PER_BYTE", 10)
    process.close()  # a process keeps the limit of its first request
    verdict = validate(f"[{'[],' * 2_000_000}1]", {}, process=process)
    assert line(verdict) == "not validated: it needs more than 100 MB of memory"
    process.close()


def test_no_file_and_no_server_is_asked(process: ConstraintProcess, tmp_path: Path) -> None:
    """jsonschema without a registry follows both references: the answer would be valid."""
    allowing = tmp_path / "schema.json"
    allowing.write_text("true")
    asked: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def accept() -> None:
            connection, address = server.accept()
            asked.append(address)
            connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"
        for reference in (allowing.as_uri(), url):
            for schema in ({"$ref": reference}, {"$id": reference, "$ref": "other.json"}, {"$schema": reference}):
                verdict = validate("1", schema, process=process)
                if "$ref" in schema:
                    assert line(verdict).startswith("not validated: $ref cannot be resolved: ")
                else:
                    assert line(verdict) == "valid"
        assert asked == []
        with socket.create_connection(server.getsockname()):  # the server would have noticed
            thread.join(30)
        assert len(asked) == 1


@pytest.mark.push
@settings(max_examples=examples(60), deadline=None)
@given(JSON_VALUES, JSON_VALUES, st.text(max_size=20))
def test_any_schema_and_any_text_end_in_a_verdict(schema: object, answer: object, text: str) -> None:
    for one in (json.dumps(answer), text):
        line(validate(one, schema, process=SHARED))


SHARED = ConstraintProcess()  # hypothesis does not mix with fixtures of a function; it ends with pytest


@pytest.mark.push
def test_a_process_for_one_verdict_does_not_stay() -> None:
    before = psutil.Process().children()
    assert validate("1", {}) == Verdict("valid")
    assert psutil.Process().children() == before


def test_one_process_gives_many_verdicts(process: ConstraintProcess) -> None:
    validate("1", {}, process=process)
    running = process._running().pid
    started = time.perf_counter()
    for _ in range(10):
        validate("1", PEOPLE, process=process)
    assert time.perf_counter() - started < 5
    assert process._running().pid == running


def test_a_broken_process_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "isolated_command", lambda _: [sys.executable, "-c", "import sys; sys.exit(3)"])
    assert str(validate("1", {})) == "not validated: its process ended: exit status 3"


@pytest.mark.push
def test_the_parent_imports_neither_library() -> None:
    program = (
        "import sys; from llmrun.engine.constraint.process import ConstraintProcess, validate;"
        "from llmrun.engine.constraint.limits import check_schema, compile_probe;"
        "assert str(validate('1', check_schema('{}'))) == 'valid'; "
        "compile_probe('start: \"a\"', process=ConstraintProcess());"
        "print(*[name for name in ('jsonschema', 'referencing', 'llguidance', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
