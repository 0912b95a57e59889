"""Tests of the names of types: they are those of llama.cpp, and misspelled ones get a suggestion."""

from __future__ import annotations

import llama_cpp
import pytest

from llmrun.base.errors import UsageError
from llmrun.jobs.file_types import FILE_TYPE_NAMES, file_type_named, weight_type_named, weight_type_names


def test_numbers_are_those_of_llama_cpp() -> None:
    prefix = "LLAMA_FTYPE_MOSTLY_"
    theirs = {name.removeprefix(prefix): value for name, value in vars(llama_cpp).items() if name.startswith(prefix)}
    del theirs["NVFP4"]
    found = [file_type_named(name) for name in FILE_TYPE_NAMES if name not in ("F32", "COPY")]
    assert dict(found) == theirs


@pytest.mark.parametrize(("text", "name"), [("q4_k_m", "Q4_K_M"), ("Q4_K", "Q4_K_M"), ("Iq4_Xs", "IQ4_XS")])
def test_case_and_aliases_are_understood(text: str, name: str) -> None:
    assert file_type_named(text).name == name


@pytest.mark.parametrize(
    ("text", "words"), [("Q4_M", "did you mean Q4_K_M"), ("Q9_0", "Q8_0"), ("tiny", "choose from F32, F16, ")]
)
def test_misspelled_types_get_a_suggestion(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"TYPE: '{text}' is not a file type") as raised:
        file_type_named(text)
    assert words in raised.value.hint


def test_types_of_tensors_are_named_by_flag() -> None:
    assert weight_type_named("q6_k", "--output-type") == "Q6_K"
    assert "I32" not in weight_type_names()
    with pytest.raises(UsageError, match="--output-type: 'Q4_K_M' is not a weight type"):
        weight_type_named("Q4_K_M", "--output-type")
