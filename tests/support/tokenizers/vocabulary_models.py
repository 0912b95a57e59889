"""Tiny llama models with real vocabularies, and vocabularies whose models can fill in the middle."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.engine.requests import ContextFile, FillPrompt
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import CONTROL, tiny_llama
from tests.support.models.tiny_models import changed_copy
from tests.support.tokenizers.random_text import random_text
from tests.support.tokenizers.vocabularies import SMOLLM2, vocabulary_path

WIDTH = 32


@dataclass(frozen=True)
class FillVocabulary:
    """A vocabulary with tokens for filling in the middle.

    base   the vocabulary of llama.cpp's from which it is made
    texts  the texts of control tokens, by id; ids after the base's last one are added
    keys   of the file, without `tokenizer.ggml.`
    """

    base: str
    texts: Mapping[int, str] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


_QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
FILLING = {
    "starcoder": FillVocabulary("starcoder"),
    "refact": FillVocabulary("refact"),
    "deepseek-coder": FillVocabulary("deepseek-coder"),
    "qwen2.5-coder": FillVocabulary("qwen2", dict(enumerate(_QWEN, 151_659))),
    "codellama": FillVocabulary("llama-spm", dict(enumerate(("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), 32_000))),
    "gemma by character": FillVocabulary("gemma-4", dict(enumerate((*_QWEN[:3], "<|file_sep|>"), 262_144))),
    "keys": FillVocabulary(
        SMOLLM2,
        keys={"fim_pre_token_id": 11, "fim_suf_token_id": 12, "fim_mid_token_id": 13, "fim_sep_token_id": 5},
    ),
    "former keys and a BOS": FillVocabulary(
        "llama-bpe", keys={"prefix_token_id": 128_011, "suffix_token_id": 128_012, "middle_token_id": 128_013}
    ),
}


def with_vocabulary(folder: Path, name: str, *, context: int = 512) -> Path:
    """Return a tiny llama with a vocabulary of FILLING, or of one of llama.cpp's vocabulary-only files."""
    vocabulary = FILLING.get(name, FillVocabulary(name))

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for key in [key for key in metadata if key.startswith("tokenizer.")]:
            del metadata[key]
        metadata |= tokenizer_keys(vocabulary)
        size = len(metadata["tokenizer.ggml.tokens"])
        metadata["llama.vocab_size"] = size
        weights = np.random.default_rng(0).standard_normal((size, WIDTH)).astype(np.float16)
        tensors["token_embd.weight"] = ("F16", weights.tobytes(), weights.shape)

    path = folder / "tiny.gguf"
    tiny = tiny_llama(path, weight_type="F16", context=context, layers=1, width=WIDTH, heads=2, kv_heads=1)
    return changed_copy(tiny, folder / f"{name.replace(' ', '-')}.gguf", change)


def tokenizer_keys(vocabulary: FillVocabulary) -> dict[str, Any]:
    """Return the keys of a file with this vocabulary."""
    keys: dict[str, Any] = {}
    with open_gguf(vocabulary_path(vocabulary.base)) as file:
        for key, value in file.metadata.items():
            if key.startswith("tokenizer."):
                keys[key] = value if isinstance(value, str | bool | int | float | np.ndarray) else list(value)
    tokens, types = keys["tokenizer.ggml.tokens"], np.array(keys["tokenizer.ggml.token_type"], np.int32)
    added = sum(token >= len(tokens) for token in vocabulary.texts)
    tokens += [""] * added
    types = np.concatenate([types, np.full(added, CONTROL, np.int32)])
    for token, text in vocabulary.texts.items():
        tokens[token], types[token] = text, CONTROL
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if (scores := keys.get("tokenizer.ggml.scores")) is not None:
        keys["tokenizer.ggml.scores"] = np.concatenate([np.array(scores, np.float32), np.zeros(added, np.float32)])
    return keys | {f"tokenizer.ggml.{key}": value for key, value in vocabulary.keys.items()}


def random_fill(seed: int, name: str) -> FillPrompt:
    """Return a random prompt for a vocabulary of FILLING. One in four has long texts, of which some tokens are cut."""
    source = random.Random(seed)
    special = [*FILLING[name].texts.values(), "<fim_prefix>", "<fim_suffix>", "<｜fim▁hole｜>", "<|endoftext|>", "</s>"]

    def text() -> str:
        return random_text(source, special)

    def long_text() -> str:
        words = [text() for _ in range(8)]
        return "".join(source.choices(words, k=source.choice((1, 20, 200))))

    part = long_text if source.random() < 0.25 else text
    files = [ContextFile(source.choice(("a.py", text())), part()) for _ in range(source.choice((0, 0, 1, 2, 5)))]
    return FillPrompt(part(), part(), source.choice(("", text())), tuple(files), cut=True)
