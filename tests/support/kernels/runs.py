"""Run kernels in tests at a chosen instruction level, alone or in a small plan with a team of threads."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from llmrun import kernels
from llmrun.backends.cpu.lower import lower
from llmrun.backends.cpu.team import Team
from llmrun.backends.cpu.weights import reserve
from llmrun.base.compiled import host, levels, loading
from llmrun.base.compiled.host import IDENTIFY, host_levels
from llmrun.base.compiled.kernel import Kernel, KernelName, Progress
from llmrun.base.compiled.levels import AVX512_VNNI, AVX_VNNI, LEVELS, Target
from llmrun.base.compiled.library import EXTENDS
from llmrun.base.compiled.loading import load_for
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, round_up
from llmrun.formats.layouts.kv import KV_TYPES
from llmrun.formats.layouts.linear import PACKED_TYPES, WIDE, WIDENED_TYPES
from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import WeightType
from llmrun.kernels.code.simd import NEON
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import Value
from scripts.kernel_list import FLOAT_TYPES, SHAPELESS, takes_dots
from tests.support.backends.filled_weights import fill
from tests.support.kernels.blocks import put_halves, put_spread_half

PACKED_NAMES = tuple(PACKED_TYPES)
INTEGER_TYPES = (*(name for name in PACKED_NAMES if name != WIDE), *sorted(WIDENED_TYPES))
WEIGHT_TYPES = INTEGER_TYPES + FLOAT_TYPES

# Expert types to test: one scale per block, two levels with minimums, two sub-blocks, a lookup table.
EXPERT_TYPES = ("q8_0", "q4_k", "q6_k", "mxfp4")

_HEAD = {"head_size": 48, "value_size": 48}

LEVEL_NAMES = {level.name: level for level in LEVELS}
LEVELS_HERE = tuple(level.name for level in host_levels())  # best first

# AVX-VNNI's only instruction also exists in AVX-512 VNNI, in another encoding, so processors with that can run the
# kernels of this level.
AVX512_VNNI_ON_YMM = "+avx512f,+avx512vl,+avx512vnni"
EXECUTABLE_LEVELS = (
    *LEVELS_HERE,
    *([AVX_VNNI.name] if AVX512_VNNI.name in LEVELS_HERE and AVX_VNNI.name not in LEVELS_HERE else []),
)

# Every kernel; attention kernels appear in a few shapes. test_instructions.py compares this list with the sources.
ALL_KERNELS = (
    *SHAPELESS,
    *(KernelName.of("attention.rope", "rope_store", **_HEAD, keys=kind, values=kind) for kind in KV_TYPES),
    *(KernelName.of("attention.rope", "rotate", head_size=64, keys=kind) for kind in KV_TYPES),
    *(KernelName.of("attention.attention", "attention", **_HEAD, group=1, keys=kind, values=kind) for kind in KV_TYPES),
    KernelName.of("attention.attention", "attention", head_size=64, value_size=64, group=3, keys="f16", values="f16"),
    KernelName.of("attention.attention", "capped_attention", **_HEAD, group=1, keys="f16", values="f16"),
    *(KernelName.of("attention.attention", "merge", value_size=48, values=kind) for kind in KV_TYPES),
    IDENTIFY,
)

EPSILON = 2.0**-24  # half a unit in the last place of 1.0: the largest relative error of one float32 rounding


def target_of(level_name: str) -> Target:
    """Return the target of a level. The target for AVX-VNNI is one that this processor can run."""
    level = LEVEL_NAMES[level_name]
    target = levels.target_of(level)
    if level is AVX_VNNI and level_name not in LEVELS_HERE:
        return replace(target, features=AVX512_VNNI_ON_YMM)
    return target


# A target for every level, whether or not this machine supports the level.
X86_LINUX, ARM_LINUX = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
TARGETS = {
    level.name: levels.target_of(level, ARM_LINUX if level.name in NEON else X86_LINUX) for level in reversed(LEVELS)
}


@functools.cache
def _takes_level(module: str, function: str) -> bool:
    """Return whether a kernel's source asks for the level, which only families of kernels can do."""
    found = next(
        node
        for node in ast.parse(
            (Path(kernels.__path__[0]) / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        ).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    return "level" in {argument.arg for argument in found.args.args}


def stand_in(name: KernelName, level: str) -> str:
    """Return the level to compile instead of `level`, where compiling both would prove nothing more.

    A kernel that never asks for its level is compiled for the best level here, the lowest and another architecture.
    A level that extends another level differs from it only in kernels with integer dot products.
    """
    if name == IDENTIFY:
        return "portable"
    if level in (LEVELS_HERE[0], "portable", "neondot"):
        return level
    if not _takes_level(name.module, name.function):
        return LEVELS_HERE[0]
    return level if takes_dots(name) else EXTENDS.get(level, level)


def own_kernels(names: Iterable[KernelName], level: str) -> list[KernelName]:
    """Return the kernels that must be compiled at this level itself."""
    return [name for name in names if stand_in(name, level) == level]


@contextmanager
def at_level(level_name: str) -> Iterator[set[KernelName]]:
    """Load kernels for another level that this processor supports, or for its stand-in, inside the block.

    Yield the names of the kernels that the block has loaded.
    """
    loaded: set[KernelName] = set()
    load = loading.load_for

    def load_stand_ins(
        target: Target, names: Sequence[KernelName], progress: Progress | None = None, shipped: str = ""
    ) -> dict[KernelName, Kernel]:
        loaded.update(names)
        found: dict[KernelName, Kernel] = {}
        for level, group in groupby(sorted(names, key=by_stand_in), by_stand_in):
            found |= load(target_of(level), list(group), progress)
        return found

    def by_stand_in(name: KernelName) -> str:
        return stand_in(name, level_name)

    with (
        mock.patch.object(host, "host_target", return_value=target_of(level_name)),
        mock.patch.object(host, "load_for", load_stand_ins),
    ):
        yield loaded


def run_kernel(
    name: KernelName,
    words: Sequence[int],
    step: Mapping[int, int],
    *,
    level: str = LEVELS_HERE[0],
    threads: int = 1,
    flags: int = 0,
) -> None:
    """Run one kernel on an op record with `words` as its arguments. `step` holds the words of the step record."""
    kernel = load_for(target_of(stand_in(name, level)), [name])[name]
    claim = np.zeros(8, np.int64)
    op = np.zeros(records.OP_WORDS, np.int64)
    first = records.OP_ARGS // records.WORD
    op[records.OP_FLAGS // records.WORD] = flags
    op[records.OP_ROWS // records.WORD] = records.STEP_ROWS
    op[records.OP_CLAIM // records.WORD] = address_of(claim)
    op[first : first + len(words)] = words
    step_words = np.zeros(records.STEP_WORDS, np.int64)
    for offset, value in step.items():
        step_words[offset // records.WORD] = value
    with ThreadPoolExecutor(threads) as pool:
        calls = [
            pool.submit(kernel.run, address_of(op), address_of(step_words), thread, threads)
            for thread in range(threads)
        ]
        for call in calls:
            call.result()


def ulps(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest error in units of the last place of `expected`."""
    return float((np.abs(actual - expected) / np.spacing(np.abs(expected))).max())


def padded_rows(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy with rows zero-padded to a whole number of vectors, like the kernels' buffers."""
    rows, width = values.shape
    padded = allocate(rows * round_up(4 * width, records.CACHE_LINE), "rows of a test").view(np.float32)
    padded = padded.reshape(rows, -1)
    padded[:, :width] = values
    return padded


def matrix_of(kind: str, values: NDArray[np.float32], name: str = "w") -> Matrix:
    """Quantize float32[rows, columns] with gguf-py."""
    encoded = gguf.quants.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind.upper()])
    rows, columns = values.shape
    return Matrix.of_bytes(name, kind, rows, columns, np.ascontiguousarray(encoded).view(np.uint8).reshape(-1))


def random_matrix(kind: str, rows: int, columns: int, seed: int = 0, name: str = "w") -> Matrix:
    """Return random weights of roughly standard normal size, for any type, including those that gguf-py cannot
    write."""
    random = np.random.default_rng(seed)
    type_ = BY_NAME[kind.upper()]
    if type_.quantize is not None:
        return matrix_of(kind, random.standard_normal((rows, columns)).astype(np.float32), name)
    data = random.integers(0, 256, (rows, type_.row_bytes(columns)), np.uint8)
    fields = random.uniform(0.01, 0.05, (data.size // type_.block_bytes, 2)).astype(np.float16).view(np.uint16)
    return Matrix.of_bytes(name, kind, rows, columns, with_factors(type_, data, fields).reshape(-1))


def with_factors(type_: WeightType, data: NDArray[np.uint8], halves: NDArray[np.uint16]) -> NDArray[np.uint8]:
    return put_spread_half(data, halves[:, 0]) if type_.name == "IQ1_M" else put_halves(type_, data, halves)


def width(kind: str, at_least: int) -> int:
    """Return the smallest valid number of columns of this type that is at least `at_least`."""
    block = BY_NAME[kind.upper()].block_weights
    return -(-at_least // block) * block


def whole_matrix(kind: str, rows: int, columns: int, seed: int, name: str = "w") -> Matrix:
    """Return a matrix whose products with integers sum exactly in float32.

    It has random integers, and scales and minimums of 1/2 and 1, or small integer multiples of these.
    """
    random = np.random.default_rng(seed)
    type_ = BY_NAME[kind.upper()]
    data = random.integers(0, 256, (rows, type_.row_bytes(columns)), np.uint8)
    blocks = data.reshape(-1, type_.block_bytes)
    if kind == "mxfp4":
        blocks[:, 0] = random.integers(127, 129, len(blocks))
    if kind == "nvfp4":
        blocks[:, :4] = random.choice([0x30, 0x38], (len(blocks), 4))  # 1/2 and 1 in e4m3
    fields = np.exp2(random.integers(-1, 1, (data.size // type_.block_bytes, 2))).astype(np.float16).view(np.uint16)
    return Matrix.of_bytes(name, kind, rows, columns, with_factors(type_, data, fields).reshape(-1))


def run_plan(
    build: Callable[[Plan, Value], None],
    x: NDArray[np.float32],
    *,
    level: str = LEVELS_HERE[0],
    threads: int = 1,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    scales: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Run the ops that `build` appends on x, float32[rows, width]. Returns float32[rows, width of the output].

    The rows enter through a float32 embedding in which row i is token i. `change` may add adapters to the plan, with
    `scales`.
    """
    plan = Plan()
    table = Matrix.of_bytes("x", "f32", len(x), x.shape[1], np.ascontiguousarray(x).view(np.uint8).reshape(-1))
    build(plan, plan.embed(table))
    plan = change(plan)
    assert plan.logits is not None
    rows = np.arange(len(x), dtype=np.int32)
    with at_level(level):
        packed = reserve(plan.matrices)
        fill(packed, threads)
        lowered = lower(plan, packed, [], kv_type="f16", max_rows=len(x), n_threads=threads)
        lowered.link()
        team = Team(lowered, threads)
    logits = np.full((len(x), lowered.logits_width), np.nan, np.float32)
    try:
        inputs = (rows, rows, np.zeros(len(x), np.int64), rows, np.zeros((len(x), 0, 2), np.float32), logits)
        team.run(*inputs, scales=scales)
    finally:
        team.close()
    return logits[:, : plan.logits.width]


def run_linear(
    matrix: Matrix, x: NDArray[np.float32], *, level: str = LEVELS_HERE[0], threads: int = 1
) -> NDArray[np.float32]:
    """Return x . matrix, computed by packing, quantizing and the linear kernel."""
    return run_plan(lambda plan, value: plan.output(value, matrix), x, level=level, threads=threads)
