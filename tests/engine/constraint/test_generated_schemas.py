"""Tests of schemas as generators write them: random answers are complete, match the schema, and repeat no key."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.limits import compile_probe
from llmrun.engine.constraint.matcher import Constraint
from llmrun.engine.constraint.process import ConstraintProcess, validate
from llmrun.engine.constraint.repeated_keys import QuotedTokens, RepeatedKeys
from llmrun.engine.constraint.strict_json import parse_unique
from tests.support.constraint.generated_schemas import REFUSED, SCHEMAS
from tests.support.constraint.matchers import byte_tokenizer, checked_schema, matcher, schema_grammar
from tests.support.constraint.random_answers import random_chooser
from tests.support.tiers import examples

pytestmark = pytest.mark.push

SEEDS = examples(12)
LONGEST = 400  # bytes


@pytest.fixture(scope="module")
def process() -> Iterator[ConstraintProcess]:
    made = ConstraintProcess()
    yield made
    made.close()


def refusal(schema: dict[str, Any], process: ConstraintProcess) -> str | None:
    try:
        checked = checked_schema(json.dumps(schema))
        return compile_probe(schema_grammar(checked), checked, process=process)
    except UsageError as error:
        return str(error)


def constraint_of(schema: dict[str, Any]) -> Constraint:
    tokens = [bytes([byte]) for byte in range(256)]
    quoted = QuotedTokens(tokens, lambda token: tokens[token])
    return Constraint(matcher(byte_tokenizer(), schema_grammar(schema)), RepeatedKeys(quoted))


def answer(schema: dict[str, Any], source: random.Random) -> str | None:
    """Return a random answer, or None if it is too long."""
    constraint = constraint_of(schema)
    choose = random_chooser(byte_tokenizer(), source)
    text = bytearray()
    while not constraint.is_complete and len(text) < LONGEST:
        mask = np.zeros(9, np.uint32)
        constraint.allowed(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), f"nothing may follow {bytes(text)!r}"
        token = choose(allowed)
        if token in byte_tokenizer().eos_tokens:
            return text.decode()
        constraint.take(token)
        text.append(token)
    return text.decode() if constraint.is_complete else None


def validator(schema: dict[str, Any]) -> Validator:
    """Return jsonschema's validator for a schema. Without "$schema", a list of `items` is read as in draft-07."""
    default = Draft7Validator if isinstance(schema.get("items"), list) else Draft202012Validator
    return validator_for(schema, default=default)(schema)


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED.keys()))
def test_random_answers_match(name: str, process: ConstraintProcess) -> None:
    schema = SCHEMAS[name]
    assert refusal(schema, process) is None
    if "exclusiveMinimum" in schema:  # OpenAPI's boolean is valid only in draft-04, among the drafts of jsonschema
        schema = {"$schema": "http://json-schema.org/draft-04/schema#", **schema}
    ended = 0
    for seed in range(SEEDS):
        text = answer(schema, random.Random(seed))
        if text is not None:
            ended += 1
            assert [error.message for error in validator(schema).iter_errors(parse_unique(text))] == []
            assert str(validate(text, SCHEMAS[name], process=process)) == "valid"
    assert ended > 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_reason(name: str, process: ConstraintProcess) -> None:
    assert str(refusal(SCHEMAS[name], process)).startswith(REFUSED[name])
