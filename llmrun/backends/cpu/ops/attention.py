"""Attention on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.backends.cpu.lowering import FLOAT, REPLICATED_OUTPUT, Needs, StepShape, float_word, kv_position_bytes
from llmrun.backends.cpu.ops.base import CpuOp
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, round_up
from llmrun.formats.layouts.kv import BLOCK, CHUNK, Q8_0, SPLIT_ROWS, Scratch, parse_kv_type, state_floats
from llmrun.model.plan.ops.attention import Attention, AttentionWords, MergeWords
from llmrun.model.plan.shapes import AttentionShape, LayerKV, seen_ranges

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import AttentionSpeed, SpeedTable
    from llmrun.model.plan.ops.base import Op

# The maximum memory for partial results, in bytes, unless a single row needs more. A step touches only the part of this
# memory that it needs. In a 1.24B model with 32 heads of 64 features, this limit allows 8 rows at a depth of 50,000.
# Steps that need more memory are not split over chunks.
_MOST_PARTIALS = 32 << 20


class AttentionMemory(NamedTuple):
    """The memory shared by all layers of the same shape.

    This memory contains scratch memory for each thread, and `slots` partial results, each for one row and one chunk.
    The other fields are addresses or sizes in bytes.
    """

    scratch: int
    scratch_bytes: int
    partials: int
    partial_stride: int
    slots: int


def _attention(work: Lowering, op: Attention) -> None:
    """Emit a record that computes attention and a record that merges its partial results.

    For one row, the merge writes a copy of the output for each thread. For a few rows, the threads share the merge. For
    many rows, attention itself writes the output.
    """
    shape = attention_shape(op.kv)
    q, out = work.buffers[op.q], work.place(op.out, private=True)
    memory = attention_memory(work, op.kv)
    cache, block_bytes = work.cache_of(op.kv)
    words = AttentionWords(
        q=q.address,
        q_stride=q.stride,
        out=out.address,
        out_stride=out.stride,
        cache=cache,
        block_bytes=block_bytes,
        kv_heads=shape.kv_heads,
        scale=float_word(op.scale),
        scratch=memory.scratch,
        scratch_bytes=memory.scratch_bytes,
        partials=memory.partials,
        partial_stride=memory.partial_stride,
        slots=memory.slots,
        tables=work.tables_of(op.kv),
        reach=work.plan.reaches.index(shape.reach),
        sinks=0 if op.sinks is None else work.kept_vector(op.sinks),
        soft_cap=float_word(op.soft_cap),
    )
    sizes = {"head_size": shape.head_size, "value_size": shape.value_size, "group": shape.heads // shape.kv_heads}
    types = parse_kv_type(work.kv_type)
    function = "capped_attention" if op.soft_cap else "attention"
    kernel = KernelName.of("attention.attention", function, **sizes, keys=types.keys.name, values=types.values.name)
    work.wait_for_readers(memory.partials, op.out)
    work.emit(kernel, op.out, records.FLAG_PRIVATE_INPUT, words)
    merged = MergeWords(
        partials=memory.partials,
        partial_stride=memory.partial_stride,
        slots=memory.slots,
        out=out.address,
        out_stride=out.stride,
        heads=shape.heads,
        scratch=memory.scratch,
        scratch_bytes=memory.scratch_bytes,
        reach=words.reach,
        sinks=words.sinks,
    )
    merge = KernelName.of("attention.attention", "merge", value_size=shape.value_size, values=types.values.name)
    work.emit(merge, op.out, REPLICATED_OUTPUT, merged)
    work.note_reads(memory.partials)


def attention_shape(kv: LayerKV) -> AttentionShape:
    assert isinstance(kv.shape, AttentionShape)
    return kv.shape


def attention_memory(work: Lowering, kv: LayerKV) -> AttentionMemory:
    """Return the memory shared by all layers of the same shape. The first call allocates the memory."""
    key = f"attention {kv.group}"
    if key not in work.shared:
        shape = attention_shape(kv)
        scratch_stride = round_up(Scratch(shape.head_size, shape.value_size).n_bytes, records.CACHE_LINE)
        partial_stride = round_up(FLOAT * shape.heads * state_floats(shape.value_size), records.CACHE_LINE)
        slots = _n_slots(_most_chunks(shape, work.kv[kv.group].shape[1]), work.max_rows, partial_stride)
        scratch = allocate(work.n_threads * scratch_stride, "attention scratch")
        partials = allocate(slots * partial_stride, "attention of few rows")
        work.keep += [scratch, partials]
        work.shared[key] = AttentionMemory(
            address_of(scratch), scratch_stride, address_of(partials), partial_stride, slots
        )
    found: AttentionMemory = work.shared[key]
    return found


def _n_slots(n_chunks: int, max_rows: int, slot_bytes: int) -> int:
    """Return the number of slots for partial results: enough for one row, or more rows within _MOST_PARTIALS."""
    return max(n_chunks, min(n_chunks * min(SPLIT_ROWS, max_rows), _MOST_PARTIALS // slot_bytes))


def _most_chunks(shape: AttentionShape, n_blocks: int) -> int:
    """Return the maximum number of chunks that a row attends to. A window may begin in the middle of a chunk."""
    of_context = -(-n_blocks * BLOCK // CHUNK)
    if not shape.window:
        return of_context
    # Blocks that have left the window are reused, so a sequence can be longer than n_blocks. A window that begins
    # inside a chunk extends into one more chunk.
    return min(of_context, -(-(shape.window - 1) // CHUNK)) + 1


def _needs(op: Attention, kv_type: str, step: StepShape) -> Needs:
    shape = attention_shape(op.kv)
    positions = np.arange(step.start, step.start + step.rows, dtype=np.int32)
    [seen] = seen_ranges([shape.reach], positions, np.zeros_like(positions)).astype(np.int64)
    attended = int((seen[:, 1] - seen[:, 0]).sum())
    first_read = int(seen[0, 0]) if step.rows else step.start
    features = list(zip(parse_kv_type(kv_type), (shape.head_size, shape.value_size), strict=True))
    in_integers = sum(size for kind, size in features if kind is Q8_0)
    in_floats = sum(size for kind, size in features if kind is not Q8_0)
    return Needs(
        kv_bytes=(step.start + step.rows - first_read) * kv_position_bytes(shape, kv_type),
        activation_bytes=step.float_bytes(op.q, op.out),
        products=shape.heads * in_integers * attended,
        float_products=shape.heads * in_floats * attended,
    )


def attention_speed(kv: LayerKV, speeds: SpeedTable, kv_type: str) -> AttentionSpeed:
    """Return the attention speed for a layer's shape. The rows' reach does not affect the speed and is ignored."""
    return speeds.attention(replace(attention_shape(kv), window=0, around=None), kv_type)


def _seconds(op: Attention, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    """Return the expected time in seconds. The keys and values are read once for all rows of the step.

    The read speed is capped at the memory bandwidth. In the trial (speeds/machine.py), the keys and values fit in the
    CPU caches. In a real model, keys and values are read from memory.
    """
    needs = _needs(op, kv_type, step)
    speed = attention_speed(op.kv, speeds, kv_type)
    reading = needs.kv_bytes / min(speed.read, speeds.read_bandwidth())
    return speed.op + max(reading, (needs.products + needs.float_products) / speed.multiply)


OPS: dict[type[Op], CpuOp] = {Attention: CpuOp("attention", _attention, _needs, _seconds)}
