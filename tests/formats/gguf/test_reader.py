"""Tests of reading a correct file: its values equal gguf-py's and stay valid while anything refers to them."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import BadGGUF, LlmrunError, ModelFileError, ModelNotFound
from llmrun.formats.gguf import cursor
from llmrun.formats.gguf.header import read_header
from llmrun.formats.gguf.metadata import StringArray
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from llmrun.formats.gguf.tensors import read_tensors
from llmrun.formats.quants.registry import BY_NAME
from tests.support.gguf.gguf_bytes import BOOL, CODES, F64, I32, RawGGUF, numbers, scalar, string, strings, whole_file
from tests.support.gguf.gguf_files import tiny_llama, tiny_spm_vocabulary, write_gguf
from tests.support.gguf.gguf_memory import MemorySource, read_gguf
from tests.support.models.downloads import llama_cpp_source, smollm2
from tests.support.tiers import examples


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tiny.gguf", weight_type="Q4_1", tied=False, rope_scaling="llama3")


def read_header_of(source: MemorySource, path: Path) -> int:
    """Parse the header and return its bytes."""
    at = cursor.Cursor(source, path)
    read_tensors(at, read_header(at))
    return at.position


def plain(value: Any) -> Any:
    """Return one of our values in the form of gguf-py's `ReaderField.contents`."""
    if isinstance(value, StringArray):
        return list(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_equal_to_gguf_py(path: Path) -> None:
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
        assert {key: plain(value) for key, value in ours.metadata.items()} == expected
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.type.name == tensor.tensor_type.name
            assert info.shape == tuple(tensor.shape.tolist())
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert info.n_rows == tensor.n_elements // info.shape[0]
            np.testing.assert_array_equal(ours.read(info), tensor.data.view(np.uint8).reshape(-1))


def test_a_model_gives_what_gguf_py_reads(tiny: Path) -> None:
    assert_equal_to_gguf_py(tiny)


def test_a_sentencepiece_model_gives_what_gguf_py_reads(tmp_path: Path) -> None:
    assert_equal_to_gguf_py(tiny_llama(tmp_path / "spm.gguf", vocabulary=tiny_spm_vocabulary()))


def test_every_value_type_gives_what_gguf_py_reads(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    path.write_bytes(whole_file().build())
    with open_gguf(path) as file:
        expected: dict[str, Any] = {f"test.scalar.{type_id}": 1 for type_id in CODES}
        expected |= {f"test.array.{type_id}": [0, 1, 1] for type_id in CODES}
        expected |= {"test.strings": ["one", "", "drei"], "test.no_strings": [], "test.no_numbers": []}
        for key, value in expected.items():
            assert plain(file.metadata[key]) == value, key
        assert file.metadata["test.scalar.7"] is True
        assert file.types["test.array.7"] == "arr[bool]"
        assert file.types["test.scalar.10"] == "u64"
        assert file.types["test.strings"] == "arr[str]"


def written_values() -> st.SearchStrategy[tuple[bytes, Any]]:
    """Return a strategy for a value's bytes in a file and the expected result: strings and numbers, also in arrays."""
    text = st.text(st.characters(codec="utf-8"), max_size=300)
    number = st.integers(-(2**31), 2**31 - 1)
    real = st.floats(allow_nan=False)
    return st.one_of(
        text.map(lambda value: (string(value), value)),
        number.map(lambda value: (scalar(I32, value), value)),
        real.map(lambda value: (scalar(F64, value), value)),
        st.lists(text, max_size=20).map(lambda values: (strings(values), values)),
        st.lists(number, max_size=20).map(lambda values: (numbers(I32, values), values)),
        st.lists(real, max_size=20).map(lambda values: (numbers(F64, values), values)),
        st.lists(st.booleans(), max_size=20).map(lambda values: (numbers(BOOL, values), values)),
    )


@pytest.mark.push
@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), written_values()))
def test_whatever_is_written_is_read(written: dict[str, tuple[bytes, Any]]) -> None:
    keys: dict[str | bytes, bytes] = {f"test.{key}": raw for key, (raw, _) in written.items()}
    file = read_gguf(RawGGUF(keys).build(), Path("written"))
    expected = {f"test.{key}": value for key, (_, value) in written.items()}
    assert {key: plain(value) for key, value in file.metadata.items()} == expected


