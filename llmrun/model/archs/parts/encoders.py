"""Tells from a file's header whether a model is an encoder, such as BERT, and whether it scores documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llmrun.base.errors import UnsupportedModel
from llmrun.base.types import Pooling
from llmrun.formats.gguf.problems import shown

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

# Architectures that never have a causal mask. Not all of their files have the key `attention.causal`.
_ENCODERS: Final = frozenset(
    {
        *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert"),
        *("nomic-bert", "nomic-bert-moe", "t5encoder"),
    }
)


def is_encoder(file: GGUFFile) -> bool:
    """Return whether a model has no causal mask. It then computes hidden states, but generates no text."""
    architecture = file.string("general.architecture")
    return architecture in _ENCODERS or not file.boolean(f"{architecture}.attention.causal", default=True)


def has_no_cache(file: GGUFFile) -> bool:
    """Return whether llama.cpp runs the model without a KV cache."""
    return file.string("general.architecture") in _ENCODERS - {"t5encoder"}


def labels_of(file: GGUFFile) -> int:
    """Return the number of labels that a reranker scores, or 0 if the model is none.

    Raises UnsupportedModel if the file has no matrix from which the scores follow.
    """
    architecture = file.string("general.architecture")
    if file.integer(f"{architecture}.pooling_type", 0) != Pooling.RANK:
        return 0
    key = f"{architecture}.classifier.output_labels"
    labels = len(file.strings(key)) if file.has(key) else 1
    head = file.tensors.get("cls.output.weight") or file.tensors.get("cls.weight")
    if head is None or head.n_rows != labels:
        raise UnsupportedModel(
            f"model not supported: {shown(str(file.path), 300)}: pooling_type is rank, but no matrix cls or cls.output "
            f"has {labels} row{'s' if labels > 1 else ''}",
            hint="convert the model again, with its classification head",
        )
    return labels
