"""Split models, built field by field or written by gguf-py."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import gguf

from llmrun.base.errors import ModelNotFound
from llmrun.formats.gguf.reader import GGUFFile, read_source
from llmrun.formats.gguf.source import Source
from tests.support.gguf import gguf_bytes
from tests.support.gguf.gguf_bytes import I32, U16, RawGGUF, RawTensor
from tests.support.gguf.gguf_memory import MemorySource

FOLDER = Path("folder")


def name_of(number: int, count: int = 3) -> str:
    """Return the name of file `number`, counted from 0."""
    return f"model-{number + 1:05d}-of-{count:05d}.gguf"


def split_keys(number: int, count: int = 3, tensors: int = 6) -> dict[str | bytes, bytes]:
    return {
        "split.no": gguf_bytes.scalar(U16, number),
        "split.count": gguf_bytes.scalar(U16, count),
        "split.tensors.count": gguf_bytes.scalar(I32, tensors),
    }


def raw_shards() -> list[RawGGUF]:
    """Return a valid model in three files: metadata in the first, two tensors in each."""
    first = {"general.architecture": gguf_bytes.string("llama")} | gguf_bytes.bpe_vocabulary()
    return [
        RawGGUF(first | split_keys(0), [RawTensor("a"), RawTensor("b", 2, (32, 2), 36)]),
        RawGGUF(split_keys(1), [RawTensor("c", 14, (256,), 210), RawTensor("d")]),
        RawGGUF(split_keys(2), [RawTensor("e", 8, (64, 3), 2 * 34 * 3), RawTensor("f")]),
    ]


def built(shards: list[RawGGUF]) -> dict[str, bytes]:
    return {name_of(number): shard.build() for number, shard in enumerate(shards)}


def read_shards(files: Mapping[str, bytes], first: str = name_of(0)) -> GGUFFile:
    """Open a split model from memory."""

    def open_shard(name: str) -> Source:
        if name not in files:
            raise ModelNotFound(f"no such model file: {name}")
        return MemorySource(files[name])

    return read_source(MemorySource(files[first]), FOLDER / first, open_shard)


def split_by_gguf_py(whole: Path, folder: Path, *, tensors_each: int, small_first: bool = False) -> Path:
    """Write a copy of the model, split into several files, and return the path of the first."""
    logging.getLogger("gguf.gguf_writer").setLevel(logging.ERROR)
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / "split.gguf", "", split_max_tensors=tensors_each, small_first_shard=small_first)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        inside = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], inside)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.glob("split-*.gguf"))
