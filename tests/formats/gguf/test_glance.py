"""Tests that a quick glance at a header agrees with the strict reader, reads little, and never crashes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import BadGGUF, LlmrunError, ModelFileError, ModelNotFound
from llmrun.formats.gguf import glance as glancing
from llmrun.formats.gguf.cursor import Cursor
from llmrun.formats.gguf.format import MAX_ARRAY_ELEMENTS, MAX_KEYS
from llmrun.formats.gguf.glance import Glance, glance
from llmrun.formats.gguf.header import read_header
from llmrun.formats.gguf.source import FileSource
from tests.support.gguf.gguf_bytes import (
    ARRAY,
    BOOL,
    I32,
    STRING,
    U8,
    U32,
    RawGGUF,
    numbers,
    scalar,
    string,
    strings,
    u32,
    u64,
    whole_file,
)
from tests.support.gguf.gguf_memory import MemorySource
from tests.support.gguf.gguf_mutations import base_files, mutant
from tests.support.hub.model_stores import gguf, long_header
from tests.support.models.downloads import llama_cpp_source, smollm2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def glance_at(path: Path, data: bytes) -> Glance:
    path.write_bytes(data)
    return glance(path)


def refusal(path: Path, data: bytes) -> str:
    """Return the glance's error for a broken header, after checking that the strict reader gives the same one."""
    with pytest.raises(BadGGUF) as refused:
        glance_at(path, data)
    with pytest.raises(BadGGUF) as strict:
        read_header(Cursor(MemorySource(data), path))
    assert str(refused.value) == str(strict.value)
    return str(refused.value).partition(f"{path}: ")[2]


def test_the_facts_of_a_real_model() -> None:
    assert glance(smollm2()) == Glance(
        architecture="llama",
        quantization="Q4_1",
        context=8192,
        size_label="135M",
    )


@pytest.mark.push
def test_real_vocabularies_are_seen_as_the_reader_sees_them() -> None:
    seen = 0
    for file in sorted(llama_cpp_source().glob("**/ggml-vocab-*.gguf")):
        read = read_header(Cursor(MemorySource(file.read_bytes()), file)).metadata
        facts = glance(file)
        assert facts.architecture == read["general.architecture"]
        assert facts.context == read.get(f"{facts.architecture}.context_length", 0)
        seen += 1
    assert seen > 5


def test_the_type_is_found_before_and_behind_the_vocabulary(path: Path) -> None:
    wanted = Glance("llama", "Q4_K_M", 4096, "1B")
    assert glance_at(path, long_header(type_last=False)) == wanted
    assert glance_at(path, long_header(type_last=True)) == wanted
    # The file name already gives the type, so the vocabulary is not scanned for it.
    named = path.with_name("model-Q8_0.gguf")
    assert glance_at(named, long_header(type_last=True)) == wanted._replace(quantization="Q8_0")


def test_few_kilobytes_of_a_usual_header_are_read(path: Path) -> None:
    def bytes_read(file: Path) -> int:
        with mock.patch.object(FileSource, "read", autospec=True, side_effect=FileSource.read) as reads:
            glance(file)
        return sum(len(call.args[2]) for call in reads.call_args_list)

    assert 0 < bytes_read(smollm2()) <= 100_000
    named = path.with_name("model-Q8_0.gguf")
    named.write_bytes(long_header(type_last=True, tokens=100_000))
    assert 0 < bytes_read(named) <= 100_000


