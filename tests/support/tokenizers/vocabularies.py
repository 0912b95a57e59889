"""Real vocabularies for tests: llama.cpp's vocabulary-only files and SmolLM2's, each opened once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.tokenizers.kinds import load_tokenizer
from llmrun.model.tokenizers.text_tokenizer import Tokenizer
from tests.support.gguf.gguf_files import CONTROL, USER_DEFINED
from tests.support.models.downloads import LLAMA_CPP_FOLDER, llama_cpp_source, smollm2

if TYPE_CHECKING:
    from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary

SMOLLM2 = "smollm2"

# llama.cpp's `ggml-vocab-*.gguf` files that load_tokenizer supports, by kind. Some have test vectors beside them.
BYTE_LEVEL = (
    *(SMOLLM2, "gpt-2", "llama-bpe", "qwen2", "starcoder", "refact", "command-r", "mpt", "gpt-neox", "aquila"),
    *("deepseek-coder", "deepseek-llm", "falcon", "qwen35"),
)
BY_CHARACTER = ("gemma-4",)
SENTENCE_PIECE = ("llama-spm", "phi-3", "baichuan")
WORD_PIECE = ("bert-bge",)
UNIGRAM = ("nomic-bert-moe",)
ALL = BYTE_LEVEL + BY_CHARACTER + SENTENCE_PIECE + WORD_PIECE + UNIGRAM
WITH_VECTORS = tuple(name for name in ALL if name not in (SMOLLM2, "gpt-neox", "aquila", "baichuan", *UNIGRAM))


def vocabulary_path(name: str) -> Path:
    if name == SMOLLM2:
        return smollm2()
    return llama_cpp_source() / LLAMA_CPP_FOLDER / f"ggml-vocab-{name}.gguf"


@cache
def our_tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(open_gguf(vocabulary_path(name)))


@cache
def llama_vocabulary(name: str) -> LlamaVocabulary:
    from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary  # needs llama.cpp, which the ARM tests lack

    return LlamaVocabulary(vocabulary_path(name))


def added_texts(name: str) -> list[str]:
    """Return the control and user-defined tokens in the vocabulary's file, and some from other vocabularies."""
    file = open_gguf(vocabulary_path(name))
    texts = file.strings("tokenizer.ggml.tokens")
    kinds = file.integers("tokenizer.ggml.token_type")
    added = [texts[token] for token in np.flatnonzero(np.isin(kinds, (CONTROL, USER_DEFINED))).tolist()]
    return [*filter(None, added), "<|im_start|>", "<|im_end|>", "</s>", "<think>"]


def published_ids(name: str) -> list[tuple[str, list[int]]]:
    """Return llama.cpp's own test vectors as (text, ids), with special tokens neither added nor parsed."""
    path = vocabulary_path(name)
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    return [(text, [int(id_) for id_ in line.split()]) for text, line in zip(texts, lines, strict=False)]
