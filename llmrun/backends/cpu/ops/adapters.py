"""LoRA adapters on the CPU.

The ops of adapters are omitted from steps in which no row uses an adapter (Lowered.records_for), so such steps have no
overhead. Predictions and profiles describe steps without adapters and also leave out the ops of adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering import FLOAT, LANES, Buffer, Needed, Needs, StepShape, float_word, private_inputs
from llmrun.backends.cpu.ops.base import CpuOp
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts.arena import address_of, allocate, round_up
from llmrun.formats.layouts.records import CACHE_LINE, Unit
from llmrun.formats.quants.weight_type import GROUP_ROWS
from llmrun.model.plan.ops.adapters import AdapterOp, AddLowRank, AddLowRankEmbedding, LowRankWords
from llmrun.model.plan.twin import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.matrix import Matrix
    from llmrun.model.plan.ops.adapters import LowRank
    from llmrun.model.plan.ops.base import Op

_NOTHING = Buffer(0, 0, private=False)


def _low_rank(work: Lowering, op: AddLowRank) -> None:
    units = [
        unit._replace(weights=unit.weights + group * unit.group_bytes, offset=unit.offset + group * CACHE_LINE)
        for unit, rank in _units(work, op, lambda pair: pair.a)
        for group in range(-(-rank // GROUP_ROWS))
    ]
    _emit(work, op, "reduce", work.buffers[op.x], units, columns=round_up(op.x.width, 4))


def _low_rank_embedding(work: Lowering, op: AddLowRankEmbedding) -> None:
    units = [unit for unit, _ in _units(work, op, lambda pair: pair.a)]
    _emit(work, op, "look_up", _NOTHING, units)


def _units(work: Lowering, op: AdapterOp, matrix_of: Callable[[LowRank], Matrix]) -> list[tuple[Unit, int]]:
    """Return a unit for a matrix of each pair, with the pair's rank."""
    units, offset = [], 0
    for adapter, pair in enumerate(op.pairs):
        if pair is None:
            continue
        matrix = matrix_of(pair)
        packed = work.packed[matrix.name]
        unit = Unit(
            weights=packed.address,
            group_bytes=packed.layout.group_bytes,
            columns=round_up(matrix.columns, 4),
            adapter=adapter,
            offset=offset,
            factor=float_word(pair.factor),
        )
        units.append((unit, pair.rank))
        offset += FLOAT * round_up(pair.rank, GROUP_ROWS)
    return units


def _emit(work: Lowering, op: AdapterOp, kernel: str, x: Buffer, units: Sequence[Unit], columns: int = 0) -> None:
    """Emit a record that computes low-rank products, and a record that adds their products with B to the output."""
    low = _low_rank_memory(work)
    out, is_logits = work.buffer_of(op.out), op.out is work.plan.logits
    assert not out.private
    words = LowRankWords(
        units=_table(work, units),
        n_units=len(units),
        n_groups=-(-op.out.width // GROUP_ROWS),
        columns=columns,
        x=x.address,
        x_stride=x.stride,
        out=low.address,
        out_stride=low.stride,
        n_adapters=len(op.pairs),
        wanted=int(op.out.rows in (Rows.WANTED, Rows.SCORED)),
        logits=0,
    )
    work.emit(KernelName.of("linear.adapters", kernel), op.out, private_inputs(x), words, needed=Needed.ADAPTERS)
    expanded = [unit for unit, _ in _units(work, op, lambda pair: pair.b)]
    words = words._replace(
        units=_table(work, expanded),
        n_units=len(expanded),
        x=low.address,
        x_stride=low.stride,
        out=out.address,
        out_stride=out.stride,
        logits=int(is_logits),
    )
    work.emit(KernelName.of("linear.adapters", "expand"), op.out, 0, words, needed=Needed.ADAPTERS)


def _table(work: Lowering, units: Sequence[Unit]) -> int:
    table = np.array(units, np.int64)
    work.keep.append(table)
    return address_of(table)


def _low_rank_memory(work: Lowering) -> Buffer:
    """Return the memory for low-rank products, which all ops of adapters share."""
    if "low rank" not in work.shared:
        widths = [
            sum(round_up(pair.rank, LANES) for pair in op.pairs if pair)
            for op in work.plan.ops
            if isinstance(op, AdapterOp)
        ]
        memory = allocate(work.max_rows * FLOAT * max(widths), "low-rank products")
        work.keep.append(memory)
        work.shared["low rank"] = Buffer(address_of(memory), FLOAT * max(widths), private=False)
    found: Buffer = work.shared["low rank"]
    return found


def _no_needs(op: AdapterOp, kv_type: str, step: StepShape) -> Needs:
    return Needs()


def _no_seconds(op: AdapterOp, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    return 0.0


OPS: dict[type[Op], CpuOp] = {
    AddLowRank: CpuOp("adapters", _low_rank, _no_needs, _no_seconds),
    AddLowRankEmbedding: CpuOp("adapters", _low_rank_embedding, _no_needs, _no_seconds),
}
