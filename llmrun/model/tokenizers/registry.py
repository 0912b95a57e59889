"""Chooses the tokenizer for a GGUF file by its key `tokenizer.ggml.model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.base.compiled.store import KernelName, load_kernels
from llmrun.base.errors import UnsupportedModel, shown
from llmrun.model.tokenizers.bpe import load_bpe, load_gemma4, pre_tokenizer_of
from llmrun.model.tokenizers.spm import load_spm
from llmrun.model.tokenizers.unigram import load_unigram
from llmrun.model.tokenizers.wordpiece import load_wordpiece

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of tokenizer: its loader, its kernels and an optional check of the metadata."""

    load: Callable[[GGUFFile], Tokenizer]
    kernels: tuple[KernelName, ...]
    check: Callable[[GGUFFile], object] | None = None  # raises UnsupportedModel without reading the vocabulary


_ALWAYS = (
    KernelName.of("tokens.token_table", "build"),
    *(KernelName.of("tokens.special_tokens", name) for name in ("build", "find")),
)
_BPE = (KernelName.of("tokens.split", "split"), KernelName.of("tokens.bpe_merge", "merge"))
_KINDS = {
    "gpt2": _Kind(load_bpe, _BPE, pre_tokenizer_of),
    "gemma4": _Kind(load_gemma4, _BPE),
    "llama": _Kind(
        load_spm, (KernelName.of("tokens.spm_merge", "find_joined"), KernelName.of("tokens.spm_merge", "merge"))
    ),
    "bert": _Kind(load_wordpiece, (KernelName.of("tokens.word_pieces", "encode"),)),
    "t5": _Kind(
        load_unigram, tuple(KernelName.of("tokens.unigram", name) for name in ("measure", "normalize", "encode"))
    ),
}
# Maps the kinds of tokenizer that llama.cpp supports but llmrun does not to the explanations in error messages.
_OTHERS = {
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
    "hybriddna": "k-mers of DNA",
    "whitespace": "words without whitespace",
}


def tokenizer_kernels(file: GGUFFile) -> Sequence[KernelName]:
    """Return the kernels that `load_tokenizer` uses, so that all of a model's kernels can be compiled together.

    Raises UnsupportedModel in the same cases as `load_tokenizer`, but does not read the vocabulary.
    """
    kind = _kind_of(file)
    if kind.check is not None:
        kind.check(file)
    return *_ALWAYS, *kind.kernels


def load_tokenizer(file: GGUFFile) -> Tokenizer:
    """Load the tokenizer of an open GGUF file. The tokenizer keeps the file's header in memory.

    Raises UnsupportedModel if the kind of tokenizer or the pre-tokenizer is not supported, and BadGGUF if there is
    no vocabulary.
    """
    kind = _kind_of(file)
    load_kernels(tokenizer_kernels(file))  # a single call, so that a first run compiles all kernels in parallel
    return kind.load(file)


def _kind_of(file: GGUFFile) -> _Kind:
    model = file.string("tokenizer.ggml.model")
    kind = _KINDS.get(model)
    if kind is None:
        known = f", which is {_OTHERS[model]}" if model in _OTHERS else ""
        raise UnsupportedModel(
            f"tokenizer not supported: {shown(str(file.path), 300)}: tokenizer.ggml.model: '{shown(model)}'{known}; "
            "llmrun supports BPE (gpt2, gemma4), SentencePiece (llama), WordPiece (bert) and Unigram (t5)",
            hint="try --backend llama, or another model",
        )
    return kind
