"""Tests that answers do not repeat a key."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.matcher import Constraint, ConstraintCompiler
from llmrun.engine.constraint.repeated_keys import QuotedTokens, RepeatedKeys
from tests.support.tokenizers.vocabularies import our_tokenizer

TOKENS = [
    b'"',
    b"a",
    b"b",
    b'a"',
    b'"a": ',
    b', "a": ',
    b'1, "b": ',
    b"{",
    b"}",
    b"[",
    b"]",
    b": ",
    b", ",
    b"1",
    b'\\"',
    b"\\",
]
QUOTED = QuotedTokens(TOKENS, TOKENS.__getitem__)


def written(*texts: bytes) -> RepeatedKeys:
    keys = RepeatedKeys(QUOTED)
    for text in texts:
        keys.take(TOKENS.index(text))
    return keys


def forbidden(keys: RepeatedKeys) -> list[bytes]:
    mask = np.array([(1 << len(TOKENS)) - 1], np.uint32)
    keys.forbid(mask)
    return [text for token, text in enumerate(TOKENS) if not int(mask[0]) >> token & 1]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], []),
        ([b"{"], []),
        ([b"{", b'"a": ', b"1"], [b', "a": ']),
        ([b"{", b'"a": ', b"1", b", "], [b'"a": ', b', "a": ']),
        ([b"{", b'"a": ', b"1", b", ", b'"'], [b'a"']),
        ([b"{", b'"a": ', b"1", b", ", b'"', b"a"], [b'"', b'"a": ']),
        ([b"{", b'"a": ', b"1", b", ", b'"', b"a", b"b"], []),
        ([b"{", b'"a": ', b"1", b", ", b'"', b"a", b"\\"], []),
        ([b"{", b'"a": ', b'"', b"a"], []),  # a value
        ([b"{", b'"a": ', b"[", b'"a": '], []),  # an item of a list
        ([b"{", b'"a": ', b"{"], []),  # another object
        ([b"{", b'"a": ', b"{", b'"', b'a"', b": ", b"1", b"}"], [b', "a": ']),
        ([b"[", b"{", b'"a": ', b"1", b"}", b", ", b"{"], []),
        ([b"{", b'"', b'\\"', b'"', b": ", b"1", b", ", b'"', b'\\"'], [b'"', b'"a": ']),
    ],
)
def test_tokens_that_repeat_a_key_are_forbidden(texts: list[bytes], expected: list[bytes]) -> None:
    assert forbidden(written(*texts)) == expected


def test_a_key_may_be_repeated_if_nothing_else_is_left() -> None:
    keys = written(b"{", b'"a": ', b"1", b", ", b'"', b"a")
    mask = np.array([1 << TOKENS.index(b'"')], np.uint32)
    keys.forbid(mask)
    assert mask[0] == 1 << TOKENS.index(b'"')


def test_tokens_can_be_taken_back() -> None:
    keys = written(b"{", b'"a": ', b"1")
    keys.take(TOKENS.index(b'1, "b": '))
    keys.take(TOKENS.index(b"1"))
    keys.back(2)
    keys.take(TOKENS.index(b", "))
    assert forbidden(keys) == [b'"a": ', b', "a": ']


def test_a_draft_ends_before_a_repeated_key() -> None:
    draft = [TOKENS.index(text) for text in (b"1", b", ", b'"', b"b", b'"a": ', b"1")]
    assert written(b"{", b'"a": ').n_allowed(draft) == len(draft)
    assert written(b"{", b'"a": ').n_allowed([*draft[:3], TOKENS.index(b'a"')]) == 3


@given(st.lists(st.sampled_from(TOKENS)))
def test_exactly_the_tokens_that_repeat_a_key_are_forbidden(texts: list[bytes]) -> None:
    keys = written(b"{", *texts)
    repeating = [text for token, text in enumerate(TOKENS) if not keys.n_allowed([token])]
    assert forbidden(keys) == (repeating if len(repeating) < len(TOKENS) else [])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 20])
def test_all_keys_of_large_objects_are_remembered(n: int) -> None:
    """The sets of keys are merged as they grow."""
    keys = written(b"{", *(text for i in range(n) for text in (b'"', b"a", *([b"b"] * i), b'"', b": ", b"1", b", ")))
    for i in range(n):
        keys.take(TOKENS.index(b'"'))
        for text in (b"a", *([b"b"] * i)):
            keys.take(TOKENS.index(text))
        assert b'"' in forbidden(keys)
        keys.back(i + 2)


OBJECTS = st.recursive(
    st.integers(0, 9) | st.text('ab"\\{},:[]', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\{},é', max_size=2), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.push
@given(OBJECTS, st.data())
def test_objects_without_repeated_keys_are_allowed(value: object, data: st.DataObject) -> None:
    tokenizer = our_tokenizer("smollm2")
    tokens = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special=False, parse_special=False).tolist()
    keys = RepeatedKeys(QuotedTokens(tokenizer.all_token_bytes(), tokenizer.token_bytes))
    assert keys.n_allowed(tokens) == len(tokens)
    for token in tokens:
        mask = np.full(tokenizer.vocabulary_size // 32 + 1, 0xFFFFFFFF, np.uint32)
        keys.forbid(mask)
        assert int(mask[token // 32]) >> token % 32 & 1
        keys.take(token)
        if data.draw(st.booleans()):
            keys.back(1)
            keys.take(token)


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler()


def constraint(compiler: ConstraintCompiler, text: str, **schema: object) -> Constraint:
    tokenizer = ScriptedTokenizer()
    found = compiler.compile(ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(schema)), tokenizer)
    for token in tokenizer.encode(text, add_special=False, parse_special=False).tolist():
        found.take(token)
    return found


@pytest.mark.push
def test_additional_properties_are_not_repeated(compiler: ConstraintCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
    found = constraint(compiler, '{"a": 1, "b": 2, "b', **schema)
    assert found.n_allowed([*b'"']) == 0
    assert found.n_allowed([*b'c": 3}']) == 6
    compiler.close()


@pytest.mark.push
def test_several_free_keys_can_be_demanded(compiler: ConstraintCompiler) -> None:
    found = constraint(compiler, '{"b": 2, "', type="object", minProperties=2, additionalProperties={"type": "integer"})
    assert found.n_allowed([*b'b"']) == 1
    assert found.n_allowed([*b'c": 3}']) == 6
    compiler.close()
