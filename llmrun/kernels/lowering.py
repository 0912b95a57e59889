"""A plan becomes records: kernels chosen, buffers placed, activations quantized for integer weights, barriers set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from llmrun.kernels import plan as ops
from llmrun.kernels import records
from llmrun.kernels.arena import address_of, allocate, round_up
from llmrun.kernels.attention_layout import CHUNK, scratch_bytes, state_floats
from llmrun.kernels.kv_layout import BLOCK, HeadLayout
from llmrun.kernels.store import KernelName, load_kernels
from llmrun.kernels.tile_shapes import panel_bytes
from llmrun.kernels.weights import PackedLayout, PackedMatrix

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOAT = 4
_LANES = 16


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
class _Record:
    """One op on its way to memory: `words` follow OP_ARGS."""

    kernel: KernelName
    rows: int
    flags: int
    words: list[int]
    # Of a linear op that does not add onto another's output: the next one with the same input needs no barrier.
    independent_input: ops.Value | None = None


@dataclass(slots=True)
class Lowered:
    """Records ready to run, and everything they point to."""

    records: NDArray[np.int64]  # [ops, OP_WORDS]
    counters: NDArray[np.int64]  # [ops, 8]: a claim counter on each cache line
    kernels: list[KernelName]  # of each op
    origins: list[int]  # of each op: the index in the plan of the one that it is made of, or part of
    logits_width: int  # vocabulary padded to whole vectors
    keep: list[object] = field(default_factory=list)

    def link(self) -> None:
        """Load the kernels and put their addresses into the records; must precede the first run."""
        loaded = load_kernels(self.kernels)
        self.records[:, records.OP_KERNEL // records.WORD] = [loaded[name].address for name in self.kernels]


class _Rows:
    """Row buffers for values: memory goes back only at a barrier that every thread passes.

    A value whose width is no whole number of vectors keeps its memory: its padding must stay zero.
    """

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._free: dict[int, list[int]] = {}
        self._released: list[tuple[int, int]] = []
        self.memory: list[NDArray[np.uint8]] = []

    def take(self, n_bytes: int) -> int:
        """Address of `n_rows` rows of n_bytes each, which is a whole number of cache lines."""
        waiting = self._free.get(n_bytes)
        if waiting:
            return waiting.pop()
        self.memory.append(allocate(self._n_rows * n_bytes, "activations"))
        return address_of(self.memory[-1])

    def give_back(self, address: int, n_bytes: int) -> None:
        self._released.append((address, n_bytes))

    def barrier(self) -> None:
        for address, n_bytes in self._released:
            self._free.setdefault(n_bytes, []).append(address)
        self._released.clear()


class _Lowering:
    def __init__(
        self,
        plan: ops.Plan,
        packed: Mapping[str, PackedMatrix],
        kv: NDArray[np.uint8],
        kv_type: str,
        max_rows: int,
        n_threads: int,
    ) -> None:
        self._plan, self._packed, self._kv, self._kv_type, self._n_threads = plan, packed, kv, kv_type, n_threads
        self._rows = _Rows(max(max_rows, n_threads))
        self._buffers: dict[ops.Value, Buffer] = {}
        self._quantized: dict[ops.Value, QuantizedBuffer] = {}
        self._records: list[_Record] = []
        self._keep: list[object] = []
        self._attention_buffers: tuple[int, int] | None = None
        self._panels = self._panel_memory()
        self._last_use = {value: index for index, op in enumerate(plan.ops) for value in _inputs(op)}

    def run(self) -> Lowered:
        origins: list[int] = []
        for index, op in enumerate(self._plan.ops):
            self._lower(op)
            self._release(op, index)
            origins += [index] * (len(self._records) - len(origins))
        words = np.zeros((len(self._records), records.OP_WORDS), np.int64)
        counters = np.zeros((len(self._records), records.CACHE_LINE // records.WORD), np.int64)
        for index, record in enumerate(self._records):
            head = [0, self._flags(index), record.rows, address_of(counters[index])]
            words[index, : len(head) + len(record.words)] = head + record.words
        assert self._plan.logits is not None
        width = round_up(self._plan.logits.width, _LANES)
        kernels = [record.kernel for record in self._records]
        keep = [*self._keep, *self._rows.memory, self._packed, self._kv]
        return Lowered(words, counters, kernels, origins, width, keep)

    def _flags(self, index: int) -> int:
        """A barrier after every record, but not between linear ops that read the same value."""
        record = self._records[index]
        following = self._records[index + 1] if index + 1 < len(self._records) else None
        if (
            record.independent_input is not None
            and following is not None
            and following.independent_input is record.independent_input
        ):
            return record.flags
        return record.flags | records.FLAG_BARRIER

    def _release(self, op: ops.Op, index: int) -> None:
        for value in _inputs(op):
            if self._last_use[value] == index and value.width % _LANES == 0 and value in self._buffers:
                buffer = self._buffers.pop(value)
                self._rows.give_back(buffer.address, buffer.stride)
                quantized = self._quantized.pop(value, None)
                if quantized is not None:
                    self._rows.give_back(quantized.integers.address, quantized.integers.stride)
                    for address in (quantized.scales, quantized.offsets, quantized.sums):
                        self._rows.give_back(address, quantized.scale_stride)
                    self._rows.give_back(quantized.half_sums, 2 * quantized.scale_stride)
        following = self._plan.ops[index + 1] if index + 1 < len(self._plan.ops) else None
        shares_input = isinstance(op, ops.Linear) and isinstance(following, ops.Linear) and op.x is following.x
        if not self._records[-1].flags & records.FLAG_REPLICATED and not shares_input:
            self._rows.barrier()

    def _place(self, value: ops.Value, *, private: bool) -> Buffer:
        stride = round_up(value.width * _FLOAT, records.CACHE_LINE)
        buffer = Buffer(self._rows.take(stride), stride, private)
        self._buffers[value] = buffer
        return buffer

    def _emit(self, kernel: KernelName, value: ops.Value, flags: int, words: list[int]) -> _Record:
        rows = records.STEP_WANTED if value.wanted else records.STEP_ROWS
        record = _Record(kernel, rows, flags, words)
        self._records.append(record)
        return record

    def _lower(self, op: ops.Op) -> None:
        match op:
            case ops.Embed():
                self._embed(op)
            case ops.RmsNorm():
                self._rmsnorm(op)
            case ops.Linear():
                self._linear(op)
            case ops.RopeStore():
                self._rope_store(op)
            case ops.Attention():
                self._attention(op)
            case ops.SwiGLU():
                self._swiglu(op)

    def _embed(self, op: ops.Embed) -> None:
        out = self._place(op.out, private=False)
        table = self._packed[op.table.name]
        layout = table.layout
        words = [table.address, layout.group_bytes, *layout.planes, op.table.columns, out.address, out.stride]
        self._emit(KernelName.of("embed", "embed", weight=op.table.packed), op.out, 0, words)

    def _rmsnorm(self, op: ops.RmsNorm) -> None:
        x, out = self._buffers[op.x], self._place(op.out, private=True)
        weight = np.zeros(round_up(op.x.width, _LANES), np.float32)
        weight[: op.x.width] = op.weight
        self._keep.append(weight)
        words = [
            *(x.address, x.stride, out.address, out.stride, address_of(weight), op.x.width),
            _float_word(op.epsilon),
            int(op.out.wanted and not op.x.wanted),
        ]
        self._emit(KernelName.of("rowwise", "rmsnorm"), op.out, _REPLICATED_OUTPUT, words)

    def _quantize(self, value: ops.Value) -> QuantizedBuffer:
        if value in self._quantized:
            return self._quantized[value]
        x = self._buffers[value]
        n_blocks = value.width // 32
        stride, scale_stride = round_up(value.width, records.CACHE_LINE), round_up(4 * n_blocks, records.CACHE_LINE)
        integers = Buffer(self._rows.take(stride), stride, private=True)
        scales, offsets, sums = (self._rows.take(scale_stride) for _ in range(3))
        half_sums = self._rows.take(2 * scale_stride)
        made = QuantizedBuffer(integers, scales, offsets, sums, half_sums, scale_stride)
        flags = _REPLICATED_OUTPUT | (records.FLAG_PRIVATE_INPUT if x.private else 0)
        words = [x.address, x.stride, integers.address, stride, scales, offsets, sums, half_sums]
        words += [scale_stride, n_blocks]
        self._emit(KernelName.of("quantize", "quantize"), value, flags, words)
        self._quantized[value] = made
        return made

    def _linear(self, op: ops.Linear) -> None:
        packed = self._packed[op.weight.name]
        layout = packed.layout
        if op.weight.is_integer:
            x = self._quantize(op.x)
            source = x.integers
            head = [packed.address, layout.n_groups, op.weight.columns // 32, layout.group_bytes]
            head += [*layout.planes, source.address, source.stride]
            head += [x.scales, x.offsets, x.sums, x.half_sums, x.scale_stride]
            kernel = KernelName.of("linear_int8", "linear", weight=op.weight.packed)
        else:
            source = self._buffers[op.x]
            head = [packed.address, layout.n_groups, round_up(op.weight.columns, 4), layout.group_bytes]
            head += [source.address, source.stride]
            kernel = KernelName.of("linear_float", "linear", weight=op.weight.kind)
        is_logits = op.out is self._plan.logits
        if is_logits:
            out = Buffer(0, round_up(op.out.width, _LANES) * _FLOAT, private=False)
        else:
            out = self._buffers[op.out] if op.adds else self._place(op.out, private=False)
        words = [*head, out.address, out.stride, int(op.adds), layout.chunk_groups, int(is_logits)]
        if op.weight.is_integer:
            words += self._panels
        flags = records.FLAG_PRIVATE_INPUT if source.private else 0
        record = self._emit(kernel, op.out if is_logits else op.x, flags, words)
        record.independent_input = None if op.adds else op.x

    def _panel_memory(self) -> tuple[int, int]:
        """(address, bytes for a thread) of memory to unpack weights in, the same for all linear ops."""
        stride = max((panel_bytes(matrix) for matrix in self._plan.matrices if matrix.is_integer), default=0)
        memory = allocate(self._n_threads * stride, "unpacked weights")
        self._keep.append(memory)
        return address_of(memory), stride

    def _kv_layer(self, layer: int) -> tuple[int, int]:
        """(address of a layer's first block, bytes of a block)."""
        return address_of(self._kv[layer]), self._kv.shape[2]

    def _rope_store(self, op: ops.RopeStore) -> None:
        q, k, v = (self._buffers[value] for value in (op.q, op.k, op.v))
        out = self._place(op.out, private=True)
        shape = self._plan.attention_shape
        words = [q.address, q.stride, k.address, k.stride, v.address, v.stride, out.address, out.stride]
        scratch, scratch_stride, *_ = self._attention_memory()
        words += [*self._kv_layer(op.layer), shape.heads, shape.kv_heads, self._plan.rope.frequencies.size]
        words += [scratch, scratch_stride]
        kernel = KernelName.of("rope", "rope_store", head_size=shape.head_size, kv_type=self._kv_type)
        self._emit(kernel, op.out, _REPLICATED_OUTPUT, words)

    def _attention(self, op: ops.Attention) -> None:
        """The merge writes each thread's copy of the one row; of many rows, attention itself writes each once."""
        q, out = self._buffers[op.q], self._place(op.out, private=True)
        shape = self._plan.attention_shape
        scratch, scratch_stride, partials, chunk_stride = self._attention_memory()
        words = [q.address, q.stride, out.address, out.stride, *self._kv_layer(op.layer)]
        words += [shape.kv_heads, _float_word(shape.head_size**-0.5), scratch, scratch_stride, partials, chunk_stride]
        group = shape.heads // shape.kv_heads
        sizes = {"head_size": shape.head_size, "group": group}
        kernel = KernelName.of("attention", "attention", **sizes, kv_type=self._kv_type)
        self._emit(kernel, op.out, records.FLAG_PRIVATE_INPUT, words)
        words = [partials, chunk_stride, out.address, out.stride, shape.heads, scratch, scratch_stride]
        merge = KernelName.of("attention", "merge", head_size=shape.head_size)
        self._emit(merge, op.out, _REPLICATED_OUTPUT, words)

    def _attention_memory(self) -> tuple[int, int, int, int]:
        """(address of the threads' scratch, bytes of one thread's, address of partial results, bytes of a chunk's), the
        same for all layers."""
        shape = self._plan.attention_shape
        scratch_stride = round_up(scratch_bytes(shape.head_size), records.CACHE_LINE)
        chunk_stride = round_up(_FLOAT * shape.heads * state_floats(shape.head_size), records.CACHE_LINE)
        if self._attention_buffers is None:
            n_chunks = -(-self._kv.shape[1] * BLOCK // CHUNK)
            scratch = allocate(self._n_threads * scratch_stride, "attention scratch")
            partials = allocate(n_chunks * chunk_stride, "attention of one row")
            self._keep += [scratch, partials]
            self._attention_buffers = address_of(scratch), address_of(partials)
        scratch_address, partials_address = self._attention_buffers
        return scratch_address, scratch_stride, partials_address, chunk_stride

    def _swiglu(self, op: ops.SwiGLU) -> None:
        gate, up, out = self._buffers[op.gate], self._buffers[op.up], self._place(op.out, private=True)
        words = [gate.address, gate.stride, up.address, up.stride, out.address, out.stride, op.out.width]
        self._emit(KernelName.of("rowwise", "swiglu"), op.out, _REPLICATED_OUTPUT, words)


_REPLICATED_OUTPUT = records.FLAG_REPLICATED | records.FLAG_PRIVATE_OUTPUT


def _inputs(op: ops.Op) -> list[ops.Value]:
    match op:
        case ops.Embed():
            return []
        case ops.RmsNorm():
            return [op.x]
        case ops.Linear():
            return [op.x, op.out] if op.adds else [op.x]
        case ops.RopeStore():
            return [op.q, op.k, op.v]
        case ops.Attention():
            return [op.q]
        case ops.SwiGLU():
            return [op.gate, op.up]


def _float_word(value: float) -> int:
    """A float32 in the low half of a word."""
    return int(np.float32(value).view(np.uint32))


def kv_shape(shape: ops.AttentionShape, n_blocks: int, kv_type: str) -> tuple[int, int, int]:
    """Shape of the KV cache's bytes: [layers, blocks, bytes of a block]."""
    return shape.layers, n_blocks, shape.kv_heads * HeadLayout.of(kv_type, shape.head_size).n_bytes


def lower(
    plan: ops.Plan,
    packed: Mapping[str, PackedMatrix],
    kv: NDArray[np.uint8],
    *,
    kv_type: str,
    max_rows: int,
    n_threads: int,
) -> Lowered:
    """Records for `plan` over packed weights and a KV cache of `kv_shape`."""
    return _Lowering(plan, packed, kv, kv_type, max_rows, n_threads).run()


def scratch_needed(plan: ops.Plan, *, kv_type: str, max_rows: int, n_threads: int) -> int:
    """Bytes of the activations and all else that `lower` takes memory for, by doing it with weights and a KV cache that
    are not there. Attention's partial results, 0.2 % of a KV cache, are counted for one block of it."""
    nowhere = np.empty(0, np.uint8)
    packed = {matrix.name: PackedMatrix(matrix, PackedLayout.of(matrix), nowhere) for matrix in plan.matrices}
    kv = np.broadcast_to(np.zeros(1, np.uint8), kv_shape(plan.attention_shape, 1, kv_type))
    lowered = lower(plan, packed, kv, kv_type=kv_type, max_rows=max_rows, n_threads=n_threads)
    return sum(part.nbytes for part in lowered.keep if isinstance(part, np.ndarray) and part is not kv)
