"""The encoders of Qwen's models: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen3.6.

GELU is exact between the two matrices that merge patches, also in deepstack, as in the models' code. libmtmd computes
tanh GELU there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from llmrun.model.plan.elementary import Pairing, Rope, inverse_powers
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.twin import Value
from llmrun.model.vision.encoder import Geometry, VisionEncoder
from llmrun.model.vision.encoders.parts import EncoderWriter, grid_positions, square_groups, usual_activation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.shapes import AttentionShape
    from llmrun.model.vision.projector import ProjectorFile

_BASE = 10000.0  # the base of RoPE
_WINDOW = 112  # side of a window, in pixels


class _Qwen(VisionEncoder):
    """The base class: patches in the order of the squares that are merged, 2-D RoPE, and an MLP that merges.

    merger_activation  the activation between merged patches
    """

    merger_activation: ClassVar[Activation] = Activation.GELU_ERF

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        super().__init__(file, projector)
        self.w = w = EncoderWriter(file, self.plan)
        rope = _rope(w)
        with w.stage("patches", self.patches) as gives:
            # A still image is two equal frames of a video.
            frames = w.patch_matrix("v.patch_embd.weight", self.patches.width, "v.patch_embd.weight.1")
            gives.append(w.biased("v.patch_embd.bias", self.plan.linear(self.patches, frames)))
        for layer in range(w.layers):
            w.layer(layer, self.x, self._norm, self._feed_forward, rope, self._shape(layer))
            self._after(layer)
        with w.stage("norm", self.x) as gives:
            gives.append(self._norm("v.post_ln", self.x))
        merged = Value(w.width * self.merge**2)
        with w.stage("embeddings", merged) as gives:
            gives.append(self._merged_by("mm.0", "mm.2", merged))
        self._read_others()
        w.finish()

    def _read_others(self) -> None:
        """Read the tensors that no op uses."""

    def _norm(self, name: str, x: Value) -> Value:
        return self.w.layernorm(name, x)

    def _feed_forward(self, block: str, h: Value) -> Value:
        return self.w.mlp(block, h, usual_activation(self.w.file))

    def _shape(self, layer: int) -> AttentionShape:
        """Return which rows attend to each other in a layer."""
        return self.w.shape

    def _after(self, layer: int) -> None:
        """Append the stages that follow a layer."""

    def _merged_by(self, first: str, second: str, merged: Value) -> Value:
        """Multiply merged rows by a matrix, and then, after an activation, by another one."""
        made = self.plan.activate(self.w.linear(first, merged, self.w.rows_of(first)), self.merger_activation)
        return self.w.linear(second, made, self.w.rows_of(second))

    def geometry(self, columns: int, rows: int) -> Geometry:
        patches = square_groups(columns, rows, self.merge).reshape(-1)
        groups = np.arange(len(patches)).reshape(-1, self.merge**2)
        return Geometry(patches, groups, positions=grid_positions(columns, rows)[patches])


class Qwen2VLEncoder(_Qwen):
    """Qwen2-VL."""

    names = ("qwen2vl_merger",)


class Qwen25VLEncoder(_Qwen):
    """Qwen2.5-VL, whose layers see windows of the image, except for one in `n_wa_pattern` layers.

    Rows are in the order of the windows, so that the rows of a window are adjacent.
    """

    names = ("qwen2.5vl_merger",)

    def __init__(self, file: GGUFFile, projector: ProjectorFile) -> None:
        self._pattern = file.integer("clip.vision.n_wa_pattern", minimum=1)
        sizes = projector.layouts.sizes
        self._side = max(1, _WINDOW // sizes.unit)  # a window's side, in merged patches
        super().__init__(file, projector)

    def _norm(self, name: str, x: Value) -> Value:
        return self.w.rmsnorm(name, x)

    def _feed_forward(self, block: str, h: Value) -> Value:
        return self.w.gated(block, h, usual_activation(self.w.file))

    def _shape(self, layer: int) -> AttentionShape:
        return self._window_shape if (layer + 1) % self._pattern else self.w.shape

    @property
    def _window_shape(self) -> AttentionShape:
        return self.w.shape_around((self._side * self.merge) ** 2 - 1)

    def geometry(self, columns: int, rows: int) -> Geometry:
        usual = super().geometry(columns, rows)
        row, column = np.divmod(np.arange(len(usual.groups)), columns // self.merge)
        in_windows = -(-columns // self.merge // self._side)
        window = row // self._side * in_windows + column // self._side
        order = np.argsort(window, kind="stable")  # the merged patches, window by window
        patches = usual.patches.reshape(-1, self.merge**2)[order].reshape(-1)
        groups = np.empty_like(usual.groups)
        groups[order] = usual.groups
        counts = self.merge**2 * np.bincount(window)
        ends = np.cumsum(counts)
        seen = np.repeat(np.stack([ends - counts, ends], axis=1), counts, axis=0).astype(np.int32)
        positions = grid_positions(columns, rows)[patches]
        return Geometry(patches, groups, positions=positions, seen={self._window_shape.reach: seen})


class Qwen3VLEncoder(_Qwen):
    """Qwen3-VL, Qwen3.5 and Qwen3.6, with learned positions. Qwen3-VL also merges the features after some layers."""

    names = ("qwen3vl_merger",)

    def _read_others(self) -> None:
        positions = self.w.table("v.position_embd")
        side = round(len(positions) ** 0.5)
        self._positions = positions.reshape(side, side, -1)

    def _after(self, layer: int) -> None:
        name = f"v.deepstack.{layer}"
        if f"{name}.fc1.weight" not in self.w.tensors:
            return
        merged = Value(self.w.width * self.merge**2)
        with self.w.stage(f"deepstack {layer}", merged) as gives:
            h = self.w.layernorm(f"{name}.norm", merged)
            gives.append(self._merged_by(f"{name}.fc1", f"{name}.fc2", h))

    def geometry(self, columns: int, rows: int) -> Geometry:
        usual = super().geometry(columns, rows)
        table = self._positions
        left, right, to_right = _neighbours(table.shape[1], columns)
        above, below, to_below = _neighbours(len(table), rows)

        def added(tile: slice) -> NDArray[np.float32]:
            row, column = np.divmod(usual.patches[tile], columns)
            upper, lower = (
                table[line[row], left[column]] * (np.float32(1) - to_right[column])
                + table[line[row], right[column]] * to_right[column]
                for line in (above, below)
            )
            found: NDArray[np.float32] = upper * (np.float32(1) - to_below[row]) + lower * to_below[row]
            return found

        return Geometry(usual.patches, usual.groups, added, positions=usual.positions)


def _neighbours(size: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """Return how `count` numbers are interpolated linearly between `size` numbers, whose ends stay the ends.

    Returns intp[count] of the numbers before and after, and float32[count, 1], the weights of those after.
    """
    places = np.arange(count) * ((size - 1) / max(1, count - 1))
    low = np.minimum(places.astype(np.intp), size - 1)
    return low, np.minimum(low + 1, size - 1), (places - low).astype(np.float32)[:, None]


def _rope(w: EncoderWriter) -> Rope:
    """Return the RoPE, which rotates the first half of the pairs by a patch's row, and the others by its column."""
    pairs = w.pairs_per_axis
    return Rope(np.tile(inverse_powers(_BASE, pairs), 2), Pairing.NEOX, axes=np.repeat([1, 2], pairs))
