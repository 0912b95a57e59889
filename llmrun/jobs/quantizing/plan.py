"""Plans quantizations: the new type of each tensor, as llama.cpp chooses it, and the size of the new file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError
from llmrun.formats.gguf.format import DEFAULT_ALIGNMENT
from llmrun.formats.gguf.problems import shown
from llmrun.formats.quants.registry import BY_NAME

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.tensors import TensorInfo
    from llmrun.formats.quants.weight_type import WeightType

# A line of a dry run, such as "[   3/ 272] blk.0.attn_k.weight - [ 576,  192,    1,    1], type =    f16, size =
# 0.21 MiB ->     0.11 MiB (q8_0)". Tensors that are copied have no second size.
_LINE = re.compile(
    r"\[ *\d+/ *\d+\] (.+?) +- \[[\d, ]*\], type = +\w+, size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\w+)\))?"
)
_NEEDS_IMATRIX = "will require an imatrix"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the model, and its type in the new file."""

    old: TensorInfo
    type: WeightType

    @property
    def n_bytes(self) -> int:
        return self.type.row_bytes(self.old.shape[0]) * self.old.n_rows

    @property
    def weights(self) -> int:
        return prod(self.old.shape)

    @property
    def is_converted(self) -> bool:
        return self.type is not self.old.type


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors in the order in which llama.cpp writes them.

    header_bytes   size of the old file's header, which the new one resembles
    needs_imatrix  whether a type is useless without an importance matrix, and there is none
    """

    tensors: Sequence[PlannedTensor]
    header_bytes: int
    needs_imatrix: bool

    @property
    def n_bytes(self) -> int:
        """The expected size of the new file."""
        return self.header_bytes + sum(-(-one.n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT for one in self.tensors)

    @property
    def old_bits(self) -> float:
        """Bits per weight in the tensors of the model."""
        return self._bits(sum(one.old.nbytes for one in self.tensors))

    @property
    def new_bits(self) -> float:
        """Bits per weight in the tensors of the new file."""
        return self._bits(sum(one.n_bytes for one in self.tensors))

    @property
    def types(self) -> list[tuple[str, int]]:
        """The types of the new tensors with the number of tensors, most frequent first."""
        return Counter(one.type.name for one in self.tensors).most_common()

    @property
    def requantized(self) -> list[PlannedTensor]:
        """The tensors that are converted although they are quantized already."""
        return [one for one in self.tensors if one.is_converted and one.old.type.block_weights > 1]

    def done_before(self, number: int) -> float:
        """Return the share of the old bytes in front of the tensor with this number, which starts at 1."""
        sizes = [one.old.nbytes for one in self.tensors]
        return sum(sizes[: number - 1]) / sum(sizes)

    def _bits(self, n_bytes: int) -> float:
        return 8 * n_bytes / sum(one.weights for one in self.tensors)


def plan_from_log(file: GGUFFile, log: str) -> Plan:
    """Return the plan that llama.cpp reports in the log of a dry run."""
    tensors = list(_planned(file, log))
    if {one.old.name for one in tensors} != set(file.tensors):
        raise LlmrunError(
            f"llama.cpp's dry run lists {len(tensors)} of {len(file.tensors)} tensors",
            hint="this version of llama-cpp-python is not supported; install the one that llmrun doctor names",
        )
    header_bytes = file.file_bytes - sum(tensor.nbytes for tensor in file.tensors.values())
    return Plan(tensors, header_bytes, _NEEDS_IMATRIX in log)


def _planned(file: GGUFFile, log: str) -> Iterator[PlannedTensor]:
    for name, type_name in _LINE.findall(log):
        if name not in file.tensors:
            raise LlmrunError(f"llama.cpp's dry run names an unknown tensor: {shown(name)}")
        old = file.tensors[name]
        yield PlannedTensor(old, BY_NAME[type_name.upper()] if type_name else old.type)