def test_numpy_is_not_imported(path: Path) -> None:
    path.write_bytes(gguf())
    program = (
        "import sys; from pathlib import Path; from llmrun.formats.gguf.glance import glance; "
        f"glance(Path({str(path)!r})); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_kind_of_value_is_stepped_over(path: Path) -> None:
    raw = whole_file()
    raw.keys["llama.context_length"] = scalar(U32, 77)
    assert glance_at(path, raw.build()).context == 77


def test_a_value_of_another_type_is_not_taken(path: Path) -> None:
    keys: dict[str | bytes, bytes] = {
        "general.architecture": scalar(U8, 1),
        "general.name": numbers(I32, [1]),
        "llama.context_length": string("many"),
        "general.file_type": scalar(U32, 999),
    }
    assert glance_at(path, RawGGUF(keys).build()) == Glance()
    keys["general.architecture"] = string("x" * 5000)
    assert glance_at(path, RawGGUF(keys).build()) == Glance("x" * 300)


def test_other_files_are_told_as_the_reader_tells_them(path: Path) -> None:
    assert refusal(path, b"") == "magic: the file is empty"
    assert refusal(path, b"<html>").startswith("magic: this is a web page")
    assert refusal(path, b"GGUF" + u32(1)).startswith("version: must be 2 or 3; version 1")
    assert refusal(path, b"GGUF" + u32(3)) == "number of tensors: 8 bytes needed, 0 bytes remain"


def test_numbers_beyond_the_limits_are_refused(path: Path) -> None:
    start, end = b"GGUF" + u32(3) + u64(0), bytes(64)
    assert refusal(path, start + u64(MAX_KEYS + 1)).startswith(
        f"number of keys: must be at most {MAX_KEYS}, not {MAX_KEYS + 1}"
    )
    assert refusal(path, start + u64(1) + u64(0) + end).startswith(
        "name of key 0: must be 1 to 65535 bytes long, not 0"
    )
    long = start + u64(1) + u64(70_000) + bytes(70_000)
    assert refusal(path, long) == "name of key 0: must be 1 to 65535 bytes long, not 70000"
    key = start + u64(1) + u64(1) + b"k"
    assert refusal(path, key + u32(13) + end) == "k: unknown value type 13 (known: 0 to 12)"
    assert refusal(path, key + u32(ARRAY) + u32(13) + u64(0)) == "k: unknown array element type 13 (known: 0 to 12)"
    many = MAX_ARRAY_ELEMENTS + 1
    assert refusal(path, key + u32(ARRAY) + u32(STRING) + u64(many)).startswith("k: must be at most")
    assert refusal(path, key + u32(ARRAY) + u32(U32) + u64(4)) == "k: for 4 items, 16 bytes needed, 0 bytes remain"
    assert refusal(path, key + u32(STRING) + u64(2**63)) == f"k: {2**63} bytes needed, 0 bytes remain"
    assert refusal(path, key + u32(ARRAY) + u32(STRING) + u64(9)) == "k: for 9 items, 72 bytes needed, 0 bytes remain"


def test_a_file_that_holds_a_long_header_is_not_called_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values beyond the glance's limit are left out, but a value that would end past the end of the file is refused."""
    monkeypatch.setattr(glancing, "MOST_BYTES", 300)
    keys: dict[str | bytes, bytes] = {"general.architecture": string("llama"), "general.name": string("x" * 400)}
    assert glance_at(path, RawGGUF(keys).build()) == Glance("llama")
    keys["general.name"] = u32(STRING) + u64(2**63)
    with pytest.raises(BadGGUF, match=r"general\.name: 9223372036854775808 bytes needed"):
        glance_at(path, RawGGUF(keys).build() + bytes(500))


def test_a_vocabulary_beyond_the_limit_is_not_walked_to_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glancing, "MOST_BYTES", 30_000)
    assert glance_at(path, long_header(type_last=True)) == Glance("llama", "", 4096, "1B")


def test_a_model_that_says_no_context_says_none_behind_its_vocabulary(path: Path) -> None:
    keys: dict[str | bytes, bytes] = {
        "general.architecture": string("llama"),
        "general.file_type": scalar(U32, 2),
        "tokenizer.ggml.tokens": strings(["x"] * 2000),
        "llama.context_length": scalar(U32, 9),
    }
    assert glance_at(path, RawGGUF(keys).build()) == Glance("llama", quantization="Q4_0")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 1000])
def test_a_string_that_leads_out_of_the_file_is_refused(path: Path, length: int) -> None:
    keys: dict[str | bytes, bytes] = {"general.architecture": string("llama")}
    array = u32(ARRAY) + u32(STRING) + u64(2) + u64(length) + b"x" * 10
    with pytest.raises(BadGGUF, match=r"a: .* bytes needed, "):
        glance_at(path, RawGGUF(keys | {"a": array}).build())


def test_short_arrays_before_the_facts_do_not_hide_them(path: Path) -> None:
    keys: dict[str | bytes, bytes] = {
        "general.tags": strings(["a", "b"]),
        "general.flag": scalar(BOOL, 1),
        "general.architecture": string("gemma3"),
        "gemma3.context_length": scalar(U32, 5),
    }
    assert glance_at(path, RawGGUF(keys).build()) == Glance("gemma3", context=5)


def test_a_file_that_is_not_there_or_is_no_file(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    with pytest.raises(ModelNotFound):
        glance(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound):
        glance(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError):
        glance(tmp_path / "pipe")


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_magic_are_facts_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + data)
    with contextlib.suppress(LlmrunError):
        glance(path)


@pytest.mark.night
def test_what_the_reader_opens_a_glance_takes_too(path: Path) -> None:
    bases = base_files()
    refused = 0
    for case in range(2000):
        data = mutant(bases, 3, case)
        path.write_bytes(data)
        try:
            facts = glance(path)
        except LlmrunError:
            refused += 1
            with pytest.raises(LlmrunError):
                read_header(Cursor(MemorySource(data), path))
        else:
            assert isinstance(facts.architecture, str)
    assert 100 < refused < 1900
