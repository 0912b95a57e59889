"""A tiny model for llama.cpp with a recurrent state instead of a KV cache, so it cannot be rewound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.gguf.gguf_files import CHATML, Tensor, tiny_vocabulary, write_gguf


def tiny_recurrent(path: Path, *, layers: int = 2, width: int = 32, state: int = 8, context: int = 2048) -> Path:
    """Write a complete `mamba` model with random float32 weights.

    llama.cpp's CUDA kernels need a state of 16 and a width that is a multiple of 64. Other sizes run on the CPU.
    """
    vocabulary = tiny_vocabulary()
    inner, kernel, time_step_rank = 2 * width, 4, 4
    metadata: dict[str, Any] = {
        "general.architecture": "mamba",
        "general.name": "tiny recurrent",
        "mamba.vocab_size": len(vocabulary.tokens),
        "mamba.context_length": context,
        "mamba.embedding_length": width,
        "mamba.block_count": layers,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
        "mamba.ssm.conv_kernel": kernel,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": state,
        "mamba.ssm.time_step_rank": time_step_rank,
        "tokenizer.chat_template": CHATML,
        **vocabulary.metadata(),
    }
    random = np.random.default_rng(0)

    def values(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape).astype(np.float32)

    def matrix(rows: int, columns: int) -> Tensor:
        return ("F32", (values(rows, columns) / np.sqrt(columns)).astype(np.float32))

    def norm() -> Tensor:
        return ("F32", (1 + values(width) / 10).astype(np.float32))

    tensors: dict[str, Tensor] = {
        "token_embd.weight": matrix(len(vocabulary.tokens), width),
        "output_norm.weight": norm(),
    }
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.ssm_in.weight": matrix(2 * inner, width),
            f"blk.{layer}.ssm_conv1d.weight": matrix(inner, kernel),
            f"blk.{layer}.ssm_conv1d.bias": ("F32", (values(inner) / 10).astype(np.float32)),
            f"blk.{layer}.ssm_x.weight": matrix(time_step_rank + 2 * state, inner),
            f"blk.{layer}.ssm_dt.weight": matrix(inner, time_step_rank),
            f"blk.{layer}.ssm_dt.bias": ("F32", (values(inner) - 2).astype(np.float32)),
            f"blk.{layer}.ssm_a": ("F32", -np.exp(values(inner, state))),  # negative, so the state decays
            f"blk.{layer}.ssm_d": ("F32", values(inner)),
            f"blk.{layer}.ssm_out.weight": matrix(width, inner),
        }
    return write_gguf(path, metadata, tensors)
