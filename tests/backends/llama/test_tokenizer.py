"""Tests of llama.cpp's tokenizer, used for vocabularies that ours do not support, under the same contract as ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.tokenizer import LlamaTokenizer
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Finished, Request, TextPrompt
from llmrun.formats.gguf.reader import open_gguf
from llmrun.options.sampling_params import SamplingParams
from tests.support.models.tiny_models import changed_copy, tiny_model
from tests.support.tokenizers.random_text import random_texts
from tests.support.tokenizers.vocabularies import llama_vocabulary, our_tokenizer
from tests.support.tokenizers.vocabulary_models import with_vocabulary

pytestmark = pytest.mark.push

SEARCHED = ("deepseek-llm", "falcon")  # split by regular expressions; every byte of a text round-trips
# Pieces that begin a word have a space, except at the start of a text.
SPACE_FIRST = ("llama-spm", "bert-bge", "nomic-bert-moe")
OURS_TOO = (*SPACE_FIRST, "llama-bpe", *SEARCHED)


def opened(path: Path) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, OpenOptions(context_size=64, threads=1, gpu_layers=0))


def rwkv_model(folder: Path) -> Path:
    """Write a model with a vocabulary that only llama.cpp reads."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        words = [f"word{n}" for n in range(len(metadata["tokenizer.ggml.tokens"]) - 256)]
        for key in [key for key in metadata if key.startswith("tokenizer.")]:
            del metadata[key]
        metadata["tokenizer.ggml.model"] = "rwkv"
        metadata["tokenizer.ggml.tokens"] = [*(rf"\x{byte:02x}" for byte in range(256)), *words]

    return changed_copy(tiny_model(folder, "F32"), folder / "rwkv.gguf", change)


@pytest.fixture(scope="module", params=OURS_TOO)
def named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LlamaTokenizer]]:
    """Yield (name of the vocabulary, llama.cpp's tokenizer for it)."""
    backend = opened(with_vocabulary(tmp_path_factory.mktemp("vocabulary"), request.param))
    size = backend.info.vocabulary_size
    yield request.param, LlamaTokenizer(backend._process, size, space_prefix=request.param in SPACE_FIRST)
    backend.close()


@pytest.mark.night
def test_ids_are_llama_cpps(named: tuple[str, LlamaTokenizer]) -> None:
    name, tokenizer = named
    oracle = llama_vocabulary(name)
    assert tokenizer.vocabulary_size == oracle.size
    assert tokenizer.end_of_generation == oracle.end_of_generation()
    assert tokenizer.fill_tokens == oracle.fill_tokens()
    for text, _ in zip(random_texts(3, 60, ["<|im_end|>", "</s>", "[SEP]"]), range(60), strict=False):
        ids = tokenizer.encode(text, add_special=False, parse_special=False).tolist()
        assert ids == oracle.encode(text, add_special=False, parse_special=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == b"".join(map(oracle.token_bytes, ids))


@pytest.mark.night
@pytest.mark.parametrize("character", [".", "a"])
def test_a_long_row_of_one_character_does_not_end_the_process(
    named: tuple[str, LlamaTokenizer], character: str
) -> None:
    """llama.cpp's search for split points recurses once per character."""
    name, tokenizer = named
    ids = tokenizer.encode(character * 60_000, add_special=False, parse_special=False)
    decoded = tokenizer.decode(ids.tolist())
    assert decoded == character.encode() * 60_000 if name in SEARCHED else len(ids) > 0


@pytest.mark.night
def test_one_bos_whoever_wrote_it(named: tuple[str, LlamaTokenizer]) -> None:
    _, tokenizer = named
    first = tokenizer.encode("a b", add_special=True, parse_special=True).tolist()
    if tokenizer.bos_id is not None and first[0] == tokenizer.bos_id:
        written = tokenizer.token_text(tokenizer.bos_id) + "a b"
        for ids in (
            tokenizer.encode(written, add_special=True, parse_special=True),
            tokenizer.encode_rendered(written),
        ):
            assert ids.tolist().count(tokenizer.bos_id) == 1


@pytest.mark.night
def test_a_protected_control_string_stays_text(named: tuple[str, LlamaTokenizer]) -> None:
    _, tokenizer = named
    for token in sorted(tokenizer.end_of_generation):
        string = tokenizer.token_text(token)
        assert token in tokenizer.encode_rendered(f"a{string}b").tolist()
        assert token not in tokenizer.encode_rendered(f"a{tokenizer.protect(string)}b").tolist()
        assert tokenizer.unprotect(tokenizer.protect(string)) == string


@pytest.mark.night
@pytest.mark.parametrize("name", OURS_TOO)
def test_it_agrees_with_ours_where_both_read_the_vocabulary(tmp_path: Path, name: str) -> None:
    backend = opened(with_vocabulary(tmp_path, name))
    size = backend.info.vocabulary_size
    theirs, ours = LlamaTokenizer(backend._process, size, space_prefix=name in SPACE_FIRST), our_tokenizer(name)
    assert (theirs.bos_id, theirs.eos_id) == (ours.bos_id, ours.eos_id)
    for text in random_texts(5, 60, ["<|eot_id|>", "</s>", "<s>"]):
        rendered = "<s>" + theirs.protect(text) + "</s>"
        assert theirs.protect(text) == ours.protect(text)
        np.testing.assert_array_equal(theirs.encode_rendered(rendered), ours.encode_rendered(rendered))
        ids = ours.encode(text, add_special=False, parse_special=True).tolist()
        assert theirs.decode(ids) == ours.decode(ids)
        assert [theirs.token_text(token) for token in ids] == [ours.token_text(token) for token in ids]
    backend.close()


def test_the_engine_answers_with_it(tmp_path: Path) -> None:
    backend = opened(rwkv_model(tmp_path))
    assert isinstance(backend.tokenizer, LlamaTokenizer)
    with Engine(backend) as engine:
        request = Request(TextPrompt("hello world"), max_tokens=4, sampling=SamplingParams(temperature=0))
        finished = list(engine.generate(request))[-1]
    assert isinstance(finished, Finished)
    assert finished.timings.prompt_tokens >= 2
