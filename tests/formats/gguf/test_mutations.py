"""Tests that for any bytes, the reader terminates with a ModelFileError or a usable file."""

from __future__ import annotations

import ctypes
import faulthandler
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import llama_cpp._ggml as llama_cpp_ggml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gguf.gguf_mutations import base_files, mutant, outcome, outcome_of_shards, shard_bases, shard_mutant
from tests.support.gguf.gguf_shards import name_of
from tests.support.tiers import examples

pytestmark = pytest.mark.push

CORPUS = Path(__file__).parent / "corpus"
CASES = 20_000
SEED = 2


class GGUFInitParams(ctypes.Structure):
    """ggml's `struct gguf_init_params` from gguf.h."""

    _fields_: ClassVar = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """End the run and print the stack if a loop never terminates, instead of hanging."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_the_files_that_are_mutated_are_correct() -> None:
    assert [outcome(base.data) for base in base_files()] == ["opened"] * 3


@pytest.mark.night
def test_20_000_mutants_end_in_a_model_file_error_or_a_file() -> None:
    bases = base_files()
    seen: Counter[str] = Counter()
    for case in range(CASES):
        try:
            seen[outcome(mutant(bases, SEED, case))] += 1
        except Exception as error:
            raise AssertionError(f"seed {SEED}, case {case}: {type(error).__name__}: {error}") from error
    # A mutator that always breaks the first byte, or breaks nothing, would test nothing.
    assert seen["BadGGUF"] > CASES // 2
    assert seen["opened"] > CASES // 20


@pytest.mark.night
def test_20_000_mutants_of_a_model_in_three_files_end_as_well() -> None:
    bases = shard_bases()
    assert outcome_of_shards({name_of(number): base.data for number, base in enumerate(bases)}) == "opened"
    seen: Counter[str] = Counter()
    for case in range(CASES):
        try:
            seen[outcome_of_shards(shard_mutant(bases, SEED, case))] += 1
        except Exception as error:
            raise AssertionError(f"seed {SEED}, case {case}: {type(error).__name__}: {error}") from error
    assert seen["BadGGUF"] > CASES // 2
    assert seen["opened"] > CASES // 100
    assert seen["ModelNotFound"] > CASES // 100


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", b"GGUF\2\0\0\0" + bytes(7)]))
def test_any_bytes_end_in_a_model_file_error_or_a_file(data: bytes, start: bytes) -> None:
    assert outcome(start + data) in ("BadGGUF", "opened")


def test_every_file_that_once_crashed_a_reader_ends_well() -> None:
    paths = sorted(CORPUS.glob("*.gguf"))
    assert paths
    for path in paths:
        assert outcome(path.read_bytes()) == "BadGGUF", path.name


def test_what_opens_here_opens_in_llama_cpps_own_parser() -> None:
    """Our rules are stricter throughout, so we must refuse every mutant that llama.cpp refuses."""
    ggml = llama_cpp_ggml.libggml
    ggml.gguf_init_from_buffer.restype = ctypes.c_void_p
    ggml.gguf_init_from_buffer.argtypes = [ctypes.c_char_p, ctypes.c_size_t, GGUFInitParams]
    ggml.gguf_free.argtypes = [ctypes.c_void_p]
    bases = base_files()
    opened = 0
    for case in range(CASES // 4):
        data = mutant(bases, SEED + 1, case)
        if outcome(data) != "opened":
            continue
        opened += 1
        parsed = ggml.gguf_init_from_buffer(data, len(data), GGUFInitParams(no_alloc=True, ctx=None))
        assert parsed, f"seed {SEED + 1}, case {case}: opened here, refused by llama.cpp"
        ggml.gguf_free(parsed)
    assert opened > 100
