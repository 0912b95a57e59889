"""Run kernels on buffers next to a guard page: `python -m tests.support.kernels.guard_pages LEVEL END`.

The program prints each kernel's name before running it, and a checksum of all results at the end, so a crash shows
which kernel caused it. Buffers have exactly the sizes that the engine allocates. The engine guarantees that memory for
weights, activations and the cache starts on a cache line, and that each row or group is a whole number of cache lines.
A step's lists (tokens, positions, block tables, rotations, wanted rows) are exactly as long as the step.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import sys
from bisect import bisect_right, insort
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from types import ModuleType
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from llmrun.backends.cpu import weights
from llmrun.backends.cpu.lower import kv_shapes, lower, state_shapes
from llmrun.backends.cpu.lowering import Lowered
from llmrun.backends.cpu.speeds import measured
from llmrun.backends.cpu.weights import PackedMatrix
from llmrun.base.compiled.host import load_kernels
from llmrun.engine.sampler import Sampler, SequenceRows
from llmrun.formats.layouts import arena, records
from llmrun.formats.layouts.arena import address_of
from llmrun.formats.layouts.kv import BLOCK, KV_TYPES, REPLAY_ROWS
from llmrun.model.plan.elementary import Pairing, Rope, rotations_of
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.embedding import PlaceImages
from llmrun.model.plan.ops.experts import ExpertGroups, Gating
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape, seen_ranges
from llmrun.model.plan.twin import Value
from llmrun.options.sampling_params import SamplingParams
from tests.support.backends.filled_weights import fill
from tests.support.kernels.guarded_tokenizers import run_tokenizers
from tests.support.kernels.random_adapters import some_scales, with_random_adapters
from tests.support.kernels.row_ops_plan import row_ops_plan
from tests.support.kernels.runs import EXPERT_TYPES, WEIGHT_TYPES, at_level, random_matrix, width

ENDS = ("start", "end")
# Shapes that test_attention.py uses too, because each additional shape takes five seconds to compile.
SHAPES = (
    *((shape, kv_type) for shape in (AttentionShape(9, 3, 64), AttentionShape(3, 3, 48)) for kv_type in KV_TYPES),
    *((AttentionShape(22, 2, 16), kv_type) for kv_type in KV_TYPES),
    (AttentionShape(4, 2, 48, value_size=32), "f16"),
    (AttentionShape(4, 2, 48, value_size=32), "q4_0:f16"),
    (AttentionShape(4, 2, 48, value_size=32), "f16:q8_0"),
    (AttentionShape(9, 3, 64), "q8_0:q4_0"),
    (AttentionShape(3, 3, 80), "q4_0"),
    (AttentionShape(4, 1, 512), "f16"),
    (AttentionShape(16, 1, 576, value_size=512), "q8_0"),
)
AGAIN = 64  # head size of the shape whose layers attend to their cache twice
RANKS = (3, 16, 17)  # of adapters
STEPS = (1, 2, 3, 8, 17, 41)  # rows, chosen around the tile sizes of every level
CAPPED = (48, 48, "f16")  # head size, value size and cache type of the layers with a soft cap on scores
POSITIONS = 5 * BLOCK  # more than one chunk of attention
WINDOW = 40
NOWHERE = np.int32(-(1 << 31))  # an invalid block number


class GuardedMemory:
    """Buffers between two inaccessible pages.

    Each buffer touches the guard page at its `end` ("start" or "end") and is `missing` bytes too short on that side.
    """

    def __init__(self, end: str, missing: int = 0) -> None:
        self._at_end = end == "end"
        self._shift = missing if self._at_end else -missing
        self._starts: list[int] = []  # sorted
        self._regions: dict[int, mmap.mmap] = {}  # by start
        self._libc = ctypes.CDLL(None, use_errno=True)

    def take(self, n_bytes: int, what: str = "") -> NDArray[np.uint8]:
        """Return uint8[n_bytes] of zeros. Stands in for arena.allocate."""
        page = mmap.PAGESIZE
        inner = max(1, -(-n_bytes // page)) * page
        region = mmap.mmap(-1, inner + 2 * page)
        whole = np.frombuffer(region, np.uint8)
        for guard in (whole.ctypes.data, whole.ctypes.data + page + inner):
            if self._libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        insort(self._starts, whole.ctypes.data)
        self._regions[whole.ctypes.data] = region
        start = page + (inner - n_bytes if self._at_end else 0) + self._shift
        return whole[start : start + n_bytes]

    def copy(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        copied = self.take(array.nbytes).view(array.dtype).reshape(array.shape)
        copied[...] = array
        return copied

    def address(self, array: NDArray[np.generic]) -> int:
        """Return the address of an array, or of a guarded copy if it is not guarded yet. Stands in for
        arena.address_of.

        Record words and counters are not copied, because the test reads them again after kernels change them.
        """
        here = array.ctypes.data
        start = self._starts[index - 1] if (index := bisect_right(self._starts, here)) else here
        inside = start in self._regions and here < start + len(self._regions[start])
        return here if inside or array.dtype == np.int64 else self.copy(array).ctypes.data


def run_plans(memory: GuardedMemory) -> bytes:
    """Run one layer per weight type and shape, and all row ops. Return a checksum of the logits."""
    checksum = hashlib.sha256()
    plans = [(row_ops_plan(), "f16"), (with_random_adapters(row_ops_plan(), RANKS), "f16")]
    for index, kind in enumerate(WEIGHT_TYPES):
        shape, kv_type = SHAPES[index % len(SHAPES)]
        plans.append((_plan(kind, shape, kv_type), kv_type))
    for plan, kv_type in plans:
        packed: dict[str, PackedMatrix] = {}
        for matrix in plan.matrices:
            _say(f"packing.pack.{matrix.kind}")
            packed |= weights.reserve([matrix])
            fill({matrix.name: packed[matrix.name]}, 1)
        shapes = kv_shapes(plan, [POSITIONS // BLOCK] * len(plan.windows), kv_type)
        kv = [memory.take(prod(shape)).reshape(shape) for shape in shapes]
        states = [memory.take(prod(shape)).reshape(shape) for shape in state_shapes(plan, n_sequences=2)]
        for rows in (POSITIONS, *STEPS):  # the first step fills the cache
            lowered = lower(plan, packed, kv, states, kv_type=kv_type, max_rows=rows, n_threads=1)
            lowered.link()
            checksum.update(_run(memory, plan, lowered, rows).tobytes())
    return checksum.digest()


def _plan(kind: str, shape: AttentionShape, kv_type: str) -> Plan:
    """Return a one-layer plan with full and windowed attention.

    Where the weight type allows it, widths are not multiples of a vector.
    """
    columns = width(kind, 96 if kind not in ("f32", "f16", "bf16") else 75)
    heads, seen_width = shape.heads * shape.head_size, shape.heads * shape.value_size
    plan, rope = Plan(), Rope(10_000.0 ** -(np.arange(shape.head_size // 2) / shape.head_size))
    growing = replace(rope, growth=(0.1, 32))
    partial = Rope(np.full(shape.head_size // 4 - 1, 0.3), Pairing.NEOX)

    def matrix(name: str, rows: int, columns: int, of: str = kind) -> Matrix:
        return random_matrix(of, rows, columns, name=name)

    norm = np.ones(columns, np.float32)
    x = plan.embed(matrix("embedding", 37, columns))
    plan.place_images(x, 0.5)
    plan.add_images(x, 1)
    h = plan.rmsnorm(x, norm, 1e-5)
    q = plan.linear(h, matrix("q", heads, columns))
    k = plan.linear(h, matrix("k", shape.kv_heads * shape.head_size, columns))
    v = plan.linear(h, matrix("v", shape.kv_heads * shape.value_size, columns))
    seen = plan.attention(q, k, v, shape, rope, query_rope=growing)
    plan.linear_add(seen, matrix("o", columns, seen_width, "f16"), to=x)
    if shape.head_size == AGAIN:
        plan.linear_add(plan.attention_again(q, shape, rope), matrix("o", columns, seen_width, "f16"), to=x)
    sees = replace(shape, window=WINDOW)
    cap = 20.0 if (shape.head_size, shape.value_size, kv_type) == CAPPED else 0.0
    seen = plan.attention(q, k, v, sees, partial, soft_cap=cap, sinks=np.ones(shape.heads, np.float32))
    plan.linear_add(seen, matrix("o", columns, seen_width, "f16"), to=x)
    gate, up = (plan.linear(x, matrix(name, 101, columns)) for name in ("gate", "up"))
    plan.linear_add(plan.swiglu(gate, up), matrix("down", columns, 101, "f32"), to=x)
    if kind in (*EXPERT_TYPES, "f32"):
        _experts(plan, kind, x)
        _heads(plan, kind, x)
    plan.output(plan.rmsnorm_wanted(x, norm, 1e-5), matrix("output", 37, columns))
    return plan


def _table(window: int, position: int) -> NDArray[np.int32]:
    """Return a block table whose blocks before the window of `position` point outside the cache."""
    table = np.arange(POSITIONS // BLOCK, dtype=np.int32)[::-1].copy()
    gone = max(0, position + 1 - window) // BLOCK if window else 0
    table[:gone] = NOWHERE
    return table


def _experts(plan: Plan, kind: str, x: Value) -> None:
    """Add six experts in three groups, with two active per row: so few that the longest step unpacks their weights."""
    n, columns, inner = 6, x.width // 16 * 16, width(kind, 48)
    h = plan.linear(x, random_matrix("f32", columns, x.width, name="to experts"))
    routing = plan.route(
        plan.linear(h, random_matrix("f32", n, columns, name="router")),
        2,
        Gating.SIGMOID,
        normalized=True,
        selection_bias=np.ones(n, np.float32),
        expert_scales=np.ones(n, np.float32),
        groups=ExpertGroups(3, 1),
    )
    gate, up = (
        plan.expert_linear(h, random_matrix(kind, n * inner, columns, name=f"{name} of experts"), routing)
        for name in ("gate", "up")
    )
    gate = plan.expert_bias(gate, np.ones((n, inner), np.float32), routing)
    down = random_matrix(kind, n * columns, inner, name="down of experts")
    y = plan.expert_linear(plan.swiglu(gate, up), down, routing)
    plan.combine(y, routing, to=h)
    plan.add(plan.combined(y, routing), to=h)
    plan.linear_add(h, random_matrix("f32", x.width, columns, name="from experts"), to=x)


def _heads(plan: Plan, kind: str, x: Value) -> None:
    """Add three heads that are each multiplied by their own matrix."""
    columns = width(kind, 44)
    h = plan.linear(x, random_matrix("f32", 3 * columns, x.width, name="to heads"))
    y = plan.head_linear(h, random_matrix(kind, 3 * 32, columns, name="of heads"), heads=3)
    plan.linear_add(y, random_matrix("f32", x.width, y.width, name="from heads"), to=x)


def _run(memory: GuardedMemory, plan: Plan, lowered: Lowered, rows: int) -> NDArray[np.generic]:
    """Run the records in order in this thread. Returns logits, float32[1 or 2 wanted rows, padded vocabulary]."""
    positions = np.arange(POSITIONS - rows, POSITIONS, dtype=np.int32)
    wanted = np.unique([rows // 2, rows - 1]).astype(np.int32)
    # The rows of the second half are of another sequence, whose block table is the same.
    of_rows = []
    for window in plan.windows:
        first, second = (memory.copy(_table(window, int(positions[0]))).ctypes.data for _ in range(2))
        of_rows += [first] * (rows // 2) + [second] * (rows - rows // 2)
    logits = memory.take(4 * len(wanted) * lowered.logits_width).view(np.float32)
    lists: dict[int, NDArray[np.generic]] = {
        records.STEP_TOKENS: np.arange(rows, dtype=np.int32) % 37,
        records.STEP_POSITIONS: positions,
        records.STEP_TABLES: np.array(of_rows, np.int64),
        records.STEP_SEEN: seen_ranges(plan.reaches, positions, np.zeros(rows, np.int64)),
        records.STEP_WANTED_ROWS: wanted,
        records.STEP_ROTATIONS: rotations_of(plan.ropes, positions),
        records.STEP_RUN_LIST: _runs(rows),
        records.STEP_SCALES: some_scales(rows, len(RANKS)),
        records.STEP_RUN_ROWS: np.arange(rows, dtype=np.int32),
    }
    step = np.zeros(records.STEP_WORDS, np.int64)
    for offset, value in lists.items():
        step[offset // records.WORD] = memory.copy(value).ctypes.data
    step[records.STEP_LOGITS // records.WORD] = logits.ctypes.data
    images = memory.copy(_images(memory, plan, rows))
    step[records.STEP_IMAGES // records.WORD] = images.ctypes.data
    step[records.STEP_ROWS // records.WORD] = rows
    step[records.STEP_WANTED // records.WORD] = step[records.STEP_SCORED // records.WORD] = len(wanted)
    step[records.STEP_RUNS // records.WORD] = len(lists[records.STEP_RUN_LIST])
    step[records.STEP_CHOSEN // records.WORD] = rows * plan.experts_used
    step[records.STEP_REPLICATED // records.WORD] = int(rows == 1)
    kernels = load_kernels(lowered.kernels)
    for record, name in zip(lowered.records, lowered.kernels, strict=True):
        _say(f"{name.module}.{name.function} {dict(name.parameters)}, {rows} rows")
        kernels[name].run(address_of(record), address_of(step), 0, 1)
    return logits


def _images(memory: GuardedMemory, plan: Plan, rows: int) -> NDArray[np.int64]:
    """Return the addresses of the rows of images, which have two parts each. From row 1 on, every third row is one."""
    addresses = np.zeros(rows, np.int64)
    width = next((op.out.width for op in plan.ops if isinstance(op, PlaceImages)), 0)
    for row in range(1, rows if width else 0, 3):
        addresses[row] = memory.copy(np.linspace(-1, 1, 2 * width, dtype=np.float32)).ctypes.data
    return addresses


def _runs(rows: int) -> NDArray[np.int64]:
    """Return the words of two runs, or of one if there is a single row.

    They replay as many rows as possible, and leave as many of their own rows as possible for the next step.
    """
    words = []
    for sequence, (first, count) in enumerate([(0, rows // 2), (rows // 2, rows - rows // 2)]):
        start = POSITIONS - rows + first
        base = max(0, start - REPLAY_ROWS)
        words.append([first, count, sequence, base, start, max(base, start + count - REPLAY_ROWS), sequence, 0])
    return np.array([run for run in words if run[1]], np.int64)


def run_sampling() -> bytes:
    """Draw from vocabularies around the sizes of vectors and stripes. Return a checksum of the tokens."""
    _say("sampling.chain.sample")
    checksum = hashlib.sha256()
    off = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    penalized = SamplingParams(repeat_penalty=1.1, logit_bias={0: 1.0}, top_k=2000)
    for vocabulary in (1, 15, 16, 17, 1023, 2048, 2049, 5001):
        sampler = Sampler()
        logits = np.random.default_rng(vocabulary).normal(0, 3, (2, vocabulary)).astype(np.float32)
        history = [0, vocabulary - 1, vocabulary // 2]
        for params in (off, replace(off, temperature=0), replace(off, top_p=0.9, min_p=0.01), penalized):
            (drawn,) = sampler.sample_rows([SequenceRows(logits, history, params, 3, draft=[0])])
            checksum.update(np.array(drawn.tokens).tobytes())
        for n in (0, 1, vocabulary):
            checksum.update(str(sampler.log_probabilities(logits[0], 0, n)).encode())
    return checksum.digest()


def run_machine() -> None:
    """Run the kernels that measure the machine. Their results are speeds, so there is no checksum."""
    _say("limits.read")
    here = measured.MachineLimits(1, memory_bytes=1 << 20)
    here.read_bandwidth()
    _say("limits.multiply")
    here.multiply_rate()


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def _users_of(name: str) -> list[ModuleType]:
    """Return the modules that import a function from arena.py."""
    modules = [module for key, module in sys.modules.items() if key.startswith("llmrun.")]
    return [module for module in modules if module is not arena and hasattr(module, name)]


def main(level: str, end: str, missing: str = "0") -> None:
    memory = GuardedMemory(end, int(missing))
    with ExitStack() as stack:
        stack.enter_context(at_level(level))
        guarded = {"allocate": memory.take, "allocate_huge": memory.take, "address_of": memory.address}
        for name, stand_in in guarded.items():
            for module in _users_of(name):
                stack.enter_context(mock.patch.object(module, name, stand_in))
        stack.enter_context(mock.patch.object(measured, "_ROUNDS", 1000))
        run_machine()
        plans = run_plans(memory)
        tokenizers = run_tokenizers(memory, _say)
        drawn = run_sampling()
    _say(f"{plans.hex()} {tokenizers.hex()} {drawn.hex()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
