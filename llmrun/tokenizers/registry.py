"""From `tokenizer.ggml.model` to the tokenizer that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.errors import UnsupportedModel
from llmrun.tokenizers.bpe import load_bpe
from llmrun.tokenizers.spm import load_spm

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.tokenizers.base import Tokenizer

_LOADERS = {"gpt2": load_bpe, "llama": load_spm}


def load_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file. The file stays mapped as long as it lives.

    Raises UnsupportedModel for a kind of tokenizer or pre-tokenizer that is not supported, BadGGUF for a broken one.
    """
    kind = file.string("tokenizer.ggml.model")
    load = _LOADERS.get(kind)
    if load is None:
        raise UnsupportedModel(
            f"tokenizer not supported: tokenizer.ggml.model: {kind!r}, supported are {', '.join(_LOADERS)}",
            hint="another model, or --backend llama, may run",
        )
    return load(file)
