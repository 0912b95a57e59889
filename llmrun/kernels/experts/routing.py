"""Routes rows to experts: chooses and weights the experts of each row, and sorts the rows by expert.

The results are the tables described in layouts/experts.py. Routing is cheap, so in a step of one row every thread
computes all of it (records.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.experts import HEAD_ACTIVE, HEAD_EXPERTS, LEAST_SUM, SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from llmrun.kernels.code import curves, simd
from llmrun.kernels.code.load_store import load_f32, load_i32, load_i64, store_f32, store_i32, store_i64
from llmrun.kernels.code.work import PRIVATE_INPUT, REPLICATED, first_item, n_rows, next_item, own_copy
from llmrun.kernels.compiler import inline_function, kernel, kernel_family
from llmrun.model.plan.ops.experts import GroupWords, RouteWords

_ROUTE = records.offsets(RouteWords)
_GROUP = records.offsets(GroupWords)

# --- route ------------------------------------------------------------------------------------------------------------

_NO_RANK = -1 << 31  # the rank of padding and of experts already chosen
_NAN_RANK = _NO_RANK + 1  # lower than the rank of every number, so that NaN is chosen last


@intrinsic
def _store_ranks(typingctx: Any, to: Any, values: Any, count: Any) -> Any:
    """Store integer ranks, int32[16], that sort in the same order as the values. NaN ranks last.

    Only the first `count` values belong to experts; the rest are padding.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, values, count = args
        values = builder.fadd(values, simd.constant(simd.F32X16, 0.0))  # converts -0.0 to 0.0
        bits = builder.bitcast(values, simd.I32X16)
        falling = builder.xor(bits, simd.constant(simd.I32X16, 0x7FFFFFFF))
        ranks = builder.select(builder.icmp_signed("<", bits, simd.constant(simd.I32X16, 0)), falling, bits)
        is_number = builder.fcmp_ordered("ord", values, values)
        ranks = builder.select(is_number, ranks, simd.constant(simd.I32X16, _NAN_RANK))
        lanes = ir.Constant(simd.I32X16, list(range(simd.LANES)))
        is_expert = builder.icmp_signed("<", lanes, simd.emit_splat(builder, builder.trunc(count, simd.I32)))
        simd.emit_store(builder, to, builder.select(is_expert, ranks, simd.constant(simd.I32X16, _NO_RANK)), 4)
        return context.get_dummy_value()

    return types.void(types.int64, simd.f32x16, types.int64), codegen


