"""What all ops need on their way to records: memory for values, weights and caches by address, the records so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.backends.cpu.lowering.needs import FLOAT
from llmrun.backends.cpu.weights.packed import PackedMatrix
from llmrun.compiled.store import KernelName, load_kernels
from llmrun.layouts import records
from llmrun.layouts.arena import address_of, allocate, round_up
from llmrun.plan.kv_shapes import LayerKV
from llmrun.plan.ops.linear import Linear
from llmrun.plan.values import Routing, Rows, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.layouts.expert_tables import Tables
    from llmrun.plan.plan import Plan

LANES = 16
REPLICATED_OUTPUT = records.FLAG_REPLICATED | records.FLAG_PRIVATE_OUTPUT
_PRIVATE_INPUTS = (records.FLAG_PRIVATE_INPUT, records.FLAG_PRIVATE_SECOND, records.FLAG_PRIVATE_THIRD)

_STEP_ROWS = {
    Rows.ALL: records.STEP_ROWS,
    Rows.WANTED: records.STEP_WANTED,
    Rows.CHOSEN: records.STEP_CHOSEN,
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """Rows of activations in memory. Private: written by a replicated op, so a copy a thread in a step of one row."""

    address: int
    stride: int  # bytes from row to row
    private: bool


@dataclass(frozen=True, slots=True)
class QuantizedBuffer:
    """A value as int8 per 32, with its scales, offsets and sums (quantize.py)."""

    integers: Buffer
    scales: int
    offsets: int
    sums: int
    half_sums: int  # of twice the stride
    scale_stride: int


@dataclass(slots=True)
class OpRecord:
    """One call of a kernel on its way to memory. `words`: its NamedTuple in plan/ops; they follow OP_ARGS."""

    kernel: KernelName
    rows: int
    flags: int
    words: Sequence[int]
    # Of an op with a matrix that does not add onto another's output: the next one with the same input needs no barrier.
    independent_input: Value | None = None


@dataclass(slots=True)
class Lowered:
    """Records ready to run, and everything they point to."""

    records: NDArray[np.int64]  # [ops, OP_WORDS]
    counters: NDArray[np.int64]  # [ops, 8]: a claim counter on each cache line
    kernels: list[KernelName]  # of each op
    origins: list[int]  # of each op: the index in the plan of the one that it is made of, or part of
    logits_width: int  # vocabulary padded to whole vectors
    experts_used: int  # rows of a CHOSEN value for each row of the step
    keep: list[object] = field(default_factory=list)

    def link(self) -> None:
        """Load the kernels and put their addresses into the records; must precede the first run."""
        loaded = load_kernels(self.kernels)
        self.records[:, records.OP_KERNEL // records.WORD] = [loaded[name].address for name in self.kernels]


class RowMemory:
    """Row buffers for values: memory goes back only at a barrier that every thread passes.

    A value whose width is no whole number of vectors keeps its memory: its padding must stay zero.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._released: list[tuple[int, int]] = []
        self.memory: list[NDArray[np.uint8]] = []

    def take(self, n_bytes: int) -> int:
        """Address of so many bytes, a whole number of cache lines."""
        waiting = self._free.get(n_bytes)
        if waiting:
            return waiting.pop()
        self.memory.append(allocate(n_bytes, "activations"))
        return address_of(self.memory[-1])

    def give_back(self, address: int, n_bytes: int) -> None:
        self._released.append((address, n_bytes))

    def barrier(self) -> None:
        for address, n_bytes in self._released:
            self._free.setdefault(n_bytes, []).append(address)
        self._released.clear()


