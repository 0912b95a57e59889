"""Records of attention, and of what enters the KV cache for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.lowering.base import FLOAT, REPLICATED_OUTPUT, float_word, private_inputs
from llmrun.compiled.store import KernelName
from llmrun.layouts import records
from llmrun.layouts.arena import address_of, allocate, round_up
from llmrun.layouts.attention import CHUNK, SEES_ALL, scratch_bytes, state_floats
from llmrun.layouts.kv_blocks import BLOCK
from llmrun.plan import ops
from llmrun.plan.kv_shapes import AttentionShape, Place
from llmrun.plan.rope import Pairing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.backends.cpu.lowering.base import Lowering
    from llmrun.plan.rope import Rope


def rope_store(work: Lowering, op: ops.RopeStore) -> None:
    shape, ropes = _shape(op.place), work.plan.ropes
    k, v = (work.buffers[value] for value in (op.k, op.v))
    words, flags = _queries(work, op.q, op.out, op.place, op.query_rope), private_inputs(work.buffers[op.q], k, v)
    pairs, key_rotation, *form = rotation_words(ropes, op.key_rope)
    query_pairs, _, *query_form = rotation_words(ropes, op.query_rope)
    assert (pairs, form) == (query_pairs, query_form)
    scratch, scratch_stride, *_ = _memory(work, op.place)
    words += [k.address, k.stride, v.address, v.stride, shape.kv_heads, key_rotation]
    words += [*work.cache_of(op.place), work.tables_of(op.place), scratch, scratch_stride]
    sizes = {"head_size": shape.head_size, "value_size": shape.value_size}
    kernel = KernelName.of("attention.rope", "rope_store", **sizes, kv_type=work.kv_type)
    work.emit(kernel, op.out, REPLICATED_OUTPUT | flags, words)


def rotate(work: Lowering, op: ops.Rotate) -> None:
    shape = _shape(op.place)
    words, flags = _queries(work, op.q, op.out, op.place, op.rope), private_inputs(work.buffers[op.q])
    kernel = KernelName.of("attention.rope", "rotate", head_size=shape.head_size, kv_type=work.kv_type)
    work.emit(kernel, op.out, REPLICATED_OUTPUT | flags, words)


def _queries(work: Lowering, q: ops.Value, out: ops.Value, place: Place, rope: int | None) -> list[int]:
    """The first words of a record that rotates queries."""
    source, rotated = work.buffers[q], work.place(out, private=True)
    words = [source.address, source.stride, rotated.address, rotated.stride, _shape(place).heads]
    return words + rotation_words(work.plan.ropes, rope)


def rotation_words(ropes: Sequence[Rope], number: int | None) -> list[int]:
    """Of rope_store and rotate: pairs, and where they and their rotations are."""
    if number is None:
        return [0] * 5
    rope = ropes[number]
    before = sum(other.pairs for other in ropes[:number])
    row_bytes = 2 * FLOAT * sum(other.pairs for other in ropes)
    step, gap = (2 * FLOAT, FLOAT) if rope.pairing is Pairing.ADJACENT else (FLOAT, FLOAT * rope.pairs)
    return [rope.pairs, 2 * FLOAT * before, row_bytes, step, gap]


def attention(work: Lowering, op: ops.Attention) -> None:
    """The merge writes each thread's copy of the one row; of many rows, attention itself writes each once."""
    shape = _shape(op.place)
    q, out = work.buffers[op.q], work.place(op.out, private=True)
    scratch, scratch_stride, partials, chunk_stride = _memory(work, op.place)
    window = shape.window or SEES_ALL
    sinks = 0 if op.sinks is None else work.kept_vector(op.sinks)
    words = [q.address, q.stride, out.address, out.stride, *work.cache_of(op.place)]
    words += [shape.kv_heads, float_word(op.scale), scratch, scratch_stride, partials, chunk_stride]
    words += [work.tables_of(op.place), window, sinks, float_word(op.soft_cap)]
    sizes = {"head_size": shape.head_size, "value_size": shape.value_size, "group": shape.heads // shape.kv_heads}
    function = "capped_attention" if op.soft_cap else "attention"
    kernel = KernelName.of("attention.attention", function, **sizes, kv_type=work.kv_type)
    work.emit(kernel, op.out, records.FLAG_PRIVATE_INPUT, words)
    words = [partials, chunk_stride, out.address, out.stride, shape.heads, scratch, scratch_stride, window, sinks]
    merge = KernelName.of("attention.attention", "merge", value_size=shape.value_size)
    work.emit(merge, op.out, REPLICATED_OUTPUT, words)


def _shape(place: Place) -> AttentionShape:
    assert isinstance(place.shape, AttentionShape)
    return place.shape


def _memory(work: Lowering, place: Place) -> tuple[int, int, int, int]:
    """(address of the threads' scratch, bytes of one thread's, address of partial results, bytes of a chunk's), the
    same for all layers of a shape."""
    key = f"attention {place.group}"
    if key not in work.shared:
        shape = _shape(place)
        scratch_stride = round_up(scratch_bytes(shape.head_size, shape.value_size), records.CACHE_LINE)
        chunk_stride = round_up(FLOAT * shape.heads * state_floats(shape.value_size), records.CACHE_LINE)
        n_chunks = _most_chunks(shape, work.kv[place.group].shape[1])
        scratch = allocate(work.n_threads * scratch_stride, "attention scratch")
        partials = allocate(n_chunks * chunk_stride, "attention of one row")
        work.keep += [scratch, partials]
        work.shared[key] = address_of(scratch), scratch_stride, address_of(partials), chunk_stride
    found: tuple[int, int, int, int] = work.shared[key]
    return found


def _most_chunks(shape: AttentionShape, n_blocks: int) -> int:
    """That a row sees part of. A window may begin in the middle of one."""
    of_context = -(-n_blocks * BLOCK // CHUNK)
    if not shape.window:
        return of_context
    # A pool of a window has no more blocks than it takes, but they come round: a chunk more.
    return min(of_context, -(-(shape.window - 1) // CHUNK)) + 1
