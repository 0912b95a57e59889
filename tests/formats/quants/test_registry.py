"""Tests of the table of weight types, against gguf-py's and llama.cpp's."""

from __future__ import annotations

import ctypes

import gguf
import llama_cpp._ggml as llama_cpp_ggml
import pytest
from gguf.constants import GGML_QUANT_SIZES

from llmrun.formats.quants.registry import ALL_TYPES, BY_ID, BY_NAME

GGML_TYPE_COUNT = 43  # as in llama-cpp-python 0.3.36
REMOVED = {4, 5, 31, 32, 33, 36, 37, 38}


def test_no_type_is_declared_twice() -> None:
    """A type that has a format must not also be listed as unreadable."""
    assert len({type_.ggml_id for type_ in ALL_TYPES}) == len({type_.name for type_ in ALL_TYPES}) == len(ALL_TYPES)


def test_ids_and_names_name_the_same_types() -> None:
    assert {id_: type_.name for id_, type_ in BY_ID.items()} == {t.ggml_id: name for name, t in BY_NAME.items()}
    assert all(type_.ggml_id == id_ for id_, type_ in BY_ID.items())
    assert not REMOVED & BY_ID.keys()


@pytest.mark.parametrize("kind", list(GGML_QUANT_SIZES), ids=lambda kind: kind.name)
def test_block_sizes_are_those_of_gguf_py(kind: gguf.GGMLQuantizationType) -> None:
    ours = BY_ID[int(kind)]
    sizes = GGML_QUANT_SIZES[kind]
    if kind.name == "Q8_1":
        # gguf-py counts two f32 fields, but the struct in ggml-common.h has two f16 fields: llama.cpp reads 36 bytes.
        sizes = (32, 36)
    assert (ours.name, ours.block_weights, ours.block_bytes) == (kind.name, *sizes)


def test_every_type_of_llama_cpp_is_known_with_its_own_block_sizes() -> None:
    ggml = llama_cpp_ggml.libggml
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_type_name.restype = ctypes.c_char_p
    theirs = {
        id_: (ggml.ggml_type_name(id_).decode().upper(), ggml.ggml_blck_size(id_), ggml.ggml_type_size(id_))
        for id_ in range(GGML_TYPE_COUNT)
        if ggml.ggml_blck_size(id_) > 0  # removed types have blocks of 0
    }
    assert theirs == {id_: (t.name, t.block_weights, t.block_bytes) for id_, t in BY_ID.items()}


def test_row_bytes_counts_blocks_and_refuses_a_part_of_one() -> None:
    assert BY_NAME["Q4_1"].row_bytes(576) == 18 * 20
    assert BY_NAME["F32"].row_bytes(3) == 12
    assert BY_NAME["Q6_K"].row_bytes(0) == 0
    with pytest.raises(ValueError, match="577 weights"):
        BY_NAME["Q4_1"].row_bytes(577)
