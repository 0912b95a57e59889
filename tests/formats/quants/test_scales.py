"""Tests that a block counts as unsound exactly when one of its weights can be NaN or infinite."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.formats.quants.registry import BY_NAME, unsound_blocks
from tests.support.kernels import blocks as drafts

SCALED = sorted(set(drafts.READABLE))


@pytest.mark.parametrize("name", SCALED)
def test_scales_that_are_no_numbers_are_seen(name: str) -> None:
    type_ = BY_NAME[name]
    raw = drafts.random_rows(type_, 1, 64, seed=7).reshape(-1)
    sound = np.zeros_like(raw)
    assert not unsound_blocks(type_, sound).any()
    with np.errstate(all="ignore"):
        assert type_.dequantize is not None
        numbers = np.isfinite(type_.dequantize(sound)).all()
    assert numbers
    if name in drafts.HALF_FIELDS:
        for bad in (0x7C00, 0xFC00, 0x7E00, 0x7C01):
            for column, _ in enumerate(drafts.HALF_FIELDS[name]):
                halves = np.full((64, 2), 0x3C00, np.uint16)
                halves[3, column] = bad
                marked = drafts.put_halves(type_, raw, halves)
                assert np.flatnonzero(unsound_blocks(type_, marked)).tolist() == [3]


@pytest.mark.push
@pytest.mark.parametrize("name", sorted(set(SCALED) - {"MXFP4", "NVFP4"}))
@given(seed=st.integers(0, 2**32 - 1))
def test_a_sound_block_gives_numbers_and_an_unsound_one_some_that_are_none(name: str, seed: int) -> None:
    type_ = BY_NAME[name]
    raw = drafts.random_rows(type_, 1, 16, seed).reshape(-1)
    found = unsound_blocks(type_, raw)
    assert type_.dequantize is not None
    with np.errstate(all="ignore"):
        weights = type_.dequantize(raw).reshape(len(found), -1)
    finite = np.array([np.isfinite(block).all() for block in weights])
    # In no type does the product of two finite fields overflow f32.
    assert finite[~found].all()
    # An infinite scale times a level of 0 is NaN too, so every unsound block has such weights.
    assert not finite[found].any()


def test_the_floats_of_8_bits() -> None:
    mxfp4 = np.zeros((3, 17), np.uint8)
    mxfp4[1, 0] = 255
    assert unsound_blocks(BY_NAME["MXFP4"], mxfp4.reshape(-1)).tolist() == [False, True, False]
    nvfp4 = np.zeros((4, 36), np.uint8)
    nvfp4[1, 3], nvfp4[2, 0], nvfp4[3, 4] = 127, 255, 127
    assert unsound_blocks(BY_NAME["NVFP4"], nvfp4.reshape(-1)).tolist() == [False, True, True, False]


def test_iq1_ms_scale_is_put_together_from_four_words() -> None:
    type_ = BY_NAME["IQ1_M"]
    raw = drafts.random_rows(type_, 1, 8, seed=1)
    halves = np.array([0x3C00, 0x7C00, 0x7BFF, 0xFC01, 0, 0x7E00, 0x8000, 0x03FF], np.uint16)
    found = unsound_blocks(type_, drafts.put_spread_half(raw, halves).reshape(-1))
    assert found.tolist() == [False, True, False, True, False, True, False, False]


def test_integers_are_always_numbers() -> None:
    assert not unsound_blocks(BY_NAME["I8"], np.arange(256, dtype=np.uint8)).any()


def test_the_fields_are_those_that_the_reference_reads() -> None:
    assert {t.name: t.half_fields for t in BY_NAME.values() if t.half_fields} == {**drafts.HALF_FIELDS, "F16": (0,)}
