"""Tiny models whose results are compared with digests in a file: every architecture, weight type and KV cache type.

The models must be the same on every machine and with every version of NumPy and gguf-py, so random numbers come from
our own generator, and quantized weights are random blocks instead of the result of a quantizer. What remains are the
file format and the vocabulary. The digests file also has a digest of each model, which distinguishes changes in these
from changes in the engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import frexp, prod
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.formats.layouts.kv import KV_CHOICES, KV_TYPES
from llmrun.formats.quants.registry import BY_NAME
from scripts.kernel_list import FLOAT_TYPES
from tests.support.gguf.gguf_files import RandomWeights, Tensor, tiny_vocabulary, write_gguf
from tests.support.kernels.runs import EXPERT_TYPES, WEIGHT_TYPES, with_factors
from tests.support.models.digests import BOTH_WAYS, IMAGES, ONE_WAY, StableRandom
from tests.support.models.tiny_architecture import TinyArchitecture
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES
from tests.support.models.tiny_encoders import TINY_ENCODERS, TINY_RERANKERS

DIGESTS = Path(__file__).resolve().parents[2] / "backends" / "cpu" / "numerics.json"

_SIZES: dict[str, Any] = {
    "width": 256,
    "heads": 16,
    "kv_heads": 8,
    "feed_forward": 256,
    "expert_size": 256,
    "layers": 1,
}
# One architecture for each head size and form of attention, to test with the KV cache types other than the default.
_CACHED = ("qwen2", "qwen3", "gemma2", "gemma4", "gemma", "deepseek2", "deepseek2 V2 Lite, older")
# One architecture for each way to read the rows of images.
_WITH_IMAGES = dict.fromkeys(("gemma3", "gemma4"), BOTH_WAYS) | dict.fromkeys(
    ("gemma4 E2B", "qwen2vl", "qwen3vlmoe", "qwen35", "lfm2", "granite"), ONE_WAY
)


@dataclass(frozen=True)
class NumericModel:
    """A model and the type of its KV cache. `images` is the value of the key IMAGES, or "" to run only text."""

    row: TinyArchitecture
    weight_type: str = "F32"
    kv_type: str = KV_CHOICES[0]
    images: str = ""


def _models() -> Iterator[tuple[str, NumericModel]]:
    for name, row in TINY_ARCHITECTURES.items():
        yield name, NumericModel(row)
    for name, row in TINY_ENCODERS.items():
        yield f"{name}, encoder", NumericModel(row)
    for name, row in TINY_RERANKERS.items():
        yield f"{name}, reranker", NumericModel(row)
    for kind in WEIGHT_TYPES:
        yield f"{kind} weights", NumericModel(replace(TINY_ARCHITECTURES["qwen2"], **_SIZES), kind.upper())
    for kind in EXPERT_TYPES:
        yield f"{kind} experts", NumericModel(replace(TINY_ARCHITECTURES["llama Mixtral"], **_SIZES), kind.upper())
    for kv_type in KV_CHOICES[1:]:
        for name in _CACHED if kv_type in KV_TYPES else _CACHED[:1]:
            yield f"{name}, {kv_type} KV cache", NumericModel(TINY_ARCHITECTURES[name], kv_type=kv_type)
    for name, images in _WITH_IMAGES.items():
        yield f"{name}, images", NumericModel(TINY_ARCHITECTURES[name], images=images)


NUMERIC_MODELS: dict[str, NumericModel] = dict(_models())


class StableWeights(RandomWeights):
    """Matrices in any weight type, with random blocks if the type is quantized."""

    def __init__(self, random: StableRandom, weight_type: str) -> None:
        super().__init__(random, weight_type)
        self._source = random

    def matrix(self, *shape: int) -> Tensor:
        kind = BY_NAME[self._weight_type]
        if kind.name.lower() in FLOAT_TYPES:
            values = super().matrix(*shape)[1]
            assert isinstance(values, np.ndarray)
            if kind.name == "F16":
                return (kind.name, values.astype(np.float16).tobytes(), shape)
            return (kind.name, (values if kind.name == "F32" else values.view(np.uint16)[..., 1::2]).tobytes(), shape)
        blocks = prod(shape) // kind.block_weights
        size = -(-blocks * kind.block_bytes // 8)
        data = self._source.bits(size).view(np.uint8)[: blocks * kind.block_bytes].reshape(blocks, -1).copy()
        if kind.name == "MXFP4":
            data[:, 0] = 122 + data[:, 0] % 3
        if kind.name == "NVFP4":
            data[:, :4] = 32 + data[:, :4] % 16
        # With this power of two as scale, the weights are near 1 / sqrt(columns) for any type.
        assert kind.dequantize is not None
        ones = with_factors(kind, data, np.full((blocks, 2), 0x3C00, np.uint16))
        average = float(np.abs(kind.dequantize(ones.reshape(blocks, -1))).astype(np.float64).mean())
        scale = 2.0 ** -frexp(average * shape[-1] ** 0.5)[1]
        factors = (scale * self._source.uniform(1, 2, (blocks, 2))).astype(np.float16).view(np.uint16)
        return (kind.name, with_factors(kind, data, factors).tobytes(), shape)


def write_numeric_model(path: Path, name: str) -> str:
    """Write a model to `path` and return the first 16 hexadecimal digits of the sha256 of the file."""
    model, vocabulary = NUMERIC_MODELS[name], tiny_vocabulary()
    random = StableRandom(1)
    tensors = model.row.tensors_of(random, StableWeights(random, model.weight_type), len(vocabulary.tokens))
    keys: dict[str, Any] = {"tokenizer.ggml.token_type_count": 2} if "token_types" in model.row.once else {}
    if model.images:
        keys[IMAGES] = model.images
    write_gguf(path, model.row.metadata() | vocabulary.metadata() | keys, tensors)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read_digests() -> Any:
    """Return the contents of the file: {"numerics": version, "models": {name: {"file": digest, "logits": digest}}}.

    The second digest of encoders and rerankers is that of their hidden states.
    """
    return json.loads(DIGESTS.read_text(encoding="utf-8"))


def written_digests(numerics: int, models: dict[str, dict[str, str]]) -> str:
    """Return the text of the file, with one line for each model."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(digests)}" for name, digests in models.items())
    return f'{{\n  "numerics": {numerics},\n  "models": {{\n{lines}\n  }}\n}}\n'
