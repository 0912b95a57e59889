"""Rotary position embeddings on the CPU, including the op that stores keys and values in the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llmrun.backends.cpu.lowering import (
    FLOAT,
    REPLICATED_OUTPUT,
    Buffer,
    Needs,
    StepShape,
    kv_position_bytes,
    private_inputs,
)
from llmrun.backends.cpu.ops.attention import attention_memory, attention_shape, attention_speed
from llmrun.backends.cpu.ops.base import CpuOp, reads_and_writes, takes_as_long_as
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts.kv import parse_kv_type
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.rope import RopeStore, RopeWords, Rotate, RotateHeads, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.shapes import LayerKV
    from llmrun.model.plan.twin import Value


_WITHOUT_HADAMARD = "f16"  # for this type of the KV cache, queries are only rotated by RoPE


class Rotation(NamedTuple):
    """The fields of RopeWords that locate the feature pairs and their rotations."""

    pairs: int
    rotation: int
    rotation_stride: int
    pair_step: int
    pair_gap: int


def rotation_words(ropes: Sequence[Rope], number: int | None) -> Rotation:
    """Return the fields for the plan's rope with index `number`, or for no rotation if `number` is None."""
    if number is None:
        return Rotation(0, 0, 0, 0, 0)
    rope = ropes[number]
    step, gap = (2 * FLOAT, FLOAT) if rope.pairing is Pairing.INTERLEAVED else (FLOAT, FLOAT * rope.pairs)
    return Rotation(
        pairs=rope.pairs,
        rotation=2 * FLOAT * sum(other.pairs for other in ropes[:number]),
        rotation_stride=2 * FLOAT * sum(other.pairs for other in ropes),
        pair_step=step,
        pair_gap=gap,
    )


def _rope_store(work: Lowering, op: RopeStore) -> None:
    q, k, v = (work.buffers[value] for value in op.inputs)
    queries, keys = (rotation_words(work.plan.ropes, rope) for rope in (op.query_rope, op.key_rope))
    assert keys._replace(rotation=queries.rotation) == queries, "queries and keys must have the same pairs"
    words = _head_words(work, q, op.out, attention_shape(op.kv).heads, queries)
    _emit_store(work, op.kv, op.out, words._replace(key_rotation=keys.rotation), q, k, v)


def _store(work: Lowering, op: Store) -> None:
    k, v = (work.buffers[value] for value in op.inputs)
    keys = rotation_words(work.plan.ropes, op.rope)
    words = RopeWords(q=0, q_stride=0, out=0, out_stride=0, heads=0, **keys._asdict())
    _emit_store(work, op.kv, op.k, words._replace(key_rotation=keys.rotation), Buffer(0, 0, private=False), k, v)


def _emit_store(work: Lowering, kv: LayerKV, rows: Value, words: RopeWords, q: Buffer, k: Buffer, v: Buffer) -> None:
    """Emit the record that stores keys and values, and rotates the queries of `words`, for the rows of a value."""
    shape = attention_shape(kv)
    memory = attention_memory(work, kv)
    cache, block_bytes = work.cache_of(kv)
    words = words._replace(
        k=k.address,
        k_stride=k.stride,
        v=v.address,
        v_stride=v.stride,
        kv_heads=shape.kv_heads,
        cache=cache,
        block_bytes=block_bytes,
        tables=work.tables_of(kv),
        scratch=memory.scratch,
        scratch_bytes=memory.scratch_bytes,
    )
    sizes, types = {"head_size": shape.head_size, "value_size": shape.value_size}, parse_kv_type(work.kv_type)
    kernel = KernelName.of("attention.rope", "rope_store", **sizes, keys=types.keys.name, values=types.values.name)
    work.emit(kernel, rows, REPLICATED_OUTPUT | private_inputs(q, k, v), words)


def _rotate(work: Lowering, op: Rotate) -> None:
    _emit_rotation(work, op.q, attention_shape(op.kv).head_size, op.rope, op.out, work.kv_type)


def _rotate_heads(work: Lowering, op: RotateHeads) -> None:
    _emit_rotation(work, op.x, op.head_size, op.rope, op.out, _WITHOUT_HADAMARD)


def _emit_rotation(work: Lowering, value: Value, head_size: int, rope: int | None, result: Value, kv_type: str) -> None:
    x, heads = work.buffers[value], value.width // head_size
    words = _head_words(work, x, result, heads, rotation_words(work.plan.ropes, rope))
    kernel = KernelName.of("attention.rope", "rotate", head_size=head_size, keys=parse_kv_type(kv_type).keys.name)
    work.emit(kernel, result, REPLICATED_OUTPUT | private_inputs(x), words)


def _head_words(work: Lowering, q: Buffer, value: Value, heads: int, rotation: Rotation) -> RopeWords:
    out = work.place(value, private=True)
    return RopeWords(
        q=q.address,
        q_stride=q.stride,
        out=out.address,
        out_stride=out.stride,
        heads=heads,
        **rotation._asdict(),
    )


def _rope_store_needs(op: RopeStore, kv_type: str, step: StepShape) -> Needs:
    entered = step.rows * kv_position_bytes(op.kv.shape, kv_type)
    return Needs(kv_bytes=entered, activation_bytes=step.float_bytes(op.q, op.k, op.v, op.out))


def _store_needs(op: Store, kv_type: str, step: StepShape) -> Needs:
    entered = step.rows * kv_position_bytes(op.kv.shape, kv_type)
    return Needs(kv_bytes=entered, activation_bytes=step.float_bytes(op.k, op.v))


def _seconds(op: RopeStore | Store | Rotate, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    speed = attention_speed(op.kv, speeds, kv_type)
    features = sum(value.width for value in op.inputs)
    return step.rows * features * (speed.rope_one if step.rows == 1 else speed.rope_many)


OPS: dict[type[Op], CpuOp] = {
    RopeStore: CpuOp("rope", _rope_store, _rope_store_needs, _seconds),
    Store: CpuOp("rope", _store, _store_needs, _seconds),
    Rotate: CpuOp("rope", _rotate, reads_and_writes(lambda op: (op.q, op.out)), _seconds),
    RotateHeads: CpuOp("rope", _rotate_heads, reads_and_writes(lambda op: (op.x, op.out)), takes_as_long_as("rmsnorm")),
}
