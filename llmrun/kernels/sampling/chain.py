"""The sampling kernel, which draws the next token of each row of a step. Its twin is engine/sampling.py.

The functions have the names and the order of the twin's. Candidates are parallel arrays in scratch memory: their ids,
int32, and their logits, float32. The results are bit-identical to the twin's at every instruction-set level, because
both compute the same IEEE 754 operations in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from llmrun.formats.layouts import records, tokens
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import (
    copy_bytes,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
)
from llmrun.kernels.code.work import claim
from llmrun.kernels.compiler import called_function, inline_function, kernel
from llmrun.kernels.sampling.vectors import (
    WEIGHTS,
    any_nan,
    any_weight_at_least,
    copy_allowed_lanes,
    lanes_at_least,
    not_inlined,
    note_nan,
    sort_candidates,
    weigh,
)

_OP = records.offsets(tokens.SamplingWords)
_LANES = simd.LANES
_STRIPES = tokens.STRIPES
_INFINITY = np.float32(np.inf)
_ONE = 0x3FF0000000000000  # the bits of 1.0, the largest weight
_BUCKETS, _BUCKET_SHIFT = 256, 50  # four buckets for each power of two
_MARGIN = 1e-9  # far above the rounding errors of a sum of any order
_LARGEST = np.finfo(np.float32).max


@inline_function
def ids_of(scratch: Any, room: Any) -> Any:
    return scratch + tokens.SCRATCH_IDS * room


@inline_function
def weights_of(scratch: Any, room: Any) -> Any:
    return scratch + tokens.SCRATCH_WEIGHTS * room


@inline_function
def words_of(scratch: Any, room: Any) -> Any:
    return scratch + tokens.SCRATCH_WORDS * room


# --- logits -----------------------------------------------------------------------------------------------------------


@called_function
def largest_of(logits: Any, n: Any) -> Any:
    """Return the largest of n logits, or NaN if any of them is NaN."""
    not_inlined()
    vectors = noted = simd.splat(-_INFINITY)
    whole = n // _LANES * _LANES
    for i in range(0, whole, _LANES):
        vector = simd.load_f32x16(logits + 4 * i)
        vectors, noted = simd.maximum(vector, vectors), note_nan(noted, vector)
    largest = types.float32(np.nan) if any_nan(noted) else simd.max_lanes(vectors)
    for i in range(whole, n):
        logit = load_f32(logits + 4 * i)
        if largest == largest and not logit <= largest:  # NaN stays
            largest = logit
    return largest


@called_function
def first_of(logits: Any, n: Any, largest: Any) -> Any:
    """Return the lowest id whose logit equals the largest."""
    not_inlined()
    token = 0
    while token + _LANES <= n and lanes_at_least(logits + 4 * token, largest) == 0:
        token += _LANES
    while load_f32(logits + 4 * token) != largest:
        token += 1
    return token


@called_function
def apply_mask(logits: Any, allowed: Any, masked: Any, n: Any) -> None:
    """Copy n logits to `masked`, with -inf for the tokens that the mask `allowed` bans."""
    not_inlined()
    whole = n // _LANES * _LANES
    for i in range(0, whole, _LANES):
        copy_allowed_lanes(masked + 4 * i, logits + 4 * i, load_i32(allowed + 4 * (i // 32)) >> (i & 31))
    for i in range(whole, n):
        is_allowed = (load_i32(allowed + 4 * (i // 32)) >> (i & 31)) & 1
        store_f32(masked + 4 * i, load_f32(logits + 4 * i) if is_allowed else -_INFINITY)


@called_function
def apply_logit_bias(logits: Any, row: Any, vocabulary: Any) -> Any:
    """Add each token's bias to its logit. Return whether all ids are in the vocabulary."""
    not_inlined()
    ids, biases = load_i64(row + tokens.ROW_BIAS_IDS), load_i64(row + tokens.ROW_BIASES)
    for i in range(load_i64(row + tokens.ROW_N_BIASES)):
        token = load_i32(ids + 4 * i)
        if token < 0 or token >= vocabulary:
            return False
        biased = load_f32(logits + 4 * token) + load_f32(biases + 4 * i)
        store_f32(logits + 4 * token, min(biased, _LARGEST))
    return True


