"""Records of attention, and of what enters the KV cache for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.kernels import plan_ops as ops
from llmrun.kernels import records
from llmrun.kernels.arena import address_of, allocate, round_up
from llmrun.kernels.attention_layout import CHUNK, scratch_bytes, state_floats
from llmrun.kernels.kv_layout import BLOCK
from llmrun.kernels.lowering_base import FLOAT, REPLICATED_OUTPUT, float_word
from llmrun.kernels.store import KernelName

if TYPE_CHECKING:
    from llmrun.kernels.lowering_base import Lowering


def rope_store(work: Lowering, op: ops.RopeStore) -> None:
    shape = _shape(op.place)
    assert op.rope == 0
    assert len(work.plan.ropes) == 1
    q, k, v = (work.buffers[value] for value in (op.q, op.k, op.v))
    out = work.place(op.out, private=True)
    words = [q.address, q.stride, k.address, k.stride, v.address, v.stride, out.address, out.stride]
    scratch, scratch_stride, *_ = _memory(work, op.place)
    words += [*work.cache_of(op.place), shape.heads, shape.kv_heads, work.plan.ropes[op.rope].pairs]
    words += [scratch, scratch_stride]
    kernel = KernelName.of("rope", "rope_store", head_size=shape.head_size, kv_type=work.kv_type)
    work.emit(kernel, op.out, REPLICATED_OUTPUT, words)


def attention(work: Lowering, op: ops.Attention) -> None:
    """The merge writes each thread's copy of the one row; of many rows, attention itself writes each once."""
    shape = _shape(op.place)
    assert op.sinks is None
    assert not shape.window
    assert not op.soft_cap
    q, out = work.buffers[op.q], work.place(op.out, private=True)
    scratch, scratch_stride, partials, chunk_stride = _memory(work, op.place)
    words = [q.address, q.stride, out.address, out.stride, *work.cache_of(op.place)]
    words += [shape.kv_heads, float_word(op.scale), scratch, scratch_stride, partials, chunk_stride]
    sizes = {"head_size": shape.head_size, "group": shape.heads // shape.kv_heads}
    kernel = KernelName.of("attention", "attention", **sizes, kv_type=work.kv_type)
    work.emit(kernel, op.out, records.FLAG_PRIVATE_INPUT, words)
    words = [partials, chunk_stride, out.address, out.stride, shape.heads, scratch, scratch_stride]
    merge = KernelName.of("attention", "merge", head_size=shape.head_size)
    work.emit(merge, op.out, REPLICATED_OUTPUT, words)


def _shape(place: ops.Place) -> ops.AttentionShape:
    assert isinstance(place.shape, ops.AttentionShape)
    return place.shape


def _memory(work: Lowering, place: ops.Place) -> tuple[int, int, int, int]:
    """(address of the threads' scratch, bytes of one thread's, address of partial results, bytes of a chunk's), the
    same for all layers of a shape."""
    key = f"attention {place.group}"
    if key not in work.shared:
        shape = _shape(place)
        scratch_stride = round_up(scratch_bytes(shape.head_size), records.CACHE_LINE)
        chunk_stride = round_up(FLOAT * shape.heads * state_floats(shape.head_size), records.CACHE_LINE)
        n_chunks = -(-work.kv[place.group].shape[1] * BLOCK // CHUNK)
        scratch = allocate(work.n_threads * scratch_stride, "attention scratch")
        partials = allocate(n_chunks * chunk_stride, "attention of one row")
        work.keep += [scratch, partials]
        work.shared[key] = address_of(scratch), scratch_stride, address_of(partials), chunk_stride
    found: tuple[int, int, int, int] = work.shared[key]
    return found