def test_the_real_model_is_read_whole() -> None:
    with open_gguf(smollm2()) as file:
        assert (file.version, file.alignment, file.file_bytes) == (3, 32, 98_362_432)
        assert file.string("general.architecture") == "llama"
        assert file.integer("llama.block_count") == 30
        assert len(file.tensors) == 272
        assert len(file.strings("tokenizer.ggml.tokens")) == 49_152
        last = max(file.tensors.values(), key=lambda tensor: tensor.offset)
        assert 0 <= file.file_bytes - (last.offset + last.nbytes) < 32


@pytest.mark.push
def test_all_of_llama_cpps_vocabulary_files_open() -> None:
    paths = sorted((llama_cpp_source() / "vendor/llama.cpp/models").glob("*.gguf"))
    assert len(paths) > 15
    for path in paths:
        with open_gguf(path) as file:
            assert len(file.strings("tokenizer.ggml.tokens")) > 1000


def test_the_headers_arrays_are_views_that_cannot_be_written(tiny: Path) -> None:
    with open_gguf(tiny) as file:
        for array in (file.integers("tokenizer.ggml.token_type"), file.strings("tokenizer.ggml.tokens").data):
            assert not array.flags.owndata
            assert not array.flags.writeable


def test_a_tensor_is_read_whole_or_in_parts(tiny: Path) -> None:
    with open_gguf(tiny) as file:
        tensor = file.tensors["output.weight"]
        whole = file.read(tensor)
        assert whole.tobytes() == tiny.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        parts = np.zeros(tensor.nbytes, np.uint8)
        for start in range(0, tensor.nbytes, 100):
            file.read_into(tensor, start, parts[start : start + 100])
        np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 10**9), (10**9, 0), (10**9, 1)])
