"""Tests of each readable format against llama.cpp's C code, which gguf-py reimplements. Results are bit-identical."""

from __future__ import annotations

import ctypes

import llama_cpp._ggml as llama_cpp_ggml
import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import WeightType
from tests.support.kernels.blocks import EXTREME_HALVES, READABLE, assert_same_bits, put_halves, random_rows

ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class TypeTraits(ctypes.Structure):
    """ggml's `struct ggml_type_traits`, as in llama-cpp-python 0.3.36."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ToFloat),
        ("from_float_ref", ctypes.c_void_p),
    )


def weights_of_c(type_: WeightType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    get_traits = llama_cpp_ggml.libggml.ggml_get_type_traits
    get_traits.restype = ctypes.POINTER(TypeTraits)
    traits = get_traits(type_.ggml_id).contents
    assert (traits.type_name.decode().upper(), traits.type_size) == (type_.name, type_.block_bytes)
    raw = np.ascontiguousarray(raw)
    weights = np.empty(raw.size // type_.block_bytes * type_.block_weights, np.float32)
    traits.to_float(raw.ctypes.data, weights.ctypes.data, weights.size)
    return weights.reshape(*raw.shape[:-1], -1)


@pytest.mark.parametrize("name", [name for name in READABLE if name != "F32"])
def test_llama_cpp_reads_the_same_weights(name: str) -> None:
    type_ = BY_NAME[name]
    assert type_.dequantize is not None
    raw = random_rows(type_, 29, 40, seed=8)
    assert_same_bits(type_.dequantize(raw), weights_of_c(type_, raw))
    halves = np.random.default_rng(9).choice(EXTREME_HALVES, (29 * 40, 2))
    raw = put_halves(type_, raw, halves)
    assert_same_bits(type_.dequantize(raw), weights_of_c(type_, raw))
