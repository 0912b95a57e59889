"""Tests of what the names of model files reveal, of the order of models, and of the hints for unknown names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.hub.names import (
    bits_in_file,
    bits_of,
    hint_for_name,
    hint_for_repository,
    nearest_in_bits,
    nearest_in_size,
    shards_of,
    smallest_first,
    weights_in,
    without_shard,
)


def test_shards_are_counted_from_the_first() -> None:
    assert shards_of("a/b-00001-of-00003.gguf") == tuple(f"a/b-0000{n}-of-00003.gguf" for n in (1, 2, 3))
    assert shards_of("model.gguf") == ("model.gguf",)
    assert shards_of("b-00001-of-00001.GGUF") == ("b-00001-of-00001.GGUF",)
    assert without_shard("a/b-00002-of-00003.gguf") == "a/b.gguf"
    assert without_shard("b.gguf") == "b.gguf"


@pytest.mark.parametrize(
    "file", ["b-00002-of-00003.gguf", "b-00000-of-00003.gguf", "b-00001-of-00000.gguf", "b-00001-of-99999.gguf"]
)
def test_a_model_is_not_named_by_another_shard_or_by_numbers_that_cannot_be(file: str) -> None:
    with pytest.raises(ValueError, match="first shard"):
        shards_of(file)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen3:4b", 4e9),
        ("QWEN3:0.6B", 6e8),
        ("gemma3:270m", 270e6),
        ("qwen3:30b-a3b", 30e9),
        ("gemma3n:e2b", None),
        ("mixtral:8x7b", 56e9),
        ("phi3:3.8b-128k", 3.8e9),
        ("phi4-reasoning:plus", None),
        ("mistral:v0.2", None),
        ("qwen3", None),
    ],
)
def test_the_weights_that_a_name_says(name: str, weights: float | None) -> None:
    assert weights_in(name) == weights


def test_sizes_are_sorted_as_numbers() -> None:
    names = ["x:30b", "x:4b", "x:micro", "x:0.6b", "x:8b", "x:1.7b", "x:270m"]
    assert smallest_first(names) == ["x:270m", "x:0.6b", "x:1.7b", "x:4b", "x:8b", "x:30b", "x:micro"]
    assert nearest_in_size("x:5b", names)[:2] == ["x:4b", "x:8b"]
    assert smallest_first(["x:e4b", "x:12b", "x:e2b"]) == ["x:e2b", "x:e4b", "x:12b"]
    assert nearest_in_size("x:0b", names) == smallest_first(names)
    assert nearest_in_size("x:5b", ["x:0b", "x:4b"]) == ["x:4b", "x:0b"]
    assert nearest_in_size("x", names) == smallest_first(names)


def test_quantizations_are_sorted_by_bits() -> None:
    by_bits = ["IQ2_M", "Q4_0", "UD-Q4_K_XL", "Q8_0", "F16"]
    assert nearest_in_bits("none", ["Q8_0", "F16", "IQ2_M", "Q4_0", "UD-Q4_K_XL"]) == by_bits
    assert nearest_in_bits("Q5_0", ["Q8_0", "Q2_K", "Q4_0"]) == ["Q4_0", "Q2_K", "Q8_0"]
    assert [bits_of(name) for name in ("MXFP4", "BF16", "TQ1_0", "none")] == [4, 16, 1, 0]
    assert bits_in_file("Q4_K_M") == 4.85
    assert bits_in_file("F16") == 16.0


MODELS = ("qwen3:4b", "qwen3:8b", "llama3.2:1b", "llama3.2:3b", "llama3:8b", "deepseek-r1:8b", "phi4:14b")
OTHERS = ("ministral", "my-own")
REPOSITORIES = ("Qwen/Qwen3-4B-GGUF", "unsloth/Qwen3-4B-GGUF", "bartowski/gemma-2-9b-it-GGUF")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen3-4b", "did you mean qwen3:4b?"),
        ("Qwen3 4B", "did you mean qwen3:4b?"),
        ("qwen34b", "did you mean qwen3:4b?"),
        ("llama3:2", "did you mean llama3.2?"),
        ("llama32:3b", "did you mean llama3.2:3b?"),
        ("deepseekr1", "did you mean deepseek-r1?"),
        ("myown", "did you mean my-own?"),
        ("qwen3:5b", "qwen3 is available as qwen3:4b, qwen3:8b"),
        ("llama3.2:90b", "llama3.2 is available as llama3.2:1b, llama3.2:3b"),
        ("qwen3:4b-q9", "did you mean qwen3:4b? `llmrun fit qwen3:4b` lists its quantizations"),
        ("qwn3:4b", "did you mean qwen3:4b or qwen3:8b"),
        ("minstral", "did you mean ministral"),
        ("qwen", "did you mean qwen3 or "),
        ("phi", "did you mean phi4?"),
    ],
)
def test_what_was_meant_is_named(name: str, hint: str) -> None:
    assert hint_for_name(name, MODELS, OTHERS).startswith(hint)


def test_where_nothing_is_near_the_command_that_lists_all_is_named() -> None:
    hint = hint_for_name("zzzzzz", MODELS, OTHERS)
    assert hint.startswith("`llmrun search` lists the models of all 5 families; ")
    assert "hf:owner/name" in hint


def test_of_a_large_family_the_nearest_sizes_are_named_the_smallest_first() -> None:
    sizes = [f"qwen3:{size}" for size in ("8b", "4b", "32b", "0.6b", "1.7b", "14b", "30b", "4b-instruct")]
    assert hint_for_name("qwen3:5b", sizes) == (
        "qwen3 is available as qwen3:1.7b, qwen3:4b, qwen3:4b-instruct, qwen3:8b, qwen3:14b; "
        "`llmrun search qwen3` lists all 8"
    )
    assert hint_for_name("qwen3:0.5b", sizes).startswith("qwen3 is available as qwen3:0.6b, qwen3:1.7b, qwen3:4b, ")
    families = [f"qwen{number}:4b" for number in range(5)]
    assert hint_for_name("qwen", families).endswith("? `llmrun search qwen` lists all")
    many = [f"qwen-of-another-name-{number}:4b" for number in range(5)]
    assert hint_for_name("qwe", many).endswith("? `llmrun search qwe` lists all")


def test_a_file_of_that_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mymodel").write_bytes(b"GGUF\3")
    monkeypatch.chdir(tmp_path)
    assert hint_for_name("mymodel", MODELS) == "to run the file with that name, use ./mymodel"


@pytest.mark.parametrize(
    ("repository", "hint"),
    [
        ("Qwen3-4B-GGUF", "did you mean hf:Qwen/Qwen3-4B-GGUF or hf:unsloth/Qwen3-4B-GGUF?"),
        ("bartowsky/gemma-2-9b-it-gguf", "did you mean hf:bartowski/gemma-2-9b-it-GGUF?"),
        ("someone/Qwen3-4B-GGUF", "did you mean hf:Qwen/Qwen3-4B-GGUF or hf:unsloth/Qwen3-4B-GGUF?"),
        ("bartowski/gemma-2-9b-GGUF", "did you mean hf:bartowski/gemma-2-9b-it-GGUF?"),
        ("zzz/zzz", ""),
        ("", ""),
    ],
)
def test_repositories_near_the_one_asked_for_are_named(repository: str, hint: str) -> None:
    assert hint_for_repository(repository, REPOSITORIES) == hint


@given(st.text())
def test_every_name_gets_one_line(name: str) -> None:
    hint = hint_for_name(name, MODELS, OTHERS)
    assert hint
    assert hint.isprintable()


def test_a_quantization_of_a_family_is_that_of_its_first_model() -> None:
    assert hint_for_name("qwen3:q8_0", MODELS) == "did you mean qwen3:4b-q8_0?"


def test_a_name_that_no_system_can_look_up_is_no_file() -> None:
    assert "llmrun search" in hint_for_name("z" * 5000, MODELS)


def test_a_file_of_that_name_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zzzz").write_bytes(b"GGUF\3")
    assert hint_for_name("zzzz", MODELS) == "to run the file with that name, use ./zzzz"


def test_only_gguf_files_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# GGUF")
    assert "./README.md" not in hint_for_name("README.md", MODELS)
