"""Tests of random answers within real schemas: what ends by itself is valid. `scripts/soak constraints` does more."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import open_backend
from llmrun.base.errors import UsageError
from llmrun.engine.constraint.limits import compile_probe
from llmrun.engine.constraint.process import ConstraintProcess
from tests.support.constraint.corpora import real_schemas
from tests.support.constraint.engine_soak import SEQUENCES, engine_outcomes
from tests.support.constraint.matchers import byte_tokenizer, checked_schema, matcher, schema_grammar, wrapped_tokenizer
from tests.support.constraint.random_answers import random_answer, random_chooser
from tests.support.constraint.soak import compiled_schemas, outcomes
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.push
ANSWERS = 150
SEED = 3


@pytest.mark.night
@pytest.mark.parametrize("name", ["byte", "smollm2"])
def test_random_answers_are_valid(name: str) -> None:
    tokenizer = byte_tokenizer() if name == "byte" else wrapped_tokenizer(name)
    source = random.Random(SEED)
    choose = random_chooser(tokenizer, source)
    schemas = compiled_schemas(tokenizer, "validate-pyproject-schema-store")
    found = outcomes(schemas, lambda matching: random_answer(matching, tokenizer, choose, 300), source)
    seen = list(islice(found, ANSWERS))
    assert [outcome for outcome in seen if outcome.kind == "invalid"] == []
    assert Counter(outcome.kind for outcome in seen)["valid"] > ANSWERS / 2


@pytest.mark.night
def test_answers_of_an_engine_are_valid(tmp_path: Path) -> None:
    """Answers that are cut off are refused, which `engine_outcomes` asserts."""
    options = OpenOptions("cpu", context_size=512, max_sequences=SEQUENCES, threads=2)
    backend = open_backend(tiny_model(tmp_path, "Q8_0 one KV head"), options)
    schemas = compiled_schemas(byte_tokenizer(), "datamodel-code-generator/a")
    seen = list(islice(engine_outcomes(backend, schemas, 120, random.Random(SEED)), 6 * SEQUENCES))
    backend.close()
    kinds = Counter(outcome.kind for outcome in seen)
    assert kinds.keys() == {"valid", "cut off"}
    assert kinds["valid"] > kinds["cut off"]


def test_the_same_seed_gives_the_same_answer() -> None:
    matching = matcher(byte_tokenizer(), schema_grammar({"type": "array", "minItems": 9}))
    answers = [
        random_answer(matching, byte_tokenizer(), random_chooser(byte_tokenizer(), random.Random(seed)), 100)
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.night
def test_every_real_schema_compiles_or_is_refused_in_one_line() -> None:
    """Every tenth schema; a third of them compiles."""
    process = ConstraintProcess()
    supported = 0
    for name, schema in real_schemas()[::10]:
        try:
            checked = checked_schema(json.dumps(schema))
            refusal = compile_probe(schema_grammar(checked), checked, process=process)
        except UsageError as error:
            refusal = str(error)
        supported += refusal is None
        assert refusal is None or (refusal.isprintable() and len(refusal) < 400), name
        assert "too complex" not in (refusal or ""), name
    process.close()
    assert supported > 100
