"""A tiny model whose draft head is exact by construction: the next token is a permutation of the current token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.gguf.gguf_files import Tensor, tiny_vocabulary, write_gguf
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES

_NAME = "qwen35 layers by name, with a layer ahead"
_CONTROL = 3  # number of control tokens, which never follow other tokens
ADDED = ("attn_output.weight", "ffn_down.weight", "ssm_out.weight")  # the matrices whose outputs are added
_WIDTH = 320  # at least the size of the vocabulary, so that a matrix can permute embeddings


def exact_head(folder: Path, *, knows: str) -> Path:
    """Write the model and return its path.

    All layers add nothing, so a token's hidden state is its embedding, a unit vector. The output matrix maps it to the
    next token. The head knows the current token from the `"token"` itself, or from the `"state"` at the position
    before, by permuting it. In both cases, its own hidden state is that of the model.
    """
    row, vocabulary = replace(TINY_ARCHITECTURES[_NAME], width=_WIDTH, once="output:v,w"), tiny_vocabulary()
    n = len(vocabulary.tokens)
    tensors = row.tensors("F32", n)
    for name, (_, values, *_) in tensors.items():
        if name.endswith(ADDED):
            tensors[name] = _float(np.zeros(np.shape(values)))
        elif name.endswith("norm.weight"):
            tensors[name] = _float(np.ones(np.shape(values)))
    following = np.arange(n)
    np.random.default_rng(5).shuffle(following[_CONTROL:])
    embedding = np.eye(n, _WIDTH)
    permuting = np.zeros((_WIDTH, _WIDTH))
    permuting[following, np.arange(n)] = 1
    tensors["token_embd.weight"] = _float(embedding)
    tensors["output.weight"] = _float(10 * embedding @ permuting)
    own, nothing = np.eye(_WIDTH), np.zeros((_WIDTH, _WIDTH))
    halves = {"token": (own, nothing), "state": (nothing, permuting)}[knows]
    tensors[f"blk.{row.layers - 1}.nextn.eh_proj.weight"] = _float(np.concatenate(halves, axis=1))
    return write_gguf(folder / f"exact-{knows}.gguf", row.metadata() | vocabulary.metadata(), tensors)


def _float(values: NDArray[np.float64]) -> Tensor:
    return "F32", values.astype(np.float32)
