"""llguidance as tests use it directly: its own byte tokenizer, and our tokenizers wrapped for it."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from llmrun.base.stacks import on_stack
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.constraint.limits import LARGE_STACK
from llmrun.engine.constraint.matcher import grammar_of, schema_of
from llmrun.engine.constraint.parser import new_matcher
from tests.support.tokenizers.vocabularies import our_tokenizer


class _Wrapper:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, name: str) -> None:
        self._tokenizer = our_tokenizer(name)
        ids = range(self._tokenizer.vocabulary_size)
        self.tokens = [self._tokenizer.token_bytes(i) or self._tokenizer.token_text(i).encode() for i in ids]
        self.special_token_ids = [i for i in ids if not self._tokenizer.token_bytes(i)]
        self.eos_token_id = min(self._tokenizer.end_of_generation)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return [int(token) for token in self._tokenizer.encode(text, add_special=False, parse_special=False)]


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


@cache
def wrapped_tokenizer(name: str) -> LLTokenizer:
    """Return one of our tokenizers (see tests/support/tokenizers/vocabularies.py) for llguidance."""
    return LLTokenizer(cast("Any", _Wrapper(name)))  # its stub knows only its own wrapper


def checked_schema(text: str) -> dict[str, Any]:
    """Return the schema of a response format. Raises UsageError, whose message begins with "JSON Schema"."""
    schema = schema_of(ResponseFormat(FormatKind.JSON_SCHEMA, text, origin="JSON Schema"))
    assert schema is not None
    return schema


def schema_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar that llmrun makes from a schema, which has been checked."""
    return grammar_of(ResponseFormat(FormatKind.JSON_SCHEMA), schema)


def matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar. The matcher is in an error state if the grammar is refused."""
    return on_stack(LARGE_STACK, lambda: new_matcher(tokenizer, grammar))


def allowed_tokens(matching: LLMatcher) -> NDArray[np.intp]:
    mask = np.frombuffer(matching.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def accepts(matching: LLMatcher, tokens: list[int]) -> bool:
    """Return whether the tokens are a whole answer. The matcher itself does not change."""
    trial = matching.deep_copy()
    return bool(trial.try_consume_tokens(tokens) == len(tokens) and trial.is_accepting())
