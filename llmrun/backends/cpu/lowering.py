"""The state that all ops share while a plan is lowered, and the cost of ops in bytes read and multiply-adds computed.

The state consists of memory for values, the addresses of weights and caches, and the records written so far. Profiles
and rooflines compare measured times with the costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from llmrun.backends.cpu.weights import PackedMatrix
from llmrun.base.compiled.host import load_kernels
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, round_up
from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.ops.adapters import AdapterOp
from llmrun.model.plan.ops.linear import Linear
from llmrun.model.plan.ops.rows import ConcatWords
from llmrun.model.plan.shapes import KVShape, LayerKV, LayerState
from llmrun.model.plan.twin import Routing, Rows, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.layouts.experts import Tables
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.shapes import Reach

FLOAT = 4  # bytes


class Needs(Struct, frozen=True):
    """The cost of one or more ops.

    weight_bytes      bytes of packed weights, which are read from memory once per step, however many rows it has
    kv_bytes          bytes that ops read from or write to the KV cache, once per step
    activation_bytes  bytes of activations read and written; they stay in the CPU caches, so memory bandwidth does not
                      limit them
    products          number of int8 multiply-adds, from quantized weights, and from keys and values in q8_0
    float_products    number of float32 multiply-adds, from float weights, and from keys and values of other types
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    products: int = 0
    float_products: int = 0

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, part.name) + getattr(other, part.name) for part in structs.fields(Needs)))


class StepShape(Struct, frozen=True):
    """A step that runs `rows` tokens of one sequence from position `start`.

    The step returns logits and hidden states for `wanted` of the tokens.
    """

    rows: int
    start: int = 0
    wanted: int = 1

    def of(self, value: Value) -> int:
        """Return the number of rows that a value has in this step."""
        return self.wanted if value.rows in (Rows.WANTED, Rows.SCORED) else self.rows * value.copies

    def float_bytes(self, *values: Value) -> int:
        """Return the size in bytes of values stored as float32."""
        return sum(self.of(value) * value.width * FLOAT for value in values)


def kv_position_bytes(shape: KVShape, kv_type: str) -> int:
    """Return the number of bytes that one layer's KV cache uses per position."""
    return shape.block_bytes(kv_type) // BLOCK


LANES = 16
REPLICATED_OUTPUT = records.FLAG_REPLICATED | records.FLAG_PRIVATE_OUTPUT
_PRIVATE_INPUTS = (
    records.FLAG_PRIVATE_INPUT,
    records.FLAG_PRIVATE_SECOND,
    records.FLAG_PRIVATE_THIRD,
    records.FLAG_PRIVATE_FOURTH,
    records.FLAG_PRIVATE_FIFTH,
)

STEP_COUNTS = {  # the words of the step record that contain numbers of rows
    Rows.ALL: records.STEP_ROWS,
    Rows.WANTED: records.STEP_WANTED,
    Rows.SCORED: records.STEP_SCORED,
    Rows.CHOSEN: records.STEP_CHOSEN,
}


class Buffer(Struct, frozen=True):
    """Rows of activations in memory.

    A private buffer is written by a replicated op, so in a step of one row, each thread has its own copy.
    """

    address: int
    stride: int  # bytes from one row to the next
    private: bool


class Needed(IntEnum):
    """The steps in which a record runs."""

    ALWAYS = 0
    ADAPTERS = 1  # steps in which a row uses a LoRA adapter
    IMAGES = 2  # steps with rows of images


class OpRecord(Struct):
    """A kernel call before it is written to memory. `words` is a NamedTuple from plan/ops that is stored at OP_ARGS."""

    kernel: KernelName
    rows: int
    flags: int
    words: Sequence[int]
    # The input, if this record is a matrix product that does not add to an existing output, or else None. If the next
    # record is a matrix product with the same input, no barrier is needed between the records.
    independent_input: Value | None = None
    needed: Needed = Needed.ALWAYS


class LoweredStage(Struct, frozen=True):
    """A stage of a plan: the records from `first` up to, but not including, `end`.

    takes, gives  float32[rows of a step, width], where a step finds its input and leaves its output
    """

    first: int
    end: int
    takes: NDArray[np.float32]
    gives: NDArray[np.float32] | None


