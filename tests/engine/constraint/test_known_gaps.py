"""What llguidance 1.9.1 accepts although the schema does not allow it, and what the final validation says about it.

If a test fails because llguidance does not accept an answer any more, it has improved: remove the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.constraint.process import ConstraintProcess, validate
from tests.support.constraint.matchers import accepts, byte_tokenizer, matcher, schema_grammar

GAPS: list[tuple[str, dict[str, Any], str]] = [
    # The answer, the schema, and the beginning of the verdict's reason.
    # llguidance counts a repeated key twice; repeated_keys.py prevents repeated keys.
    ('{"a": 1, "a": 2}', {"type": "object", "minProperties": 2}, "top level: {'a': 2} does not have enough properties"),
    # The least common multiple overflows.
    (
        "65536",
        {"allOf": [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]},
        "top level: 65536 is not a multiple of 65537",
    ),
    # Numbers are doubles; check_schema refuses this schema.
    ("9007199254740992", {"const": 9007199254740993}, "top level: 9007199254740993 was expected"),
    # Control characters without a short escape are left out; check_schema refuses these schemas.
    ('"ab"', {"const": "a\0b"}, "top level: 'a\\x00b' was expected"),
    ('"ab"', {"pattern": "^a\0b$"}, "top level: 'ab' does not match"),
    # A format beside a pattern stays as it is (see keywords.py).
    ('"2023-02-29"', {"format": "date", "pattern": "^2"}, "top level: '2023-02-29' is not a 'date'"),
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


LETTERS = st.sampled_from('ab"\\/\b\f\n\r\té\x01\x7f\u2028🙂') | st.characters(exclude_categories=["Cs"])
SPELLINGS = (
    lambda letter: letter,
    lambda letter: "\\" + letter,
    lambda letter: json.dumps(letter, ensure_ascii=False)[1:-1],
    lambda letter: "".join(f"\\u{unit:04x}" for unit in memoryview(letter.encode("utf-16-le")).cast("H")),
)


@pytest.mark.push
@given(st.lists(LETTERS, min_size=1, max_size=3), st.data())
def test_a_key_has_only_one_spelling(letters: list[str], data: st.DataObject) -> None:
    """With other escapes, a key would be taken for another one, to which another schema applies."""
    key = "".join(letters)
    matching = matcher(
        byte_tokenizer(),
        schema_grammar({"properties": {key: {"type": "integer"}}, "additionalProperties": {"type": "string"}}),
    )
    assert accepts(matching, list(f"{{{json.dumps(key, ensure_ascii=False)}: 1}}".encode()))
    spelled = "".join(data.draw(st.sampled_from(SPELLINGS))(letter) for letter in letters)
    with suppress(ValueError):
        if json.loads(f'"{spelled}"') == key:
            assert not accepts(matching, list(f'{{"{spelled}": "x"}}'.encode()))


@pytest.mark.parametrize(
    ("answer", "schema"),
    [
        ("19.99", {"type": "number", "multipleOf": 0.01}),
        ('"é"', {"type": "string", "pattern": r"^[^\w]$"}),
        ('"0000-02-29"', {"format": "date"}),
        ('{"a": "x", "a": 1}', {"additionalProperties": {"type": ["integer", "string"]}}),
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
