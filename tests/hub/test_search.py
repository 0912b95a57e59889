"""Tests of searching the catalogue: matching, order, and which models fit or are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.errors import ModelNotFound
from llmrun.hub import search
from llmrun.hub.resolve.memory_check import estimated_need
from llmrun.hub.search import NO, TIGHT, YES, FoundModel, find_models
from tests.support.hub.model_stores import Stores

OWN = """
[models."toy:30b"]
description = "A toy that paints"
license = "MIT"
repository = "o/n"
default = "Q8_0"
quants.Q8_0 = { file = "m-Q8_0.gguf" }
quants.Q4_0 = { file = "m-Q4_0.gguf" }

[models."toy:4b"]
description = "A toy that sings"
license = "Apache-2.0"
parameters = 4_000_000_000
context = 8192
aliases = ["singer"]
repository = "o/n"
quants.Q4_K_M = { file = "m-Q4_K_M.gguf", about = "2.0 GiB" }
"""


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    made = Stores(tmp_path)
    made.enter(monkeypatch)
    (tmp_path / "config.toml").touch()
    (tmp_path / "models.toml").write_text(OWN)
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    return made


def names(*words: str) -> list[str]:
    return [model.name for model in find_models(words)]


def test_all_models_are_sorted_by_family_and_size(stores: Stores) -> None:
    found = names()
    assert len(found) > 100
    families = [name.partition(":")[0] for name in found]
    assert families == sorted(families)
    assert [name for name in found if name.startswith("qwen3:")] == [
        *("qwen3:0.6b", "qwen3:1.7b", "qwen3:4b", "qwen3:4b-instruct", "qwen3:4b-thinking", "qwen3:8b", "qwen3:14b"),
        *("qwen3:30b", "qwen3:30b-instruct", "qwen3:30b-thinking", "qwen3:32b"),
    ]
    assert names("toy") == ["toy:4b", "toy:30b"]


@pytest.mark.push
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["toy:4b"], ["toy:4b"]),
        (["TOY", "apache"], ["toy:4b"]),
        (["Paints"], ["toy:30b"]),
        (["singer"], ["toy:4b"]),
        (["toy-30b"], ["toy:30b"]),
        (["toy", "mit"], ["toy:30b"]),
        (["toy", "0b", "mit"], []),
        (["toy", "30b"], ["toy:30b"]),
    ],
)
def test_every_word_must_match_somewhere(stores: Stores, words: list[str], found: list[str]) -> None:
    if found:
        assert names(*words) == found
    else:
        with pytest.raises(ModelNotFound):
            names(*words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["qwn3"], "did you mean `llmrun search qwen3`?"),
        (["toy", "aphache-2.0"], "did you mean `llmrun search toy apache-2.0`?"),
        (["zzzzzz"], "to search the Hugging Face Hub: llmrun search --hub zzzzzz"),
        (["toy", "gemma3"], "each word matches some models, but none matches all; use fewer words"),
    ],
)
def test_words_without_a_model_get_a_suggestion(stores: Stores, words: list[str], hint: str) -> None:
    with pytest.raises(ModelNotFound, match="no model in the catalogue matches") as caught:
        find_models(words)
    assert caught.value.hint == hint


def test_sizes_are_exact_quoted_or_computed(stores: Stores) -> None:
    (exact,) = find_models(["smollm2:135m"])
    assert (exact.size, exact.is_exact) == (98_362_432, True)
    quoted, computed = find_models(["toy"])
    assert (quoted.size, quoted.is_exact) == (2 << 30, False)
    assert (computed.size, computed.is_exact) == (30e9 * 8.5 / 8, False)
    unknown = next(model for model in find_models(["gemma4"]) if model.name == "gemma4:e4b")
    assert unknown.size is None
    assert unknown.fits(1 << 40) == ""


def test_quantizations_that_are_here_are_named(stores: Stores) -> None:
    assert find_models(["toy:30b"])[0].here == ()
    stores.shared("o/n", {"m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF more"})
    assert find_models(["toy:30b"])[0].here == ("Q8_0", "Q4_0")


def test_what_fits_is_told_by_the_memory(stores: Stores) -> None:
    (model,) = find_models(["toy:4b"])
    assert model.size is not None
    assert model.needed is not None
    assert [model.fits(memory) for memory in (None, model.needed, model.size, model.size - 1)] == ["", YES, TIGHT, NO]


@pytest.mark.parametrize(
    ("billions", "layers", "kv_heads", "width"),
    [
        (0.135, 30, 3, 64),  # SmolLM2
        (0.6, 28, 8, 128),  # Qwen3
        (1.24, 16, 8, 64),  # Llama 3.2
        (4.02, 36, 8, 128),
        (8.03, 32, 8, 128),  # Llama 3.1
        (14.8, 40, 8, 128),
        (32.8, 64, 8, 128),
        (70.6, 80, 8, 128),
    ],
)
def test_the_estimate_covers_the_cache_of_known_models(billions: float, layers: int, kv_heads: int, width: int) -> None:
    cache = 4096 * layers * kv_heads * width * 2 * 2  # keys and values, 2 bytes each
    file_bytes = round(billions * 1e9 * 4.85 / 8)
    beyond = estimated_need(file_bytes, billions * 1e9) - 1.05 * file_bytes
    assert cache <= beyond <= max(3.5 * cache, 0.7e9)
    assert estimated_need(file_bytes, None) == pytest.approx(estimated_need(file_bytes, billions * 1e9), rel=0.1)


def test_words_that_are_empty_match_all(stores: Stores) -> None:
    assert names("") == names()
    assert isinstance(search.find_models(["toy"])[0], FoundModel)
