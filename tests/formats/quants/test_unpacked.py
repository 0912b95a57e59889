"""Tests of `unpack`: the integers and factors of each type, and that their product is the weight."""

from __future__ import annotations

import dataclasses
import warnings

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmrun.formats.quants import table_quants, weight_type
from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import Unpacked
from tests.support.kernels.blocks import INTEGERS, READABLE, assert_same_bits, random_rows, raw_blocks
from tests.support.tiers import examples


@dataclasses.dataclass(frozen=True)
class Promise:
    """The values and sub-scales that a type may have, and how many weights share a factor."""

    values: tuple[int, ...]
    super_block: int
    sub_block: int
    sub_scales: tuple[int, ...] | None = None
    sub_minimums: tuple[int, ...] | None = None
    has_minimums: bool = False


def between(least: int, greatest: int, step: int = 1) -> tuple[int, ...]:
    return tuple(range(least, greatest + 1, step))


def of_either_sign(*magnitudes: int) -> tuple[int, ...]:
    return tuple(sorted({sign * magnitude for magnitude in magnitudes for sign in (1, -1)}))


TABLE_OF_IQ4 = tuple(table_quants.IQ4_VALUES.tolist())
TABLE_OF_FP4 = tuple(sorted(set(table_quants.E2M1_VALUES.tolist())))
OF_IQ1 = of_either_sign(1, 7, 9)
OF_IQ2 = of_either_sign(8, 25, 43)
OF_IQ3_XXS = of_either_sign(4, 12, 20, 28, 36, 44, 52, 62)
OF_IQ3_S = of_either_sign(*between(1, 15, 2))

PROMISES = {
    "Q4_0": Promise(between(-8, 7), 32, 32),
    "Q4_1": Promise(between(0, 15), 32, 32, has_minimums=True),
    "Q5_0": Promise(between(-16, 15), 32, 32),
    "Q5_1": Promise(between(0, 31), 32, 32, has_minimums=True),
    "Q8_0": Promise(between(-128, 127), 32, 32),
    "Q2_K": Promise(between(0, 3), 256, 16, between(0, 15), between(0, 15), has_minimums=True),
    "Q3_K": Promise(between(-4, 3), 256, 16, between(-32, 31)),
    "Q4_K": Promise(between(0, 15), 256, 32, between(0, 63), between(0, 63), has_minimums=True),
    "Q5_K": Promise(between(0, 31), 256, 32, between(0, 63), between(0, 63), has_minimums=True),
    "Q6_K": Promise(between(-32, 31), 256, 16, between(-128, 127)),
    "IQ4_NL": Promise(TABLE_OF_IQ4, 32, 32),
    "IQ4_XS": Promise(TABLE_OF_IQ4, 256, 32, between(-32, 31)),
    "MXFP4": Promise(TABLE_OF_FP4, 32, 32),
    "NVFP4": Promise(TABLE_OF_FP4, 16, 16),
    "IQ1_S": Promise(OF_IQ1, 256, 32, between(1, 15, 2)),
    "IQ1_M": Promise(OF_IQ1, 256, 16, between(1, 15, 2)),
    "IQ2_XXS": Promise(OF_IQ2, 256, 32, between(1, 31, 2)),
    "IQ2_XS": Promise(OF_IQ2, 256, 16, between(1, 31, 2)),
    "IQ2_S": Promise(OF_IQ2, 256, 16, between(1, 31, 2)),
    "IQ3_XXS": Promise(OF_IQ3_XXS, 256, 32, between(1, 31, 2)),
    "IQ3_S": Promise(OF_IQ3_S, 256, 32, between(1, 31, 2)),
    "TQ1_0": Promise(between(-1, 1), 256, 32),
    "TQ2_0": Promise(between(-1, 2), 256, 32),
}


def unpack(name: str, raw: NDArray[np.uint8]) -> Unpacked:
    function = BY_NAME[name].unpack
    assert function is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(raw)


def test_every_readable_type_but_the_plain_floats_is_integers_times_scales() -> None:
    assert sorted(PROMISES) == INTEGERS
    assert sorted(set(READABLE) - set(INTEGERS)) == ["BF16", "F16", "F32"]


