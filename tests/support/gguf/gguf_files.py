"""GGUF files written by gguf-py for tests: any metadata, any tensors, and complete tiny llama models."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from llmrun.formats.gguf.reader import GGUFFile, no_other, open_gguf, read_source
from tests.support.gguf.gguf_memory import MemorySource

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# A tensor is (weight type, float32 values) or (weight type, raw bytes, shape). Shapes are in NumPy's order.
Tensor = tuple[str, NDArray[np.float32]] | tuple[str, bytes, tuple[int, ...]]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_VALUE_TYPES = {
    np.dtype(np.uint8): gguf.GGUFValueType.UINT8,
    np.dtype(np.int8): gguf.GGUFValueType.INT8,
    np.dtype(np.uint16): gguf.GGUFValueType.UINT16,
    np.dtype(np.int16): gguf.GGUFValueType.INT16,
    np.dtype(np.uint32): gguf.GGUFValueType.UINT32,
    np.dtype(np.int32): gguf.GGUFValueType.INT32,
    np.dtype(np.float32): gguf.GGUFValueType.FLOAT32,
    np.dtype(np.bool_): gguf.GGUFValueType.BOOL,
    np.dtype(np.uint64): gguf.GGUFValueType.UINT64,
    np.dtype(np.int64): gguf.GGUFValueType.INT64,
    np.dtype(np.float64): gguf.GGUFValueType.FLOAT64,
}


def write_gguf(path: Path | str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write one file and return its path.

    A Python int becomes u32 (i32 if negative, u64 if large), a float f32, a list of ints i32 and a list of floats f32.
    NumPy scalars and arrays keep their own type. `general.alignment` is respected.
    """
    with _quiet_writer():
        writer = _writer(path, metadata)
        for name, tensor in tensors.items():
            _add_tensor(writer, name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(path)


def header_of_a_large_file(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], kind: str
) -> GGUFFile:
    """Open a file whose tensors have the given shapes and all weights 1.0. Only its header is written to `path`.

    Vectors are F32 and all other tensors `kind`.
    """
    with _quiet_writer():
        writer = _writer(path, metadata)
        size = 0
        for name, shape in shapes.items():
            raw = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else kind]
            values, bytes_ = gguf.GGML_QUANT_SIZES[raw]
            nbytes = prod(shape) // values * bytes_
            writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw)
            size += -(-nbytes // writer.data_alignment) * writer.data_alignment
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
    header = path.read_bytes()
    return read_source(_LargeSource(header, len(header) + writer.data_alignment + size), path, no_other)


class _LargeSource(MemorySource):
    """A header, followed by 32-bit floats with the value 1.0."""

    def __init__(self, header: bytes, size: int) -> None:
        super().__init__(header)
        self.size = size

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = np.ones(len(into) // 4 + 1, "<f4").tobytes()[: len(into)]
        part = self._bytes[offset : offset + len(into)]
        into[: len(part)] = part


def _writer(path: Path | str, metadata: Mapping[str, Any]) -> gguf.GGUFWriter:
    """Return a writer with the metadata and no tensors yet."""
    writer = gguf.GGUFWriter(path, "")
    for key, value in metadata.items():
        _add_value(writer, key, value)
    writer.data_alignment = int(metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
    return writer


def gguf_about_attention(folder: Path, architecture: str, layers: int, **attention: Any) -> GGUFFile:
    """Open a file whose header has these attention keys and this many layers. Its only tensor belongs to no layer."""
    metadata = {f"{architecture}.attention.{name}": value for name, value in attention.items()}
    metadata |= {"general.architecture": architecture, f"{architecture}.block_count": layers}
    tensors = {"token_embd.weight": ("F32", np.zeros((1, 32), np.float32))}
    return open_gguf(write_gguf(folder / "made.gguf", metadata, tensors))


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind = gguf.GGUFValueType
    if isinstance(value, np.generic):
        writer.add_key_value(key, value.item(), _VALUE_TYPES[value.dtype])
    elif isinstance(value, np.ndarray):
        writer.add_key_value(key, value.tolist(), kind.ARRAY, _VALUE_TYPES[value.dtype])
    elif isinstance(value, (str, bytes)):
        writer.add_key_value(key, value, kind.STRING)
    elif isinstance(value, bool):
        writer.add_key_value(key, value, kind.BOOL)
    elif isinstance(value, int):
        writer.add_key_value(key, value, kind.INT32 if value < 0 else kind.UINT32 if value < 2**32 else kind.UINT64)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kind.FLOAT32)
    elif isinstance(value, Sequence):
        writer.add_key_value(key, list(value), kind.ARRAY)
    else:
        raise TypeError(f"no GGUF type for {key}: {value!r}")


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    kind = gguf.GGMLQuantizationType[tensor[0]]
    if len(tensor) == 2:
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor[1]), kind), raw_dtype=kind)
        return
    _, raw, shape = tensor
    byte_shape = gguf.quants.quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor(name, np.frombuffer(raw, np.uint8).reshape(byte_shape), raw_dtype=kind)


