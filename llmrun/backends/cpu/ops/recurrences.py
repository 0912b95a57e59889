"""The delta rule and the recurrences of Mamba-1 and Mamba-2 on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.lowering import FLOAT, LANES, Buffer, Needs, StepShape, private_inputs
from llmrun.backends.cpu.ops.base import CpuOp
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.model.plan.ops.recurrences import DeltaRule, RecurrenceWords, SelectiveScan, Ssd
from llmrun.model.plan.shapes import LayerState, MatrixState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.ops.base import Op

_MOST_VECTORS = 4  # the maximum number of vectors of matrix columns that a thread processes at a time
_NOTHING = Buffer(0, 0, private=False)

_Recurrence = DeltaRule | Ssd | SelectiveScan
# The number of products per row and element of the matrices. Each exponential of `selective_scan` counts as 8.
_PRODUCTS: dict[type[_Recurrence], int] = {DeltaRule: 4, Ssd: 3, SelectiveScan: 12}


def _delta_rule(work: Lowering, op: DeltaRule) -> None:
    inputs = tuple(work.buffers[value] for value in op.inputs)
    _recurrence(work, "delta_rule", op, inputs, op.rate, skip=0, shared=op.shared)


def _ssd(work: Lowering, op: Ssd) -> None:
    x, b, c, gate = (work.buffers[value] for value in op.inputs)
    _recurrence(work, "ssd", op, (c, b, x, gate, _NOTHING), op.rate, skip=work.kept_vector(op.skip), shared=op.shared)


def _selective_scan(work: Lowering, op: SelectiveScan) -> None:
    """Emit the scan, with the rates in the order in which a part of the columns reads the rates."""
    x, b, c, gate = (work.buffers[value] for value in op.inputs)
    rate = op.rate.reshape(-1, LANES, op.rate.shape[1]).transpose(0, 2, 1).reshape(-1)
    inputs = (c, b, x, gate, _NOTHING)
    _recurrence(work, "selective_scan", op, inputs, rate, skip=work.kept_vector(op.skip), shared=1, widths=(1,))


def _recurrence(
    work: Lowering,
    name: str,
    op: _Recurrence,
    inputs: tuple[Buffer, ...],
    rate: NDArray[np.float32],
    *,
    skip: int,
    shared: int,
    widths: Sequence[int] = (_MOST_VECTORS, 2, 1),
) -> None:
    """Emit a record in which the threads divide the heads and the columns of their matrices.

    `widths` are the numbers of vectors of columns that a thread can process together.
    """
    shape = _shape_of(op.state)
    assert shape.key_size % LANES == 0
    assert shape.value_size % LANES == 0
    q, k, v, gate, beta = inputs
    out = work.place(op.out, private=False)
    vectors = next(count for count in widths if shape.value_size % (LANES * count) == 0)
    scratch = _scratch(work, FLOAT * shape.key_size * LANES * vectors)
    state, state_bytes = work.state_of(op.state)
    words = RecurrenceWords(
        q=q.address,
        q_stride=q.stride,
        k=k.address,
        k_stride=k.stride,
        v=v.address,
        v_stride=v.stride,
        gate=gate.address,
        gate_stride=gate.stride,
        beta=beta.address,
        beta_stride=beta.stride,
        out=out.address,
        out_stride=out.stride,
        rate=work.kept_vector(rate),
        bias=work.kept_vector(op.bias),
        skip=skip,
        heads=shape.heads,
        key_heads=shape.key_heads,
        shared=shared,
        key_size=shape.key_size,
        value_size=shape.value_size,
        state=state,
        state_bytes=state_bytes,
        row_bytes=shape.row_bytes,
        scratch=address_of(scratch),
        scratch_bytes=scratch.nbytes // work.n_threads,
    )
    parameters = {"vectors": vectors} if len(widths) > 1 else {}
    kernel = KernelName.of("recurrent.recurrences", name, **parameters)
    work.emit(kernel, op.out, private_inputs(*inputs), words)


def _scratch(work: Lowering, part_bytes: int) -> NDArray[np.uint8]:
    """Return scratch memory for one part of a matrix per thread. All layers with parts of this size share it."""
    key = f"matrix part {part_bytes}"
    if key not in work.shared:
        work.shared[key] = allocate(work.n_threads * part_bytes, "scratch memory of recurrent layers")
        work.keep.append(work.shared[key])
    found: NDArray[np.uint8] = work.shared[key]
    return found


def _shape_of(state: LayerState) -> MatrixState:
    assert isinstance(state.shape, MatrixState)
    return state.shape


def _needs(op: _Recurrence, kv_type: str, step: StepShape) -> Needs:
    """Return the cost. A step reads and writes the matrices once."""
    shape = _shape_of(op.state)
    elements = shape.matrix_bytes // FLOAT
    return Needs(
        kv_bytes=2 * shape.matrix_bytes if step.rows else 0,
        activation_bytes=step.float_bytes(*op.inputs, op.out),
        float_products=step.rows * elements * _PRODUCTS[type(op)],
    )


def _seconds(op: _Recurrence, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    """Return the expected time: the longer of the time to read and write the matrices and the time to multiply."""
    needs = _needs(op, kv_type, step)
    reading = needs.kv_bytes / speeds.read_bandwidth()
    return max(reading, needs.float_products / speeds.linear("f32").products(_shape_of(op.state).key_size))


OPS: dict[type[Op], CpuOp] = {
    DeltaRule: CpuOp("delta rule", _delta_rule, _needs, _seconds),
    Ssd: CpuOp("state space", _ssd, _needs, _seconds),
    SelectiveScan: CpuOp("selective scan", _selective_scan, _needs, _seconds),
}