def test_bytes_outside_a_tensor_are_not_read(tiny: Path, start: int, length: int) -> None:
    with open_gguf(tiny) as file:
        tensor = file.tensors["output.weight"]
        with pytest.raises(ValueError, match=f"of a tensor of {tensor.nbytes}"):
            file.read_into(tensor, start, np.zeros(length, np.uint8))


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_header_is_read_in_steps_of_any_size(tiny: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_gguf(tiny) as file:
        expected = {key: plain(value) for key, value in file.metadata.items()}
        tensors = file.tensors
    monkeypatch.setattr(cursor, "_WINDOW_STEP", step)
    with open_gguf(tiny) as file:
        assert {key: plain(value) for key, value in file.metadata.items()} == expected
        assert file.tensors == tensors


def test_no_more_of_a_file_than_its_header_is_read_to_open_it(tiny: Path) -> None:
    source = MemorySource(tiny.read_bytes() + bytes(50 << 20))
    with mock.patch.object(source, "read", wraps=source.read) as reads:
        header_bytes = read_header_of(source, tiny)
    assert header_bytes <= sum(len(call.args[1]) for call in reads.call_args_list) <= header_bytes + (1 << 20)


def test_a_quantized_tensor_dequantizes_to_the_values_that_were_written(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "f32.gguf", {"general.architecture": "llama"}, {"w": ("F32", values)})
    with open_gguf(path) as file:
        tensor = file.tensors["w"]
        assert tensor.type is BY_NAME["F32"]
        assert tensor.type.dequantize is not None
        np.testing.assert_array_equal(tensor.type.dequantize(file.read(tensor)).reshape(3, 64), values)


def test_version_2_and_another_alignment_are_read(tmp_path: Path) -> None:
    raw = whole_file()
    raw.version = 2
    assert read_gguf(raw.build(), tmp_path / "two").version == 2
    values = np.ones((2, 32), np.float32)
    metadata = {"general.alignment": 128}
    path = write_gguf(tmp_path / "128.gguf", metadata, {"a": ("Q8_0", values), "b": ("F32", values)})
    with open_gguf(path) as file:
        assert file.alignment == 128
        assert all(tensor.offset % 128 == 0 for tensor in file.tensors.values())


def test_a_file_without_keys_and_tensors_is_a_file() -> None:
    file = read_gguf(RawGGUF().build(), Path("empty"))
    assert (dict(file.metadata), file.tensors) == ({}, {})


def test_bytes_after_the_last_tensor_and_a_missing_last_padding_are_allowed() -> None:
    data = whole_file().build()
    file = read_gguf(data + b"more", Path("longer"))
    last = file.tensors["output.weight"]
    assert read_gguf(data[: last.offset + last.nbytes], Path("shorter")).tensors == file.tensors


# Closing


@pytest.mark.push
def test_what_was_read_outlives_the_file(tiny: Path) -> None:
    with open_gguf(tiny) as file:
        tensor = file.read(file.tensors["output_norm.weight"])
        types = file.integers("tokenizer.ggml.token_type")
        tokens = file.strings("tokenizer.ggml.tokens")
        before = (tensor.tobytes(), types.tolist(), tokens[5])
    file.close()
    del file
    gc.collect()
    assert (tensor.tobytes(), types.tolist(), tokens[5]) == before


def test_a_closed_file_keeps_its_scalars_and_gives_no_bytes(tiny: Path) -> None:
    with open_gguf(tiny) as file:
        tensor = file.tensors["output.weight"]
    assert file.string("general.name") == "tiny llama"
    with pytest.raises(ValueError, match="closed"):
        file.read(tensor)


# Strings


def strings_of(*values: str | bytes) -> StringArray:
    raw = [value.encode() if isinstance(value, str) else value for value in values]
    lengths = np.array([len(value) for value in raw], np.int64)
    return StringArray(np.frombuffer(b"".join(raw), np.uint8), np.cumsum(lengths) - lengths, lengths)


def test_a_string_array_is_a_sequence() -> None:
    array = strings_of("a", "", "ünï", b"\xff!")
    assert list(array) == ["a", "", "ünï", "\ufffd!"]
    assert array[-2:] == ["ünï", "\ufffd!"]
    assert array[-1] == "\ufffd!"
    assert array.raw(3) == b"\xff!"
    assert array.all_raw() == [b"a", b"", "ünï".encode(), b"\xff!"]
    assert array.positions() == {b"a": 0, b"": 1, "ünï".encode(): 2, b"\xff!": 3}
    assert "a" in array
    assert len(array) == 4
    with pytest.raises(IndexError):
        array[4]


def test_an_empty_string_array_is_empty() -> None:
    array = strings_of()
    assert (list(array), array.all_raw(), array.positions()) == ([], [], {})


# Files that cannot be opened


def refused(path: Path | str) -> LlmrunError:
    with pytest.raises(LlmrunError) as caught:
        open_gguf(path)
    return caught.value


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    paths = (tmp_path / "none.gguf", tmp_path / "file" / "none.gguf", "nul\0byte.gguf", "x" * 5000, loop)
    for path in paths:
        error = refused(path)
        assert type(error) is ModelNotFound
        assert "such model file" in str(error)


def test_a_folder_is_not_found_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    assert type(refused(tmp_path)) is ModelNotFound
    os.mkfifo(tmp_path / "pipe")
    assert type(refused(tmp_path / "pipe")) is ModelFileError
    assert str(refused(tmp_path / "pipe")).endswith("/pipe: a named pipe")
    assert str(refused("/dev/null")) == "not a regular file: /dev/null: a device"


def test_a_link_to_itself_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert str(refused(tmp_path / "loop")).endswith("/loop: a symbolic link that leads to itself")


def test_a_file_that_may_not_be_read_is_a_model_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.gguf"
    path.write_bytes(whole_file().build())

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", deny)
    error = refused(path)
    assert type(error) is ModelFileError
    assert "locked.gguf: Permission denied" in str(error)


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    error = refused(tmp_path / "empty.gguf")
    assert isinstance(error, BadGGUF)
    assert "the file is empty" in str(error)


def test_a_path_that_would_disturb_a_terminal_is_shown_escaped(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31m\u202egguf"
    path.write_bytes(b"no")
    message = str(refused(path))
    assert r"\x1b[31m\u202egguf" in message
    assert message.isprintable()


# The typed getters


@pytest.fixture
def file() -> GGUFFile:
    return read_gguf(whole_file().build(), Path("folder/whole.gguf"))


def test_getters_give_values_of_their_type(file: GGUFFile) -> None:
    assert file.string("general.architecture") == "llama"
    assert file.integer("general.alignment", minimum=32, maximum=32) == 32
    assert file.number("test.scalar.6") == 1.0
    assert isinstance(file.number("test.scalar.4"), float)
    assert file.boolean("test.scalar.7") is True
    assert file.integers("test.array.0").tolist() == [0, 1, 1]
    assert file.numbers("test.array.12").tolist() == [0, 1, 1]
    assert file.numbers("test.array.5").tolist() == [0, 1, 1]
    assert file.strings("test.strings")[2] == "drei"
    assert file.has("test.empty")
    assert not file.has("test.none")


def test_a_missing_key_gives_the_default_or_names_itself(file: GGUFFile) -> None:
    assert file.string("none", None) is None
    assert file.integer("none", 5, minimum=7) == 5
    assert file.number("none", default=0.5) == 0.5
    assert file.boolean("none", default=True) is True
    getters = (file.string, file.integer, file.number, file.boolean, file.integers, file.numbers, file.strings)
    for getter in getters:
        with pytest.raises(BadGGUF, match=r"folder/whole\.gguf: llama\.block_count: the key is missing"):
            getter("llama.block_count")


@pytest.mark.parametrize(
    ("getter", "key", "message"),
    [
        ("string", "test.scalar.4", "must be a string, not u32"),
        ("integer", "test.scalar.7", "must be an integer, not bool"),
        ("integer", "test.scalar.6", "must be an integer, not f32"),
        ("number", "test.scalar.7", "must be a number, not bool"),
        ("number", "test.string", "must be a number, not str"),
        ("boolean", "test.scalar.0", "must be a boolean, not u8"),
        ("integers", "test.array.6", r"must be an array of integers, not arr\[f32\]"),
        ("integers", "test.scalar.4", "must be an array of integers, not u32"),
        ("numbers", "test.array.7", r"must be an array of numbers, not arr\[bool\]"),
        ("strings", "test.array.0", r"must be an array of strings, not arr\[u8\]"),
    ],
)
def test_another_type_is_named_with_what_it_must_be(file: GGUFFile, getter: str, key: str, message: str) -> None:
    with pytest.raises(BadGGUF, match=f"{key}: {message}"):
        getattr(file, getter)(key)


def test_an_integer_outside_its_limits_is_named_with_the_limit(file: GGUFFile) -> None:
    with pytest.raises(BadGGUF, match=r"general\.alignment: must be at least 33, not 32"):
        file.integer("general.alignment", minimum=33)
    with pytest.raises(BadGGUF, match=r"general\.alignment: must be at most 31, not 32"):
        file.integer("general.alignment", 8, maximum=31)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    path = write_gguf(tmp_path / "nan.gguf", {"rope.freq_base": value}, {})
    with open_gguf(path) as file, pytest.raises(BadGGUF, match=r"rope\.freq_base: must be finite, not ."):
        file.number("rope.freq_base")
