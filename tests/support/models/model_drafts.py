"""A complete model in editable parts: metadata as values, tensors as bytes. `build` writes them without checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.formats.gguf.format import SCALAR_TYPES
from llmrun.formats.gguf.metadata import StringArray
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from tests.support.gguf import gguf_bytes
from tests.support.gguf.gguf_bytes import STRING, RawGGUF, RawTensor

_TYPE_IDS = {type_.name: id_ for id_, type_ in SCALAR_TYPES.items()} | {"str": STRING}


@dataclass
class Value:
    """A metadata value. `content` is a scalar or a list; `type_id` is the type of the scalar or of the list's
    elements."""

    type_id: int
    content: Any

    def encoded(self) -> bytes:
        if isinstance(self.content, list):
            if self.type_id == STRING:
                return gguf_bytes.strings(self.content)
            return gguf_bytes.numbers(self.type_id, self.content)
        if self.type_id == STRING:
            return gguf_bytes.string(self.content)
        return gguf_bytes.scalar(self.type_id, self.content)


@dataclass
class Weights:
    """A tensor. `shape` is in GGUF's order, row length first."""

    name: str | bytes
    type_id: int
    shape: Sequence[int]
    data: bytes


@dataclass
class Draft:
    """A model file that has not been written yet."""

    keys: dict[str | bytes, Value]
    tensors: list[Weights]
    alignment: int = 32
    version: int = 3

    def copy(self) -> Draft:
        """Return a copy whose values and tensors can be replaced (but not mutated) without affecting this draft."""
        return Draft(dict(self.keys), list(self.tensors), self.alignment, self.version)

    def build(self) -> bytes:
        raw = RawGGUF(
            {key: value.encoded() for key, value in self.keys.items()},
            [RawTensor(t.name, t.type_id, t.shape, len(t.data)) for t in self.tensors],
            version=self.version,
            alignment=self.alignment,
        )
        header = raw.header()
        parts = [header, bytes(-len(header) % self.alignment)]
        for tensor in self.tensors:
            parts += [tensor.data, bytes(-len(tensor.data) % self.alignment)]
        return b"".join(parts)


def draft_of(path: Path) -> Draft:
    """Return a valid file as a draft."""
    with open_gguf(path) as file:
        keys: dict[str | bytes, Value] = {key: _value(file, key) for key in file.metadata}
        tensors = [Weights(t.name, t.type.ggml_id, t.shape, file.read(t).tobytes()) for t in file.tensors.values()]
        return Draft(keys, tensors, file.alignment, file.version)


def _value(file: GGUFFile, key: str) -> Value:
    content: Any = file.metadata[key]
    type_name = file.types[key].removeprefix("arr[").removesuffix("]")
    if isinstance(content, StringArray):
        content = [content.raw(i) for i in range(len(content))]
    elif isinstance(content, np.ndarray):
        content = content.tolist()
    return Value(_TYPE_IDS[type_name], content)
