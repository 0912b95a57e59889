"""The encoders of InternVL 2.5 to 3.5.

The class token is before the patches and has the first position, and GELU is exact, as in the model's code. libmtmd
puts the class token after the patches, so that all positions are off by one, and computes tanh GELU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.twin import Value
from llmrun.model.vision.encoder import Geometry, VisionEncoder
from llmrun.model.vision.encoders.parts import EncoderWriter, square_groups

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile

_PROJECTOR_EPSILON = 1e-5


class InternVLEncoder(VisionEncoder):
    """InternVL: a class token, scales for both parts of a layer, and an MLP for squares of patches.

    The variant with 6 billion parameters has RMSNorm instead of LayerNorm, and normalizes queries and keys.
    """

    names = ("internvl",)
    activation = Activation.GELU_ERF

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        super().__init__(file, projector)
        w, plan = EncoderWriter(file, self.plan), self.plan
        with w.stage("patches", self.patches) as gives:
            matrix = w.patch_matrix("v.patch_embd.weight", self.patches.width)
            gives.append(w.biased("v.patch_embd.bias", plan.linear(self.patches, matrix)))
        for layer in range(w.layers):
            block = f"v.blk.{layer}"
            norm = w.layernorm if f"{block}.ln1.bias" in w.tensors else w.rmsnorm
            with w.stage(f"keys {layer}", self.x):
                h = norm(f"{block}.ln1", self.x)
                k = _norm_of_heads(w, f"{block}.attn_k_norm", w.keys(block, h))
                plan.store(k, w.values(block, h), w.shape, None)
            with w.stage(f"layer {layer}", self.x) as gives:
                q = _norm_of_heads(w, f"{block}.attn_q_norm", w.queries(block, norm(f"{block}.ln1", self.x)))
                found = w.linear(f"{block}.attn_out", w.attended(q), w.width)
                plan.add(_scaled(w, f"{block}.ls1", found), self.x)
                made = w.mlp(block, norm(f"{block}.ln2", self.x), self.activation)
                plan.add(_scaled(w, f"{block}.ls2", made), self.x)
                gives.append(self.x)
        merged = Value(w.width * self.merge**2)
        with w.stage("embeddings", merged) as gives:
            h = w.layernorm("mm.model.mlp.0", merged, _PROJECTOR_EPSILON)
            h = w.linear("mm.model.mlp.1", h, w.rows_of("mm.model.mlp.1"))
            gives.append(w.linear("mm.model.mlp.3", plan.activate(h, self.activation), projector.row_width))
        positions = w.table("v.position_embd")
        positions[0] += w.tensors.vector("v.class_embd", w.width)
        self._added = positions
        w.finish()

    def geometry(self, columns: int, rows: int) -> Geometry:
        groups = square_groups(columns, rows, self.merge, first=1)
        return Geometry(np.arange(columns * rows), groups, self._added.__getitem__, leading=1)


def _norm_of_heads(w: EncoderWriter, name: str, x: Value) -> Value:
    """Normalize the queries or keys of all heads together, if the file has weights for that."""
    weight = w.tensors.optional_vector(f"{name}.weight", w.width)
    return x if weight is None else w.norm_of_heads(weight, x)


def _scaled(w: EncoderWriter, name: str, x: Value) -> Value:
    weight = w.tensors.optional_vector(f"{name}.weight", w.width)
    return x if weight is None else w.plan.multiply(x, weight)