@called_function
def apply_penalties(logits: Any, row: Any, vocabulary: Any, counts: Any) -> Any:
    """Penalize the tokens of the row's history. Return whether all of them are in the vocabulary.

    `counts` is int32[vocabulary] with any content.
    """
    not_inlined()
    history, n = load_i64(row + tokens.ROW_HISTORY), load_i64(row + tokens.ROW_HISTORY_LENGTH)
    repeat = types.float32(load_f64(row + tokens.ROW_REPEAT_PENALTY))
    frequency = types.float32(load_f64(row + tokens.ROW_FREQUENCY_PENALTY))
    presence = types.float32(load_f64(row + tokens.ROW_PRESENCE_PENALTY))
    for i in range(n):
        token = load_i32(history + 4 * i)
        if token < 0 or token >= vocabulary:
            return False
        store_i32(counts + 4 * token, 0)
    for i in range(n):
        at = counts + 4 * load_i32(history + 4 * i)
        store_i32(at, load_i32(at) + 1)
    for i in range(n):
        token = load_i32(history + 4 * i)
        count = load_i32(counts + 4 * token)
        if count > 0:
            store_i32(counts + 4 * token, 0)
            seen = load_f32(logits + 4 * token)
            seen = seen * repeat if seen <= 0 else seen / repeat
            seen -= types.float32(count) * frequency
            seen -= presence
            if seen != seen:
                seen = types.float32(0)
            store_f32(logits + 4 * token, max(-_LARGEST, min(seen, _LARGEST)))
    return True


# --- candidates -------------------------------------------------------------------------------------------------------


@called_function
def weigh_all(scratch: Any, room: Any, n: Any, largest: Any, temperature: Any) -> Any:
    """Store the weight exp((logit - largest) / temperature) of each candidate, and return the sum from left to right.

    The candidates are padded to whole vectors with logits of -inf, whose weight is 0.
    """
    not_inlined()
    for i in range(n, n + (-n & (WEIGHTS - 1))):
        store_f32(scratch + 4 * i, -_INFINITY)
    weights, total = weights_of(scratch, room), 0.0
    for i in range(0, n, WEIGHTS):
        total = weigh(scratch + 4 * i, types.float64(largest), temperature, weights + 8 * i, total)
    return total


@called_function
def keep_weights(scratch: Any, room: Any, n: Any, bound: Any) -> Any:
    """Keep the candidates whose weight is not below `bound`, and return their number."""
    not_inlined()
    ids, weights = ids_of(scratch, room), weights_of(scratch, room)
    kept = 0
    for start in range(0, n, WEIGHTS):
        if any_weight_at_least(weights + 8 * start, bound):
            for i in range(start, min(start + WEIGHTS, n)):
                weight = load_f64(weights + 8 * i)
                store_f32(scratch + 4 * kept, load_f32(scratch + 4 * i))
                store_i32(ids + 4 * kept, load_i32(ids + 4 * i))
                store_f64(weights + 8 * kept, weight)
                kept += weight >= bound
    return kept


@called_function
def keep_logits(logits: Any, scratch: Any, room: Any, n: Any, bound: Any) -> Any:
    """Make candidates of the ids whose logit is not below `bound`, in order of id, and return their number."""
    not_inlined()
    ids = ids_of(scratch, room)
    kept = 0
    whole = n // _LANES * _LANES
    for start in range(0, n, _LANES):
        if start == whole or lanes_at_least(logits + 4 * start, bound) != 0:
            for i in range(start, min(start + _LANES, n)):
                logit = load_f32(logits + 4 * i)
                store_f32(scratch + 4 * kept, logit)
                store_i32(ids + 4 * kept, i)
                kept += logit >= bound
    return kept


@called_function
def bound_of_top(logits: Any, scratch: Any, room: Any, n: Any, k: Any) -> Any:
    """Return a lower bound for the k largest logits that few other logits reach.

    The bound is the k-th largest of the stripes' maxima. Every STRIPES-th logit belongs to the same stripe.
    """
    not_inlined()
    depth = n // _STRIPES
    if k > _STRIPES or depth < 2:
        return -_INFINITY
    maxima = weights_of(scratch, room)
    for stripe in range(0, 4 * _STRIPES, 4 * _LANES):
        vectors = simd.load_f32x16(logits + stripe)
        for row in range(1, depth):
            vectors = simd.maximum(simd.load_f32x16(logits + stripe + 4 * _STRIPES * row), vectors)
        simd.store_f32x16(maxima + stripe, vectors)
    sort_candidates(maxima, ids_of(scratch, room), n - n + _STRIPES, words_of(scratch, room), room)
    return load_f32(maxima + 4 * (k - 1))


