"""Mixtures of experts on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering import FLOAT, LANES, REPLICATED_OUTPUT, Needs, StepShape, float_word, private_inputs
from llmrun.backends.cpu.ops.base import CpuOp, reads_and_writes, takes_as_long_as
from llmrun.backends.cpu.ops.linear import product_input, product_words, quantized_bytes
from llmrun.backends.cpu.weights import PackedLayout, product_kernel
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, round_up
from llmrun.formats.layouts.experts import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, Tables, tables_bytes
from llmrun.formats.layouts.linear import MOST_GROUPS
from llmrun.model.plan.ops.experts import (
    Combine,
    CombineWords,
    ExpertBias,
    ExpertBiasWords,
    ExpertLinear,
    Gating,
    GroupWords,
    Route,
    RouteWords,
)
from llmrun.model.plan.twin import Rows

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.twin import Routing

_GATINGS = {
    Gating.SOFTMAX: SOFTMAX,
    Gating.SIGMOID: SIGMOID,
    Gating.SOFTMAX_OF_CHOSEN: SOFTMAX_OF_CHOSEN,
}


def _route(work: Lowering, op: Route) -> None:
    """Emit a record that chooses experts, and a record that builds the routing tables.

    Each thread chooses the experts for some of the rows. One thread builds the tables.
    """
    routing, logits = op.routing, work.buffers[op.logits]
    assert routing.used == work.plan.experts_used, "all layers must use the same number of experts"
    tables = work.tables[routing] = _take_tables(work, routing)
    bias, scales = (0 if of is None else work.kept_vector(of) for of in (op.selection_bias, op.expert_scales))
    scratch, scratch_bytes = _scratch(work)
    words = RouteWords(
        logits=logits.address,
        logits_stride=logits.stride,
        experts=routing.experts,
        used=routing.used,
        gating=_GATINGS[op.gating],
        normalized=int(op.normalized),
        scale=float_word(op.scale),
        bias=bias,
        scratch=scratch,
        scratch_bytes=scratch_bytes,
        chosen=tables.chosen,
        weights=tables.weights,
        row_bytes=tables.row_bytes,
        expert_scales=scales,
        groups=0 if op.groups is None else op.groups.count,
        groups_used=0 if op.groups is None else op.groups.used,
    )
    flags = REPLICATED_OUTPUT | private_inputs(logits)
    work.emit(KernelName.of("experts.routing", "route"), op.logits, flags, words)
    group = GroupWords(
        head=tables.head,
        head_bytes=tables.head_bytes,
        next_slots=tables.next_slots,
        chosen=tables.chosen,
        slots=tables.slots,
        sources=tables.sources,
        experts=tables.experts,
        row_bytes=tables.row_bytes,
        n_experts=routing.experts,
        used=routing.used,
    )
    work.emit(KernelName.of("experts.routing", "group"), op.logits, REPLICATED_OUTPUT, group)


def _expert_linear(work: Lowering, op: ExpertLinear) -> None:
    tables, layout = work.tables[op.routing], work.packed[op.weight.name].layout
    n_groups = layout.n_groups // op.routing.experts
    assert op.out.width == n_groups * 16, "an expert's outputs must be whole groups"
    source = product_input(work, op.x, op.weight)
    out = work.place(op.out, private=False)
    has_own_rows = op.x.rows is Rows.CHOSEN
    # A step of one row reads only the matrices of the `used` experts, which must contain chunks for every thread.
    chunk = round_up(layout.chunk_groups(work.n_threads, n_groups * op.routing.used), MOST_GROUPS)
    words = product_words(work, op.weight, source, out, n_groups, min(chunk, n_groups))._replace(
        tables=tables.head,
        tables_bytes=tables.head_bytes,
        row_numbers=_own_numbers(work, op.routing) if has_own_rows else tables.sources,
        own_rows=int(has_own_rows),
    )
    record = work.emit(product_kernel(op.weight, "experts", "experts"), op.out, private_inputs(source), words)
    record.independent_input = op.x


def _expert_bias(work: Lowering, op: ExpertBias) -> None:
    tables, x, out = work.tables[op.routing], work.buffers[op.x], work.place(op.out, private=True)
    assert op.bias.shape[1] % LANES == 0  # the output size of every expert is a multiple of LANES
    biases = np.ascontiguousarray(op.bias)
    work.keep.append(biases)
    words = ExpertBiasWords(
        x=x.address,
        x_stride=x.stride,
        out=out.address,
        out_stride=out.stride,
        bias=address_of(biases),
        bias_stride=biases.strides[0],
        experts=tables.experts,
        row_bytes=tables.row_bytes,
        width=op.x.width,
    )
    work.emit(KernelName.of("experts.rows", "bias"), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


def _combine(work: Lowering, op: Combine) -> None:
    """Emit the weighted sum of the experts' outputs.

    If the threads share the destination, each thread adds some of the columns, and all threads wait at a barrier.
    """
    tables, y = work.tables[op.routing], work.buffers[op.y]
    out = work.buffers[op.out] if op.adds else work.place(op.out, private=True)
    words = CombineWords(
        y=y.address,
        y_stride=y.stride,
        slots=tables.slots,
        weights=tables.weights,
        row_bytes=tables.row_bytes,
        used=op.routing.used,
        out=out.address,
        out_stride=out.stride,
        width=op.out.width,
        adds=int(op.adds),
    )
    flags = (REPLICATED_OUTPUT if out.private else 0) | private_inputs(y)
    work.emit(KernelName.of("experts.rows", "combine"), op.out, flags, words)


# --- tables ----------------------------------------------------------------------------------------------------------


def give_back_tables(work: Lowering, routing: Routing) -> None:
    """Release the memory of routing tables that no later op reads."""
    tables = work.tables.pop(routing)
    work.rows.give_back(tables.head, _tables_bytes(work, routing))


def _take_tables(work: Lowering, routing: Routing) -> Tables:
    address = work.rows.take(_tables_bytes(work, routing))
    return Tables.at(address, routing.experts, routing.used, _most_rows(work), work.n_threads)


def _tables_bytes(work: Lowering, routing: Routing) -> int:
    return tables_bytes(routing.experts, routing.used, _most_rows(work), work.n_threads)


def _most_rows(work: Lowering) -> int:
    return max(work.max_rows, work.n_threads)


def _scratch(work: Lowering) -> tuple[int, int]:
    """Return (address, bytes per thread) of the scratch memory for a row's probabilities, ranks and scores of groups.

    All layers share this memory.
    """
    if "route" not in work.shared:
        most = max(routing.experts for op in work.plan.ops if (routing := op.routed_by))
        stride = 3 * round_up(FLOAT * most, records.CACHE_LINE)
        memory = allocate(work.n_threads * stride, "probabilities of experts")
        work.keep.append(memory)
        work.shared["route"] = address_of(memory), stride
    found: tuple[int, int] = work.shared["route"]
    return found


def _own_numbers(work: Lowering, routing: Routing) -> int:
    """Return the address of the row indices 0, 1, 2 and so on, for inputs that have one row per slot."""
    if "own numbers" not in work.shared:
        numbers = np.arange(_most_rows(work) * routing.used, dtype=np.int32)
        work.keep.append(numbers)
        work.shared["own numbers"] = address_of(numbers)
    found: int = work.shared["own numbers"]
    return found


# --- cost and speed --------------------------------------------------------------------------------------------------


def _linear_needs(op: ExpertLinear, kv_type: str, step: StepShape) -> Needs:
    """Return the cost, including the weights of the experts that are likely to be active.

    The estimate assumes that rows choose all experts with the same probability.
    """
    rows, routing = step.of(op.out), op.routing
    missed: float = (1 - routing.used / routing.experts) ** step.rows
    weight_bytes = round(PackedLayout.of(op.weight).n_bytes * (1 - missed))
    products = rows * op.out.width * op.weight.columns
    written = step.float_bytes(op.out)
    if op.weight.is_integer:
        return Needs(weight_bytes, 0, quantized_bytes(op.x, rows) + written, products=products)
    return Needs(weight_bytes, 0, rows * op.x.width * FLOAT + written, float_products=products)


def _linear_seconds(op: ExpertLinear, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    """Return the time to read the weights plus the time to multiply by them, in seconds.

    Each expert processes too few rows for the multiplication to hide the memory reads. With 719 MB of experts, 64, 128,
    256 and 512 rows took 23, 35, 58 and 100 ms. This function estimates 29, 38, 56 and 92 ms.
    """
    needs = _linear_needs(op, kv_type, step)
    speed = speeds.linear(op.weight.packed)
    multiplying = (needs.products + needs.float_products) / speed.products(op.weight.columns)
    return speed.op + needs.weight_bytes / speed.read + (multiplying if step.rows > 1 else 0.0)


def _bias_needs(op: ExpertBias, kv_type: str, step: StepShape) -> Needs:
    return Needs(step.of(op.x) * op.x.width * FLOAT, activation_bytes=step.float_bytes(op.x, op.out))


OPS: dict[type[Op], CpuOp] = {
    Route: CpuOp("route", _route, reads_and_writes(lambda op: (op.logits,)), takes_as_long_as("swiglu", "logits")),
    ExpertLinear: CpuOp("experts", _expert_linear, _linear_needs, _linear_seconds),
    ExpertBias: CpuOp("bias", _expert_bias, _bias_needs, takes_as_long_as("rmsnorm")),
    Combine: CpuOp(
        "combine",
        _combine,
        reads_and_writes(lambda op: (op.y, *(op.out,) * (1 + op.adds))),
        takes_as_long_as("rmsnorm", "y"),
    ),
}
