"""Sorts candidates by probability, with a radix sort whose time does not depend on the logits.

A candidate is a word: the sort key in the upper half, the token id in the lower half. The likeliest token has the
smallest key. The sort is stable, so among equal logits the order of ids stays.
"""

from __future__ import annotations

from typing import Any

from llmrun.formats.layouts.sampling import DIGIT_BITS, N_DIGITS
from llmrun.kernels.code.load_store import load_i32, load_i64, store_i32, store_i64
from llmrun.kernels.compiler import called_function, inline_function
from llmrun.kernels.sampling.vectors import not_inlined

_LOW_HALF = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_SIGN = 0x80000000
_INFINITY = 0x7F800000  # the bits of a float32
_DIGITS = 1 << DIGIT_BITS


@inline_function
def sort_key(logit_bits: Any) -> Any:
    """Return the key of a logit, which is at least 0 and below 2^32. -0 and 0 have the same key."""
    return _INFINITY - (logit_bits if logit_bits >= 0 else -(logit_bits & _MAGNITUDE))


@inline_function
def logit_bits_of(key: Any) -> Any:
    ordered = _INFINITY - key
    return ordered if ordered >= 0 else -ordered | _SIGN


@inline_function
def key_of(word: Any) -> Any:
    return (word >> 32) & _LOW_HALF


@called_function
def sort_candidates(logits: Any, ids: Any, n: Any, words: Any, room: Any) -> None:
    """Sort n candidates, float32 logits and int32 ids, by probability. Among equal logits, their order stays.

    `words` is memory for int64[2 * room] and for the counts. The digits of all passes are counted at once. A pass whose
    digit is the same in all words is left out.
    """
    not_inlined()
    spare, counts = words + 8 * room, words + 16 * room
    for i in range(0, 4 * N_DIGITS * _DIGITS, 8):
        store_i64(counts + i, 0)
    for i in range(n):
        key = sort_key(load_i32(logits + 4 * i))
        store_i64(words + 8 * i, key << 32 | load_i32(ids + 4 * i))
        for digit in range(N_DIGITS):
            at = counts + 4 * (digit * _DIGITS + ((key >> (digit * DIGIT_BITS)) & (_DIGITS - 1)))
            store_i32(at, load_i32(at) + 1)
    for digit in range(N_DIGITS):
        starts, shift = counts + 4 * digit * _DIGITS, digit * DIGIT_BITS
        if load_i32(starts + 4 * (key_of(load_i64(words)) >> shift & (_DIGITS - 1))) == n:
            continue
        start = 0
        for at in range(starts, starts + 4 * _DIGITS, 4):
            count = load_i32(at)
            store_i32(at, start)
            start += count
        for i in range(n):
            word = load_i64(words + 8 * i)
            at = starts + 4 * (key_of(word) >> shift & (_DIGITS - 1))
            place = load_i32(at)
            store_i32(at, place + 1)
            store_i64(spare + 8 * place, word)
        words, spare = spare, words
    for i in range(n):
        word = load_i64(words + 8 * i)
        store_i32(logits + 4 * i, logit_bits_of(key_of(word)))
        store_i32(ids + 4 * i, word)
