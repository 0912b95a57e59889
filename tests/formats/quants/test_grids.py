"""Tests of the grids and sign tables of IQ1, IQ2 and IQ3 against gguf-py's, which are stored differently."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.formats.quants import grid_quants
from llmrun.formats.quants.grid_quants import even_signs, signs

GRIDS: dict[str, Callable[[], NDArray[np.int8]]] = {
    "IQ2_XXS": grid_quants.iq2_xxs,
    "IQ2_XS": grid_quants.iq2_xs,
    "IQ2_S": grid_quants.iq2_s,
    "IQ3_XXS": grid_quants.iq3_xxs,
    "IQ3_S": grid_quants.iq3_s,
    "IQ1_S": grid_quants.iq1,
    "IQ1_M": grid_quants.iq1,
}


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_a_grid_is_that_of_gguf_py(name: str) -> None:
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    np.testing.assert_array_equal(GRIDS[name](), theirs.grid.reshape(theirs.grid_shape))


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_a_grid_is_read_once_and_cannot_be_changed(name: str) -> None:
    grid = GRIDS[name]()
    assert GRIDS[name]() is grid
    with pytest.raises(ValueError, match="read-only"):
        grid[0, 0] = 0


def test_seven_bits_of_signs_are_eight_as_in_gguf_py() -> None:
    theirs = np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8)
    np.testing.assert_array_equal(even_signs(np.arange(128)), signs(theirs))
    assert (even_signs(np.arange(128)).prod(axis=-1) == 1).all()


def test_a_bit_of_1_is_a_negative_sign_and_the_lowest_is_the_first() -> None:
    assert signs(np.array([0, 1, 0x86], np.uint8)).tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1],
        [-1, 1, 1, 1, 1, 1, 1, 1],
        [1, -1, -1, 1, 1, 1, 1, -1],
    ]
