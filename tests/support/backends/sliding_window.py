"""A tiny model for llama.cpp whose layers attend to a few recent tokens. llama.cpp drops tokens outside all windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf.gguf_files import CHATML, Tensor, tiny_vocabulary, write_gguf

WINDOW = 16  # tokens; every fourth layer attends to everything


def tiny_sliding_window(path: Path, *, layers: int = 4, width: int = 64, context: int = 2048) -> Path:
    """Write a complete `cohere2` model with random float32 weights."""
    vocabulary = tiny_vocabulary()
    heads, kv_heads, feed_forward = 4, 2, 96
    metadata: dict[str, Any] = {
        "general.architecture": "cohere2",
        "general.name": "tiny window",
        "cohere2.vocab_size": len(vocabulary.tokens),
        "cohere2.context_length": context,
        "cohere2.embedding_length": width,
        "cohere2.block_count": layers,
        "cohere2.feed_forward_length": feed_forward,
        "cohere2.attention.head_count": heads,
        "cohere2.attention.head_count_kv": kv_heads,
        "cohere2.attention.layer_norm_epsilon": 1e-5,
        "cohere2.attention.sliding_window": WINDOW,
        "cohere2.logit_scale": 4.0,
        "cohere2.rope.dimension_count": width // heads,
        "cohere2.rope.freq_base": 10_000.0,
        "tokenizer.chat_template": CHATML,
        **vocabulary.metadata(),
    }
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return ("F32", (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32))

    def norm() -> Tensor:
        return ("F32", (1 + 0.1 * random.standard_normal(width)).astype(np.float32))

    tensors: dict[str, Tensor] = {
        "token_embd.weight": matrix(len(vocabulary.tokens), width),
        "output_norm.weight": norm(),
    }
    kv_width = width // heads * kv_heads
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(width, width),
            f"blk.{layer}.attn_k.weight": matrix(kv_width, width),
            f"blk.{layer}.attn_v.weight": matrix(kv_width, width),
            f"blk.{layer}.attn_output.weight": matrix(width, width),
            f"blk.{layer}.ffn_gate.weight": matrix(feed_forward, width),
            f"blk.{layer}.ffn_up.weight": matrix(feed_forward, width),
            f"blk.{layer}.ffn_down.weight": matrix(width, feed_forward),
        }
    return write_gguf(path, metadata, tensors)