@dataclass(slots=True)
class Lowered:
    """Records that are ready to run, and the memory that they refer to."""

    records: NDArray[np.int64]  # [ops, OP_WORDS]
    counters: NDArray[np.int64]  # [ops, 8]; each claim counter has its own cache line
    kernels: list[KernelName]  # the kernel of each record
    origins: list[int]  # for each record, the index of its op in the plan
    written: list[list[tuple[Value, Buffer]]]  # for each op, the values that the op writes to buffers
    logits_width: int  # the vocabulary size, padded to whole vectors; 0 if the model has no logits
    hidden: NDArray[np.float32] | None  # [rows, hidden size]: where the last step left the plan's hidden state
    given: NDArray[np.float32] | None  # [rows, hidden size]: where a step finds the hidden states that it is given
    experts_used: int  # number of rows of a CHOSEN value for each row of the step
    needed: NDArray[np.int8]  # [ops]: the steps in which each record runs, as in Needed
    stages: list[LoweredStage]  # the stages of the plan
    reaches: list[Reach]  # the reaches of the plan
    looks_ahead: NDArray[np.int32]  # [reaches, 1]: 1 if rows of images may look ahead in layers with the reach, or 0
    keep: list[object] = field(default_factory=list)
    _chosen: dict[tuple[Needed, ...], NDArray[np.int64]] = field(default_factory=dict, repr=False)

    def link(self) -> None:
        """Load the kernels and write their addresses to the records. Call this method before the first run."""
        loaded = load_kernels(self.kernels)
        self.records[:, records.OP_KERNEL // records.WORD] = [loaded[name].address for name in self.kernels]
        self._chosen.clear()

    def records_for(self, *optional: Needed) -> NDArray[np.int64]:
        """Return the records of a step that needs these kinds of optional records. Call `link` first."""
        if optional not in self._chosen:
            self._chosen[optional] = self.records[np.isin(self.needed, (Needed.ALWAYS, *optional))]
        return self._chosen[optional]


class RowMemory:
    """An allocator of row buffers for values. Released memory is reused only after a barrier that all threads pass.

    Values whose width is not a multiple of the vector size are never released, because their padding must stay zero.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._released: list[tuple[int, int]] = []
        self.memory: list[NDArray[np.uint8]] = []

    def take(self, n_bytes: int) -> int:
        """Allocate `n_bytes` bytes and return their address. `n_bytes` must be a multiple of the cache line size."""
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
    """The state of lowering a plan to records, op by op.

    `shared` maps names to objects that all ops of one family use.
    """

    def __init__(
        self,
        plan: Plan,
        packed: Mapping[str, PackedMatrix],
        kv: Sequence[NDArray[np.uint8]],
        states: Sequence[NDArray[np.uint8]],
        kv_type: str,
        max_rows: int,
        n_threads: int,
    ) -> None:
        self.plan, self.packed, self.kv, self.kv_type, self.states = plan, packed, kv, kv_type, states
        self._sums_of_products = {
            op.out for op in plan.ops if isinstance(op, AdapterOp) or (isinstance(op, Linear) and op.adds)
        }
        self.max_rows, self.n_threads = max_rows, n_threads
        self.buffers: dict[Value, Buffer] = {}
        self.quantized: dict[Value, Buffer] = {}  # layouts/linear.py describes the layout
        self.tables: dict[Routing, Tables] = {}
        self.keep: list[object] = []
        self.shared: dict[str, Any] = {}
        self.rows = RowMemory()
        self.records: list[OpRecord] = []
        # The addresses that replicated ops have read since the last barrier of a step of one row.
        self._read: set[int] = set()

    def most_rows(self, value: Value) -> int:
        """Return how many rows to allocate for a value. In a step of one row, each thread may have its own copy."""
        return max(self.max_rows, self.n_threads) * value.copies

    def take(self, value: Value, row_bytes: int) -> int:
        """Allocate memory for the rows of a value and return its address.

        `row_bytes` must be a multiple of the cache line size.
        """
        return self.rows.take(self.most_rows(value) * row_bytes)

    def place(self, value: Value, *, private: bool) -> Buffer:
        stride = round_up(value.width * FLOAT, records.CACHE_LINE)
        buffer = Buffer(self.take(value, stride), stride, private)
        self.buffers[value] = buffer
        return buffer

    def is_private_sum(self, value: Value) -> bool:
        """Return whether each thread has its own copy of a sum in a step of one row.

        Private copies save barriers, but require that only row-wise ops compute the value and add to it.
        If matrix products are added to the value, the threads share it, because each thread computes a part of it.
        """
        return value not in self._sums_of_products

    def give_back(self, value: Value) -> None:
        buffer = self.buffers.pop(value, None)
        if buffer is None:
            return
        self.rows.give_back(buffer.address, self.most_rows(value) * buffer.stride)
        self.give_integers_back(value)

    def give_integers_back(self, value: Value) -> None:
        """Release the quantized form of a value after its last use or when the value changes."""
        quantized = self.quantized.pop(value, None)
        if quantized is not None:
            self.rows.give_back(quantized.address, self.most_rows(value) * quantized.stride)

    def buffer_of(self, value: Value) -> Buffer:
        """Return the buffer of a value. The logits have address 0 because each step supplies their memory."""
        if value is self.plan.logits:
            return Buffer(0, round_up(value.width, LANES) * FLOAT, private=False)
        return self.buffers[value]

    def emit(
        self,
        kernel: KernelName,
        value: Value,
        flags: int,
        words: Sequence[int],
        *,
        needed: Needed = Needed.ALWAYS,
    ) -> OpRecord:
        """Append a record that processes the rows of a value."""
        record = OpRecord(kernel, STEP_COUNTS[value.rows], flags, words, needed=needed)
        self.records.append(record)
        if not flags & records.FLAG_REPLICATED and needed is Needed.ALWAYS:
            self._read.clear()
        return record

    def note_reads(self, *addresses: int) -> None:
        """Remember what the last record reads, if threads do not wait after the record in a step of one row."""
        if self.records[-1].flags & records.FLAG_REPLICATED:
            self._read.update(addresses)

    def wait_for_readers(self, address: int, value: Value) -> None:
        """Add a barrier before a write to shared memory, if replicated ops may still read from that memory.

        The barrier belongs to a record that copies nothing for each row of `value`.
        """
        if address in self._read:
            nothing = ConcatWords(*[0] * len(ConcatWords._fields))
            self.emit(KernelName.of("rows.rowwise", "concat"), value, 0, nothing)

    def kept_vector(self, values: NDArray[np.float32]) -> int:
        """Copy a vector, float32[n], padded with zeros to whole SIMD vectors, and return the address of the copy."""
        padded = np.zeros(round_up(values.size, LANES), np.float32)
        padded[: values.size] = values
        self.keep.append(padded)
        return address_of(padded)

    def same_row(self, values: NDArray[np.float32]) -> Buffer:
        """Return a buffer in which every row is `values`, float32[n]."""
        return Buffer(self.kept_vector(values), 0, private=False)

    def cache_of(self, kv: LayerKV) -> tuple[int, int]:
        """Return (address of a layer's first block, bytes per block)."""
        memory = self.kv[kv.group]
        return address_of(memory[kv.layer]), memory.shape[2]

    def state_of(self, state: LayerState) -> tuple[int, int]:
        """Return (address of a layer's state of the first sequence, bytes per sequence)."""
        memory = self.states[state.group]
        return address_of(memory[state.layer]), memory.shape[2]

    def tables_of(self, kv: LayerKV) -> int:
        """Return the index of a layer's block tables in a step's list of tables, which is ordered by window."""
        return self.plan.windows.index(kv.shape.window)


def float_word(value: float) -> int:
    """Encode a float32 in the low half of a word."""
    return int(np.float32(value).view(np.uint32))


def private_inputs(*buffers: Buffer) -> int:
    """Return the flags that mark which of an op's inputs are private. `buffers` are the inputs in order."""
    return sum(flag for flag, buffer in zip(_PRIVATE_INPUTS, buffers, strict=False) if buffer.private)
