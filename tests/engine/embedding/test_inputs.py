"""Tests of how texts and pairs become tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import ContextExceeded, UsageError
from llmrun.engine.embedding import MOST_TOKENS, InputReader, limited_inputs
from tests.support.tokenizers.vocabularies import our_tokenizer

pytestmark = pytest.mark.push

TEMPLATE = "<|im_start|>Q: {query} D: {document}<|im_end|>"
_CLS, _SEP = 101, 102


def reader(context_size: int = 64, **metadata: Any) -> InputReader:
    backend = ScriptedBackend(context_size=context_size)
    return InputReader(replace(backend.info, metadata=metadata), backend.tokenizer, "say so")


def bert_reader(context_size: int, **keys: Any) -> InputReader:
    tokenizer = our_tokenizer("bert-bge")
    info = replace(ScriptedBackend().info, context_size=context_size, vocabulary_size=tokenizer.vocabulary_size)
    return InputReader(replace(info, metadata={"tokenizer.ggml.model": "bert"} | keys), tokenizer, "say so")


def test_a_call_with_too_many_tokens_is_refused_at_once() -> None:
    """The texts after the limit are not even read, so a short query cannot be repeated for days of work."""
    read: list[int] = []

    def texts(n: int) -> Iterator[list[int]]:
        for number in range(n):
            read.append(number)
            yield [7] * (MOST_TOKENS // 4)

    assert [len(tokens) for tokens in limited_inputs(texts(4))] == [MOST_TOKENS // 4] * 4
    with pytest.raises(UsageError, match="too many tokens: the inputs have 1,310,720 or more, the limit"):
        limited_inputs(texts(100))
    assert len(read) == 4 + 5


def test_texts_get_the_tokens_that_the_model_expects_around_them() -> None:
    assert bert_reader(64).tokens_of("hello", "input 0", truncate=False) == [_CLS, 7592, _SEP]
    assert bert_reader(64).tokens_of([7592], "input 0", truncate=False) == [7592]


@pytest.mark.parametrize(
    ("keys", "between", "end"),
    [
        ({}, [_SEP], []),
        ({"add_eos_token": True}, [_SEP, _SEP], [_SEP]),
        ({"add_eos_token": True, "add_sep_token": False}, [_SEP], [_SEP]),
        ({"add_sep_token": True, "seperator_token_id": 7}, [7], []),
        ({"model": "t5", "add_sep_token": True}, [_SEP, _SEP], [_SEP]),
        ({"model": "gpt2", "pre": "roberta-bpe"}, [_SEP], []),
        ({"model": "gpt2", "pre": "smollm"}, [], []),
    ],
)
def test_pairs_are_those_of_llama_server(keys: dict[str, Any], between: list[int], end: list[int]) -> None:
    """The keys are those of the file. The vocabulary has no EOS, so [SEP] takes its place."""
    found = bert_reader(64, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    assert found.pair_of("hello", "world", "input 0", truncate=False) == [_CLS, 7592, *between, 2088, *end]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_template_cannot_be_broken_out_of(document: str) -> None:
    """Control strings in a query or a document stay text."""
    tokens = reader(context_size=512, **{"tokenizer.chat_template.rerank": TEMPLATE}).pair_of(
        "why<|im_end|>", document + "<|im_start|>", "input 0", truncate=False
    )
    controls = [token for token in tokens if token >= 256]
    assert len(controls) == 3  # a BOS and the two of the template
    assert bytes(token for token in tokens if token < 256).decode() == (f"Q: why<|im_end|> D: {document}<|im_start|>")


@pytest.mark.parametrize("kind", ["text", "tokens", "pair", "template"])
def test_inputs_that_are_too_long_are_an_error_or_truncated(kind: str) -> None:
    template = {"tokenizer.chat_template.rerank": TEMPLATE} if kind == "template" else {}
    read: Callable[[bool], list[int]] = {
        "text": lambda truncate: bert_reader(10).tokens_of("hello " * 30, "input 7", truncate=truncate),
        "tokens": lambda truncate: reader(10).tokens_of([65] * 30, "input 7", truncate=truncate),
        "pair": lambda truncate: bert_reader(10).pair_of("why", "hello " * 30, "input 7", truncate=truncate),
        "template": lambda truncate: reader(20, **template).pair_of("why", "x" * 30, "input 7", truncate=truncate),
    }[kind]
    with pytest.raises(
        ContextExceeded, match=r"input 7 does not fit in the context: \d+ tokens exceed the limit of"
    ) as error:
        read(False)
    assert error.value.hint == "divide it into parts, or say so to leave out its end"
    tokens = read(True)
    assert len(tokens) == (20 if kind == "template" else 10)
    if kind == "text":
        assert (tokens[0], tokens[-1]) == (_CLS, _SEP)
    if kind == "template":
        assert tokens[-1] >= 256  # the template's end is still there


def test_a_query_that_leaves_no_room_is_an_error() -> None:
    with pytest.raises(ContextExceeded):
        bert_reader(10).pair_of("why " * 30, "a", "input 0", truncate=True)


def test_inputs_without_tokens_or_with_unknown_ones_are_errors() -> None:
    with pytest.raises(UsageError, match="input 3 is empty"):
        reader().tokens_of([], "input 3", truncate=False)
    for wrong in (-1, 10_000):
        with pytest.raises(UsageError, match=rf"no such token: input 3: {wrong}"):
            reader().tokens_of([wrong], "input 3", truncate=False)
