"""GGUF files built field by field, so that a test can break a single rule."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def scalar(type_id: int, value: float) -> bytes:
    """Return a value, preceded by its type id."""
    return u32(type_id) + struct.pack("<" + CODES[type_id], value)


def string(value: str | bytes) -> bytes:
    return u32(STRING) + text(value)


def numbers(type_id: int, values: Sequence[float]) -> bytes:
    return u32(ARRAY) + u32(type_id) + u64(len(values)) + struct.pack(f"<{len(values)}{CODES[type_id]}", *values)


def strings(values: Sequence[str | bytes]) -> bytes:
    return u32(ARRAY) + u32(STRING) + u64(len(values)) + b"".join(text(value) for value in values)


@dataclass
class RawTensor:
    """A tensor's description.

    `nbytes` is the size of its data. If `offset` is None, the data follows the previous tensor's.
    """

    name: str | bytes
    type_id: int = 0
    shape: Sequence[int] = (8, 4)
    nbytes: int = 128
    offset: int | None = None


@dataclass
class RawGGUF:
    """A GGUF file. `build` writes the given fields without checking them."""

    keys: dict[str | bytes, bytes] = field(default_factory=dict)
    tensors: list[RawTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    key_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32
    more_keys: bytes = b""  # records after `keys`, for duplicate names

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        n_keys = len(self.keys) if self.key_count is None else self.key_count
        parts = [self.magic, u32(self.version), u64(n_tensors), u64(n_keys)]
        parts += [text(key) + value for key, value in self.keys.items()]
        parts.append(self.more_keys)
        offset = 0
        for tensor in self.tensors:
            at = offset if tensor.offset is None else tensor.offset
            parts += [text(tensor.name), u32(len(tensor.shape)), b"".join(u64(n) for n in tensor.shape)]
            parts += [u32(tensor.type_id), u64(at)]
            offset += self._padded(tensor.nbytes)
        return b"".join(parts)

    def build(self) -> bytes:
        header = self.header()
        data = b"".join(bytes(self._padded(tensor.nbytes)) for tensor in self.tensors)
        return header.ljust(self._padded(len(header)), b"\0") + data

    def _padded(self, n: int) -> int:
        return -(-n // self.alignment) * self.alignment


BPE_TOKENS = ("<|end|>", "<|im_start|>", "a", "b", "c", "d", "Ġ", "Ġa", "ab", "abc", "Ċ", "é", "x y", "日本")
BPE_MERGES = ("Ġ a", "a b", "ab c", "  b")


def bpe_vocabulary() -> dict[str | bytes, bytes]:
    """Return the metadata of a small `gpt2` tokenizer, including every optional key."""
    n = len(BPE_TOKENS)
    keys: dict[str | bytes, bytes] = {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("smollm"),
        "tokenizer.ggml.tokens": strings(BPE_TOKENS),
        "tokenizer.ggml.scores": numbers(F32, [-float(i) for i in range(n)]),
        "tokenizer.ggml.token_type": numbers(I32, [3, 3, *[1] * (n - 2)]),
        "tokenizer.ggml.merges": strings(BPE_MERGES),
        "tokenizer.ggml.suppress_tokens": numbers(I32, [0, 1]),
        "tokenizer.ggml.add_bos_token": scalar(BOOL, 0),
        "tokenizer.ggml.add_eos_token": scalar(BOOL, 1),
        "tokenizer.ggml.add_space_prefix": scalar(BOOL, 0),
    }
    for name in ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls", "fim_pre", "prefix"):
        keys[f"tokenizer.ggml.{name}_token_id"] = scalar(U32, 1)
    return keys


def spm_vocabulary() -> dict[str | bytes, bytes]:
    """Return the metadata of a small `llama` (SentencePiece) tokenizer with all 256 byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a"]
    return {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.scores": numbers(F32, [0.0] * len(tokens)),
        "tokenizer.ggml.token_type": numbers(I32, [2, 3, 3, *[6] * 256, 1, 1]),
        "tokenizer.ggml.bos_token_id": scalar(U32, 1),
        "tokenizer.ggml.eos_token_id": scalar(U32, 2),
    }


def every_value() -> dict[str | bytes, bytes]:
    """Return metadata with one scalar and one array of each value type."""
    keys: dict[str | bytes, bytes] = {
        "general.architecture": string("llama"),
        "general.alignment": scalar(U32, 32),
        "split.count": scalar(U16, 1),
        "test.string": string("text, ünïcode and \x1b"),
        "test.empty": string(""),
        "test.strings": strings(["one", "", "drei"]),
        "test.no_strings": strings([]),
        "test.no_numbers": numbers(I32, []),
    }
    for type_id in CODES:
        keys[f"test.scalar.{type_id}"] = scalar(type_id, 1)
        keys[f"test.array.{type_id}"] = numbers(type_id, [0, 1, 1])
    return keys


def whole_file() -> RawGGUF:
    """Return a valid file with most features of the format. llama.cpp's own parser opens it too."""
    tensors = [
        RawTensor("token_embd.weight", 8, (64, 3), 2 * 34 * 3),
        RawTensor("blk.0.attn_norm.weight", 0, (5,), 20),
        RawTensor("blk.0.ffn_up.weight", 3, (32, 2, 3, 2), 20 * 12),
        RawTensor("output.weight", 30, (7, 2), 28),
    ]
    return RawGGUF(every_value() | bpe_vocabulary(), tensors)
