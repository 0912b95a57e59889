"""Writes models larger than a GPU's memory in seconds. Most of the file is a hole, which takes up no disk space."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.gguf.writer import NewTensor, NewValue, header_bytes
from llmrun.formats.quants.registry import BY_NAME
from tests.support.gguf.gguf_files import CHATML

_WIDTH, _HEADS, _KV_HEADS, _FEED_FORWARD = 8192, 64, 8, 28_672  # those of Llama 3 70B
_MOST_LAYERS = 500  # llama.cpp supports 512
_BLOCK = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])


def write_large_model(path: Path, vocabulary: Path, n_bytes: int, *, width: int = _WIDTH) -> int:
    """Write a Q8_0 model of at least `n_bytes`, and return the number of its layers.

    The embeddings and the first layer are random. The other layers are zero, so they change nothing, but take as much
    memory and time as any others. Raises ValueError if the model would have more layers than llama.cpp supports.

    vocabulary  a model whose tokenizer is used
    """
    metadata, n_tokens = _vocabulary(vocabulary)
    embeddings = [
        _tensor("token_embd.weight", "Q8_0", (width, n_tokens), _random),
        _tensor("output_norm.weight", "F32", (width,), _ones),
    ]
    rest = n_bytes - sum(tensor.nbytes for tensor in embeddings)
    n_layers = max(2, -(-rest // sum(tensor.nbytes for tensor in _layer(0, width))))
    if n_layers > _MOST_LAYERS:
        raise ValueError(f"a model of {n_bytes:,} bytes would have {n_layers} layers, more than {_MOST_LAYERS}")
    tensors = [*embeddings, *(tensor for layer in range(n_layers) for tensor in _layer(layer, width))]
    header = header_bytes({**metadata, **_sizes(width, n_layers)}, tensors)
    with path.open("wb") as file:
        file.write(header)
        offset = len(header)
        for tensor in tensors:
            file.seek(offset)
            for piece in tensor.data():
                file.write(piece.tobytes())
            offset += -(-tensor.nbytes // 32) * 32
        file.truncate(offset)
    return n_layers


def _vocabulary(path: Path) -> tuple[dict[str, NewValue], int]:
    with open_gguf(path) as file:
        found: dict[str, NewValue] = {
            key: value if isinstance(value, str | bool | int | float | np.ndarray) else list(value)
            for key, value in file.metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        return found, len(file.strings("tokenizer.ggml.tokens"))


def _sizes(width: int, n_layers: int) -> dict[str, NewValue]:
    return {
        "general.architecture": "llama",
        "general.name": f"{n_layers} layers, mostly zero",
        "tokenizer.chat_template": CHATML,
        "llama.context_length": 8192,
        "llama.embedding_length": width,
        "llama.block_count": n_layers,
        "llama.feed_forward_length": _feed_forward(width),
        "llama.attention.head_count": _heads(width),
        "llama.attention.head_count_kv": _kv_heads(width),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500_000.0,
        "llama.rope.dimension_count": width // _heads(width),
    }


def _layer(layer: int, width: int) -> list[NewTensor]:
    kv = width // _heads(width) * _kv_heads(width)
    matrices = {
        "attn_q": (width, width),
        "attn_k": (width, kv),
        "attn_v": (width, kv),
        "attn_output": (width, width),
        "ffn_gate": (width, _feed_forward(width)),
        "ffn_up": (width, _feed_forward(width)),
        "ffn_down": (_feed_forward(width), width),
    }
    random, ones = (_random, _ones) if layer == 0 else (_hole, _hole)
    return [
        *(_tensor(f"blk.{layer}.{name}.weight", "F32", (width,), ones) for name in ("attn_norm", "ffn_norm")),
        *(_tensor(f"blk.{layer}.{name}.weight", "Q8_0", shape, random) for name, shape in matrices.items()),
    ]


def _heads(width: int) -> int:
    return max(2, _HEADS * width // _WIDTH)


def _kv_heads(width: int) -> int:
    return max(1, _KV_HEADS * width // _WIDTH)


def _feed_forward(width: int) -> int:
    return _FEED_FORWARD * width // _WIDTH


def _tensor(
    name: str, kind: str, shape: tuple[int, ...], data: Callable[[tuple[int, ...]], Iterable[NDArray[np.generic]]]
) -> NewTensor:
    return NewTensor(name, BY_NAME[kind], shape, lambda: data(shape))


def _random(shape: tuple[int, ...]) -> Iterable[NDArray[np.generic]]:
    """Yield random Q8_0 blocks, a few rows at a time."""
    random = np.random.default_rng(len(shape) + shape[-1])
    rows = max(1, (1 << 20) // shape[0])
    for first in range(0, shape[1], rows):
        blocks = np.empty((min(rows, shape[1] - first), shape[0] // 32), _BLOCK)
        blocks["scale"] = 1 / (73 * np.sqrt(shape[0]))  # products keep their size, because the quants deviate by 73
        blocks["quants"] = random.integers(-127, 128, (*blocks.shape, 32), np.int8)
        yield blocks.view(np.uint8)


def _ones(shape: tuple[int, ...]) -> Iterable[NDArray[np.generic]]:
    yield np.ones(shape, np.float32)


def _hole(shape: tuple[int, ...]) -> Iterable[NDArray[np.generic]]:
    return ()