@called_function
def bound_of_heavy(scratch: Any, room: Any, n: Any, enough: Any) -> Any:
    """Return a lower bound for the largest weights that sum to at least `enough`.

    A histogram of the weights by their exponent and the upper bits of their mantissa yields the bound, which is at most
    a fifth too small. Only the candidates that reach the bound have to be sorted.
    """
    not_inlined()
    weights, sums = weights_of(scratch, room), scratch + tokens.SCRATCH_COUNTS * room
    for i in range(_BUCKETS):
        store_f64(sums + 8 * i, 0.0)
    for i in range(n):
        at = sums + 8 * min((_ONE - load_i64(weights + 8 * i)) >> _BUCKET_SHIFT, _BUCKETS - 1)
        store_f64(at, load_f64(at) + load_f64(weights + 8 * i))
    bucket = 0
    total = load_f64(sums)
    while total < enough and bucket < _BUCKETS - 1:
        bucket += 1
        total += load_f64(sums + 8 * bucket)
    if bucket == _BUCKETS - 1:
        return 0.0
    store_i64(sums, _ONE - ((bucket + 1) << _BUCKET_SHIFT) + 1)
    return load_f64(sums)


@called_function
def top_k(logits: Any, scratch: Any, room: Any, n: Any, k: Any, least: Any) -> Any:
    """Make candidates of the k most likely ids, sorted by probability, and return their number.

    Ids whose logit is below `least` are left out. Where a mask leaves fewer than k ids, this saves sorting all others.
    """
    not_inlined()
    n = keep_logits(logits, scratch, room, n, max(least, bound_of_top(logits, scratch, room, n, k)))
    sort_candidates(scratch, ids_of(scratch, room), n, words_of(scratch, room), room)
    return min(n, k)


@called_function
def top_p(scratch: Any, room: Any, n: Any, largest: Any, p: Any, is_sorted: Any) -> Any:
    """Keep the most likely candidates whose probabilities sum to p, sorted, and return their number."""
    not_inlined()
    total = weigh_all(scratch, room, n, largest, 1.0)
    n = keep_weights(scratch, room, n, (1 - p) / n * total)
    if not is_sorted:
        n = keep_weights(scratch, room, n, bound_of_heavy(scratch, room, n, (p + _MARGIN) * total))
        sort_candidates(scratch, ids_of(scratch, room), n, words_of(scratch, room), room)
        weigh_all(scratch, room, n, largest, 1.0)
    weights = weights_of(scratch, room)
    reached = 0.0
    for i in range(n):
        reached += load_f64(weights + 8 * i)
        if reached >= p * total:
            return i + 1
    return n


@called_function
def min_p(scratch: Any, room: Any, n: Any, largest: Any, p: Any) -> Any:
    """Keep the candidates that are at least p times as probable as the likeliest one, and return their number."""
    not_inlined()
    weigh_all(scratch, room, n, largest, 1.0)
    return keep_weights(scratch, room, n, min(p, 1.0))


@called_function
def draw(scratch: Any, room: Any, n: Any, largest: Any, temperature: Any, u: Any) -> Any:
    """Draw a candidate with the random number u and return its id."""
    not_inlined()
    total = weigh_all(scratch, room, n, largest, max(temperature, tokens.SMALLEST_TEMPERATURE))
    weights = weights_of(scratch, room)
    reached = 0.0
    at = 0
    while at < n - 1:
        reached += load_f64(weights + 8 * at)
        if reached > u * total:
            break
        at += 1
    return load_i32(ids_of(scratch, room) + 4 * at)


# --- rows -------------------------------------------------------------------------------------------------------------


