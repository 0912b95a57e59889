"""The tiny checkpoints of scripts/transformers_rows, converted by llama.cpp, without their weights.

The weights are random numbers, which the name of a parameter determines. A recording says which of these numbers each
tensor of the converted file has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict
from zlib import crc32

import numpy as np

from tests.support.gguf.gguf_files import write_gguf

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RecordedTensor(TypedDict):
    """A tensor of a converted file.

    name   the parameter of the checkpoint
    size   the size of the parameter
    scale, added  what the random numbers are multiplied by, and what is added then (by default, nothing)
    shape  the tensor's shape, in NumPy's order
    start  the index of the first number in the parameter, by default 0
    loops  [count, stride] of nested loops over the parameter's indices, the outermost first; by default, all numbers
    """

    name: str
    size: int
    scale: float
    added: NotRequired[float]
    shape: list[int]
    start: NotRequired[int]
    loops: NotRequired[list[list[int]]]


def random_numbers(name: str, size: int) -> NDArray[np.int64]:
    """Return integers from -127 to 127."""
    return np.random.default_rng(crc32(name.encode())).integers(-127, 128, size)


def values_of(tensor: RecordedTensor) -> NDArray[np.float32]:
    index = np.array(tensor.get("start", 0))
    for count, stride in tensor.get("loops", [[tensor["size"], 1]]):
        index = index[..., None] + stride * np.arange(count)
    numbers = random_numbers(tensor["name"], tensor["size"])[index].astype(np.float32)
    values: NDArray[np.float32] = numbers * np.float32(tensor["scale"]) + np.float32(tensor.get("added", 0.0))
    return values.reshape(tensor["shape"])


def recorded_projector(path: Path, recording: dict[str, Any]) -> Path:
    """Write the converted file of a recording, with all tensors in F32."""
    tensors = {name: ("F32", values_of(tensor)) for name, tensor in recording["tensors"].items()}
    return write_gguf(path, {key: plain(value) for key, value in recording["metadata"].items()}, tensors)


def plain(value: Any) -> Any:
    """Return a value of metadata with the type that the key has in files."""
    return np.array(value) if isinstance(value, list) and isinstance(value[0], bool) else value
