"""Lowers a plan to records: chooses kernels, places buffers and inserts barriers.

The modules in backends/cpu/ops lower the individual ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering import FLOAT, LANES, Lowered, LoweredStage, Lowering, Needed
from llmrun.backends.cpu.ops.registry import cpu_op
from llmrun.backends.cpu.weights import PackedLayout, PackedMatrix
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, floats_at, round_up
from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.ops.linear import Product
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.builder import Stage
    from llmrun.model.plan.plan import Plan


def _records(work: Lowering) -> Lowered:
    plan = work.plan
    last_use = {value: index for index, op in enumerate(plan.ops) for value in op.inputs}
    last_routed = {routing: index for index, op in enumerate(plan.ops) if (routing := op.routed_by)}
    origins: list[int] = []
    written = []
    for value in plan.supplied:
        work.place(value, private=False)
    kept = {*plan.supplied, *plan.returned}
    for index, op in enumerate(plan.ops):
        before = set(work.buffers)
        if op.changes is not None and not work.buffer_of(op.changes).private:
            work.wait_for_readers(work.buffer_of(op.changes).address, op.changes)
        cpu_op(type(op)).lower(work, op)
        work.note_reads(*(work.buffer_of(value).address for value in op.inputs))
        written.append(
            [(value, of) for value, of in work.buffers.items() if value not in before or value is op.changes]
        )
        if op.changes is not None:
            work.give_integers_back(op.changes)
        for routing in [routing for routing in work.tables if last_routed[routing] == index]:
            from llmrun.backends.cpu.ops.experts import give_back_tables  # most models have no experts

            give_back_tables(work, routing)
        _release(work, index, last_use, kept)
        origins += [index] * (len(work.records) - len(origins))
    words = np.zeros((len(work.records), records.OP_WORDS), np.int64)
    counters = np.zeros((len(work.records), records.CACHE_LINE // records.WORD), np.int64)
    for index, record in enumerate(work.records):
        head = [0, _flags(work, index), record.rows, address_of(counters[index])]
        words[index, : len(head) + len(record.words)] = [*head, *record.words]
    kernels = [record.kernel for record in work.records]
    keep = [*work.keep, *work.rows.memory, work.packed, *work.kv, *work.states]
    width = 0 if plan.logits is None else round_up(plan.logits.width, LANES)
    hidden, given = _view(work, plan.hidden), _view(work, plan.given)
    used, reaches = plan.experts_used, plan.reaches
    return Lowered(
        records=words,
        counters=counters,
        kernels=kernels,
        origins=origins,
        written=written,
        logits_width=width,
        hidden=hidden,
        given=given,
        experts_used=used,
        needed=np.array([record.needed for record in work.records], np.int8),
        stages=[_stage(work, stage, origins) for stage in plan.stages],
        reaches=reaches,
        looks_ahead=np.array([[plan.looks_ahead(reach)] for reach in reaches], np.int32).reshape(-1, 1),
        keep=keep,
    )


def _stage(work: Lowering, stage: Stage, origins: Sequence[int]) -> LoweredStage:
    """Find the records of a stage, given the op of each record, and the rows of its values."""
    takes, gives = _view(work, stage.takes), _view(work, stage.gives)
    assert takes is not None
    return LoweredStage(bisect_left(origins, stage.first), bisect_left(origins, stage.end), takes, gives)


def _view(work: Lowering, value: Value | None) -> NDArray[np.float32] | None:
    """Return the rows of a value that is never released."""
    if value is None:
        return None
    buffer = work.buffers[value]
    return floats_at(buffer.address, work.most_rows(value), buffer.stride // FLOAT)[:, : value.width]


def _flags(work: Lowering, index: int) -> int:
    """Return a record's flags, including a barrier unless the next record is a matmul that shares its input."""
    record = work.records[index]
    following = work.records[index + 1] if index + 1 < len(work.records) else None
    if (
        record.independent_input is not None
        and following is not None
        and following.independent_input is record.independent_input
    ):
        return record.flags
    return record.flags | records.FLAG_BARRIER


def _release(work: Lowering, index: int, last_use: Mapping[Value, int], kept: Collection[Value]) -> None:
    """Release the memory of values that no later op reads, except for those that are kept."""
    op = work.plan.ops[index]
    for value in op.inputs:
        if last_use[value] == index and value.width % LANES == 0 and value not in kept:
            work.give_back(value)
    following = work.plan.ops[index + 1] if index + 1 < len(work.plan.ops) else None
    shares_input = isinstance(op, Product) and isinstance(following, Product) and op.x is following.x
    is_optional = work.records[-1].needed is not Needed.ALWAYS
    if not work.records[-1].flags & records.FLAG_REPLICATED and not shares_input and not is_optional:
        work.rows.barrier()


def kv_shapes(plan: Plan, n_blocks: Sequence[int], kv_type: str) -> list[tuple[int, int, int]]:
    """Return the shape of the KV cache for each group of layers: (layers, blocks, bytes per block).

    `n_blocks` is the number of blocks for each window.
    """
    counts = dict(zip(plan.windows, n_blocks, strict=True))
    return [(group.layers, counts[group.shape.window], group.shape.block_bytes(kv_type)) for group in plan.groups]


def state_shapes(plan: Plan, n_sequences: int) -> list[tuple[int, int, int]]:
    """Return the shape of the recurrent states for each group of layers: (layers, sequences, bytes per state)."""
    return [(group.layers, n_sequences, group.shape.n_bytes) for group in plan.states]


def lower(
    plan: Plan,
    packed: Mapping[str, PackedMatrix],
    kv: Sequence[NDArray[np.uint8]],
    states: Sequence[NDArray[np.uint8]] = (),
    *,
    kv_type: str,
    max_rows: int,
    n_threads: int,
) -> Lowered:
    """Lower `plan` to records that use the packed weights and a cache.

    The KV cache has the shapes from `kv_shapes`, and the recurrent states have the shapes from `state_shapes`.
    """
    return _records(
        Lowering(
            plan=plan, packed=packed, kv=kv, states=states, kv_type=kv_type, max_rows=max_rows, n_threads=n_threads
        )
    )


# The largest number of blocks that `scratch_needed` assumes. In larger caches, the partial results of attention for a
# single row can take more memory than the limit in ops/attention.py, but never more than 0.2 % of the cache, or 2 %
# with latent attention.
_MOST_BLOCKS = 131_072 // BLOCK


def scratch_needed(plan: Plan, n_blocks: Sequence[int], *, kv_type: str, max_rows: int, n_threads: int) -> int:
    """Return how many bytes `lower` allocates for activations and scratch memory.

    Runs `lower` with placeholder weights and a placeholder KV cache. `n_blocks` is the number of blocks for each
    window, which determines the size of attention's partial results.
    """
    nowhere = np.empty(0, np.uint8)
    packed = {matrix.name: PackedMatrix(matrix, PackedLayout.of(matrix), nowhere) for matrix in plan.matrices}
    shapes = kv_shapes(plan, [min(count, _MOST_BLOCKS) for count in n_blocks], kv_type)
    kv = [np.broadcast_to(np.zeros(1, np.uint8), shape) for shape in shapes]
    states = [np.broadcast_to(np.zeros(1, np.uint8), shape) for shape in state_shapes(plan, 1)]
    lowered = lower(plan, packed, kv, states, kv_type=kv_type, max_rows=max_rows, n_threads=n_threads)
    besides = {id(part) for part in [*kv, *states]}
    return sum(part.nbytes for part in lowered.keep if isinstance(part, np.ndarray) and id(part) not in besides)
