"""Records of ops on whole rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.base import FLOAT, LANES, REPLICATED_OUTPUT, Buffer, float_word, private_inputs
from llmrun.compiled.store import KernelName
from llmrun.layouts import records
from llmrun.layouts.arena import round_up
from llmrun.plan import ops
from llmrun.plan.kv_shapes import ConvolutionShape

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.base import Lowering


# --- norms -----------------------------------------------------------------------------------------------------------


def rmsnorm(work: Lowering, op: ops.RmsNorm) -> None:
    _norm(work, "rmsnorm", op, op.x.width, last_word=1)


def headnorm(work: Lowering, op: ops.HeadNorm) -> None:
    head_size = op.weight.size
    assert head_size % LANES == 0
    _norm(work, "rmsnorm", op, head_size, last_word=op.x.width // head_size)


def layernorm(work: Lowering, op: ops.LayerNorm) -> None:
    bias = np.zeros_like(op.weight) if op.bias is None else op.bias
    _norm(work, "layernorm", op, op.x.width, last_word=work.kept_vector(bias))


def _norm(
    work: Lowering, name: str, op: ops.RmsNorm | ops.HeadNorm | ops.LayerNorm, width: int, last_word: int
) -> None:
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    gathers = op.out.rows is ops.Rows.WANTED and op.x.rows is not ops.Rows.WANTED
    words = [x.address, x.stride, out.address, out.stride, work.kept_vector(op.weight), width]
    words += [float_word(op.epsilon), int(gathers), last_word]
    work.emit(KernelName.of("rows.norms", name), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


# --- activations -----------------------------------------------------------------------------------------------------


def gated(work: Lowering, op: ops.Gated) -> None:
    _gated(work, op, op.gate, work.buffers[op.up])


def activate(work: Lowering, op: ops.Activate) -> None:
    """A gate whose other side is 1, the same for all rows."""
    _gated(work, op, op.x, _same_for_all_rows(work, np.ones(op.x.width, np.float32)))


def _gated(work: Lowering, op: ops.Gated | ops.Activate, value: ops.Value, up: Buffer) -> None:
    gate, out = work.buffers[value], work.place(op.out, private=True)
    words = [gate.address, gate.stride, up.address, up.stride, out.address, out.stride, op.out.width]
    kernel = KernelName.of("rows.rowwise", "gated", activation=op.activation.value)
    work.emit(kernel, op.out, REPLICATED_OUTPUT | private_inputs(gate, up), words)


def _same_for_all_rows(work: Lowering, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Buffer:
    return Buffer(work.kept_vector(values), 0, private=False)


# --- sums ------------------------------------------------------------------------------------------------------------

_NOTHING = Buffer(0, 0, private=False)


def bias(work: Lowering, op: ops.Bias) -> None:
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    _add(work, op.out, out, x, _same_for_all_rows(work, op.bias), 1.0, _NOTHING)


def add(work: Lowering, op: ops.Add) -> None:
    out = work.buffers[op.out]
    _add(work, op.out, out, out, work.buffers[op.y], op.scale, _NOTHING)


def add_gated(work: Lowering, op: ops.AddGated) -> None:
    out = work.buffers[op.out]
    _add(work, op.out, out, out, work.buffers[op.y], 1.0, work.buffers[op.gate])


def scale(work: Lowering, op: ops.Scale) -> None:
    """0 + factor * x."""
    x = work.buffers[op.x]
    _add(work, op.x, x, _same_for_all_rows(work, np.zeros(op.x.width, np.float32)), x, op.factor, _NOTHING)


def _add(work: Lowering, value: ops.Value, out: Buffer, x: Buffer, y: Buffer, factor: float, gate: Buffer) -> None:
    """Onto a sum that the threads share one of them adds, and all wait for it."""
    words = [out.address, out.stride, x.address, x.stride, y.address, y.stride, value.width]
    words += [float_word(factor), gate.address, gate.stride]
    flags = (REPLICATED_OUTPUT if out.private else 0) | private_inputs(x, y, gate)
    work.emit(KernelName.of("rows.rowwise", "add"), value, flags, words)


# --- parts of rows ---------------------------------------------------------------------------------------------------


def columns(work: Lowering, op: ops.Columns) -> None:
    """Copied: what reads a row takes what follows its last feature for zeros."""
    x = work.buffers[op.x]
    part = _Part(x, FLOAT * op.first, FLOAT * op.x.width // op.groups, FLOAT * op.out.width // op.groups)
    _join(work, part, _Part(_NOTHING, 0, 0, 0), op.groups, op.out)


def join(work: Lowering, op: ops.Join) -> None:
    assert op.a.rows is op.b.rows
    of_b = FLOAT * op.b.width // op.groups
    of_a = FLOAT * op.out.width // op.groups - of_b
    alone = FLOAT * op.a.width == of_a
    a, b = work.buffers[op.a], work.buffers[op.b]
    _join(work, _Part(a, 0, 0 if alone else of_a, of_a), _Part(b, 0, of_b, of_b), op.groups, op.out)


@dataclass(frozen=True, slots=True)
class _Part:
    """What is taken from a row for each part of another; in bytes."""

    of: Buffer
    first: int
    step: int  # from one to the next
    size: int

    @property
    def words(self) -> list[int]:
        return [self.of.address + self.first, self.of.stride, self.step, self.size]


def _join(work: Lowering, a: _Part, b: _Part, n_parts: int, value: ops.Value) -> None:
    out = work.place(value, private=True)
    words = [*a.words, *b.words, out.address, out.stride, n_parts]
    work.emit(KernelName.of("rows.slices", "join"), value, REPLICATED_OUTPUT | private_inputs(a.of, b.of), words)


# --- what looks back, and what comes last ----------------------------------------------------------------------------


def convolve(work: Lowering, op: ops.Convolve) -> None:
    """First all rows are kept, then they look back on each other."""
    shape = op.place.shape
    assert isinstance(shape, ConvolutionShape)
    assert shape.width % LANES == 0
    x, out = work.buffers[op.x], work.place(op.out, private=True)
    cache, block_bytes = work.cache_of(op.place)
    words = [x.address, x.stride, cache, block_bytes, work.tables_of(op.place), shape.width]
    work.emit(KernelName.of("rows.convolution", "keep"), op.out, records.FLAG_REPLICATED | private_inputs(x), words)
    by_tap = work.kept_vector(np.ascontiguousarray(op.weight.T).reshape(-1))
    words += [out.address, out.stride, by_tap, shape.taps]
    work.emit(KernelName.of("rows.convolution", "convolve"), op.out, REPLICATED_OUTPUT | private_inputs(x), words)


def soft_cap(work: Lowering, op: ops.SoftCap) -> None:
    assert op.x is work.plan.logits
    words = [round_up(op.x.width, LANES) * FLOAT, op.x.width, float_word(op.cap)]
    work.emit(KernelName.of("rows.rowwise", "soft_cap"), op.x, 0, words)
