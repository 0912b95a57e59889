"""Tests of each readable format against gguf-py, an independent implementation. Results are bit-identical."""

from __future__ import annotations

import warnings
from math import prod

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import WeightType
from tests.support.kernels.blocks import (
    EXTREME_HALVES,
    HALF_FIELDS,
    READABLE,
    WRITABLE,
    assert_same_bits,
    put_halves,
    put_spread_half,
    random_rows,
    raw_blocks,
)
from tests.support.tiers import examples

pytestmark = pytest.mark.push

# Types that gguf-py can read but not `quantize`.
ONLY_READ = [
    *("IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS"),
    *("NVFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
]
NOT_READ = ["F64", "I16", "I32", "I64", "I8", "Q1_0", "Q2_0", "Q8_1", "Q8_K"]


def test_every_type_that_gguf_py_reads_is_readable_and_what_it_writes_writable() -> None:
    assert sorted(BY_NAME.keys() - set(READABLE)) == NOT_READ
    assert sorted(set(READABLE) - set(WRITABLE)) == ONLY_READ
    for kind in gguf.GGMLQuantizationType:
        if kind.name in READABLE:
            continue
        with pytest.raises(NotImplementedError):
            gguf.quants.dequantize(np.zeros(BY_NAME[kind.name].block_bytes, np.uint8), kind)
    for name in ONLY_READ:
        with pytest.raises(NotImplementedError):
            gguf.quants.quantize(np.zeros(BY_NAME[name].block_weights, np.float32), gguf.GGMLQuantizationType[name])


def our_weights(type_: WeightType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    assert type_.dequantize is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = type_.dequantize(raw)
    assert weights.dtype == np.float32
    assert weights.shape == (*raw.shape[:-1], raw.shape[-1] // type_.block_bytes * type_.block_weights)
    return weights


def our_bytes(type_: WeightType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    assert type_.quantize is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raw = type_.quantize(values)
    assert raw.dtype == np.uint8
    return raw


def their_weights(name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]))


def their_bytes(name: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])).view(np.uint8)


@pytest.mark.parametrize("name", READABLE)
def test_random_blocks_give_the_same_weights(name: str) -> None:
    raw = random_rows(BY_NAME[name], 37, 16, seed=1)
    assert_same_bits(our_weights(BY_NAME[name], raw), their_weights(name, raw))


@pytest.mark.parametrize("name", READABLE)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_bytes_give_the_same_weights(name: str, data: st.DataObject) -> None:
    raw = data.draw(raw_blocks(name))
    assert_same_bits(our_weights(BY_NAME[name], raw), their_weights(name, raw))


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (5, 3), (2, 3, 2), (2, 1, 3, 1)])
def test_any_number_of_axes_is_kept(name: str, shape: tuple[int, ...]) -> None:
    raw = random_rows(BY_NAME[name], 1, prod(shape), seed=5).reshape(*shape[:-1], -1)
    assert_same_bits(our_weights(BY_NAME[name], raw), their_weights(name, raw))


@pytest.mark.parametrize("name", sorted(HALF_FIELDS))
def test_extreme_scales_give_the_same_weights(name: str) -> None:
    type_ = BY_NAME[name]
    fields = len(HALF_FIELDS[name])
    halves = np.array(np.meshgrid(*[EXTREME_HALVES] * fields), np.uint16).reshape(fields, -1).T
    raw = put_halves(type_, random_rows(type_, 4, len(halves), seed=6), np.tile(halves, (4, 1)))
    assert_same_bits(our_weights(type_, raw), their_weights(name, raw))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"])
def test_every_value_of_every_byte_gives_the_same_weights(name: str) -> None:
    """In larger types, the meaning of a byte depends on the other bytes, which other tests randomize."""
    type_ = BY_NAME[name]
    raw = np.repeat(np.arange(256, dtype=np.uint8), type_.block_bytes).reshape(256, -1)
    assert_same_bits(our_weights(type_, raw), their_weights(name, raw))
    if name in HALF_FIELDS:
        raw = put_halves(type_, raw, np.full((256, 2), 0x3555, np.uint16))
        assert_same_bits(our_weights(type_, raw), their_weights(name, raw))


