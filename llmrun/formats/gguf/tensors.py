"""Reads the tensor descriptions, which follow the metadata. Tensors must fill the rest of the file without gaps.

A description consists of the tensor's name (string), its number of dimensions (u32), its dimensions (u64 each, row
length first), its weight type (u32) and its offset (u64) from the start of the tensor data. The data starts at the next
multiple of `general.alignment`, and each tensor is padded to that alignment.
"""

from __future__ import annotations

from math import prod

from msgspec import Struct

from llmrun.base.errors import shown
from llmrun.formats.gguf.cursor import Cursor
from llmrun.formats.gguf.format import incomplete
from llmrun.formats.gguf.header import Header, checked_name
from llmrun.formats.quants.registry import BY_ID
from llmrun.formats.quants.weight_type import WeightType

MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 63  # ggml's GGML_MAX_NAME (64) includes the terminating NUL
MAX_WEIGHTS = 2**63 - 1

# The minimum alignment in bytes. llama.cpp memory-maps tensors and aborts if a buffer's first tensor is not aligned to
# ggml's TENSOR_ALIGNMENT, even if `general.alignment` is smaller.
LEAST_ALIGNMENT = 32

_ELEMENTWISE = ("norm.weight", ".bias")
_ELEMENTWISE_TYPES = ("F32", "F16", "BF16")
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")  # Q8_1 and Q8_K are activation formats
_TABLES = ("ffn_gate_tid2eid.weight",)  # a table from token IDs to expert IDs

_REMOVED_IDS = {4, 5, 31, 32, 33, 36, 37, 38}


class TensorInfo(Struct, frozen=True):
    """A tensor in a file.

    `shape` is in GGUF's order, with the row length first. `offset` is in bytes from the start of the file or, if the
    model is split, from the start of the concatenated shards.
    """

    name: str
    type: WeightType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def n_rows(self) -> int:
        return prod(self.shape[1:])


def read_tensors(cursor: Cursor, header: Header) -> dict[str, TensorInfo]:
    """Read all tensor descriptions in file order. Raises BadGGUF."""
    relative: dict[str, TensorInfo] = {}
    for index in range(header.tensor_count):
        tensor = _tensor(cursor, index)
        if tensor.name in relative:
            raise cursor.bad(shown(tensor.name), f"duplicate tensor name, used again by tensor {index}")
        relative[tensor.name] = tensor
    cursor.align(header.alignment)
    return _placed(cursor, relative, header.alignment)


def _tensor(cursor: Cursor, index: int) -> TensorInfo:
    where = f"name of tensor {index}"
    raw = cursor.text(where)
    if not 0 < len(raw) <= MAX_NAME_BYTES:
        raise cursor.bad(where, f"must be 1 to {MAX_NAME_BYTES} bytes long, but '{shown(raw)}' has {len(raw)}")
    name = checked_name(cursor, raw, where)
    where = shown(name)
    shape = _shape(cursor, where)
    type_ = _type(cursor, where)
    _check_role(cursor, name, type_)
    if shape[0] % type_.block_weights:
        wanted = f"must be a multiple of {type_.block_weights}, the block size of {type_.name}"
        raise cursor.bad(where, f"row length {wanted}, not {shape[0]}")
    nbytes = type_.row_bytes(shape[0]) * prod(shape[1:])
    return TensorInfo(name, type_, shape, cursor.u64(where), nbytes)


def _shape(cursor: Cursor, where: str) -> tuple[int, ...]:
    n = cursor.u32(where)
    if not 1 <= n <= MAX_DIMENSIONS:
        raise cursor.bad(where, f"must have 1 to {MAX_DIMENSIONS} dimensions, not {n}")
    shape = tuple(cursor.i64(where) for _ in range(n))
    if min(shape) < 1:
        raise cursor.bad(where, f"dimensions must be positive, not {shape}")
    if prod(shape) > MAX_WEIGHTS:
        raise cursor.bad(where, f"dimensions {shape} give more than {MAX_WEIGHTS} weights")
    return shape


def _type(cursor: Cursor, where: str) -> WeightType:
    type_id = cursor.u32(where)
    type_ = BY_ID.get(type_id)
    if type_ is not None:
        return type_
    if type_id in _REMOVED_IDS:
        raise cursor.bad(where, f"weight type {type_id} was removed from GGUF, so the model must be converted again")
    raise cursor.bad(where, f"unknown weight type {type_id} (known: 0 to {max(BY_ID)})")


def _check_role(cursor: Cursor, name: str, type_: WeightType) -> None:
    """Check that a tensor's weight type suits the operations that use the tensor.

    llama.cpp looks up the function for a matmul in a table indexed by type. For unsupported types, llama.cpp aborts or
    calls a null pointer.
    """
    if name.endswith(_ELEMENTWISE) and type_.name not in _ELEMENTWISE_TYPES:
        raise cursor.bad(shown(name), f"must have type {' or '.join(_ELEMENTWISE_TYPES)}, not {type_.name}")
    if name.endswith(_ROPE_FACTORS) and type_.name != "F32":
        raise cursor.bad(shown(name), f"must have type F32, not {type_.name}")
    if name.endswith(".weight") and type_.name in _NO_WEIGHTS and not name.endswith(_TABLES):
        raise cursor.bad(shown(name), f"type {type_.name} is not for weights")


def _placed(cursor: Cursor, relative: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Return the tensors with offsets from the start of the file. Raises BadGGUF unless tensors are contiguous."""
    start = cursor.position
    expected = end = 0
    placed: dict[str, TensorInfo] = {}
    for name, tensor in relative.items():
        where, offset = shown(name), start + tensor.offset
        if tensor.offset != expected:
            raise cursor.bad(where, f"offset must be {expected}, the end of the previous tensor, not {tensor.offset}")
        if offset % LEAST_ALIGNMENT:
            raise cursor.bad(where, f"offset must be a multiple of {LEAST_ALIGNMENT}, not {offset}")
        placed[name] = TensorInfo(name, tensor.type, tensor.shape, offset, tensor.nbytes)
        end = offset + tensor.nbytes
        expected += -(-tensor.nbytes // alignment) * alignment
    if end > cursor.file_bytes:
        raise incomplete(cursor.path, cursor.file_bytes, end)
    return placed


def trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strip trailing dimensions of size 1, which GGUF files may or may not contain."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def dimensions(shape: tuple[int, ...]) -> str:
    """Return a shape in words, such as "576 x 1536"."""
    return " x ".join(str(size) for size in shape)
