"""What llguidance 1.9.1 accepts although the schema does not allow it, and what the final validation says about it.

If a test fails because llguidance does not accept an answer any more, it has improved: remove the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llmrun.engine.constraint.process import ConstraintProcess
from llmrun.engine.constraint.validation import validate
from tests.support.constraint.matchers import accepts, byte_tokenizer, matcher, schema_grammar

GAPS: list[tuple[str, dict[str, Any], str]] = [
    # The answer, the schema, and the beginning of the verdict's reason.
    ('{"a": 1, "a": 2}', {"additionalProperties": {"type": "integer"}}, 'the key "a" occurs twice'),
    ('{"a": 1, "a": 2}', {"type": "object", "minProperties": 2}, 'the key "a" occurs twice'),
    # A key with an escape is taken for another key.
    (
        '{"a\\u0022b": "x"}',
        {"properties": {'a"b': {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        "/a\"b: 'x' is not of type",
    ),
    (
        '{"\\u00e9": "x"}',
        {"properties": {"é": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        "/é: 'x' is not of type",
    ),
    # The least common multiple overflows.
    (
        "65536",
        {"allOf": [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]},
        "top level: 65536 is not a multiple of 65537",
    ),
    # Numbers are doubles; check_schema refuses this schema.
    ("9007199254740992", {"const": 9007199254740993}, "top level: 9007199254740993 was expected"),
    ('"2023-02-29"', {"format": "date"}, "top level: '2023-02-29' is not a 'date'"),
    ('"2023-02-29T00:00:00Z"', {"format": "date-time"}, "top level: '2023-02-29T00:00:00Z' is not a 'date-time'"),
    ('"22:59:60Z"', {"format": "time"}, "top level: '22:59:60Z' is not a 'time'"),
    ('"\ufeff"', {"pattern": r"^\S$"}, "top level: "),
]


@pytest.fixture(scope="module")
def process() -> Iterator[ConstraintProcess]:
    made = ConstraintProcess()
    yield made
    made.close()


@pytest.mark.parametrize(("answer", "schema", "reason"), GAPS)
def test_the_final_validation_closes_a_gap(
    answer: str, schema: dict[str, Any], reason: str, process: ConstraintProcess
) -> None:
    assert accepts(matcher(byte_tokenizer(), schema_grammar(schema)), list(answer.encode()))
    verdict = validate(answer, schema, process=process)
    assert verdict.kind == "invalid"
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        ("19.99", {"type": "number", "multipleOf": 0.01}),
        ('"é"', {"type": "string", "pattern": r"^[^\w]$"}),
        ('"0000-02-29"', {"format": "date"}),
        ('"23:59:60Z"', {"format": "time"}),
        ("1e999", {"type": "number"}),
        ('"😀"', {"type": "string", "maxLength": 1}),
    ],
)
def test_where_libraries_differ_a_right_answer_is_valid(
    answer: str, schema: dict[str, Any], process: ConstraintProcess
) -> None:
    """jsonschema alone calls the first three of these answers invalid if formats are checked."""
    assert accepts(matcher(byte_tokenizer(), schema_grammar(schema)), list(answer.encode()))
    assert validate(answer, schema, process=process).kind == "valid"
