"""Reads from the header which layers are recurrent, and the size of their states, which llama.cpp keeps as float32.

Recurrent layers are recognized by their tensors, because architectures have different metadata for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.backends.sizing.layers_kept import layers_of, layers_run

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

_FLOAT = 4
_CONVOLUTION = re.compile(r"blk\.(\d+)\.(?:ssm_conv1d|shortconv\.conv)\.weight$")
_MATRICES = re.compile(r"(blk\.\d+)\.ssm_conv1d\.weight$")


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The memory that a layer has of one sequence.

    attends      whether the layer has keys and values
    convolution  bytes of the inputs of its causal convolution on which later tokens depend
    matrices     bytes of its heads' matrices, which each token reads and writes
    """

    attends: bool = True
    convolution: int = 0
    matrices: int = 0

    @property
    def state_bytes(self) -> int:
        """The size of the state of one sequence."""
        return self.convolution + self.matrices


def layer_memories(file: GGUFFile) -> list[LayerMemory]:
    """Return the memory of each layer. Raises BadGGUF if a size in the metadata is not a valid number."""
    memories, run = [LayerMemory()] * layers_of(file), layers_run(file)
    ssm = f"{file.string('general.architecture')}.ssm"
    rows, columns = (file.integer(f"{ssm}.{key}", 0, minimum=0) for key in ("state_size", "inner_size"))
    for name, tensor in file.tensors.items():
        found = _CONVOLUTION.match(name)
        if found is None or int(found[1]) >= run:
            continue
        # The convolution has more features than either size. llama.cpp rejects files whose metadata claims otherwise.
        features = tensor.n_rows
        memories[int(found[1])] = LayerMemory(
            attends=f"blk.{found[1]}.attn_output.weight" in file.tensors,  # layers of Falcon-H1 have both
            convolution=_FLOAT * (tensor.shape[0] - 1) * features,
            matrices=_FLOAT * min(rows, features) * min(columns, features),
        )
    return memories


def widest_input(file: GGUFFile) -> int:
    """Return the most features that a layer with matrices computes for its convolution, or 0 without such layers."""
    blocks = [found[1] for found in map(_MATRICES.match, file.tensors) if found]
    names = [f"{block}.{name}.weight" for block in blocks for name in ("attn_qkv", "ssm_in")]
    return max((file.tensors[name].n_rows for name in names if name in file.tensors), default=0)