@pytest.mark.parametrize("name", INTEGERS)
def test_the_integers_and_sub_scales_are_all_those_the_type_can_have(name: str) -> None:
    promise = PROMISES[name]
    weights = unpack(name, random_rows(BY_NAME[name], 40, 32, seed=10))
    assert tuple(np.unique(weights.values).tolist()) == promise.values
    for seen, promised in ((weights.sub_scales, promise.sub_scales), (weights.sub_minimums, promise.sub_minimums)):
        assert (None if seen is None else tuple(np.unique(seen).tolist())) == promised
    assert (weights.super_minimums is not None) == promise.has_minimums


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("shape", [(3,), (5, 2), (2, 3, 1), (0, 2), (2, 0)])
def test_every_array_has_the_rows_of_the_bytes_and_one_entry_for_each_of_its_blocks(
    name: str, shape: tuple[int, ...]
) -> None:
    type_, promise = BY_NAME[name], PROMISES[name]
    raw = np.zeros((*shape[:-1], shape[-1] * type_.block_bytes), np.uint8)
    weights = unpack(name, raw)
    rows, n = shape[:-1], shape[-1] * type_.block_weights
    assert (weights.super_block, weights.sub_block) == (promise.super_block, promise.sub_block)
    expected = {
        "values": (n, np.int8),
        "super_scales": (n // promise.super_block, np.float32),
        "sub_scales": (n // promise.sub_block, np.int16),
        "super_minimums": (n // promise.super_block, np.float32),
        "sub_minimums": (n // promise.sub_block, np.int16),
    }
    for field, (count, dtype) in expected.items():
        array = getattr(weights, field)
        if array is not None:
            assert (field, array.shape, array.dtype) == (field, (*rows, count), dtype)
    assert weight_type.dequantize_unpacked(weights).shape == (*rows, n)


def weight_by_weight(weights: Unpacked) -> NDArray[np.float32]:
    """Compute the formula for each weight separately, with each operation rounded to float32."""
    i = np.arange(weights.values.shape[-1])
    over, sub = i // weights.super_block, i // weights.sub_block
    with np.errstate(all="ignore"):
        scales = weights.super_scales[..., over]
        if weights.sub_scales is not None:
            scales = scales * weights.sub_scales[..., sub].astype(np.float32)
        products = scales * weights.values.astype(np.float32)
        if weights.super_minimums is None:
            return products
        minimums = weights.super_minimums[..., over]
        if weights.sub_minimums is not None:
            minimums = minimums * weights.sub_minimums[..., sub].astype(np.float32)
        return products - minimums


@pytest.mark.push
@pytest.mark.parametrize("name", INTEGERS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_the_factors_multiplied_one_weight_at_a_time_are_gguf_pys_weights(name: str, data: st.DataObject) -> None:
    raw = data.draw(raw_blocks(name))
    with np.errstate(all="ignore"):
        theirs = np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]))
    weights = unpack(name, raw)
    assert_same_bits(weight_by_weight(weights), theirs)
    assert_same_bits(weight_type.dequantize_unpacked(weights), theirs)


@pytest.mark.parametrize("name", INTEGERS)
def test_no_product_needs_more_bits_than_a_float32_has(name: str) -> None:
    """Kernels may therefore multiply in any order, and fuse the product with the difference."""
    promise = PROMISES[name]
    bits_of_a_half = 11
    integers = [value * scale for value in promise.values for scale in promise.sub_scales or (1,)]
    for integer in [*integers, *(promise.sub_minimums or ())]:
        odd_part = integer // (integer & -integer) if integer else 0
        assert abs(odd_part).bit_length() + bits_of_a_half <= 24


@pytest.mark.parametrize("name", INTEGERS)
def test_unpacking_leaves_the_bytes_alone(name: str) -> None:
    raw = random_rows(BY_NAME[name], 3, 4, seed=11)
    before = raw.copy()
    raw.setflags(write=False)
    weight_type.dequantize_unpacked(unpack(name, raw))
    np.testing.assert_array_equal(raw, before)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_part_of_a_block_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="reshape"):
        unpack(name, np.zeros((2, BY_NAME[name].block_bytes + 1), np.uint8))