@intrinsic
def _first_ranks(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return simd.constant(simd.I32X16, _NO_RANK)

    return simd.i32x16(), codegen


@intrinsic
def _higher_ranks(typingctx: Any, best: Any, ranks: Any) -> Any:
    """Return the lane-wise maximum of `best` and the ranks at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        best, address = args
        ranks = simd.emit_load(builder, address, simd.I32X16, 4)
        return builder.select(builder.icmp_signed(">", ranks, best), ranks, best)

    return simd.i32x16(simd.i32x16, types.int64), codegen


@intrinsic
def _higher_numbers(typingctx: Any, numbers: Any, best: Any, ranks: Any, number: Any) -> Any:
    """Return `numbers`, replaced by `number` in the lanes where the ranks at an address are higher than `best`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, best, address, number = args
        ranks = simd.emit_load(builder, address, simd.I32X16, 4)
        new = simd.emit_splat(builder, builder.trunc(number, simd.I32))
        return builder.select(builder.icmp_signed(">", ranks, best), new, numbers)

    return simd.i32x16(simd.i32x16, simd.i32x16, types.int64, types.int64), codegen


@intrinsic
def _highest(typingctx: Any, best: Any, numbers: Any) -> Any:
    """Return the index (16 * vector index + lane) of the first element with the highest rank."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        best, numbers = args

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def smaller(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed("<", a, b), a, b)

        top = simd.emit_splat(builder, simd.emit_fold(builder, best, larger))
        lanes = ir.Constant(simd.I32X16, list(range(simd.LANES)))
        places = builder.add(builder.shl(numbers, simd.constant(simd.I32X16, 4)), lanes)
        largest = simd.constant(simd.I32X16, 0x7FFFFFFF)
        found = builder.select(builder.icmp_signed("==", best, top), places, largest)
        return builder.zext(simd.emit_fold(builder, found, smaller), simd.I64)

    return types.int64(simd.i32x16, simd.i32x16), codegen


@kernel_family
def route(level: str) -> Callable[..., None]:
    """Build the kernel that chooses the experts of each row and computes their weights."""
    exp, sigmoid_of = simd.Operations(level).exp, curves.sigmoid(level)

    @inline_function
    def softmax(values: Any, count: Any) -> Any:
        """Apply softmax to a float32[count] in place. The padding becomes 0."""
        top = simd.splat(types.float32(-float("inf")))
        for at in range(0, count, 16):
            value = simd.load_f32x16(values + 4 * at)
            top = simd.maximum(simd.keep_between(value, 0, count - at, types.float32(-float("inf"))), top)
        top = simd.splat(simd.max_lanes(top))
        total = simd.splat(types.float32(0))
        for at in range(0, count, 16):
            e = exp(simd.subtract(simd.load_f32x16(values + 4 * at), top))
            e = simd.keep_between(e, 0, count - at, types.float32(0))
            simd.store_f32x16(values + 4 * at, e)
            total = simd.add(total, e)
        total = simd.splat(simd.sum_lanes(total))
        for at in range(0, count, 16):
            simd.store_f32x16(values + 4 * at, simd.divide(simd.load_f32x16(values + 4 * at), total))

    @inline_function
    def sigmoid(values: Any, count: Any) -> Any:
        for at in range(0, count, 16):
            simd.store_f32x16(values + 4 * at, sigmoid_of(simd.load_f32x16(values + 4 * at)))

    @inline_function
    def highest(ranks: Any, count: Any) -> Any:
        best = _first_ranks()
        numbers = _first_ranks()
        for at in range(0, count, 16):
            numbers = _higher_numbers(numbers, best, ranks + 4 * at, at // 16)
            best = _higher_ranks(best, ranks + 4 * at)
        return _highest(best, numbers)

    @inline_function
    def score(ranks: Any, size: Any, scratch: Any) -> Any:
        """Return the sum of the two highest values among the ranks of a group. `scratch` is two int32."""
        best, second = types.int64(_NO_RANK), types.int64(_NO_RANK)
        for at in range(0, 4 * size, 4):
            rank = load_i32(ranks + at)
            second = max(second, min(best, rank))
            best = max(best, rank)
        # A rank has the bits of its value, except that the bits after the sign are inverted if it is negative.
        store_i32(scratch, best if best >= 0 else best ^ 0x7FFFFFFF)
        store_i32(scratch + 4, second if second >= 0 else second ^ 0x7FFFFFFF)
        return load_f32(scratch) + load_f32(scratch + 4)

    @inline_function
    def leave_best_groups(op: Any, ranks: Any, count: Any) -> None:
        """Give the experts outside the best groups no rank. The scores of the groups follow the ranks in memory."""
        groups = load_i64(op + _ROUTE.groups)
        size = count // groups
        scores = ranks + (4 * count + 63) // 64 * 64
        for group in range(groups):
            store_f32(scores + 4 * group, score(ranks + 4 * size * group, size, scores + 4 * group))
        for at in range(0, groups, 16):
            _store_ranks(scores + 4 * at, simd.load_f32x16(scores + 4 * at), groups - at)
        for _ in range(load_i64(op + _ROUTE.groups_used)):
            store_i32(scores + 4 * highest(scores, groups), _NO_RANK)
        for group in range(groups):
            if load_i32(scores + 4 * group) != _NO_RANK:
                for expert in range(size * group, size * (group + 1)):
                    store_i32(ranks + 4 * expert, _NO_RANK)

    @inline_function
    def finish(op: Any, chosen: Any, weights: Any, used: Any) -> Any:
        """Normalize the weights of a row, then apply the common scale and each expert's own scale."""
        if load_i64(op + _ROUTE.gating) == SOFTMAX_OF_CHOSEN:
            softmax(weights, used)
        factor = simd.splat(load_f32(op + _ROUTE.scale))
        total = types.float32(1)
        if load_i64(op + _ROUTE.normalized) != 0:
            sums = simd.splat(types.float32(0))
            for at in range(0, used, 16):
                weight = simd.load_f32x16(weights + 4 * at)
                sums = simd.add(sums, simd.keep_between(weight, 0, used - at, types.float32(0)))
            total = simd.sum_lanes(sums)
            if total < types.float32(LEAST_SUM):
                total = types.float32(LEAST_SUM)
        for at in range(0, used, 16):
            weight = simd.divide(simd.load_f32x16(weights + 4 * at), simd.splat(total))
            simd.store_f32x16(weights + 4 * at, simd.multiply(weight, factor))
        scales = load_i64(op + _ROUTE.expert_scales)
        if scales != 0:
            for at in range(0, 4 * used, 4):
                own = load_f32(scales + 4 * load_i32(chosen + at))
                store_f32(weights + at, load_f32(weights + at) * own)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        rows = n_rows(op, step)
        count, used = load_i64(op + _ROUTE.experts), load_i64(op + _ROUTE.used)
        gating, bias = load_i64(op + _ROUTE.gating), load_i64(op + _ROUTE.bias)
        values = load_i64(op + _ROUTE.scratch) + thread * load_i64(op + _ROUTE.scratch_bytes)
        ranks = values + (4 * count + 63) // 64 * 64
        first, source = own_copy(op, step, thread, REPLICATED), own_copy(op, step, thread, PRIVATE_INPUT)
        row = first_item(op, step, thread, n_threads, rows)
        while row < rows:
            logits = load_i64(op + _ROUTE.logits) + (source + row) * load_i64(op + _ROUTE.logits_stride)
            for at in range(0, count, 16):
                simd.store_f32x16(values + 4 * at, simd.load_f32x16(logits + 4 * at))
            if gating == SOFTMAX:
                softmax(values, count)
            if gating == SIGMOID:
                sigmoid(values, count)
            for at in range(0, count, 16):
                value = simd.load_f32x16(values + 4 * at)
                if bias != 0:
                    value = simd.add(value, simd.load_f32x16(bias + 4 * at))
                _store_ranks(ranks + 4 * at, value, count - at)
            if load_i64(op + _ROUTE.groups) != 0:
                leave_best_groups(op, ranks, count)
            to = (first + row) * load_i64(op + _ROUTE.row_bytes)
            chosen, weights = load_i64(op + _ROUTE.chosen) + to, load_i64(op + _ROUTE.weights) + to
            for index in range(used):
                expert = highest(ranks, count)
                store_i32(ranks + 4 * expert, _NO_RANK)
                store_i32(chosen + 4 * index, expert)
                store_f32(weights + 4 * index, load_f32(values + 4 * expert))
            finish(op, chosen, weights, used)
            row = next_item(op, step, row, n_threads, rows)

    return run


# --- group ------------------------------------------------------------------------------------------------------------


@kernel
def group(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Assign slots to all pairs of rows and experts. One thread is enough, because 2,048 slots take only 6 us."""
    if first_item(op, step, thread, n_threads, 1) != 0:
        return
    rows = n_rows(op, step)
    n_experts, used = load_i64(op + _GROUP.n_experts), load_i64(op + _GROUP.used)
    row_bytes = load_i64(op + _GROUP.row_bytes)
    copy = own_copy(op, step, thread, REPLICATED)
    head = load_i64(op + _GROUP.head) + copy * load_i64(op + _GROUP.head_bytes)
    next_slots = head + load_i64(op + _GROUP.next_slots)
    chosen, slots = load_i64(op + _GROUP.chosen) + copy * row_bytes, load_i64(op + _GROUP.slots) + copy * row_bytes
    sources = load_i64(op + _GROUP.sources) + copy * row_bytes
    experts = load_i64(op + _GROUP.experts) + copy * row_bytes
    for expert in range(n_experts):
        store_i32(next_slots + 4 * expert, 0)
    for row in range(rows):
        for index in range(used):
            counter = next_slots + 4 * load_i32(chosen + row * row_bytes + 4 * index)
            store_i32(counter, load_i32(counter) + 1)
    n_active = 0
    slot = 0
    for expert in range(n_experts):
        count = load_i32(next_slots + 4 * expert)
        store_i32(next_slots + 4 * expert, slot)
        if count != 0:
            store_i32(head + HEAD_EXPERTS + 8 * n_active, expert)
            store_i32(head + HEAD_EXPERTS + 8 * n_active + 4, slot)
            n_active += 1
            slot += count
    store_i32(head + HEAD_EXPERTS + 8 * n_active + 4, slot)
    store_i64(head + HEAD_ACTIVE, n_active)
    for row in range(rows):
        for index in range(used):
            at = row * row_bytes + 4 * index
            expert = load_i32(chosen + at)
            slot = load_i32(next_slots + 4 * expert)
            store_i32(next_slots + 4 * expert, slot + 1)
            store_i32(slots + at, slot)
            store_i32(sources + 4 * slot, row)
            store_i32(experts + 4 * slot, expert)
