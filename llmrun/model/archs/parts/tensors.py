"""Checks that a file contains exactly the tensors that the architecture expects, with the right shapes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import BadGGUF, UnsupportedModel, shown
from llmrun.formats.gguf.quantization import quantization_in
from llmrun.formats.gguf.tensors import dimensions, trimmed
from llmrun.formats.quants.weight_type import GROUP_ROWS
from llmrun.model.plan.matrix import SUPPORTED, Matrix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo

Shape = tuple[int, ...]


class Tensors:
    """The tensors of a file, which are requested by name, with the shape that the metadata implies.

    `finish` rejects files with unrequested tensors, because ignoring a bias, for example, would give
    wrong results. The methods raise BadGGUF for tensors that are missing or have the wrong shape, and UnsupportedModel
    for weight types without kernels.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._asked: set[str] = set()
        self._left_out: tuple[str, ...] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def matrix(self, name: str, columns: int, rows: int) -> Matrix:
        """Return the matrix with `columns` inputs and `rows` outputs."""
        self._ask(name, (columns, rows))
        return matrix(self.file, name)

    def experts(self, name: str, columns: int, rows: int, n: int) -> Matrix:
        """Return the matrices of `n` experts, one after the other."""
        self._ask(name, (columns, rows, n))
        return experts(self.file, name, n)

    def halves_of_experts(self, name: str, columns: int, rows: int, n: int) -> tuple[Matrix, Matrix]:
        """Return the first and second matrices of all experts, from a tensor that stores two matrices per expert."""
        self._ask(name, (columns, 2 * rows, n))
        both = experts(self.file, name, 2 * n)
        return both.part_of_each(n, 0, rows), both.part_of_each(n, rows, rows)

    def leave_out(self, *prefixes: str) -> None:
        """Accept tensors whose names begin with the given prefixes, although no op uses the tensors."""
        self._left_out += prefixes

    def vector(self, name: str, size: int, copies: int = 1) -> NDArray[np.float32]:
        """Return a vector of floats as float32[copies * size]."""
        self._ask(name, (size, copies))
        return vector(self.file, name)

    def optional_vector(self, name: str, size: int) -> NDArray[np.float32] | None:
        return self.vector(name, size) if name in self else None

    def finish(self, prefix: str = "") -> None:
        """Raise UnsupportedModel if a tensor whose name begins with `prefix` has not been requested or left out."""
        for name in self.file.tensors:
            if name.startswith(prefix) and name not in self._asked and not name.startswith(self._left_out):
                raise UnsupportedModel(
                    f"tensor not supported: {_path(self.file)}: {shown(name)}: not part of this architecture",
                    hint="This model may run with --backend llama.",
                )

    def _ask(self, name: str, shape: Shape) -> None:
        """Check the shape of a tensor, given in GGUF's order (row length first), and mark the tensor as requested."""
        self._asked.add(name)
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise BadGGUF(f"tensor missing: {_path(self.file)}: {name}")
        if trimmed(tensor.shape) != trimmed(shape):
            raise BadGGUF(
                f"tensor has the wrong shape: {_path(self.file)}: {name}: must be {dimensions(trimmed(shape))} "
                f"according to the metadata, not {dimensions(trimmed(tensor.shape))}"
            )


def matrix(file: GGUFFile, name: str) -> Matrix:
    """Return a weight matrix, which can be read while the file is open.

    Raises UnsupportedModel for weight types without kernels.
    """
    tensor = file.tensors[name]
    kind = tensor.type.name.lower()
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"weight type not supported: {_path(file)}: {shown(name)}: the CPU engine has no "
            f"kernels for {tensor.type.name}",
            hint="This model may run with --backend llama.",
        )
    return Matrix(name, kind, tensor.n_rows, tensor.shape[0], tensor.nbytes, partial(file.read_into, tensor))


def experts(file: GGUFFile, name: str, n: int) -> Matrix:
    """Return the matrices of `n` experts, one after the other, from a three-dimensional tensor checked by `Tensors`.

    Raises UnsupportedModel in the same cases as `matrix`, or if an expert's outputs are not a whole number of groups.
    """
    found = matrix(file, name)
    outputs = found.rows // n
    if outputs % GROUP_ROWS:
        raise UnsupportedModel(
            f"tensor not supported: {_path(file)}: {shown(name)}: the outputs of an expert must be a multiple of "
            f"{GROUP_ROWS}, not {outputs}",
            hint="This model may run with --backend llama.",
        )
    return found


def vector(file: GGUFFile, name: str) -> NDArray[np.float32]:
    """Read a small float tensor as float32[n]. Raises UnsupportedModel for all other types, including block types."""
    tensor = file.tensors[name]
    if tensor.type.dequantize is None or tensor.type.block_weights > 1:
        raise UnsupportedModel(
            f"weight type not supported: {_path(file)}: {shown(name)}: must be a float type, not {tensor.type.name}"
        )
    return tensor.type.dequantize(file.read(tensor))


def quantization(file: GGUFFile) -> str:
    """Return the quantization in the file's name, or else in its header, or else the most common weight type."""
    return quantization_in(file.path.name, file.metadata.get("general.file_type")) or common_type(file)


def common_type(file: GGUFFile) -> str:
    """Return the weight type that uses the most bytes."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="none")


def is_quantized(file: GGUFFile) -> bool:
    """Return whether the quantized types use more than half of the bytes of the weights."""
    quantized = sum(tensor.nbytes for tensor in file.tensors.values() if tensor.type.block_weights > 1)
    return 2 * quantized > sum(tensor.nbytes for tensor in file.tensors.values())


def parameter_count(file: GGUFFile) -> int:
    return sum(_weights(tensor) for tensor in file.tensors.values())


def _weights(tensor: TensorInfo) -> int:
    return tensor.n_rows * tensor.shape[0]


def _path(file: GGUFFile) -> str:
    return shown(str(file.path), 300)