def test_a_scale_in_four_parts_gives_the_same_weights_whatever_it_is() -> None:
    type_ = BY_NAME["IQ1_M"]
    halves = np.arange(2**16, dtype=np.uint16)[::7]
    raw = put_spread_half(random_rows(type_, len(halves), 1, seed=7), halves)
    assert_same_bits(our_weights(type_, raw), their_weights("IQ1_M", raw))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_pair_of_a_scale_and_a_value_gives_the_same_weight(name: str) -> None:
    type_ = BY_NAME[name]
    scales = type_.block_bytes - type_.block_weights // 2
    blocks = np.empty((256, 16, type_.block_bytes), np.uint8)
    blocks[..., :scales] = np.arange(256, dtype=np.uint8)[:, None, None]
    blocks[..., scales:] = (np.arange(16, dtype=np.uint8) * 17)[None, :, None]
    raw = blocks.reshape(256, -1)
    assert_same_bits(our_weights(type_, raw), their_weights(name, raw))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_65536_half_floats_give_the_same_weights(name: str) -> None:
    raw = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    assert_same_bits(our_weights(BY_NAME[name], raw), their_weights(name, raw))


@pytest.mark.parametrize("name", READABLE)
def test_a_view_with_strides_and_an_empty_array_are_read(name: str) -> None:
    type_ = BY_NAME[name]
    raw = random_rows(type_, 6, 2, seed=2)
    assert_same_bits(our_weights(type_, raw[::2]), their_weights(name, np.ascontiguousarray(raw[::2])))
    assert our_weights(type_, raw[:0]).shape == (0, 2 * type_.block_weights)


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-2, 1.0, 30.0, 6e4])
def test_random_weights_give_the_same_bytes(name: str, spread: float) -> None:
    values = (np.random.default_rng(3).standard_normal((33, 256)) * spread).astype(np.float32)
    np.testing.assert_array_equal(our_bytes(BY_NAME[name], values), their_bytes(name, values))


def finite_weights() -> st.SearchStrategy[NDArray[np.float32]]:
    # Beyond these magnitudes, a block's inverse scale overflows, and C code converts an infinity with undefined
    # results.
    magnitudes = st.floats(2.0**-100, 2.0**100, width=32)
    weights = st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda magnitude: -magnitude))
    return hnp.arrays(np.float32, (1, 256), elements=weights)


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", WRITABLE)
@settings(max_examples=examples(60), deadline=None)
@given(values=finite_weights())
def test_any_finite_weights_give_the_same_bytes(name: str, values: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(our_bytes(BY_NAME[name], values), their_bytes(name, values))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_infinities_nans_and_ties_give_the_same_bytes(name: str) -> None:
    bits = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001, 0x80000000]
    if name == "BF16":
        bits += [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]  # signalling NaNs, and NaNs whose rounding would carry
    values = np.array(bits, np.uint32).view(np.float32)
    np.testing.assert_array_equal(our_bytes(BY_NAME[name], values), their_bytes(name, values))


@pytest.mark.parametrize("name", WRITABLE)
def test_quantizing_what_was_dequantized_changes_nothing_by_more_than_the_format_can_show(name: str) -> None:
    type_ = BY_NAME[name]
    values = np.random.default_rng(4).standard_normal((8, 256)).astype(np.float32)
    weights = our_weights(type_, our_bytes(type_, values))
    steps = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 0.5 / 127, "Q4_0": 1 / 8, "Q4_1": 1 / 15}
    steps |= {"Q5_0": 1 / 16, "Q5_1": 1 / 31, "TQ1_0": 1 / 2, "TQ2_0": 1 / 2, "MXFP4": 1 / 4}
    block = max(type_.block_weights, 1)
    widest = np.abs(values.reshape(-1, block)).max(axis=-1, keepdims=True)
    errors = np.abs(weights - values).reshape(-1, block)
    # Allow a tenth more, because the stored scale is itself rounded to f16.
    assert (errors <= 1.1 * steps[name] * widest).all()


def test_weights_too_small_for_a_power_of_two_get_the_least_one() -> None:
    """Here gguf-py casts a negative number to a byte, which is undefined in C."""
    values = np.full((1, 32), 2.0**-140, np.float32)
    raw = our_bytes(BY_NAME["MXFP4"], values)
    assert raw[0, 0] == 0
    assert (our_weights(BY_NAME["MXFP4"], raw) == 0).all()  # closer to 0 than to the smallest step, 2^-128
