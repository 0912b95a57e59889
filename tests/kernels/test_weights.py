"""Packing: every value of the file is where the kernels look for it, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.errors import ModelFileError
from llmrun.kernels import records
from llmrun.kernels.reference import dequantized
from llmrun.kernels.weights import SUPPORTED, Matrix, PackedLayout, PackedMatrix, fill, packing_kernels, reserve
from tests.support.kernel_runs import FLOAT_TYPES, INTEGER_TYPES, LEVELS_HERE, WEIGHT_TYPES, at_level, matrix_of


def packed_from(matrix: Matrix, threads: int = 2) -> PackedMatrix:
    packed = reserve([matrix])
    fill(packed, threads)
    return packed[matrix.name]


def random_matrix(kind: str, rows: int, columns: int, name: str = "w") -> Matrix:
    values = np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)
    return matrix_of(kind, values, name)


def unpacked(packed: PackedMatrix) -> NDArray[np.float32]:
    """float32[groups * 16, columns], read by the layout's description in words and nothing else."""
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
    blocks = packed.matrix.columns // 32

    def halves(offset: int) -> NDArray[np.float32]:
        plane = packed.data[:, offset : offset + 32 * blocks].view(np.float16).reshape(groups, blocks, 16)
        return plane.transpose(0, 2, 1).reshape(groups * 16, blocks, 1).astype(np.float32)

    vectors = 8 if kind == "q8_0" else 4
    plane = packed.data[:, layout.integers : layout.integers + 64 * vectors * blocks]
    plane = plane.reshape(groups, blocks, vectors, 16, 4).transpose(0, 3, 1, 2, 4)
    raw = np.ascontiguousarray(plane).reshape(groups * 16, blocks, 4 * vectors)
    if kind == "q8_0":
        integers = raw.view(np.int8).astype(np.float32)
    else:
        integers = np.concatenate([raw & 15, raw >> 4], axis=-1).astype(np.float32) - (8 if kind == "q4_0" else 0)
    values = integers * halves(0)
    if kind == "q4_1":
        values += halves(layout.mins)
    return values.reshape(groups * 16, -1)


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@given(rows=st.integers(1, 70), blocks=st.integers(1, 6), odd=st.integers(0, 31), threads=st.integers(1, 4))
@settings(max_examples=25)
def test_packed_weights_are_the_files(kind: str, rows: int, blocks: int, odd: int, threads: int) -> None:
    columns = 32 * blocks + (odd if kind in FLOAT_TYPES else 0)
    matrix = random_matrix(kind, rows, columns)
    packed = unpacked(packed_from(matrix, threads))
    np.testing.assert_array_equal(packed[:rows, :columns], dequantized(matrix))
    assert not packed[:rows, columns:].any(), "padded columns must be zero"


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_packing_is_the_same_at_every_level(level: str, kind: str) -> None:
    matrix = random_matrix(kind, 37, 96)
    with at_level(level):
        data = packed_from(matrix).data
    with at_level("portable"):
        np.testing.assert_array_equal(data, packed_from(matrix).data)


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_missing_rows_of_the_last_group_are_zero_bytes(kind: str) -> None:
    """Their products must vanish: the kernels write them behind the end of a row."""
    small, large = random_matrix(kind, 17, 64), random_matrix(kind, 17, 64)
    zeros = Matrix.of_bytes("zeros", kind, 15, 64, np.zeros(15 * large.row_bytes, np.uint8))
    whole = Matrix.of_bytes("whole", kind, 32, 64, np.concatenate([large.read(), zeros.read()]).reshape(-1))
    np.testing.assert_array_equal(packed_from(small).data, packed_from(whole).data)


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_planes_begin_on_cache_lines(kind: str) -> None:
    """Vectors of 64 bytes are loaded as aligned ones."""
    matrices = [random_matrix(kind, rows, 32 * rows, f"w{rows}") for rows in (1, 3, 17)]
    for packed in reserve(matrices).values():
        assert packed.address % records.CACHE_LINE == 0
        assert packed.layout.group_bytes % records.CACHE_LINE == 0
        assert packed.layout.mins % records.CACHE_LINE == 0
        assert packed.layout.integers % records.CACHE_LINE == 0


def test_matrices_do_not_overlap() -> None:
    matrices = [random_matrix(kind, 19 + i, 64, kind) for i, kind in enumerate(WEIGHT_TYPES)]
    packed = reserve(matrices)
    fill(packed, 2)
    for matrix in matrices:
        np.testing.assert_array_equal(unpacked(packed[matrix.name])[: matrix.rows], dequantized(matrix))


def test_packing_adds_little_to_the_files_bytes() -> None:
    """At the widths of real models. The scales of a short row are padded to a cache line."""
    for kind in WEIGHT_TYPES:
        for rows, columns in ((576, 576), (1536, 576), (576, 1536), (2048, 8192)):
            data = random_matrix(kind, 1, columns).read().repeat(rows)
            assert PackedLayout.of(Matrix.of_bytes("w", kind, rows, columns, data)).n_bytes <= 1.02 * data.size


@pytest.mark.parametrize("kind", WEIGHT_TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (576, 576), (49152, 576), (128256, 2048)])
def test_chunks_are_worth_claiming_and_not_too_few(kind: str, rows: int, columns: int) -> None:
    layout = PackedLayout.of(Matrix.of_bytes("w", kind, rows, columns, np.zeros(0, np.uint8)))
    chunks = -(-layout.n_groups // layout.chunk_groups)
    assert 1 <= chunks <= 512
    assert chunks == 1 or layout.chunk_groups * layout.group_bytes >= 16 << 10


@pytest.mark.parametrize(("kind", "rows", "columns"), [("q8_0", 5000, 256), ("q4_1", 40, 64), ("f32", 70, 8192)])
def test_each_byte_is_read_once_and_few_are_held_at_a_time(kind: str, rows: int, columns: int) -> None:
    """Beside the packed weights, loading takes a megabyte a thread, or 16 rows where those are larger."""
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


def test_a_matrix_that_cannot_be_read_ends_the_packing_with_its_error() -> None:
    def fail(start: int, into: NDArray[np.uint8]) -> None:
        raise ModelFileError("gone")

    good = [random_matrix("q8_0", 1000, 256, f"w{index}") for index in range(8)]
    broken = Matrix("broken", "q8_0", 100, 256, 100 * 8 * 34, fail)
    with pytest.raises(ModelFileError, match="gone"):
        fill(reserve([*good[:4], broken, *good[4:]]), 2)


def test_progress_counts_matrices() -> None:
    packed = reserve([random_matrix("q8_0", 16, 32, name) for name in "abc"])
    reports: list[tuple[int, int]] = []
    fill(packed, 1, lambda *report: reports.append(report))
    assert reports == [(1, 3), (2, 3), (3, 3)]


def test_every_supported_type_has_a_packing_kernel() -> None:
    assert set(WEIGHT_TYPES) == SUPPORTED
    matrices = [random_matrix(kind, 1, 32, kind) for kind in INTEGER_TYPES + FLOAT_TYPES]
    assert len(set(packing_kernels(matrices))) == 5  # float16 and bfloat16 are moved alike
