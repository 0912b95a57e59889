"""Tests of prompts for filling in the middle, against recorded tokens of llama-server's /infill."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.tokenizer import LlamaTokenizer
from llmrun.backends.scripted import BOS, FIRST_WORD, ScriptedBackend, scripted_answers
from llmrun.base.errors import ContextExceeded, UsageError
from llmrun.engine.engine import Engine
from llmrun.engine.prompts import encode_fill
from llmrun.engine.requests import ContextFile, FillPrompt, Request
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.tokenizers.kinds import load_tokenizer
from llmrun.model.tokenizers.text_tokenizer import Tokenizer
from tests.support.engine.answers import answer_all
from tests.support.engine.scripted_models import GREEDY
from tests.support.tokenizers.vocabulary_models import FILLING, random_fill, with_vocabulary

RECORDED = Path(__file__).with_name("infill_tokens.jsonl")  # written by scripts/compare_infill --record
LINES: list[dict[str, Any]] = [json.loads(line) for line in RECORDED.read_text().splitlines()]
CONTROLS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
PREFIX, SUFFIX, MIDDLE = range(FIRST_WORD, FIRST_WORD + 3)
FILL = FillPrompt("a", "b")


def check_recorded(name: str, tokenizer: Tokenizer) -> None:
    lines = [line for line in LINES if line["vocabulary"] == name]
    assert len(lines) == 32
    for line in lines:
        tokens, _ = encode_fill(random_fill(line["seed"], name), tokenizer, line["context"])
        if line["tokens"] is None:  # llama-server refused it, because it is longer than the context
            assert len(tokens) >= line["context"]
        else:
            assert len(tokens) == line["tokens"]
            assert hashlib.sha256(np.array(tokens, "<i4").tobytes()).hexdigest()[:16] == line["sha256"], line


@pytest.mark.night
@pytest.mark.parametrize("name", FILLING)
def test_tokens_are_those_of_llama_server(name: str, tmp_path: Path) -> None:
    with open_gguf(with_vocabulary(tmp_path, name)) as file:
        check_recorded(name, load_tokenizer(file))


@pytest.mark.night
@pytest.mark.parametrize("name", ["qwen2.5-coder", "deepseek-coder", "codellama"])
def test_llama_cpps_own_tokenizer_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    with open_gguf(with_vocabulary(tmp_path, name)) as file:
        backend = LlamaBackend(file, OpenOptions(context_size=64, threads=1, gpu_layers=0))
    try:
        size = backend.info.vocabulary_size
        check_recorded(name, LlamaTokenizer(backend._process, size, space_prefix=name == "codellama"))
    finally:
        backend.close()


def model(**options: Any) -> Engine:
    voice = scripted_answers([("<fim_middle>", "c")], CONTROLS)
    return Engine(ScriptedBackend(voice, control_tokens=CONTROLS, **options))


def test_the_engine_fills_the_gap() -> None:
    [gathered] = answer_all(model(), [Request(FILL, sampling=GREEDY)])
    assert (gathered.text, gathered.finished.timings.prompt_tokens) == ("c", 6)
    assert gathered.finished.cut_tokens == 0


def test_control_strings_in_texts_stay_text() -> None:
    tokenizer = model().tokenizer
    prompt = FillPrompt("<fim_middle>", "<fim_prefix>", files=(ContextFile("<fim_suffix>", "<|im_end|>"),))
    tokens, _ = encode_fill(prompt, tokenizer, 8192)
    assert [token for token in tokens if token >= 256] == [BOS, PREFIX, SUFFIX, MIDDLE]
    tokens, _ = encode_fill(structs.replace(FILL, line="<fim_suffix>"), tokenizer, 8192)
    assert tokens == [BOS, PREFIX, ord("a"), SUFFIX, SUFFIX, ord("b"), MIDDLE]


def test_only_prompts_that_may_be_cut_are_cut() -> None:
    engine = model(context_size=3000)
    long = FillPrompt("x" * 4000, "y" * 600)
    with pytest.raises(ContextExceeded, match="4,604"):
        engine.submit(Request(long))
    [gathered] = answer_all(engine, [Request(structs.replace(long, cut=True), sampling=GREEDY)])
    assert gathered.finished.cut_tokens == (4000 - 1536) + (600 - 510)
    assert gathered.finished.timings.prompt_tokens == 4 + 1536 + 510


def test_a_cut_prompt_can_still_be_too_long() -> None:
    with pytest.raises(ContextExceeded):
        model(context_size=1000).submit(Request(FillPrompt("x" * 4000, "y" * 600, cut=True)))


def test_a_model_without_the_tokens_refuses() -> None:
    engine = Engine(ScriptedBackend())
    assert not engine.fills
    with pytest.raises(UsageError, match="this model cannot fill in the middle"):
        engine.submit(Request(FILL))
