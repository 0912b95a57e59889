"""Tests that packing puts every value of the file where the kernels read it, and adds nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.backends.cpu.weights import PackedLayout, PackedMatrix, packing_kernels, reserve
from llmrun.base.errors import ModelFileError
from llmrun.formats.layouts import records
from llmrun.formats.layouts.linear import PACKED_TYPES, WIDENED_TYPES
from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import Scales
from llmrun.model.plan.matrix import SUPPORTED, Matrix
from llmrun.model.plan.twin import dequantized
from scripts.kernel_list import FLOAT_TYPES
from tests.support.backends.filled_weights import fill
from tests.support.kernels.runs import (
    INTEGER_TYPES,
    LEVELS_HERE,
    WEIGHT_TYPES,
    at_level,
    random_matrix,
    width,
)
from tests.support.tiers import examples


def packed_from(matrix: Matrix, threads: int = 2) -> PackedMatrix:
    packed = reserve([matrix])
    fill(packed, threads)
    return packed[matrix.name]


def unpacked(packed: PackedMatrix) -> NDArray[np.float32]:
    """Return float32[groups * 16, columns], read by the documented layout alone."""
    kind, layout = packed.matrix.kind, packed.layout
    groups = layout.n_groups
    if kind in FLOAT_TYPES:
        element = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}[kind]
        columns = -(-packed.matrix.columns // 4) * 4
        plane = packed.data.view(element)[:, : columns * 16].reshape(groups, columns, 16)
        bits = np.ascontiguousarray(plane.transpose(0, 2, 1)).reshape(groups * 16, columns)
        if kind == "bf16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(np.float32 if kind == "f32" else np.float16).astype(np.float32)
    type_ = PACKED_TYPES[packed.matrix.packed]
    products = unpacked_integers(packed) * unpacked_factors(packed, type_.scales_at, type_.upper_scales_at)
    if type_.mins:
        products += unpacked_factors(packed, type_.mins_at, type_.upper_mins_at)
    return products.reshape(groups * 16, -1)


def read_blocks(packed: PackedMatrix, offset_of: Callable[[Any, Any], Any], n_bytes: int) -> NDArray[np.uint8]:
    """Return uint8[groups, blocks, n_bytes]: the bytes of each block at its offset."""
    blocks = np.arange(packed.matrix.columns // 32)
    places = blocks % PACKED_TYPES[packed.matrix.packed].segment_blocks
    starts = np.asarray(offset_of(blocks - places, places))
    return np.ascontiguousarray(packed.data[:, starts[:, None] + np.arange(n_bytes)])


def unpacked_integers(packed: PackedMatrix) -> NDArray[np.float32]:
    """Return float32[groups * 16, sub-blocks of a row, columns of a sub-block]."""
    type_, groups = PACKED_TYPES[packed.matrix.packed], packed.layout.n_groups
    blocks = packed.matrix.columns // 32
    values = np.zeros((groups, blocks, 8, 16, 4), np.uint8)
    place = 0
    for plane, bits in enumerate(type_.planes):
        vectors = read_blocks(packed, partial(type_.values_at, plane), 64 * bits).reshape(groups, blocks, bits, 16, 4)
        for word in range(8):
            some = vectors[:, :, word % bits] >> (bits * (word // bits)) & ((1 << bits) - 1)
            values[:, :, word] |= (some << place).astype(np.uint8)
        place += bits
    in_order = values.transpose(0, 3, 1, 2, 4).reshape(groups * 16, -1, type_.sub_columns)
    if type_.bits == 8:
        return in_order.view(np.int8).astype(np.float32)
    if type_.table:
        return np.array(type_.table, np.float32)[in_order]
    return in_order.astype(np.float32) - type_.zero


def unpacked_factors(
    packed: PackedMatrix, offset_of: Callable[[Any, Any], Any], upper_offset_of: Callable[[Any, Any], Any]
) -> NDArray[np.float32]:
    """Return scales or minimums, float32[groups * 16, sub-blocks of a row, 1]."""
    type_ = PACKED_TYPES[packed.matrix.packed]
    groups, blocks = packed.layout.n_groups, packed.matrix.columns // 32
    stored = read_blocks(packed, offset_of, 16 * type_.scale_bytes)
    if type_.scales is Scales.F16:
        factors = stored.view(np.float16).astype(np.float32)
    elif type_.scales is Scales.F32:
        factors = stored.view(np.float32)
    elif type_.scales is Scales.E8M0:
        factors = np.ldexp(np.float32(1), stored.astype(np.int32) - 128).astype(np.float32)
    else:
        factors = stored.view(np.int8).astype(np.float32)
    factors = factors.reshape(groups, blocks, type_.sub_blocks, 16)
    if type_.two_levels:
        factors = factors * read_blocks(packed, upper_offset_of, 32).view(np.float16).astype(np.float32)[:, :, None]
    return factors.reshape(groups, -1, 16).transpose(0, 2, 1).reshape(groups * 16, -1, 1)


@pytest.mark.push
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@given(rows=st.integers(1, 70), blocks=st.integers(1, 6), odd=st.integers(0, 31), threads=st.integers(1, 4))
@settings(max_examples=examples(25))
def test_packed_weights_are_the_files(kind: str, rows: int, blocks: int, odd: int, threads: int) -> None:
    columns = width(kind, 32 * blocks) + (odd if kind in FLOAT_TYPES else 0)
    matrix = random_matrix(kind, rows, columns)
    packed = unpacked(packed_from(matrix, threads))
    np.testing.assert_array_equal(packed[:rows, :columns], dequantized(matrix))
    assert not packed[:rows, columns:].any(), "padded columns must be zero"


@pytest.mark.push
@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_packing_is_the_same_at_every_level(level: str, kind: str) -> None:
    matrix = random_matrix(kind, 37, width(kind, 96))
    with at_level(level):
        data = packed_from(matrix).data
    with at_level("portable"):
        np.testing.assert_array_equal(data, packed_from(matrix).data)


@pytest.mark.push
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_missing_rows_of_the_last_group_are_zero(kind: str) -> None:
    """Their products must be zero, because the kernels write them past the end of a row."""
    packed = packed_from(random_matrix(kind, 17, width(kind, 64)))
    assert not unpacked(packed)[17:].any()


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_groups_begin_on_cache_lines(kind: str) -> None:
    """The kernels use aligned loads of 64 bytes."""
    matrices = [random_matrix(kind, rows, width(kind, 32 * rows), name=f"w{rows}") for rows in (1, 3, 17)]
    for packed in reserve(matrices).values():
        assert packed.address % records.CACHE_LINE == 0
        assert packed.layout.group_bytes % records.CACHE_LINE == 0


@pytest.mark.push
def test_matrices_do_not_overlap() -> None:
    matrices = [random_matrix(kind, 19 + i, width(kind, 64), name=kind) for i, kind in enumerate(WEIGHT_TYPES)]
    packed = reserve(matrices)
    fill(packed, 2)
    for matrix in matrices:
        np.testing.assert_array_equal(unpacked(packed[matrix.name])[: matrix.rows], dequantized(matrix))


def test_packing_adds_little_to_the_files_bytes() -> None:
    """Uses the widths of real models. The scales of a short row are padded to a cache line."""
    for kind in (kind for kind in WEIGHT_TYPES if kind not in WIDENED_TYPES):
        for rows, columns in ((576, 576), (1536, 576), (576, 1536), (2048, 8192)):
            columns = width(kind, columns)
            n_bytes = rows * BY_NAME[kind.upper()].row_bytes(columns)
            layout = PackedLayout.of(Matrix.of_bytes("w", kind, rows, columns, np.zeros(n_bytes, np.uint8)))
            most = {"q2_k": 1.21, "q3_k": 1.05, "q4_k": 1.04, "q5_k": 1.04, "mxfp4": 1.03}.get(kind, 1.02)
            assert layout.n_bytes <= most * n_bytes


@pytest.mark.push
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize("n_threads", [1, 2, 32])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (576, 576), (2048, 2048), (49152, 576), (128256, 2048)])
def test_chunks_are_worth_claiming_and_fit_in_a_cache(kind: str, n_threads: int, rows: int, columns: int) -> None:
    """A chunk is prefetched while the previous one is multiplied, so both must fit in a core's L2 cache."""
    layout = PackedLayout.of(Matrix.of_bytes("w", kind, rows, columns, np.zeros(0, np.uint8)))
    chunk = layout.chunk_groups(n_threads)
    assert chunk >= 1
    assert chunk >= layout.n_groups or chunk * layout.group_bytes >= 16 << 10
    assert chunk == 1 or chunk * layout.group_bytes <= 104 << 10


