"""Each readable format against gguf-py, an implementation we did not write: equal bit for bit."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmrun.quants.registry import BY_NAME, WeightType

READABLE = sorted(name for name, type_ in BY_NAME.items() if type_.dequantize is not None)
SCALED = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}  # block types -> number of leading f16 fields

# Zero, the least and greatest subnormal, the least normal, one, the greatest finite, infinity, NaNs; both signs.
EXTREME_HALVES = np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF], np.uint16)
EXTREME_HALVES = np.concatenate([EXTREME_HALVES, EXTREME_HALVES | np.uint16(0x8000)])


def test_the_required_types_are_readable() -> None:
    assert READABLE == ["BF16", "F16", "F32", "Q4_0", "Q4_1", "Q8_0"]


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


def assert_same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Equal bits; of a NaN only that it is one, because its sign depends on the order of an addition."""
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))


@pytest.mark.parametrize("name", READABLE)
def test_random_blocks_give_the_same_weights(name: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (37, 16 * BY_NAME[name].block_bytes), np.uint8)
    assert_same_bits(our_weights(BY_NAME[name], raw), their_weights(name, raw))


@pytest.mark.parametrize("name", sorted(SCALED))
def test_extreme_scales_with_every_byte_value_give_the_same_weights(name: str) -> None:
    type_, fields = BY_NAME[name], SCALED[name]
    value_bytes = type_.block_bytes - 2 * fields
    halves = np.array(np.meshgrid(*[EXTREME_HALVES] * fields)).reshape(fields, -1).T
    every_byte = np.resize(np.arange(256, dtype=np.uint8), (256 // value_bytes + 1, value_bytes))
    blocks = np.zeros((len(halves), len(every_byte), type_.block_bytes), np.uint8)
    blocks[:, :, : 2 * fields] = np.ascontiguousarray(halves).view(np.uint8)[:, None, :]
    blocks[:, :, 2 * fields :] = every_byte
    raw = blocks.reshape(len(halves), -1)
    assert_same_bits(our_weights(type_, raw), their_weights(name, raw))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_65536_half_floats_give_the_same_weights(name: str) -> None:
    raw = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    assert_same_bits(our_weights(BY_NAME[name], raw), their_weights(name, raw))


@pytest.mark.parametrize("name", READABLE)
def test_a_view_with_strides_and_an_empty_array_are_read(name: str) -> None:
    type_ = BY_NAME[name]
    raw = np.random.default_rng(2).integers(0, 256, (6, 2 * type_.block_bytes), np.uint8)
    assert_same_bits(our_weights(type_, raw[::2]), their_weights(name, np.ascontiguousarray(raw[::2])))
    assert our_weights(type_, raw[:0]).shape == (0, 2 * type_.block_weights)


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-2, 1.0, 30.0, 6e4])
def test_random_weights_give_the_same_bytes(name: str, spread: float) -> None:
    values = (np.random.default_rng(3).standard_normal((33, 256)) * spread).astype(np.float32)
    np.testing.assert_array_equal(our_bytes(BY_NAME[name], values), their_bytes(name, values))


def finite_weights() -> st.SearchStrategy[NDArray[np.float32]]:
    # Beyond these magnitudes a block's inverse scale overflows, and what C does with an infinity is undefined.
    magnitudes = st.floats(2.0**-100, 2.0**100, width=32)
    weights = st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda magnitude: -magnitude))
    return hnp.arrays(np.float32, (2, 64), elements=weights)


@pytest.mark.parametrize("name", READABLE)
@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("name", READABLE)
def test_quantizing_what_was_dequantized_changes_nothing_by_more_than_the_format_can_show(name: str) -> None:
    type_ = BY_NAME[name]
    values = np.random.default_rng(4).standard_normal((8, 128)).astype(np.float32)
    weights = our_weights(type_, our_bytes(type_, values))
    steps = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 0.5 / 127, "Q4_0": 1 / 8, "Q4_1": 1 / 15}
    block = max(type_.block_weights, 1)
    widest = np.abs(values.reshape(-1, block)).max(axis=-1, keepdims=True)
    errors = np.abs(weights - values).reshape(-1, block)
    # A tenth of slack: the stored scale is itself rounded to f16.
    assert (errors <= 1.1 * steps[name] * widest).all()
