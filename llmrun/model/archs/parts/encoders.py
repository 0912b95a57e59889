"""The parts that encoders such as BERT have in common: the embedding, norms after each block, and classification heads.

The header of a file determines whether a model is an encoder, and whether a model scores documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import UnsupportedModel, shown
from llmrun.base.types import Pooling
from llmrun.model.archs.parts.architecture import MOST_WIDTH
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.architecture import Hyperparameters, PlanWriter
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.twin import Value

# Architectures that never have a causal mask. Some files of encoders lack the key `attention.causal`.
_ENCODERS: Final = frozenset(
    {
        *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert"),
        *("nomic-bert", "nomic-bert-moe", "t5encoder"),
    }
)


def is_encoder(file: GGUFFile) -> bool:
    """Return True if a model has no causal mask. Such a model computes hidden states, but generates no text."""
    architecture = file.string("general.architecture")
    return architecture in _ENCODERS or not file.boolean(f"{architecture}.attention.causal", default=True)


def has_no_cache(file: GGUFFile) -> bool:
    """Return True if llama.cpp runs the model without a KV cache."""
    return file.string("general.architecture") in _ENCODERS - {"t5encoder"}


def labels_of(file: GGUFFile) -> int:
    """Return the number of labels that a reranker scores, or 0 if the model is not a reranker.

    Raises UnsupportedModel if the file contains no matrix that computes the scores.
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


_TYPE_COUNT = "tokenizer.ggml.token_type_count"


def bert_embedding(w: PlanWriter, config: Hyperparameters, *, positions: bool) -> Value:
    """Append the normalized sum of three embeddings: token, first token type and, if `positions`, position."""
    x = w.embed()
    if "token_types.weight" in w.tensors:
        count = w.tensors.file.integer(_TYPE_COUNT, 1, minimum=1, maximum=MOST_WIDTH)
        types = w.tensors.vector("token_types.weight", config.width, count)
        x = w.plan.bias(x, np.ascontiguousarray(types[: config.width]))
    if positions:
        w.plan.add(w.embed_positions(), to=x)
    return w.layernorm("token_embd_norm", x)


def bert_layers(
    w: PlanWriter, config: Hyperparameters, x: Value, rope: Rope | None, feed_forward: Callable[[str, Value], Value]
) -> Value:
    """Append all layers, each of which normalizes the sum after attention and the sum after the feed-forward.

    `feed_forward` appends a layer's feed-forward up to the last matrix, for a name such as "blk.0" and an input.
    """
    for layer in range(config.layers):
        block = f"blk.{layer}"
        q, k, v = w.queries_keys_values(block, x)
        a = w.plan.attention(q, k, v, config.attention(), rope)
        y = w.linear(f"{block}.attn_output", a, config.width)
        w.plan.add(x, to=y)
        h = w.layernorm(f"{block}.attn_output_norm", y)
        y = w.linear(f"{block}.ffn_down", feed_forward(block, h), config.width)
        w.plan.add(h, to=y)
        norm = w.layernorm if layer < config.layers - 1 else w.layernorm_wanted
        x = norm(f"{block}.layer_output_norm", y)
    return x


def ungated(w: PlanWriter, config: Hyperparameters) -> Callable[[str, Value], Value]:
    """Return a function that appends a feed-forward with GELU and without a gate."""
    return lambda block, h: w.plan.activate(w.linear(f"{block}.ffn_up", h, config.feed_forward), Activation.GELU)


def classified(w: PlanWriter, x: Value) -> Value:
    """Append the classification head, if the file contains one. The head's output replaces the hidden state.

    The head consists of a dense layer with tanh, an output layer, or both. Only rerankers use the head.
    """
    labels = labels_of(w.tensors.file)
    if not labels:
        w.tensors.leave_out("cls.")
        return x
    if "cls.weight" in w.tensors:
        x = w.plan.activate(w.linear("cls", x, x.width), Activation.TANH)
    if "cls.output.weight" in w.tensors:
        x = w.linear("cls.output", x, labels)
    return x