def test_chunks_are_larger_where_every_thread_still_gets_many() -> None:
    layout = PackedLayout.of(Matrix.of_bytes("w", "q4_0", 2048, 2048, np.zeros(0, np.uint8)))
    assert layout.group_bytes == 18 << 10
    assert [layout.chunk_groups(n_threads) for n_threads in (1, 2, 3, 32)] == [4, 4, 2, 2]


@pytest.mark.push
@pytest.mark.parametrize(("kind", "rows", "columns"), [("q8_0", 5000, 256), ("q4_1", 40, 64), ("f32", 70, 8192)])
def test_each_byte_is_read_once_and_few_are_held_at_a_time(kind: str, rows: int, columns: int) -> None:
    """Besides the packed weights, loading takes one megabyte per thread, or 16 rows if those are larger."""
    whole = random_matrix(kind, rows, columns)
    reads: list[tuple[int, int]] = []

    def read_into(start: int, into: NDArray[np.uint8]) -> None:
        reads.append((start, start + len(into)))
        whole.read_into(start, into)

    packed = packed_from(Matrix("w", kind, rows, columns, whole.n_bytes, read_into))
    np.testing.assert_array_equal(packed.data, packed_from(whole).data)
    reads.sort()
    assert [end for _, end in reads[:-1]] == [start for start, _ in reads[1:]]
    assert (reads[0][0], reads[-1][1]) == (0, whole.n_bytes)
    assert max(end - start for start, end in reads) <= max(1 << 20, 16 * whole.row_bytes)


@pytest.mark.push
def test_a_matrix_that_cannot_be_read_ends_the_packing_with_its_error() -> None:
    def fail(start: int, into: NDArray[np.uint8]) -> None:
        raise ModelFileError("gone")

    good = [random_matrix("q8_0", 1000, 256, name=f"w{index}") for index in range(8)]
    broken = Matrix("broken", "q8_0", 100, 256, 100 * 8 * 34, fail)
    with pytest.raises(ModelFileError, match="gone"):
        fill(reserve([*good[:4], broken, *good[4:]]), 2)


@pytest.mark.push
def test_progress_counts_matrices() -> None:
    packed = reserve([random_matrix("q8_0", 16, 32, name=name) for name in "abc"])
    reports: list[tuple[int, int]] = []
    fill(packed, 1, lambda *report: reports.append(report))
    assert reports == [(1, 3), (2, 3), (3, 3)]


def test_every_supported_type_has_a_packing_kernel() -> None:
    assert set(WEIGHT_TYPES) == SUPPORTED
    matrices = [random_matrix(kind, 1, width(kind, 32), name=kind) for kind in INTEGER_TYPES + FLOAT_TYPES]
    assert len(set(packing_kernels(matrices))) == len(PACKED_TYPES) + 2  # float16 and bfloat16 share one kernel
