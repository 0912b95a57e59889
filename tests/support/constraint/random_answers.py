"""Random answers within a grammar. What chooses the tokens is a function, so a model may do it as well."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from tests.support.constraint.matchers import allowed_tokens

Chooser = Callable[[NDArray[np.intp]], int]  # the allowed tokens -> one of them

_CLOSING = b'"]}, \n'
_CLOSE = 0.4  # probability of choosing a closing token if there is one


@dataclass(frozen=True)
class RandomAnswer:
    """An answer. `ended` is false if it was cut off at the limit, and `error` is llguidance's message, or empty."""

    data: bytes
    ended: bool
    error: str = ""


def random_answer(matching: LLMatcher, tokenizer: LLTokenizer, choose: Chooser, most_tokens: int) -> RandomAnswer:
    """Choose tokens until the grammar ends, the end-of-text token is chosen, or the limit is reached."""
    matching = matching.deep_copy()
    tokens: list[int] = []
    while not matching.is_stopped() and len(tokens) < most_tokens:
        allowed = allowed_tokens(matching)
        if matching.is_error():
            break
        token = choose(allowed)
        if token in tokenizer.eos_tokens:
            return RandomAnswer(tokenizer.decode_bytes(tokens), ended=True)
        matching.consume_token(token)
        tokens.append(token)
    text = tokenizer.decode_bytes(tokens)
    if matching.is_error():
        return RandomAnswer(text, ended=False, error=matching.get_error())
    return RandomAnswer(text, ended=matching.is_stopped() and matching.is_accepting())


def random_chooser(tokenizer: LLTokenizer, source: random.Random) -> Chooser:
    """Return a chooser that prefers tokens that close a string, a list, an object or the answer."""
    ids = range(tokenizer.vocab_size)
    closing = np.array([token for token in ids if _closes(tokenizer, token)], np.intp)

    def choose(allowed: NDArray[np.intp]) -> int:
        if source.random() < _CLOSE:
            closers = np.intersect1d(allowed, closing, assume_unique=True)
            allowed = closers if len(closers) else allowed
        return int(allowed[source.randrange(len(allowed))])

    return choose


def _closes(tokenizer: LLTokenizer, token: int) -> bool:
    if tokenizer.is_special_token(token):
        return token in tokenizer.eos_tokens
    text = tokenizer.decode_bytes([token])
    return any(byte in b'"]}' for byte in text) and all(byte in _CLOSING for byte in text)