@called_function
def sample_candidates(logits: Any, scratch: Any, room: Any, n: Any, row: Any, largest: Any) -> Any:
    """Draw a token from logits with the filters of the row, and return its id.

    Without top-k, `logits` must be the scratch logits.
    """
    not_inlined()
    k, p, least = (
        load_i64(row + tokens.ROW_TOP_K),
        load_f64(row + tokens.ROW_TOP_P),
        load_f64(row + tokens.ROW_MIN_P),
    )
    if k > 0:
        n = top_k(logits, scratch, room, n, k, -_LARGEST)
    else:
        for i in range(n):
            store_i32(ids_of(scratch, room) + 4 * i, i)
    if p < 1:
        n = top_p(scratch, room, n, largest, p, k > 0)
    if least > 0:
        n = min_p(scratch, room, n, largest, least)
    u, temperature = load_f64(row + tokens.ROW_UNIFORM), load_f64(row + tokens.ROW_TEMPERATURE)
    return draw(scratch, room, n, largest, temperature, u)


@inline_function
def sample_row(row: Any, scratch: Any, room: Any, n: Any, largest: Any) -> Any:
    """Draw the token of a row, store it, and return the row's status."""
    logits, mask = load_i64(row + tokens.ROW_LOGITS), load_i64(row + tokens.ROW_MASK)
    changes = mask != 0 or load_i64(row + tokens.ROW_N_BIASES) + load_i64(row + tokens.ROW_HISTORY_LENGTH) > 0
    greedy = load_f64(row + tokens.ROW_TEMPERATURE) <= 0
    if mask != 0:
        apply_mask(logits, mask, scratch, n)
        logits = scratch
    elif changes or (not greedy and load_i64(row + tokens.ROW_TOP_K) <= 0):
        copy_bytes(scratch, logits, 4 * n)
        logits = scratch
    if changes:
        if not apply_logit_bias(logits, row, n) or not apply_penalties(logits, row, n, ids_of(scratch, room)):
            return tokens.NO_SUCH_TOKEN
        largest = largest_of(logits, n)
        if largest == -_INFINITY:
            return tokens.ALL_BANNED
    token = first_of(logits, n, largest) if greedy else sample_candidates(logits, scratch, room, n, row, largest)
    store_i64(row + tokens.ROW_TOKEN, token)
    return tokens.DONE


@inline_function
def weigh_row(row: Any, scratch: Any, room: Any, n: Any, largest: Any) -> Any:
    """Store the sum of a row's weights and its likeliest ids, and return the row's status."""
    copy_bytes(scratch, load_i64(row + tokens.ROW_LOGITS), 4 * n)
    store_f64(row + tokens.ROW_TOTAL, weigh_all(scratch, room, n, largest, 1.0))
    k = load_i64(row + tokens.ROW_TOP_LOGPROBS)
    if k > 0:
        top_k(scratch, scratch, room, n, k, -_INFINITY)
        ids, top_ids = ids_of(scratch, room), load_i64(row + tokens.ROW_TOP_IDS)
        for i in range(k):
            store_i64(top_ids + 8 * i, load_i32(ids + 4 * i))
    return tokens.DONE


@kernel
def sample(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Draw the tokens of rows, or compute what their log-probabilities need. layouts/tokens.py describes the records.

    Threads claim rows in order. A row of a sequence assumes that the rows before it draw the tokens of the draft, so
    once one of them has drawn another token, the rows after it are skipped.
    """
    n, rows = load_i64(op + _OP.vocabulary), load_i64(op + _OP.rows)
    scratch = load_i64(op + _OP.scratch) + thread * load_i64(op + _OP.scratch_bytes)
    room = load_i64(op + _OP.room)
    number = claim(op)
    while number < load_i64(op + _OP.n_rows):
        row = rows + number * tokens.ROW_BYTES
        index = load_i64(row + tokens.ROW_INDEX)
        limit = row - index * tokens.ROW_BYTES + tokens.ROW_LIMIT
        if index <= load_i64(limit):
            largest = largest_of(load_i64(row + tokens.ROW_LOGITS), n)
            store_f64(row + tokens.ROW_LARGEST, types.float64(largest))
            if not abs(largest) < _INFINITY:
                status = tokens.BAD_OUTPUT
            elif load_i64(row + tokens.ROW_TOP_LOGPROBS) == tokens.DRAW:
                status = sample_row(row, scratch, room, n, largest)
            else:
                status = weigh_row(row, scratch, room, n, largest)
            store_i64(row + tokens.ROW_STATUS, status)
            differs = status != tokens.DONE or load_i64(row + tokens.ROW_TOKEN) != load_i64(row + tokens.ROW_DRAFT)
            if differs and index < load_i64(limit):
                store_i64(limit, index)
        number = claim(op)