@contextmanager
def _quiet_writer() -> Iterator[None]:
    """Silence gguf-py, which logs every file it writes and would disturb tests that check stderr."""
    logger = logging.getLogger("gguf.gguf_writer")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the form of its `tokenizer.ggml.*` metadata."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    model: str = "gpt2"
    pre: str = "smollm"
    scores: tuple[float, ...] = ()
    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    padding: int | None = None
    add_bos: bool = False

    def metadata(self) -> dict[str, Any]:
        values: dict[str, Any] = {"tokenizer.ggml.model": self.model}
        if self.model == "gpt2":
            values["tokenizer.ggml.pre"] = self.pre
        values["tokenizer.ggml.tokens"] = self.tokens
        if self.scores:
            values["tokenizer.ggml.scores"] = np.array(self.scores, np.float32)
        values["tokenizer.ggml.token_type"] = np.array(self.types, np.int32)
        if self.merges:
            values["tokenizer.ggml.merges"] = self.merges
        ids = {"bos": self.bos, "eos": self.eos, "unknown": self.unknown, "padding": self.padding}
        values |= {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None}
        values["tokenizer.ggml.add_bos_token"] = self.add_bos
        return values


def byte_characters() -> tuple[str, ...]:
    """Return the 256 printable characters that stand for the bytes 0 to 255 in GPT-2's byte-level BPE."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return tuple(chr(byte) if byte in plain else chr(next(spare)) for byte in range(256))


_MERGES = (
    *(
        "Ġ t",
        "Ġ a",
        "h e",
        "i n",
        "r e",
        "o n",
        "Ġt he",
        "e r",
        "Ġ s",
        "a t",
        "Ġ w",
        "o r",
        "e n",
        "n d",
        "i s",
    ),
    *("Ġ o", "Ġa nd", "e s", "Ġo f", "in g", "Ġ h", "l l", "o u", "Ġ i", "Ġw or", "Ġwor l", "Ġworl d"),
    *("H e", "He ll", "Hell o", "Ġ Ġ", "ĠĠ ĠĠ", "ĠĠĠĠ ĠĠĠĠ", "Ċ Ċ", "A A", "AA AA", "AAAA AAAA", "Ã ¤"),
)


def tiny_vocabulary() -> Vocabulary:
    """Return a byte-level BPE vocabulary: 256 byte tokens, a few merges, and SmolLM2's control tokens in its order."""
    controls = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    merged = tuple(merge.replace(" ", "") for merge in _MERGES)
    tokens = controls + byte_characters() + merged
    types = (CONTROL,) * len(controls) + (NORMAL,) * (len(tokens) - len(controls))
    return Vocabulary(tokens, types, _MERGES, bos=1, eos=2, unknown=0, padding=2)


def tiny_spm_vocabulary() -> Vocabulary:
    """Return a SentencePiece vocabulary with byte fallback, in Llama 2's order: 3 control tokens, 256 bytes, scored
    pieces."""
    pieces = (
        "▁",
        "▁t",
        "he",
        "▁the",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "▁He",
        "ll",
        "▁Hell",
        "o",
        "▁Hello",
        "a",
        "e",
    )
    bytes_ = tuple(f"<0x{byte:02X}>" for byte in range(256))
    tokens = ("<unk>", "<s>", "</s>", *bytes_, *pieces)
    types = (UNKNOWN, CONTROL, CONTROL, *(BYTE,) * 256, *(NORMAL,) * len(pieces))
    scores = (*(0.0,) * 259, *(-float(rank) for rank in range(len(pieces))))
    return Vocabulary(tokens, types, model="llama", scores=scores, bos=1, eos=2, unknown=0, add_bos=True)


