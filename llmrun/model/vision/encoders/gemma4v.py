"""The encoders of Gemma 4 E2B, E4B, 26B and 31B.

The activation is tanh GELU, as in the model's code. libmtmd uses quick GELU unless the file asks for tanh GELU, which
files from llama.cpp's converter do not.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.plan.elementary import Pairing, Rope, inverse_powers
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.twin import Value
from llmrun.model.vision.encoder import Geometry, VisionEncoder
from llmrun.model.vision.encoders.parts import EncoderWriter, added_by_axis, averaged, grid_positions, square_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.matrix import Matrix
    from llmrun.model.vision.projector import ProjectorFile

_BASE = 100.0  # of RoPE


class _ClampingWriter(EncoderWriter):
    """A writer of products that clamp their inputs and outputs, where the file has limits."""

    def product(self, name: str, x: Value, weight: Matrix) -> Value:
        out = super().product(name, self._clamped(f"{name}.input", x), weight)
        return self._clamped(f"{name}.output", out)

    def _clamped(self, name: str, x: Value) -> Value:
        least, most = self._limit(f"{name}_min", -inf), self._limit(f"{name}_max", inf)
        if (least, most) == (-inf, inf):
            return x
        if not least <= 0 <= most:  # the padding of rows must stay 0
            raise self.file.bad(f"{name}_min", f"limits must be on both sides of 0, not {least} and {most}")
        return self.plan.clamp(x, least, most)

    def _limit(self, name: str, usual: float) -> float:
        found = self.tensors.optional_vector(name, 1)
        return usual if found is None else float(found[0])


class Gemma4TowerEncoder(VisionEncoder):
    """Gemma 4: positions in two tables, norms before and after each part of a layer, and the mean of 3 x 3 patches."""

    names = ("gemma4v",)

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        super().__init__(file, projector)
        self._normalized = 2 * self._normalized - 1
        w, plan = _ClampingWriter(file, self.plan), self.plan
        rope = _rope(w)
        with w.stage("patches", self.patches) as gives:
            gives.append(plan.linear(self.patches, w.patch_matrix("v.patch_embd.weight", self.patches.width)))
        for layer in range(w.layers):
            block = f"v.blk.{layer}"
            with w.stage(f"keys {layer}", self.x):
                h = w.rmsnorm(f"{block}.ln1", self.x)
                values = w.headnorm(np.ones(w.head_size, np.float32), w.values(block, h))
                plan.store(_head_norm(w, f"{block}.attn_k_norm", w.keys(block, h)), values, w.shape, rope)
            with w.stage(f"layer {layer}", self.x) as gives:
                h = w.rmsnorm(f"{block}.ln1", self.x)
                q = _head_norm(w, f"{block}.attn_q_norm", w.queries(block, h))
                found = w.linear(f"{block}.attn_out", w.attended(q, rope, scale=1.0), w.width)
                plan.add(w.rmsnorm(f"{block}.attn_post_norm", found), self.x)
                made = w.gated(block, w.rmsnorm(f"{block}.ln2", self.x), Activation.GELU)
                plan.add(w.rmsnorm(f"{block}.ffn_post_norm", made), self.x)
                gives.append(self.x)
        pooled = Value(w.width)
        with w.stage("embeddings", pooled) as gives:
            h = pooled
            if "v.std_bias" in w.tensors:
                h = plan.bias(h, -w.tensors.vector("v.std_bias", w.width))
                h = plan.multiply(h, w.tensors.vector("v.std_scale", w.width))
            h = plan.rmsnorm(h, np.ones(w.width, np.float32), w.epsilon)
            gives.append(w.linear("mm.input_projection", h, projector.row_width))
        tables = w.table("v.position_embd").reshape(2, -1, w.width)
        # The file has 10,240 positions for each axis, which would take 94 MB with 1152 features.
        self._tables = tables[:, : projector.most_rows * self.merge].copy()
        w.finish()

    def geometry(self, columns: int, rows: int) -> Geometry:
        return Geometry(
            np.arange(columns * rows),
            square_groups(columns, rows, self.merge),
            added_by_axis(self._tables, columns, rows),
            positions=grid_positions(columns, rows),
        )

    def merged(self, x: NDArray[np.float32], groups: NDArray[np.intp]) -> NDArray[np.float32]:
        return averaged(x, groups) * np.float32(sqrt(self.x.width))


def _rope(w: EncoderWriter) -> Rope:
    """Return the RoPE, and set the order of features.

    The first half of a head is rotated by the column of a patch, and the second half by its row. Each half is paired
    as in NeoX. In the new order, the whole head is.
    """
    pairs = w.pairs_per_axis
    w.order = w.order.reshape(2, 2, pairs).transpose(1, 0, 2).reshape(-1)
    return Rope(np.tile(inverse_powers(_BASE, pairs), 2), Pairing.NEOX, axes=np.repeat([2, 1], pairs))


def _head_norm(w: EncoderWriter, name: str, x: Value) -> Value:
    """Apply the norm of queries or keys, whose features are in the order of the RoPE, to each head."""
    return w.headnorm(w.tensors.vector(f"{name}.weight", w.head_size)[w.order], x)
