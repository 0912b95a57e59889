"""The encoders of Pixtral, Mistral Small 3.x and Ministral 3.

GELU is exact, as in the models' code. libmtmd computes tanh GELU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.plan.elementary import Rope, inverse_powers
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.twin import Value
from llmrun.model.vision.encoder import Geometry, VisionEncoder
from llmrun.model.vision.encoders.parts import EncoderWriter, grid_positions, square_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile

_BASE = 10000.0  # the base of RoPE


class PixtralEncoder(VisionEncoder):
    """Pixtral: 2-D RoPE, optionally a matrix for squares of patches, and the embedding of [IMG_BREAK] between rows."""

    names = ("pixtral",)
    projector_activation = Activation.GELU_ERF

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        super().__init__(file, projector)
        w, plan = EncoderWriter(file, self.plan), self.plan
        rope = _rope(w)
        activation = Activation.GELU_ERF if file.boolean("clip.use_gelu", False) else Activation.SILU
        with w.stage("patches", self.patches) as gives:
            h = plan.linear(self.patches, w.patch_matrix("v.patch_embd.weight", self.patches.width))
            gives.append(w.rmsnorm("v.pre_ln", h) if "v.pre_ln.weight" in w.tensors else h)
        for layer in range(w.layers):
            w.layer(layer, self.x, w.rmsnorm, partial(w.gated, activation=activation), rope)
        has_merger = "mm.patch_merger.weight" in w.tensors
        if has_merger:
            with w.stage("norm", self.x) as gives:
                gives.append(w.rmsnorm("mm.input_norm", self.x))
        h = merged = Value(w.width * self.merge**2)
        with w.stage("embeddings", merged) as gives:
            if has_merger:
                h = w.linear("mm.patch_merger", h, w.width)
            h = w.linear("mm.1", h, w.rows_of("mm.1"))
            gives.append(w.linear("mm.2", plan.activate(h, self.projector_activation), projector.row_width))
        self._break = w.tensors.vector("v.token_embd.img_break", projector.row_width)
        w.finish()

    def geometry(self, columns: int, rows: int) -> Geometry:
        groups = square_groups(columns, rows, self.merge)
        return Geometry(np.arange(columns * rows), groups, positions=grid_positions(columns, rows))

    def merged(self, x: NDArray[np.float32], groups: NDArray[np.intp]) -> NDArray[np.float32]:
        """Merge features so that each feature of all patches of a group comes before the next feature."""
        return x[groups].transpose(0, 2, 1).reshape(len(groups), -1)

    def embeddings(self, made: NDArray[np.float32], columns: int, rows: int) -> NDArray[np.float32]:
        lines = made.reshape(rows // self.merge, columns // self.merge, -1)
        breaks = np.broadcast_to(self._break, (len(lines), 1, len(self._break)))
        return np.concatenate([lines, breaks], axis=1).reshape(-1, len(self._break))[:-1]


def _rope(w: EncoderWriter) -> Rope:
    """Return the RoPE, whose even frequencies rotate the first half of a head by the row of a patch.

    The odd frequencies rotate the second half by its column.
    """
    pairs = w.pairs_per_axis
    frequencies = inverse_powers(_BASE, 2 * pairs)
    return Rope(np.concatenate([frequencies[::2], frequencies[1::2]]), axes=np.repeat([1, 2], pairs))
