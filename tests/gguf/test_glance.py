"""A glance at a header says what the strict reader says, reads little, and never crashes."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.errors import BadGGUF, LlmrunError, ModelFileError, ModelNotFound
from llmrun.gguf import glance as glancing
from llmrun.gguf.cursor import Cursor
from llmrun.gguf.format import MAX_ARRAY_ELEMENTS, MAX_KEYS
from llmrun.gguf.glance import FILE_TYPES, Glance, glance
from llmrun.gguf.header import read_header
from llmrun.gguf.source import MemorySource
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
from tests.support.gguf.gguf_mutations import base_files, mutant
from tests.support.hub.model_stores import gguf, long_header
from tests.support.models.downloads import llama_cpp_source, smollm2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def glance_at(path: Path, data: bytes, *, needs_file_type: bool = True) -> Glance:
    path.write_bytes(data)
    return glance(path, needs_file_type=needs_file_type)


def refusal(path: Path, data: bytes) -> str:
    with pytest.raises(BadGGUF) as refused:
        glance_at(path, data)
    return str(refused.value).partition(f"{path}: ")[2]


def test_the_facts_of_a_real_model() -> None:
    assert glance(smollm2()) == Glance(
        architecture="llama",
        name="Smollm2 135M 8k Lc100K Mix1 Ep2",
        size_label="135M",
        file_type="Q4_1",
        license="apache-2.0",
        context=8192,
    )


def test_real_vocabularies_are_seen_as_the_reader_sees_them() -> None:
    seen = 0
    for file in sorted(llama_cpp_source().glob("**/ggml-vocab-*.gguf")):
        read = read_header(Cursor(MemorySource(file.read_bytes()), file)).metadata
        facts = glance(file)
        assert facts.architecture == read["general.architecture"]
        assert facts.name == read.get("general.name", "")
        assert facts.context == read.get(f"{facts.architecture}.context_length", 0)
        seen += 1
    assert seen > 5


def test_the_type_is_found_before_and_behind_the_vocabulary(path: Path) -> None:
    wanted = Glance("llama", "", "1B", "Q4_K_M", "", 4096)
    assert glance_at(path, long_header(type_last=False)) == wanted
    assert glance_at(path, long_header(type_last=True)) == wanted
    # The name of the file has told it: nobody walks through a vocabulary for it.
    assert glance_at(path, long_header(type_last=True), needs_file_type=False) == wanted._replace(file_type="")


def test_no_more_than_some_kilobytes_are_read_of_a_usual_header(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    fill = glancing._Walk._fill

    def counted(walk: glancing._Walk, n: int) -> None:
        nonlocal read
        fill(walk, n)
        read += len(walk._data)

    monkeypatch.setattr(glancing._Walk, "_fill", counted)
    glance(smollm2())
    assert 0 < read <= 100_000
    read = 0
    glance_at(path, long_header(type_last=True, tokens=100_000), needs_file_type=False)
    assert 0 < read <= 100_000


def test_numpy_is_not_imported(path: Path) -> None:
    path.write_bytes(gguf())
    program = (
        "import sys; from pathlib import Path; from llmrun.gguf.glance import glance; "
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
        "general.license": string("x" * 5000),
        "llama.context_length": string("many"),
        "general.file_type": scalar(U32, 999),
    }
    assert glance_at(path, RawGGUF(keys).build()) == Glance(license="x" * 300)


def test_file_types_are_those_of_gguf_py() -> None:
    import gguf as oracle

    known = {int(kind): kind.name for kind in oracle.LlamaFileType if kind.name != "GUESSED"}
    theirs = {number: name.removeprefix("MOSTLY_").removeprefix("ALL_") for number, name in known.items()}
    for number, name in FILE_TYPES.items():
        assert number not in theirs or theirs[number] == name
    assert len(theirs.keys() & FILE_TYPES.keys()) > 25


def test_other_files_are_told_as_the_reader_tells_them(path: Path) -> None:
    assert refusal(path, b"") == "magic: the file is empty"
    assert refusal(path, b"<html>").startswith("magic: this is a web page")
    assert refusal(path, b"GGUF" + u32(1)).startswith("version: 1, a format of August 2023")
    assert refusal(path, b"GGUF" + u32(3)) == "number of tensors: 8 bytes needed, 0 bytes remain"


def test_numbers_beyond_the_limits_are_refused(path: Path) -> None:
    start = b"GGUF" + u32(3) + u64(0)
    assert refusal(path, start + u64(MAX_KEYS + 1)).startswith(f"number of keys: {MAX_KEYS + 1} seen, at most")
    assert refusal(path, start + u64(1) + u64(0)).startswith("name of key 0: 0 bytes long")
    assert refusal(path, start + u64(1) + u64(70_000)).startswith("name of key 0: 70000 bytes long")
    key = start + u64(1) + u64(1) + b"k"
    assert refusal(path, key + u32(13)) == "k: value type 13 seen, 0 to 12 are known"
    assert refusal(path, key + u32(ARRAY) + u32(13) + u64(0)) == "k: array element type 13 seen, 0 to 12 are known"
    many = MAX_ARRAY_ELEMENTS + 1
    assert refusal(path, key + u32(ARRAY) + u32(STRING) + u64(many)).startswith(f"k: {many} seen, at most")
    assert refusal(path, key + u32(ARRAY) + u32(U32) + u64(4)) == "k: 16 bytes needed, the file ends before"
    assert refusal(path, key + u32(STRING) + u64(2**63)) == "k: 1200 bytes needed, 0 bytes remain"
    assert refusal(path, key + u32(ARRAY) + u32(STRING) + u64(9)) == "k: 8 bytes needed, 0 bytes remain"


def test_a_vocabulary_beyond_the_limit_is_not_walked_to_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glancing, "MOST_BYTES", 30_000)
    assert glance_at(path, long_header(type_last=True)) == Glance("llama", "", "1B", "", "", 4096)


def test_a_model_that_says_no_context_says_none_behind_its_vocabulary(path: Path) -> None:
    keys: dict[str | bytes, bytes] = {
        "general.architecture": string("llama"),
        "general.file_type": scalar(U32, 2),
        "tokenizer.ggml.tokens": strings(["x"] * 2000),
        "llama.context_length": scalar(U32, 9),
    }
    assert glance_at(path, RawGGUF(keys).build()) == Glance("llama", file_type="Q4_0")


def test_a_string_that_leads_out_of_all_files_ends_the_walk(path: Path) -> None:
    keys: dict[str | bytes, bytes] = {"general.architecture": string("llama")}
    array = u32(ARRAY) + u32(STRING) + u64(2) + struct.pack("<Q", 2**64 - 1) + b"x"
    assert glance_at(path, RawGGUF(keys | {"a": array}).build()).architecture == "llama"


def test_short_arrays_before_the_facts_do_not_hide_them(path: Path) -> None:
    keys: dict[str | bytes, bytes] = {
        "general.tags": strings(["a", "b"]),
        "general.flag": scalar(BOOL, 1),
        "general.architecture": string("gemma3"),
        "gemma3.context_length": scalar(U32, 5),
    }
    assert glance_at(path, RawGGUF(keys).build()) == Glance("gemma3", context=5)


def test_a_file_that_is_not_there_or_is_no_file(tmp_path: Path) -> None:
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