def tiny_llama(
    path: Path | str,
    *,
    weight_type: str = "Q8_0",
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int | None = None,
    feed_forward: int = 96,
    context: int = 512,
    vocabulary: Vocabulary | None = None,
    pre: str | None = None,
    tied: bool = True,
    rope_scaling: str | None = None,
    rope_base: float = 10_000.0,
    chat_template: str | None = CHATML,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write a complete llama model with random weights. llama.cpp can run it too.

    `rope_scaling` is None, "linear" (factor 4) or "llama3" (adds a `rope_freqs.weight` tensor, as in Llama 3.1). If
    `head_size` differs from width / heads, it is written as key_length, value_length and the rope dimension. `extra` is
    metadata to add or replace.
    """
    vocabulary = vocabulary or tiny_vocabulary()
    if pre is not None:
        vocabulary = replace(vocabulary, pre=pre)
    size = head_size or width // heads
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "tiny llama",
        "general.file_type": int(gguf.LlamaFileType[_FILE_TYPES[weight_type]]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.vocab_size": len(vocabulary.tokens),
        "llama.context_length": context,
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": feed_forward,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": size,
        "llama.rope.freq_base": rope_base,
    }
    if head_size is not None:
        metadata |= {"llama.attention.key_length": size, "llama.attention.value_length": size}
    if rope_scaling == "linear":
        metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    metadata |= vocabulary.metadata()
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    metadata |= extra or {}
    random = RandomWeights(np.random.default_rng(seed), weight_type)

    tensors: dict[str, Tensor] = {"token_embd.weight": random.matrix(len(vocabulary.tokens), width)}
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": random.norm(width),
            f"blk.{layer}.attn_q.weight": random.matrix(heads * size, width),
            f"blk.{layer}.attn_k.weight": random.matrix(kv_heads * size, width),
            f"blk.{layer}.attn_v.weight": random.matrix(kv_heads * size, width),
            f"blk.{layer}.attn_output.weight": random.matrix(width, heads * size),
            f"blk.{layer}.ffn_norm.weight": random.norm(width),
            f"blk.{layer}.ffn_gate.weight": random.matrix(feed_forward, width),
            f"blk.{layer}.ffn_up.weight": random.matrix(feed_forward, width),
            f"blk.{layer}.ffn_down.weight": random.matrix(width, feed_forward),
        }
    tensors["output_norm.weight"] = random.norm(width)
    if not tied:
        tensors["output.weight"] = random.matrix(len(vocabulary.tokens), width)
    if rope_scaling == "llama3":
        tensors["rope_freqs.weight"] = ("F32", llama3_rope_factors(size, rope_base))
    return write_gguf(path, metadata, tensors)


_FILE_TYPES = {
    "F32": "ALL_F32",
    "F16": "MOSTLY_F16",
    "BF16": "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_0": "MOSTLY_Q4_0",
    "Q4_1": "MOSTLY_Q4_1",
    "MXFP4": "MOSTLY_MXFP4_MOE",
}


class Random(Protocol):
    """The methods of np.random.Generator that make weights."""

    def standard_normal(self, size: Any) -> Any: ...

    def uniform(self, low: Any, high: Any, size: Any) -> Any: ...


class RandomWeights:
    def __init__(self, random: Random, weight_type: str) -> None:
        self._random = random
        self._weight_type = weight_type

    def matrix(self, *shape: int) -> Tensor:
        """Return random weights of shape (rows, columns) or (matrices, rows, columns)."""
        # 1 / sqrt(columns) keeps activations near 1.
        values = self._random.standard_normal(shape) / np.sqrt(shape[-1])
        return (self._weight_type, values.astype(np.float32))

    def norm(self, width: int) -> Tensor:
        return ("F32", (1 + 0.1 * self._random.standard_normal(width)).astype(np.float32))


def llama3_rope_factors(
    head_size: int,
    base: float,
    *,
    factor: float = 8.0,
    low: float = 1.0,
    high: float = 4.0,
    original_context: int = 8192,
) -> NDArray[np.float32]:
    """Return the divisor of each rotary frequency in a Llama 3.1 file, float32[head_size / 2].

    Short wavelengths stay as they are, long ones are stretched by `factor`, and those in between are blended. Source:
    Llama 3.1's published rope scaling.
    """
    wavelength = 2 * np.pi * base ** (np.arange(0, head_size, 2) / head_size)
    blend = np.clip((original_context / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - blend) / factor + blend)).astype(np.float32)
