"""Tests that break each rule of the format in an otherwise correct file: BadGGUF names the place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.base.errors import BadGGUF, shown
from llmrun.formats.gguf import cursor
from llmrun.formats.gguf.format import MAX_KEYS, MAX_TENSORS
from tests.support.gguf.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    RawGGUF,
    RawTensor,
    numbers,
    scalar,
    string,
    strings,
    text,
    u32,
    u64,
    whole_file,
)
from tests.support.gguf.gguf_memory import read_gguf

PATH = Path("folder/model.gguf")
HUGE = [2**24, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1]


def refusal(data: bytes) -> str:
    with pytest.raises(BadGGUF) as caught:
        read_gguf(data, PATH)
    message = str(caught.value)
    assert message.startswith((f"not a valid GGUF file: {PATH}: ", f"incomplete GGUF file: {PATH}: "))
    assert message.isprintable()
    assert caught.value.hint
    return message.removeprefix(f"not a valid GGUF file: {PATH}: ")


def with_key(key: str | bytes, value: bytes) -> bytes:
    raw = whole_file()
    raw.keys[key] = value
    return raw.build()


def with_tensor(tensor: RawTensor) -> bytes:
    """Put the tensor first, so that it breaks no other rule."""
    raw = whole_file()
    raw.tensors.insert(0, tensor)
    return raw.build()


def test_the_file_these_tests_start_from_is_correct() -> None:
    file = read_gguf(whole_file().build(), PATH)
    assert len(file.tensors) == 4


# Magic and version


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(40), "zip archive"),
        (b"\x80\x02\x8a\n" + bytes(40), "pickle"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"tjgg" + bytes(40), "GGJT"),
        (b"\x40\x00\x00\x00\x00\x00\x00\x00" + b'{"a": 1}', "safetensors"),
        (b"\x1b[2J" + bytes(40), r"begins with '\x1b[2J'"),
        (b"G", "begins with 'G'"),
        (b"GGU", "begins with 'GGU'"),
    ],
)
def test_another_kind_of_file_is_named(start: bytes, message: str) -> None:
    seen = refusal(start)
    assert seen.startswith("magic: ")
    assert message in seen


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (0, "must be 2 or 3, not 0"),
        (1, "must be 2 or 3; version 1, of August 2023, is obsolete"),
        (4, "must be 2 or 3, not 4"),
        (3 << 24, "3 with its bytes swapped"),
        (2 << 24, "2 with its bytes swapped"),
        (2**32 - 1, "must be 2 or 3, not 4294967295"),
    ],
)
def test_a_version_that_is_not_read_is_refused(version: int, message: str) -> None:
    raw = whole_file()
    raw.version = version
    assert refusal(raw.build()).startswith(f"version: {message}")


# Counts and lengths against the bytes that remain


@pytest.mark.parametrize("n", HUGE)
def test_a_huge_count_is_refused_before_anything_is_read(n: int) -> None:
    raw = whole_file()
    assert refusal(replace(raw, key_count=n).build()).startswith(f"number of keys: must be at most {MAX_KEYS}")
    message = refusal(replace(raw, tensor_count=n).build())
    assert message.startswith(f"number of tensors: must be at most {MAX_TENSORS}")


def test_a_count_that_cannot_fit_in_the_file_is_refused() -> None:
    raw = RawGGUF()
    assert "bytes needed, 0 bytes remain" in refusal(replace(raw, key_count=2).build()[:24])
    assert "bytes needed, 8 bytes remain" in refusal(replace(raw, tensor_count=2).build()[:24])


@pytest.mark.parametrize("type_id", [U8, BOOL, U16, F32, I64, STRING])
@pytest.mark.parametrize("n", HUGE)
def test_a_huge_array_is_refused_at_once(type_id: int, n: int) -> None:
    data = with_key("test.huge", u32(ARRAY) + u32(type_id) + u64(n) + bytes(64))
    limit = f"must be at most {2**30}, not {n}" if n > 2**30 else f"for {n} items, "
    assert refusal(data).startswith(f"test.huge: {limit}")


@pytest.mark.parametrize("n", HUGE)
def test_a_string_longer_than_the_file_is_refused(n: int) -> None:
    assert refusal(with_key("test.long", u32(STRING) + u64(n))).startswith(f"test.long: {n} bytes needed, ")
    raw = whole_file()
    raw.more_keys = u64(n)
    raw.key_count = len(raw.keys) + 1
    assert refusal(raw.build()).startswith(f"name of key {len(raw.keys)}: {n} bytes needed, ")
    values = u32(ARRAY) + u32(STRING) + u64(3) + text("fine") + u64(n) + text("never reached")
    assert refusal(with_key("test.long", values)).startswith(f"test.long: string 1: {n} bytes needed, ")
    last = u32(ARRAY) + u32(STRING) + u64(2) + text("fine") + u64(n)
    assert refusal(with_key("test.long", last)).startswith(f"test.long: string 1: {n} bytes needed, ")


def test_a_string_array_that_ends_inside_a_length_is_refused() -> None:
    raw = RawGGUF({"a": u32(ARRAY) + u32(STRING) + u64(2) + text("x" * 20) + b"\x01\x00"})
    data = raw.header()
    assert refusal(data).startswith("a: string 1: 8 bytes needed, 2 bytes remain")


def test_a_header_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = whole_file().build()
    monkeypatch.setattr(cursor, "MAX_HEADER_BYTES", 700)
    assert refusal(data).endswith("bytes of the 700 a header may have remain")
    many = RawGGUF({"test.x": strings(["x" * 50] * 20)}).build() + bytes(10_000)
    assert re.match(r"test\.x: string \d+: 50 bytes needed, \d+ bytes of the 700", refusal(many))


# Keys and values


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (b"", "must be 1 to 65535 bytes long, not 0"),
        (b"k" * 65_536, "must be 1 to 65535 bytes long, not 65536"),
        (b"general\xff", r"'general\xff' is not UTF-8 at byte 7"),
        (b"general.name\0x", r"'general.name\x00x' contains a NUL byte"),
    ],
)
def test_a_key_that_is_no_name_is_refused(key: bytes, message: str) -> None:
    assert re.match(r"name of key \d+: " + re.escape(message), refusal(with_key(key, scalar(U8, 1))))


def test_a_key_that_is_there_twice_is_refused() -> None:
    raw = whole_file()
    raw.more_keys = text("general.architecture") + string("llama")
    raw.key_count = len(raw.keys) + 1
    assert refusal(raw.build()).startswith("general.architecture: duplicate key")


@pytest.mark.parametrize("type_id", [13, 14, 255, 2**31, 2**32 - 1])
def test_an_unknown_value_type_is_refused(type_id: int) -> None:
    assert refusal(with_key("test.x", u32(type_id) + bytes(8))).startswith(f"test.x: unknown value type {type_id} ")
    data = with_key("test.x", u32(ARRAY) + u32(type_id) + u64(1) + bytes(8))
    assert refusal(data).startswith(f"test.x: unknown array element type {type_id} ")


def test_an_array_of_arrays_is_refused() -> None:
    inner = u32(U8) + u64(1) + b"\0"
    assert refusal(with_key("test.x", u32(ARRAY) + u32(ARRAY) + u64(1) + inner)).startswith("test.x: arrays of arrays")


@pytest.mark.parametrize("value", [2, 128, 255])
def test_a_boolean_that_is_neither_0_nor_1_is_refused(value: int) -> None:
    assert refusal(with_key("test.x", scalar(BOOL, value))).startswith(f"test.x: a boolean must be 0 or 1, not {value}")
    data = with_key("test.x", numbers(BOOL, [0, 1, value, 0]))
    assert refusal(data).startswith(f"test.x: the boolean at index 2 must be 0 or 1, not {value}")


@pytest.mark.parametrize("alignment", [0, 3, 24, 33, 2**32 - 1])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    data = with_key("general.alignment", scalar(U32, alignment))
    assert refusal(data) == f"general.alignment: must be a power of two, not {alignment}"


@pytest.mark.parametrize("value", [scalar(U64, 32), scalar(I32, 32), string("32"), numbers(U32, [32])])
def test_an_alignment_of_another_type_is_refused(value: bytes) -> None:
    assert refusal(with_key("general.alignment", value)).startswith("general.alignment: must be u32, not ")


def test_an_alignment_that_puts_the_data_outside_the_file_is_refused() -> None:
    assert "must be 2147483648, the end of" in refusal(with_key("general.alignment", scalar(U32, 2**31)))


@pytest.mark.parametrize("value", [scalar(U32, 1), strings(["llama"])])
def test_an_architecture_that_is_no_string_is_refused(value: bytes) -> None:
    assert refusal(with_key("general.architecture", value)).startswith("general.architecture: must be str, not ")


# Tensors


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (b"", "must be 1 to 63 bytes long, but '' has 0"),
        (b"t" * 64, "must be 1 to 63 bytes long, but '"),
        (b"t\xc3", r"'t\xc3' is not UTF-8"),
        (b"t\0", r"'t\x00' contains a NUL byte"),
    ],
)
def test_a_tensor_name_that_is_no_name_is_refused(name: bytes, message: str) -> None:
    seen = refusal(with_tensor(RawTensor(name)))
    assert seen.startswith("name of tensor 0: ")
    assert message in seen


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    assert refusal(with_tensor(RawTensor("output.weight"))).startswith("output.weight: duplicate tensor name")


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 1), (1,) * 9])
def test_a_tensor_has_one_to_four_dimensions(shape: tuple[int, ...]) -> None:
    assert refusal(with_tensor(RawTensor("t", shape=shape))) == f"t: must have 1 to 4 dimensions, not {len(shape)}"


@pytest.mark.parametrize("shape", [(0,), (8, 0), (8, 4, 0, 1), (2**63,), (8, 2**64 - 1)])
def test_a_dimension_is_positive(shape: tuple[int, ...]) -> None:
    assert refusal(with_tensor(RawTensor("t", shape=shape))).startswith("t: dimensions must be positive, not (")


@pytest.mark.parametrize("shape", [(2**62, 2), (2**32, 2**31), (2**21, 2**21, 2**20, 4), (2**63 - 1, 3)])
def test_a_product_of_dimensions_beyond_int64_is_refused(shape: tuple[int, ...]) -> None:
    assert refusal(with_tensor(RawTensor("t", shape=shape))).endswith(f"more than {2**63 - 1} weights")


@pytest.mark.parametrize("shape", [(2**62,), (2**31, 2**31)])
def test_a_tensor_whose_bytes_overflow_is_refused(shape: tuple[int, ...]) -> None:
    assert f"must be {2**64}, the end of" in refusal(with_tensor(RawTensor("t", shape=shape, offset=0)))


@pytest.mark.parametrize("type_id", [4, 5, 31, 32, 33, 36, 37, 38])
def test_a_removed_weight_type_is_refused_with_what_to_do(type_id: int) -> None:
    message = refusal(with_tensor(RawTensor("t", type_id)))
    assert message == f"t: weight type {type_id} was removed from GGUF, so the model must be converted again"


@pytest.mark.parametrize("type_id", [43, 255, 2**31, 2**32 - 1])
def test_an_unknown_weight_type_is_refused(type_id: int) -> None:
    assert refusal(with_tensor(RawTensor("t", type_id))) == f"t: unknown weight type {type_id} (known: 0 to 42)"


@pytest.mark.parametrize(("type_id", "row"), [(2, 33), (8, 16), (12, 128), (40, 96)])
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(type_id: int, row: int) -> None:
    assert refusal(with_tensor(RawTensor("t", type_id, (row,)))).startswith("t: row length must be a multiple of ")


@pytest.mark.parametrize("offset", [32, 1, 128, 2**40, 2**63, 2**64 - 32])
def test_the_first_tensor_lies_at_the_start_of_the_data(offset: int) -> None:
    message = refusal(with_tensor(RawTensor("t", offset=offset)))
    assert message == f"t: offset must be 0, the end of the previous tensor, not {offset}"


@pytest.mark.parametrize(("offset", "why"), [(192, "overlap"), (256, "gap"), (225, "misaligned"), (0, "out of order")])
def test_tensors_lie_one_behind_the_other(offset: int, why: str) -> None:
    raw = whole_file()
    raw.tensors[1] = replace(raw.tensors[1], offset=offset)
    message = refusal(raw.build())
    assert message == f"blk.0.attn_norm.weight: offset must be 224, the end of the previous tensor, not {offset}", why


def test_a_tensor_past_the_end_of_the_file_is_refused() -> None:
    data = whole_file().build()
    said = refusal(data[:-100])
    assert said == f"incomplete GGUF file: {PATH}: 3.16 kB of 3.26 kB; the download or copy may have stopped early"
    last_byte = refusal(data[: whole_file_end(data) - 1])
    assert f" {whole_file_end(data) - 1:,} of {whole_file_end(data):,} bytes; " in last_byte


def whole_file_end(data: bytes) -> int:
    """Return the offset at which the last tensor ends, before its padding."""
    with read_gguf(data, PATH) as file:
        return max(tensor.offset + tensor.nbytes for tensor in file.tensors.values())


def test_data_that_llama_cpp_would_map_unaligned_are_refused() -> None:
    raw = whole_file()
    raw.keys["general.alignment"] = scalar(U32, 8)
    raw.alignment = 8
    raw.keys["general.name"] = string("")
    padding = (8 - len(raw.header())) % 32
    raw.keys["general.name"] = string("n" * padding)
    assert len(raw.header()) % 32 == 8
    assert "must be a multiple of 32" in refusal(raw.build())


# Truncation


@pytest.mark.push
def test_every_truncation_of_a_header_is_refused() -> None:
    raw = whole_file()
    header = raw.header()
    first = -(-len(header) // 32) * 32
    data = raw.build()
    for end in range(first + 1):
        assert refusal(data[:end])


# Names in messages


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain.name", "plain.name"),
        ("ünï 日本", "ünï 日本"),
        ("a\x1b]52;c\x07b", r"a\x1b]52;c\x07b"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("line\nbreak\u2028", r"line\nbreak\u2028"),
        (b"\xff\xfe", r"\xff\xfe"),
        ("\ud800", r"\ud800"),
    ],
)
def test_names_are_shown_printable(name: str | bytes, expected: str) -> None:
    assert shown(name) == expected


def test_long_names_are_shortened_in_the_middle() -> None:
    assert shown("a" * 60 + "b" * 60, 30) == "a" * 20 + "…" + "b" * 10
    assert len(shown(b"\xff" * 10**6)) < 100


def test_a_hostile_name_is_harmless_in_the_message_it_causes() -> None:
    message = refusal(with_key("evil\x1b[2J\u202e" + "x" * 5000, u32(99)))
    assert r"evil\x1b[2J\u202exxx" in message
    assert len(message) < 200
