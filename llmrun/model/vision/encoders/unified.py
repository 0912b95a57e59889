"""The encoder of Gemma 4 12B, which has large patches, one matrix, and no transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.plan.twin import Value
from llmrun.model.vision.encoder import Geometry, VisionEncoder
from llmrun.model.vision.encoders.parts import EncoderWriter, added_by_axis

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile

_EPSILON = 1e-5  # PyTorch's default for LayerNorm; the file's epsilon is for the RMSNorm


class UnifiedEncoder(VisionEncoder):
    """Gemma 4 12B: a matrix and learned positions of columns and rows, between LayerNorms."""

    names = ("gemma4uv",)

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        super().__init__(file, projector)
        w = EncoderWriter(file, self.plan)
        self.patch = projector.unit  # a patch is as large as the square that becomes a row
        self.patches, embedded = Value(3 * self.patch**2), Value(w.width)
        with w.stage("patches", self.patches) as gives:
            h = w.layernorm("v.patch_norm.1", self.patches, _EPSILON)
            gives.append(w.layernorm("v.patch_norm.2", w.linear("v.patch_embd", h, w.width), _EPSILON))
        with w.stage("embeddings", embedded) as gives:
            h = w.layernorm("v.patch_norm.3", embedded, _EPSILON)
            h = self.plan.rmsnorm(h, np.ones(w.width, np.float32), w.epsilon)
            gives.append(w.linear("mm.input_projection", h, projector.row_width))
        self._tables = w.table("v.position_embd").reshape(2, -1, w.width)
        w.finish()

    def geometry(self, columns: int, rows: int) -> Geometry:
        patches = np.arange(columns * rows)
        return Geometry(patches, patches[:, None], added_by_axis(self._tables, columns, rows))
