"""Tests of packing in the background: other work continues, and any failure ends both cleanly."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.cpu.weights import filling, reserve
from llmrun.base.errors import ModelFileError
from llmrun.formats.layouts.linear import WIDENED_TYPES
from llmrun.formats.quants.registry import BY_NAME
from llmrun.model.plan.matrix import Matrix
from tests.support.backends.filled_weights import fill
from tests.support.kernels.runs import random_matrix

pytestmark = pytest.mark.push

ROWS, COLUMNS = 4096, 1024  # several parts of a megabyte


def read_with(matrix: Matrix, before: Callable[[], None]) -> Matrix:
    """Return the same matrix with `before` called in the packing thread ahead of every read."""

    def read_into(start: int, into: NDArray[np.uint8]) -> None:
        before()
        matrix.read_into(start, into)

    return Matrix(matrix.name, matrix.kind, matrix.rows, matrix.columns, matrix.n_bytes, read_into)


def packing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("llmrun-packing")]


def test_weights_are_packed_while_the_block_runs() -> None:
    """The block and the first read wait for each other, so running them in sequence would deadlock."""
    reading, going_on = threading.Event(), threading.Event()

    def before() -> None:
        reading.set()
        assert going_on.wait(30)

    matrix = random_matrix("q8_0", ROWS, COLUMNS)
    packed = reserve([read_with(matrix, before)])
    with filling(packed, 2) as weights:
        assert reading.wait(30)
        going_on.set()
        weights.finish()
    alone = reserve([matrix])
    fill(alone, 1)
    np.testing.assert_array_equal(packed[matrix.name].data, alone[matrix.name].data)
    assert not packing_threads()


def test_an_error_of_reading_waits_for_whoever_asks_for_the_weights() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ModelFileError("gone")

    with filling(reserve([read_with(random_matrix("q8_0", ROWS, COLUMNS), fail)]), 2) as weights:
        assert failed.wait(30)
        with pytest.raises(ModelFileError, match="gone"):
            weights.finish()
    assert not packing_threads()


@pytest.mark.night
@pytest.mark.parametrize("error", [ModelFileError("no vocabulary"), KeyboardInterrupt()])
def test_an_error_beside_the_packing_ends_it_after_the_parts_under_way(error: BaseException) -> None:
    reading, going_on = threading.Event(), threading.Event()
    reads = []

    def before() -> None:
        reads.append(1)
        reading.set()
        assert going_on.wait(30)

    packed = reserve([read_with(random_matrix("q8_0", 8 * ROWS, COLUMNS), before)])

    def interrupted() -> None:
        with filling(packed, 2):
            assert reading.wait(30)
            threading.Timer(0.1, going_on.set).start()  # after the block has exited and waits for packing to end
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert len(reads) <= 2
    assert not packing_threads()


def test_threads_switch_fast_only_while_something_is_packed() -> None:
    usual = sys.getswitchinterval()
    packed = reserve([random_matrix("q8_0", 64, 64)])
    with filling(packed, 1) as outer:
        assert sys.getswitchinterval() < usual
        with filling(reserve([random_matrix("q8_0", 64, 64)]), 1) as inner:
            inner.finish()
        assert sys.getswitchinterval() < usual
        outer.finish()
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize("kind", sorted(WIDENED_TYPES))
def test_what_numpy_widens_comes_in_pieces_that_fit_the_cache(kind: str) -> None:
    columns = 2048
    matrix = random_matrix(kind, 1000, columns)
    sizes: list[int] = []

    def read_into(start: int, into: NDArray[np.uint8]) -> None:
        sizes.append(len(into))
        matrix.read_into(start, into)

    fill(reserve([Matrix("w", kind, matrix.rows, columns, matrix.n_bytes, read_into)]), 2)
    assert sum(sizes) == matrix.n_bytes
    assert max(sizes) // BY_NAME[kind.upper()].row_bytes(columns) * columns <= 256 << 10
