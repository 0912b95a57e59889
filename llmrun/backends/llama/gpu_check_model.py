"""A tiny model with one layer, no vocabulary and random weights. It uses the same llama.cpp kernels as a real model.

The matrices are Q8_0, with 64 to 128 rows of 64 or 128 weights. All of llama.cpp's kernels accept these sizes, even the
AMX kernels, which need whole tiles of 32 rows.
"""

from __future__ import annotations

import struct
from math import prod

import numpy as np

VOCABULARY = 64
WIDTH, _HEADS, _FEED_FORWARD, _CONTEXT = 64, 2, 128, 256
_ALIGNMENT = 32
_STRING, _U32, _F32 = 8, 4, 6  # GGUF value types
_FLOATS, _Q8_0 = 0, 8  # GGUF tensor types

_METADATA: dict[str, str | int | float] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": _CONTEXT,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": _FEED_FORWARD,
    "llama.attention.head_count": _HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCABULARY,
    "tokenizer.ggml.model": "none",
}
# Shapes are in GGUF order: the row length comes first, then the number of rows.
_MATRICES = {
    "token_embd.weight": (WIDTH, VOCABULARY),
    "output.weight": (WIDTH, VOCABULARY),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_k.weight": (WIDTH, WIDTH),
    "blk.0.attn_v.weight": (WIDTH, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, WIDTH),
    "blk.0.ffn_gate.weight": (WIDTH, _FEED_FORWARD),
    "blk.0.ffn_up.weight": (WIDTH, _FEED_FORWARD),
    "blk.0.ffn_down.weight": (_FEED_FORWARD, WIDTH),
}
_NORMS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")


def trial_model() -> bytes:
    """Return the contents of a complete GGUF file."""
    random = np.random.default_rng(1)
    tensors: list[tuple[str, int, tuple[int, ...], bytes]] = [
        (name, _Q8_0, shape, _random_q8_0(random, shape)) for name, shape in _MATRICES.items()
    ]
    tensors += [(name, _FLOATS, (WIDTH,), np.ones(WIDTH, np.float32).tobytes()) for name in _NORMS]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(_METADATA))
    header += b"".join(_text(key) + _value(value) for key, value in _METADATA.items())
    data = b""
    for name, type_id, shape, raw in tensors:
        header += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        header += struct.pack("<IQ", type_id, len(data))
        data += _padded(raw)
    return _padded(header) + data


def _random_q8_0(random: np.random.Generator, shape: tuple[int, ...]) -> bytes:
    """Return a random Q8_0 matrix. Each block has an f16 scale followed by 32 int8 weights."""
    blocks = np.zeros(prod(shape) // 32, np.dtype([("scale", "<f2"), ("weights", "i1", 32)]))
    blocks["scale"] = 1 / 1024
    blocks["weights"] = random.integers(-127, 128, blocks["weights"].shape)
    return blocks.tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    return struct.pack("<II", _U32, value) if isinstance(value, int) else struct.pack("<If", _F32, value)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
