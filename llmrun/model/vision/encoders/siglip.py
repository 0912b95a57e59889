"""Encoders with a SigLIP transformer: Gemma 3, SmolVLM and Idefics3, and LFM2-VL."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.twin import Value
from llmrun.model.vision.encoder import Geometry, VisionEncoder
from llmrun.model.vision.encoders.parts import EncoderWriter, averaged, square_groups, usual_activation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile


class _Siglip(VisionEncoder):
    """The transformer that the families share."""

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        super().__init__(file, projector)
        w = EncoderWriter(file, self.plan)
        w.epsilon = self._epsilon(w.epsilon)
        activation = usual_activation(file)
        with w.stage("patches", self.patches) as gives:
            matrix = w.patch_matrix("v.patch_embd.weight", self.patches.width)
            gives.append(w.biased("v.patch_embd.bias", self.plan.linear(self.patches, matrix)))
        for layer in range(w.layers):
            w.layer(layer, self.x, w.layernorm, partial(w.mlp, activation=activation))
        if "v.post_ln.weight" in w.tensors:
            with w.stage("post norm", self.x) as gives:
                gives.append(w.layernorm("v.post_ln", self.x))
        self._positions = w.table("v.position_embd")
        self._project(w)
        w.finish()

    def _epsilon(self, in_file: float) -> float:
        """Return the epsilon of the LayerNorms, given the epsilon in the file."""
        return in_file

    @abstractmethod
    def _project(self, w: EncoderWriter) -> None:
        """Append the stage that turns merged rows into embeddings."""

    def geometry(self, columns: int, rows: int) -> Geometry:
        return Geometry(
            np.arange(columns * rows), square_groups(columns, rows, self.merge), self._positions.__getitem__
        )


class Gemma3Encoder(_Siglip):
    """Gemma 3: the mean of 4 x 4 patches, an RMSNorm and a matrix."""

    names = ("gemma3",)

    def _project(self, w: EncoderWriter) -> None:
        pooled = Value(w.width)
        with w.stage("embeddings", pooled) as gives:
            h = w.rmsnorm("mm.soft_emb_norm", pooled)
            gives.append(self.plan.linear(h, w.transposed("mm.input_projection", w.width)))

    def merged(self, x: NDArray[np.float32], groups: NDArray[np.intp]) -> NDArray[np.float32]:
        return averaged(x, groups)


class Idefics3Encoder(_Siglip):
    """Idefics3, SmolVLM and Granite Docling: one matrix for squares of patches.

    The published configurations have no epsilon, which means 1e-6. The converter writes 1e-5, which libmtmd uses.
    """

    names = ("idefics3",)

    def _epsilon(self, in_file: float) -> float:
        return 1e-6 if np.float32(in_file) == np.float32(1e-5) else in_file

    def _project(self, w: EncoderWriter) -> None:
        merged = Value(w.width * self.merge**2)
        with w.stage("embeddings", merged) as gives:
            gives.append(w.linear("mm.model.fc", merged, self.projector.row_width))


class Lfm2Encoder(_Siglip):
    """LFM2-VL: learned positions of any size, and an MLP for squares of patches. libmtmd's MLP has the tanh GELU."""

    names = ("lfm2",)

    def _project(self, w: EncoderWriter) -> None:
        merged = Value(w.width * self.merge**2)
        with w.stage("embeddings", merged) as gives:
            h = w.layernorm("mm.input_norm", merged, 1e-5) if "mm.input_norm.weight" in w.tensors else merged
            h = self.plan.activate(w.linear("mm.1", h, w.rows_of("mm.1")), Activation.GELU_ERF)
            gives.append(w.linear("mm.2", h, self.projector.row_width))

    def geometry(self, columns: int, rows: int) -> Geometry:
        side = isqrt(len(self._positions))
        positions = resized(self._positions.reshape(side, side, -1), rows, columns).reshape(rows * columns, -1)
        return Geometry(np.arange(columns * rows), square_groups(columns, rows, self.merge), positions.__getitem__)


def resized(table: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """Resize float32[side, side, width] to [rows, columns, width], bilinearly and with antialiasing, as PyTorch does.

    The corners of the first and the last pixel are aligned, not their centers. Sums have a fixed order.
    """
    if rows > columns:  # the shorter axis goes first, which needs less memory
        return resized(table.transpose(1, 0, 2), columns, rows).transpose(1, 0, 2)
    lines = sum(
        weights[:, None, None] * line for weights, line in zip(_triangles(len(table), rows), table, strict=True)
    )
    across = _triangles(len(table), columns)
    made = np.zeros((rows, columns, table.shape[2]), np.float32)
    for number, weights in enumerate(across):
        made += lines[:, number, None] * weights[:, None]
    return made


def _triangles(side: int, size: int) -> NDArray[np.float32]:
    """Return float32[side, size], the weights of `side` numbers in each of the `size` numbers that replace them."""
    scale = side / size
    centers = (np.arange(size) + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(side)[:, None] - centers) / max(1, scale))
    return (weights / sum(weights)).astype(np.float32)