class Lowering:
    """A plan on its way to records, op by op. What ops of one family share among them lies in `shared`, by name."""

    def __init__(
        self,
        plan: Plan,
        packed: Mapping[str, PackedMatrix],
        kv: Sequence[NDArray[np.uint8]],
        kv_type: str,
        max_rows: int,
        n_threads: int,
    ) -> None:
        self.plan, self.packed, self.kv, self.kv_type = plan, packed, kv, kv_type
        self._sums_of_products = {op.out for op in plan.ops if isinstance(op, Linear) and op.adds}
        self.max_rows, self.n_threads = max_rows, n_threads
        self.buffers: dict[Value, Buffer] = {}
        self.quantized: dict[Value, QuantizedBuffer] = {}
        self.tables: dict[Routing, Tables] = {}
        self.keep: list[object] = []
        self.shared: dict[str, Any] = {}
        self.rows = RowMemory()
        self.records: list[OpRecord] = []

    def most_rows(self, value: Value) -> int:
        """Rows to have memory for: in a step of one row each thread may have a copy."""
        return max(self.max_rows, self.n_threads) * value.copies

    def take(self, value: Value, row_bytes: int) -> int:
        """Address of memory for the rows of a value, `row_bytes` (whole cache lines) each."""
        return self.rows.take(self.most_rows(value) * row_bytes)

    def place(self, value: Value, *, private: bool) -> Buffer:
        stride = round_up(value.width * FLOAT, records.CACHE_LINE)
        buffer = Buffer(self.take(value, stride), stride, private)
        self.buffers[value] = buffer
        return buffer

    def is_private_sum(self, value: Value) -> bool:
        """A value that only row ops make and add onto: in a step of one row each thread has its own, and no barrier
        is needed. One that products are added onto is shared: each thread makes a part of it."""
        return value not in self._sums_of_products

    def give_back(self, value: Value) -> None:
        buffer = self.buffers.pop(value, None)
        if buffer is None:
            return
        self.rows.give_back(buffer.address, self.most_rows(value) * buffer.stride)
        self.give_integers_back(value)

    def give_integers_back(self, value: Value) -> None:
        """Nobody reads them any more, or the value has become another one."""
        n_rows = self.most_rows(value)
        quantized = self.quantized.pop(value, None)
        if quantized is not None:
            self.rows.give_back(quantized.integers.address, n_rows * quantized.integers.stride)
            for address in (quantized.scales, quantized.offsets, quantized.sums):
                self.rows.give_back(address, n_rows * quantized.scale_stride)
            self.rows.give_back(quantized.half_sums, n_rows * 2 * quantized.scale_stride)

    def buffer_of(self, value: Value) -> Buffer:
        """Where a value is; the logits come with each step, and have no address yet."""
        if value is self.plan.logits:
            return Buffer(0, round_up(value.width, LANES) * FLOAT, private=False)
        return self.buffers[value]

    def emit(self, kernel: KernelName, value: Value, flags: int, words: Sequence[int]) -> OpRecord:
        """A record that works on the rows of a value."""
        record = OpRecord(kernel, _STEP_ROWS[value.rows], flags, words)
        self.records.append(record)
        return record

    def kept_vector(self, values: NDArray[np.float32]) -> int:
        """Address of float32[n], padded with zeros to whole vectors."""
        padded = np.zeros(round_up(values.size, LANES), np.float32)
        padded[: values.size] = values
        self.keep.append(padded)
        return address_of(padded)

    def same_row(self, values: NDArray[np.float32]) -> Buffer:
        """A buffer in which every row is float32[n]."""
        return Buffer(self.kept_vector(values), 0, private=False)

    def cache_of(self, kv: LayerKV) -> tuple[int, int]:
        """(address of a layer's first block, bytes of a block)."""
        memory = self.kv[kv.group]
        return address_of(memory[kv.layer]), memory.shape[2]

    def tables_of(self, kv: LayerKV) -> int:
        """Which of a step's block tables are a layer's: those of its window."""
        return self.plan.windows.index(kv.shape.window)


def float_word(value: float) -> int:
    """A float32 in the low half of a word."""
    return int(np.float32(value).view(np.uint32))


def private_inputs(*buffers: Buffer) -> int:
    """Flags that say which of an op's inputs, in order, are private."""
    return sum(flag for flag, buffer in zip(_PRIVATE_INPUTS, buffers, strict=False) if buffer.private)
