"""Records of a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.base import FLOAT, LANES, REPLICATED_OUTPUT, float_word, private_inputs
from llmrun.backends.cpu.lowering.linear import panels, source_words
from llmrun.backends.cpu.weights.packed import CHUNK_BYTES
from llmrun.compiled.store import KernelName
from llmrun.layouts import records
from llmrun.layouts.arena import address_of, allocate, round_up
from llmrun.layouts.expert_tables import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, Tables, tables_bytes
from llmrun.layouts.tile_shapes import MOST_GROUPS
from llmrun.plan import ops

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.base import Lowering

_GATINGS = {
    ops.Gating.SOFTMAX: SOFTMAX,
    ops.Gating.SIGMOID: SIGMOID,
    ops.Gating.SOFTMAX_OF_CHOSEN: SOFTMAX_OF_CHOSEN,
}


def route(work: Lowering, op: ops.Route) -> None:
    """Two records: the rows' experts, which threads share out by rows, and the tables, which one makes for all."""
    routing, logits = op.routing, work.buffers[op.logits]
    assert routing.used == work.plan.experts_used, "one step has one number of chosen rows"
    tables = work.tables[routing] = _take_tables(work, routing)
    bias, scales = (0 if of is None else work.kept_vector(of) for of in (op.selection_bias, op.expert_scales))
    words = [logits.address, logits.stride, routing.experts, routing.used, _GATINGS[op.gating], int(op.normalized)]
    words += [float_word(op.scale), bias, *_scratch(work), tables.chosen, tables.weights, tables.row_bytes]
    words.append(scales)
    flags = REPLICATED_OUTPUT | private_inputs(logits)
    work.emit(KernelName.of("experts.routing", "route"), op.logits, flags, words)
    words = [tables.head, tables.head_bytes, tables.next_slots, tables.chosen, tables.slots, tables.sources]
    words += [tables.experts, tables.row_bytes, routing.experts, routing.used]
    work.emit(KernelName.of("experts.routing", "group"), op.logits, REPLICATED_OUTPUT, words)


def expert_linear(work: Lowering, op: ops.ExpertLinear) -> None:
    tables, layout = work.tables[op.routing], work.packed[op.weight.name].layout
    n_groups = layout.n_groups // op.routing.experts
    assert op.out.width == n_groups * 16, "an expert's outputs are whole groups"
    words, flags = source_words(work, op.x, op.weight, n_groups)
    out = work.place(op.out, private=False)
    words += [out.address, out.stride, 0, 0, 0]
    if op.weight.is_integer:
        words += panels(work)
        kernel = KernelName.of("experts.int8", "experts", weight=op.weight.packed)
    else:
        kernel = KernelName.of("experts.floats", "experts", weight=op.weight.kind)
    has_own_rows = op.x.rows is ops.Rows.CHOSEN
    numbers = _own_numbers(work, op.routing) if has_own_rows else tables.sources
    chunk = round_up(-(-CHUNK_BYTES // layout.group_bytes), MOST_GROUPS)
    words += [tables.head, tables.head_bytes, numbers, int(has_own_rows), min(chunk, n_groups)]
    record = work.emit(kernel, op.out, flags, words)
    record.independent_input = op.x


def expert_bias(work: Lowering, op: ops.ExpertBias) -> None:
    tables, x, out = work.tables[op.routing], work.buffers[op.x], work.place(op.out, private=True)
    assert op.bias.shape[1] % LANES == 0  # as the products of experts are
    biases = np.ascontiguousarray(op.bias)
    work.keep.append(biases)
    words = [x.address, x.stride, out.address, out.stride, address_of(biases), biases.strides[0]]
    words += [tables.experts, tables.row_bytes, op.x.width]
    work.emit(KernelName.of("experts.rows", "bias"), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


def combine(work: Lowering, op: ops.Combine) -> None:
    """Onto a sum that the threads share each adds some columns, and all wait."""
    tables, y = work.tables[op.routing], work.buffers[op.y]
    out = work.buffers[op.out] if op.adds else work.place(op.out, private=True)
    words = [y.address, y.stride, tables.slots, tables.weights, tables.row_bytes, op.routing.used]
    words += [out.address, out.stride, op.out.width, int(op.adds)]
    flags = (REPLICATED_OUTPUT if out.private else 0) | private_inputs(y)
    work.emit(KernelName.of("experts.rows", "combine"), op.out, flags, words)


def give_back(work: Lowering, routing: ops.Routing) -> None:
    """The memory of tables that no later op reads."""
    tables = work.tables.pop(routing)
    work.rows.give_back(tables.head, _tables_bytes(work, routing))


def _take_tables(work: Lowering, routing: ops.Routing) -> Tables:
    address = work.rows.take(_tables_bytes(work, routing))
    return Tables.at(address, routing.experts, routing.used, _most_rows(work), work.n_threads)


def _tables_bytes(work: Lowering, routing: ops.Routing) -> int:
    return tables_bytes(routing.experts, routing.used, _most_rows(work), work.n_threads)


def _most_rows(work: Lowering) -> int:
    return max(work.max_rows, work.n_threads)


def _scratch(work: Lowering) -> tuple[int, int]:
    """(address, bytes for a thread) of probabilities and ranks of a row's experts, the same for all layers."""
    if "route" not in work.shared:
        most = max(op.routing.experts for op in work.plan.ops if isinstance(op, ops.Route))
        stride = 2 * round_up(FLOAT * most, records.CACHE_LINE)
        memory = allocate(work.n_threads * stride, "probabilities of experts")
        work.keep.append(memory)
        work.shared["route"] = address_of(memory), stride
    found: tuple[int, int] = work.shared["route"]
    return found


def _own_numbers(work: Lowering, routing: ops.Routing) -> int:
    """Address of the numbers of rows that are slots themselves."""
    if "own numbers" not in work.shared:
        numbers = np.arange(_most_rows(work) * routing.used, dtype=np.int32)
        work.keep.append(numbers)
        work.shared["own numbers"] = address_of(numbers)
    found: int = work.shared["own numbers"]
    return found
