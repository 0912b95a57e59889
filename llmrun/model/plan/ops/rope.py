"""Ops that rotate queries and keys (RoPE) and store keys and values in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.shapes import AttentionShape, LayerKV
from llmrun.model.plan.stored_kv import Stored, enter_reference
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run


@dataclass(frozen=True, slots=True)
class RopeStore(Op):
    """An op that rotates queries and keys, and stores keys and values in the cache."""

    q: Value
    k: Value
    v: Value
    kv: LayerKV
    query_rope: int | None  # index into the plan's ropes, or None for no rotation
    key_rope: int | None  # must have as many pairs as `query_rope`
    out: Value  # the rotated queries

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q, self.k, self.v)

    def twin(self, run: Run) -> None:
        shape = self.kv.shape
        assert isinstance(shape, AttentionShape)
        queries = _rotated(run, self.q, shape.head_size, self.query_rope)
        keys = _rotated(run, self.k, shape.head_size, self.key_rope)
        values = run.heads(self.v, shape.value_size)
        stored_keys, stored_values = Stored(keys, None), Stored(values, None)
        if run.kv_type is not None:
            queries, stored_keys, stored_values = enter_reference(queries, keys, values, run.kv_type)
        run.put_parts(self.out, queries)
        run.keys_values[self.kv] = stored_keys, stored_values


@dataclass(frozen=True, slots=True)
class Store(Op):
    """An op that rotates keys, and stores keys and values in the cache."""

    k: Value
    v: Value
    kv: LayerKV
    rope: int | None

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.k, self.v)

    def twin(self, run: Run) -> None:
        shape = self.kv.shape
        assert isinstance(shape, AttentionShape)
        keys = _rotated(run, self.k, shape.head_size, self.rope)
        values = run.heads(self.v, shape.value_size)
        stored_keys, stored_values = Stored(keys, None), Stored(values, None)
        if run.kv_type is not None:
            _, stored_keys, stored_values = enter_reference(keys, keys, values, run.kv_type)
        run.keys_values[self.kv] = stored_keys, stored_values


@dataclass(frozen=True, slots=True)
class Rotate(Op):
    """An op that rotates queries only, for layers that attend to the keys and values of another layer."""

    q: Value
    kv: LayerKV
    rope: int | None
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q,)

    def twin(self, run: Run) -> None:
        shape = self.kv.shape
        assert isinstance(shape, AttentionShape)
        queries = _rotated(run, self.q, shape.head_size, self.rope)
        if run.kv_type is not None:
            queries, _, _ = enter_reference(queries, queries, queries, run.kv_type)
        run.put_parts(self.out, queries)


@dataclass(frozen=True, slots=True)
class RotateHeads(Op):
    """An op that rotates the heads of a value that is not a query or a key yet, for norms after RoPE."""

    x: Value
    head_size: int
    rope: int
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def twin(self, run: Run) -> None:
        run.put_parts(self.out, _rotated(run, self.x, self.head_size, self.rope))


class RopeWords(NamedTuple):
    """The op record of `rotate` and `rope_store`. Only `rope_store` has the words from `k` to the end.

    `rope_store` without queries has 0 heads.

    pairs            number of feature pairs to rotate
    rotation         byte offset of the queries' rotations in a row of rotations
    key_rotation     byte offset of the keys' rotations in a row of rotations
    rotation_stride  distance in bytes between two rows of rotations
    pair_step        distance in bytes between two pairs
    pair_gap         distance in bytes between the two features of a pair
    tables           index of the block tables, the same as the index of their window in the plan
    """

    q: int
    q_stride: int
    out: int
    out_stride: int
    heads: int
    pairs: int
    rotation: int
    rotation_stride: int
    pair_step: int
    pair_gap: int
    k: int = 0
    k_stride: int = 0
    v: int = 0
    v_stride: int = 0
    kv_heads: int = 0
    key_rotation: int = 0
    cache: int = 0
    block_bytes: int = 0
    tables: int = 0
    scratch: int = 0
    scratch_bytes: int = 0


def _rotated(run: Run, value: Value, head_size: int, rope: int | None) -> NDArray[np.float32]:
    heads = run.heads(value, head_size)
    return heads if rope is None else rope_reference(heads, *run.rotation(rope))


def rope_reference(
    x: NDArray[np.float32], rotations: NDArray[np.float32], pairing: Pairing = Pairing.INTERLEAVED
) -> NDArray[np.float32]:
    """Rotate x float32[rows, heads, head size] by rotations float32[rows, pairs, 2] (cosine, sine).

    Returns an array with the shape of x.
    """
    y = x.copy()
    pairs = rotations.shape[1]
    cosine, sine = rotations[:, None, :, 0], rotations[:, None, :, 1]
    first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    if pairing is Pairing.NEOX:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    y[..., first] = x[..., first] * cosine - x[..., second] * sine
    y[..., second] = x[..., first] * sine + x[..., second] * cosine
    return y
