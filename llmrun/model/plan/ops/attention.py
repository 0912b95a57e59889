"""The op that computes attention over the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.formats.layouts.kv import CHUNK, F16, GROUP, Q8_0, KeysValues, parse_kv_type
from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.elementary import soft_cap_reference
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.ops.rope import RopeStore, Rotate, RotateHeads, Store
from llmrun.model.plan.shapes import AttentionShape, LayerKV
from llmrun.model.plan.stored_kv import Stored, rotated_back_reference
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.twin import Run


LARGEST_WEIGHT = (1 << 14) - 1  # the largest integer that a softmax weight is rounded to
LEAST_BOUND = 1e-30  # lower bound of the largest product of a weight and a scale, so that its unit is not 0


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """An op that computes the softmax attention of each row over all positions that are visible to it.

    scale     factor applied to the dot products of queries and keys
    soft_cap  if not 0, scores become cap * tanh(score / cap)
    sinks     float32[heads], an extra score per head that is part of the softmax but has no value vector
    """

    q: Value
    kv: LayerKV
    scale: float
    soft_cap: float
    sinks: NDArray[np.float32] | None
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q,)

    def twin(self, run: Run) -> None:
        shape = self.kv.shape
        assert isinstance(shape, AttentionShape)
        keys, values = run.keys_values[self.kv]
        types = parse_kv_type(run.kv_type or F16.name)
        rows = []
        for position, query in enumerate(run.heads(self.q, shape.head_size)):
            seen = run.seen_from(position, shape.reach)
            rows.append(attention_reference(query, keys, values, types, seen, self.scale, self.soft_cap, self.sinks))
        run.put_parts(self.out, np.stack(rows))


class AttentionWords(NamedTuple):
    """The op record of `attention` and `capped_attention`. `scale` and `soft_cap` are float32.

    scratch   address of the threads' scratch memory, `scratch_bytes` per thread
    partials  address of `slots` slots for the partial results of a step of few rows, `partial_stride` bytes each. A
              slot holds the states of all heads for one row and one chunk
    tables    index of the block tables, the same as the index of their window in the plan
    reach     index of the ranges of positions that rows attend to, the same as the index of their reach in the plan
    sinks     address of the sinks of all heads, or 0 if there are none
    """

    q: int
    q_stride: int
    out: int
    out_stride: int
    cache: int
    block_bytes: int
    kv_heads: int
    scale: int
    scratch: int
    scratch_bytes: int
    partials: int
    partial_stride: int
    slots: int
    tables: int
    reach: int
    sinks: int
    soft_cap: int


class MergeWords(NamedTuple):
    """The op record of `merge`. The words have the same meaning as in AttentionWords."""

    partials: int
    partial_stride: int
    slots: int
    out: int
    out_stride: int
    heads: int
    scratch: int
    scratch_bytes: int
    reach: int
    sinks: int


def attention_reference(
    q: NDArray[np.float32],
    keys: Stored,
    values: Stored,
    types: KeysValues,
    seen: slice,
    scale: float,
    soft_cap: float = 0.0,
    sinks: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Compute the attention of one row to the positions `seen`, with keys and values as the cache holds them.

    q is float32[heads, head size], rotated like the keys. Returns float32[heads, value size], rotated back. Keys and
    values of 8 bits are multiplied as integers, in chunks of CHUNK positions (kernels/attention/integers.py).
    """
    group = len(q) // keys.numbers.shape[1]
    heads = np.arange(len(q)) // group
    keys, values = keys.of_heads(heads), values.of_heads(heads)
    if Q8_0 not in types:
        scores = _scores_reference(q, keys.at(seen), np.float32(scale))
        weights = _softmax_reference(scores, soft_cap, sinks)
        return rotated_back_reference(_sums_reference(weights, values.at(seen)), types.values)
    largest = np.full(len(q), -np.inf, np.float32) if sinks is None else sinks.astype(np.float32)
    total = np.zeros(len(q), np.float32) if sinks is None else np.ones(len(q), np.float32)
    sums = np.zeros((len(q), values.numbers.shape[2]), np.float32)
    for start in range(seen.start // CHUNK * CHUNK, seen.stop, CHUNK):
        part = slice(max(start, seen.start), min(start + CHUNK, seen.stop))
        scores_of, sums_of = (
            (_integer_scores_reference if types.keys is Q8_0 else _scores_reference),
            (_integer_sums_reference if types.values is Q8_0 else _sums_reference),
        )
        scores = scores_of(q, keys.at(part), np.float32(scale))
        if soft_cap:
            scores = soft_cap_reference(scores, soft_cap)
        of_chunk = scores.max(-1)
        weights = np.exp(scores - of_chunk[:, None])
        later = np.maximum(largest, of_chunk)
        faded, weight = np.exp(largest - later), np.exp(of_chunk - later)
        sums = sums * faded[:, None] + sums_of(weights, values.at(part)) * weight[:, None]
        total, largest = total * faded + weights.sum(-1) * weight, later
    return rotated_back_reference(sums / total[:, None], types.values)


def _softmax_reference(
    scores: NDArray[np.float32], soft_cap: float, sinks: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Return the weights float32[heads, length] of all positions, without the weights of sinks."""
    n_positions = scores.shape[1]
    if soft_cap:
        scores = soft_cap_reference(scores, soft_cap)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    result: NDArray[np.float32] = weights[:, :n_positions]
    return result


def _scores_reference(q: NDArray[np.float32], keys: Stored, scale: np.float32) -> NDArray[np.float32]:
    result: NDArray[np.float32] = np.einsum("hd,lhd->hl", q, keys.read(), dtype=np.float32) * scale
    return result


def _sums_reference(weights: NDArray[np.float32], values: Stored) -> NDArray[np.float32]:
    result: NDArray[np.float32] = np.einsum("hl,lhd->hd", weights, values.read(), dtype=np.float32)
    return result


def _integer_scores_reference(q: NDArray[np.float32], keys: Stored, scale: np.float32) -> NDArray[np.float32]:
    """Compute scores float32[heads, length] of queries that are rounded to int8 by groups of GROUP features."""
    assert keys.scales is not None
    scores = np.zeros((len(q), len(keys.numbers)), np.float32)
    for group, first in enumerate(range(0, q.shape[1], GROUP)):
        of_query = q[:, first : first + GROUP]
        step = np.abs(of_query).max(-1) / np.float32(127)
        inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
        integers = np.clip(np.rint(of_query * inverse[:, None]), -127, 127)
        dots = np.einsum("hd,lhd->hl", integers, keys.numbers[:, :, first : first + GROUP], dtype=np.float64)
        scores = scores + dots.astype(np.float32) * (keys.scales[:, :, group].T * (step * scale)[:, None])
    return scores


def _integer_sums_reference(weights: NDArray[np.float32], values: Stored) -> NDArray[np.float32]:
    """Compute weighted sums float32[heads, value size] with weights float32[heads, length] rounded to 14 bits.

    A weight is multiplied by the scale of each group of features before it is rounded.
    """
    assert values.scales is not None
    largest = (weights * values.scales.max(-1).T).max(-1, keepdims=True)
    step = np.maximum(largest, np.float32(LEAST_BOUND)) / np.float32(LARGEST_WEIGHT)
    factors = weights * (np.float32(1) / step)
    _, heads, size = values.numbers.shape
    sums = np.empty((heads, size), np.float32)
    for group, first in enumerate(range(0, size, GROUP)):
        integers = np.rint(factors.astype(np.float64) * values.scales[:, :, group].T)
        of_group = values.numbers[:, :, first : first + GROUP]
        sums[:, first : first + GROUP] = np.einsum("hl,lhd->hd", integers, of_group, dtype=np.float64) * step
    return sums


class AttentionOps(PlanBuilder):
    __slots__ = ()

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        shape: AttentionShape,
        rope: Rope | None,
        *,
        query_rope: Rope | None = None,
        scale: float | None = None,
        soft_cap: float = 0.0,
        sinks: NDArray[np.float32] | None = None,
    ) -> Value:
        """Append ops that rotate queries and keys, store keys and values, and compute attention.

        `query_rope` defaults to `rope`, and `scale` to 1 / sqrt(head size).
        """
        kv, rotated = self.next_layer(shape), Value(q.width)
        query_number, key_number = self.rope_number(query_rope or rope), self.rope_number(rope)
        self.ops.append(RopeStore(q, k, v, kv, query_number, key_number, rotated))
        return self._attend(rotated, kv, shape, scale, soft_cap, sinks)

    def store(self, k: Value, v: Value, shape: AttentionShape, rope: Rope | None) -> None:
        """Append an op that rotates and stores keys and values. All layers of this shape overwrite the same memory.

        Call `attention_again` for the queries.
        """
        is_new = shape not in [group.shape for group in self.groups]
        kv = self.next_layer(shape) if is_new else self.last_layer(shape)
        self.ops.append(Store(k, v, kv, self.rope_number(rope)))

    def rotated(self, x: Value, head_size: int, rope: Rope) -> Value:
        """Append an op that rotates each head of x, for queries and keys that are normalized after RoPE."""
        out, number = x.like(x.width), self.rope_number(rope)
        assert number is not None
        self.ops.append(RotateHeads(x, head_size, number, out))
        return out

    def attention_again(
        self, q: Value, shape: AttentionShape, rope: Rope | None, *, scale: float | None = None
    ) -> Value:
        """Append ops that rotate queries and attend to the keys and values stored by the last layer of this shape."""
        kv, rotated = self.last_layer(shape), Value(q.width)
        self.ops.append(Rotate(q, kv, self.rope_number(rope), rotated))
        return self._attend(rotated, kv, shape, scale, soft_cap=0.0, sinks=None)

    def _attend(
        self,
        q: Value,
        kv: LayerKV,
        shape: AttentionShape,
        scale: float | None,
        soft_cap: float,
        sinks: NDArray[np.float32] | None,
    ) -> Value:
        out = Value(shape.heads * shape.value_size)
        scale = 1 / sqrt(shape.head_size) if scale is None else scale
        self.ops.append(Attention(q, kv, scale, soft_cap, sinks, out))
        return out
