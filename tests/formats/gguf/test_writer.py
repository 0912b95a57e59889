"""Tests that written files are read back by the strict reader and by gguf-py, with the same values."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.formats.gguf.metadata import StringArray
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.gguf.writer import NewTensor, file_bytes, header_bytes, write_gguf
from llmrun.formats.quants.registry import BY_NAME

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ARRAYS = st.sampled_from(["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", "?"])
VALUES = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    TEXT,
    st.lists(TEXT, max_size=5),
    ARRAYS.map(lambda dtype: np.arange(5).astype(dtype)),
)


def tensor(name: str, type_name: str, *shape: int) -> tuple[NewTensor, bytes]:
    """Return a tensor with random bytes that are produced in pieces, and the bytes."""
    type_ = BY_NAME[type_name]
    size = type_.row_bytes(shape[0]) * int(np.prod(shape[1:], dtype=int))
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    return NewTensor(name, type_, shape, lambda: np.array_split(data, 3)), data.tobytes()


@pytest.mark.push
@settings(deadline=None)
@given(
    metadata=st.dictionaries(TEXT.filter(lambda key: key and "\0" not in key).map("x.{}".format), VALUES, max_size=8)
)
def test_what_was_written_is_read(metadata: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("written") / "a.gguf"
    made = [tensor("a", "F32", 7), tensor("b", "Q4_0", 64, 3), tensor("c", "Q5_0", 32), tensor("d", "BF16", 5, 2, 2)]
    with path.open("wb") as file:
        write_gguf(file, metadata, [each for each, _ in made])
    assert path.stat().st_size == file_bytes(metadata, [each for each, _ in made])
    with open_gguf(path) as read:
        assert list(read.metadata) == list(metadata)
        for key, value in metadata.items():
            found = read.metadata[key]
            expected = list(value) if isinstance(value, list) else value
            assert np.array_equal(found[:] if isinstance(found, StringArray) else found, expected)
        for each, data in made:
            assert read.tensors[each.name].shape == each.shape
            assert read.read(read.tensors[each.name]).tobytes() == data


def test_files_are_those_of_gguf_py(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.x": 0.5,
        "llama.y": True,
    }
    metadata |= {"llama.texts": ["a", "ö"], "llama.numbers": np.arange(3, dtype=np.int32)}
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.x", 0.5)
    writer.add_bool("llama.y", True)
    writer.add_array("llama.texts", ["a", "ö"])
    writer.add_array("llama.numbers", [0, 1, 2])
    writer.add_tensor("first", values)
    writer.add_tensor("second", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, f32 = io.BytesIO(), BY_NAME["F32"]
    first = NewTensor("first", f32, (32, 2), lambda: [values])
    write_gguf(file, metadata, [first, NewTensor("second", f32, (32,), lambda: [values[0]])])
    assert file.getvalue() == (tmp_path / "theirs.gguf").read_bytes()


def test_a_tensor_of_another_size_is_an_error() -> None:
    short = NewTensor("a", BY_NAME["F32"], (3,), lambda: [np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="a has 8 bytes, but its shape needs 12"):
        write_gguf(io.BytesIO(), {}, [short])


@pytest.mark.parametrize("value", [-1, 2**32, 1e300])
def test_numbers_that_do_not_fit_are_an_error(value: float) -> None:
    with pytest.raises(ValueError, match=r"x\.y: .* does not fit into a (u32|f32)"):
        header_bytes({"x.y": value}, [])


def test_data_is_produced_only_when_it_is_written() -> None:
    produced: list[str] = []

    def noted(name: str) -> NewTensor:
        def data() -> list[np.ndarray[Any, Any]]:
            produced.append(name)
            return [np.zeros(2, np.float32), np.zeros(1, np.float32)]

        return NewTensor(name, BY_NAME["F32"], (3,), data)

    seen: list[tuple[str, int]] = []
    write_gguf(io.BytesIO(), {}, [noted("a"), noted("b")], lambda n: seen.append(("".join(produced), n)))
    assert seen == [("a", 8), ("a", 4), ("ab", 8), ("ab", 4)]


def test_files_that_write_a_little_at_a_time_get_everything() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any, /) -> int:
            return super().write(bytes(data[:5]))

    made, _ = tensor("a", "Q4_0", 64, 3)
    slow, fast = Slow(), io.BytesIO()
    for file in (slow, fast):
        write_gguf(file, {"a.b": "c"}, [made])
    assert slow.getvalue() == fast.getvalue()
