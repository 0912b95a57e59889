"""The parts of encoders' plans: matrix products with biases, norms, and attention in two stages per layer.

In the first stage of a layer, keys and values of all rows are stored; in the second stage, the rows attend to them.
Kernels need heads whose size is a multiple of 16. Heads of other sizes are padded with zeros, which do not change any
dot product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from llmrun.formats.layouts.arena import round_up
from llmrun.model.archs.parts.tensors import Tensors, vector
from llmrun.model.plan.builder import Stage
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.shapes import ALL, AttentionShape
from llmrun.model.plan.twin import Value, dequantized
from llmrun.model.vision.tensors import OF_AUDIO, is_exchanged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.plan import Plan

_HEAD_MULTIPLE = 16
_MOST_POSITION = 1e30  # sums of positions and features cannot overflow in float32


class EncoderWriter:
    """A writer that adds ops to the plan of an encoder. Names of tensors are without the suffix `.weight`.

    layers, heads, head_size, width, epsilon  as in the file's metadata
    shape  the attention of all layers whose rows attend to all others
    """

    def __init__(self, file: GGUFFile, plan: Plan) -> None:
        self.file, self.plan, self.tensors = file, plan, Tensors(file)
        self.layers, self.width = self._integer("block_count"), self._integer("embedding_length")
        self.heads = self._integer("attention.head_count")
        self.head_size = file.integer("clip.vision.attention.head_dim", self.width // max(1, self.heads), minimum=1)
        self.epsilon = file.number("clip.vision.attention.layer_norm_epsilon")
        self.padded_size = round_up(self.head_size, _HEAD_MULTIPLE)
        self.shape = self.shape_around(ALL)
        self.order = np.arange(self.head_size)  # the order of the features of queries and keys in each head

    def _integer(self, name: str) -> int:
        return self.file.integer(f"clip.vision.{name}", minimum=0)

    def shape_around(self, around: int) -> AttentionShape:
        """Return the shape of attention to rows that are at most `around` rows away."""
        return AttentionShape(max(1, self.heads), max(1, self.heads), self.padded_size, around=around)

    def finish(self) -> None:
        """Raise UnsupportedModel if the file has a tensor of the encoder for images that the plan does not use."""
        self.tensors.leave_out(*OF_AUDIO)
        self.tensors.finish()

    @contextmanager
    def stage(self, name: str, takes: Value) -> Iterator[list[Value]]:
        """Make the ops of a `with` block a stage. The block appends what the stage gives to the list, if anything."""
        first = len(self.plan.ops)
        gives: list[Value] = []
        yield gives
        self.plan.stages.append(Stage(name, first, len(self.plan.ops), takes, gives[0] if gives else None))

    # --- products and norms ---

    def rows_of(self, name: str) -> int:
        """Return the number of outputs of a matrix that the metadata does not imply."""
        return self.file.tensors[f"{name}.weight"].n_rows

    def linear(self, name: str, x: Value, rows: int) -> Value:
        out = self.product(name, x, self.tensors.matrix(f"{name}.weight", x.width, rows))
        return self.biased(f"{name}.bias", out)

    def product(self, name: str, x: Value, weight: Matrix) -> Value:
        """Multiply by the weights of a tensor, or by some of their rows. Subclasses may change inputs and outputs."""
        return self.plan.linear(x, weight)

    def linear_add(self, name: str, x: Value, to: Value) -> None:
        """Add x . weight + bias to `to`."""
        if f"{name}.bias" in self.tensors:
            self.plan.add(self.linear(name, x, to.width), to)
        else:
            self.plan.linear_add(x, self.tensors.matrix(f"{name}.weight", x.width, to.width), to)

    def biased(self, name: str, x: Value) -> Value:
        bias = self.tensors.optional_vector(name, x.width)
        return x if bias is None else self.plan.bias(x, bias)

    def layernorm(self, name: str, x: Value, epsilon: float | None = None) -> Value:
        weight = self.tensors.vector(f"{name}.weight", x.width)
        bias = self.tensors.optional_vector(f"{name}.bias", x.width)
        return self.plan.layernorm(x, weight, bias, self.epsilon if epsilon is None else epsilon)

    def rmsnorm(self, name: str, x: Value, epsilon: float | None = None) -> Value:
        weight = self.tensors.vector(f"{name}.weight", x.width)
        return self.plan.rmsnorm(x, weight, self.epsilon if epsilon is None else epsilon)

    def transposed(self, name: str, columns: int) -> Matrix:
        """Return a matrix that the file stores transposed, with so many inputs."""
        stored = self.tensors.matrix(f"{name}.weight", self.file.tensors[f"{name}.weight"].shape[0], columns)
        weights = np.ascontiguousarray(dequantized(stored).T)
        return _float_matrix(f"{name}.weight", weights)

    def table(self, name: str) -> NDArray[np.float32]:
        """Return a table of positions, float32[positions, width]. Tables of several axes follow each other.

        Raises BadGGUF for positions that are not finite or too large.
        """
        self.tensors.leave_out(f"{name}.weight")
        table = vector(self.file, f"{name}.weight").reshape(-1, self.width)
        if not np.abs(table).max() <= _MOST_POSITION:  # also if there are NaNs
            raise self.file.bad(
                f"{name}.weight", f"must be numbers of at most {_MOST_POSITION:g}, the positions of patches"
            )
        return table

    def patch_matrix(self, name: str, columns: int, *others: str) -> Matrix:
        """Return the matrix of a convolution over patches, which do not overlap, or the sum of several ones."""
        self.tensors.leave_out(name, *others)
        weights = vector(self.file, name)
        for other in others:
            with np.errstate(over="ignore", invalid="ignore"):  # the file may be damaged
                weights = weights + vector(self.file, other)
        return _float_matrix(name, weights.reshape(-1, columns))

    # --- attention ---

    @property
    def pairs_per_axis(self) -> int:
        """The pairs of features of a head that 2-D RoPE rotates for each axis. Raises BadGGUF if some are left."""
        if self.head_size % 4:
            raise self.file.bad("clip.vision.attention.head_dim", f"must be a multiple of 4, not {self.head_size}")
        return self.head_size // 4

    def _of_heads(self, name: str, x: Value, order: NDArray[np.intp], first: int = 0, total: int = 0) -> Value:
        """Multiply by the rows of a matrix that belong to heads, from row `first` on, with padding."""
        size = self.heads * self.head_size
        rows = np.full((self.heads, self.padded_size), -1)
        rows[:, : self.head_size] = first + self.head_size * np.arange(self.heads)[:, None] + order
        weight = self.tensors.matrix(f"{name}.weight", x.width, total or size)
        out = self.product(name, x, weight.gathered(f"rows of heads from {first}", rows.reshape(-1)))
        bias = self.tensors.optional_vector(f"{name}.bias", total or size)
        if bias is None:
            return out
        return self.plan.bias(out, np.append(bias, np.float32(0))[rows.reshape(-1)])

    def queries(self, block: str, h: Value) -> Value:
        """Compute queries from `attn_q` or a fused `attn_qkv`, without norm and RoPE."""
        return self._projected(block, h, 0)

    def keys(self, block: str, h: Value) -> Value:
        return self._projected(block, h, 1)

    def values(self, block: str, h: Value) -> Value:
        return self._projected(block, h, 2)

    def _projected(self, block: str, h: Value, part: int) -> Value:
        order = np.arange(self.head_size) if part == 2 else self.order
        if f"{block}.attn_qkv.weight" in self.tensors:
            size = self.heads * self.head_size
            return self._of_heads(f"{block}.attn_qkv", h, order, part * size, 3 * size)
        return self._of_heads(f"{block}.attn_{'qkv'[part]}", h, order)

    def headnorm(self, weight: NDArray[np.float32], x: Value) -> Value:
        """Apply RMSNorm to each head, although heads are padded. `weight` is float32[head size], in the order of x.

        The mean of a padded head's squares is head size / padded size times as large.
        """
        return self.plan.headnorm(x, self._padded(weight), self.epsilon * self._share)

    def norm_of_heads(self, weight: NDArray[np.float32], x: Value) -> Value:
        """Apply RMSNorm to all heads together. `weight` is float32[heads * head size], in the order of x."""
        of_heads = self._padded(weight.reshape(self.heads, self.head_size))
        return self.plan.rmsnorm(x, of_heads.reshape(-1), self.epsilon * self._share)

    @property
    def _share(self) -> float:
        return self.head_size / self.padded_size

    def _padded(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return weights float32[..., head size] for a norm of padded heads."""
        padded = np.zeros((*weight.shape[:-1], self.padded_size), np.float32)
        padded[..., : self.head_size] = weight * np.float32(sqrt(self._share))
        return padded

    def attended(
        self, q: Value, rope: Rope | None = None, *, shape: AttentionShape | None = None, scale: float | None = None
    ) -> Value:
        """Return what queries find in the stored keys and values, without padding.

        `scale` defaults to 1 / sqrt(head size).
        """
        scale = 1 / sqrt(self.head_size) if scale is None else scale
        found = self.plan.attention_again(q, shape or self.shape, rope, scale=scale)
        if self.padded_size == self.head_size:
            return found
        return self.plan.slice(found, 0, self.head_size, groups=self.heads)

    # --- layers ---

    def layer(
        self,
        number: int,
        x: Value,
        norm: Callable[[str, Value], Value],
        feed_forward: Callable[[str, Value], Value],
        rope: Rope | None = None,
        shape: AttentionShape | None = None,
    ) -> None:
        """Append the stages of a layer: attention and a feed-forward network, both of which read normalized features.

        norm          normalizes features, given the name of a norm
        feed_forward  computes the network, given the name of the layer and normalized features
        """
        block = f"v.blk.{number}"
        with self.stage(f"keys {number}", x):
            h = norm(f"{block}.ln1", x)
            self.plan.store(self.keys(block, h), self.values(block, h), shape or self.shape, rope)
        with self.stage(f"layer {number}", x) as gives:
            q = self.queries(block, norm(f"{block}.ln1", x))
            self.linear_add(f"{block}.attn_out", self.attended(q, rope, shape=shape), x)
            self.plan.add(feed_forward(block, norm(f"{block}.ln2", x)), x)
            gives.append(x)

    def _feed_forward_names(self, block: str) -> tuple[str, str]:
        """Return the names of the first and the second matrix.

        Only the matrices tell the width between them: with Qwen2-VL, the metadata has the text model's width instead.
        """
        up, down = f"{block}.ffn_up", f"{block}.ffn_down"
        return (down, up) if is_exchanged(self.file, block) else (up, down)

    def mlp(self, block: str, h: Value, activation: Activation) -> Value:
        """Return the second matrix times the activation of the first matrix times h."""
        first, second = self._feed_forward_names(block)
        made = self.plan.activate(self.linear(first, h, self.rows_of(first)), activation)
        return self.linear(second, made, self.width)

    def gated(self, block: str, h: Value, activation: Activation) -> Value:
        """Return the second matrix times activation(gate . h) * (first matrix . h)."""
        first, second = self._feed_forward_names(block)
        gate = self.linear(f"{block}.ffn_gate", h, self.rows_of(first))
        made = self.plan.gated(gate, self.linear(first, h, gate.width), activation)
        return self.linear(second, made, self.width)


def _float_matrix(name: str, weights: NDArray[np.float32]) -> Matrix:
    """Return a matrix with these weights, float32[outputs, inputs]."""
    rows, columns = weights.shape
    return Matrix.of_bytes(name, "f32", rows, columns, weights.reshape(-1).view(np.uint8))


def usual_activation(file: GGUFFile) -> Activation:
    """Return the activation that the file's metadata names: tanh GELU, SiLU, or else quick GELU."""
    if file.boolean("clip.use_gelu", False):
        return Activation.GELU
    return Activation.SILU if file.boolean("clip.use_silu", False) else Activation.GELU_QUICK


def square_groups(columns: int, rows: int, side: int, *, first: int = 0) -> NDArray[np.intp]:
    """Return intp[groups, side * side]: the patches of each square of side * side patches, row by row.

    first  the number of the first patch
    """
    numbers = first + np.arange(rows * columns).reshape(rows // side, side, columns // side, side)
    return numbers.transpose(0, 2, 1, 3).reshape(-1, side**2)


def grid_positions(columns: int, rows: int) -> NDArray[np.int32]:
    """Return int32[patches, 3], the positions of patches in time, which are 0, and their rows and columns."""
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), np.int32(columns))
    return np.stack([np.zeros_like(row), row, column], axis=1)


def added_by_axis(tables: NDArray[np.float32], columns: int, rows: int) -> Callable[[slice], NDArray[np.float32]]:
    """Return `Geometry.added` for tables of the positions of columns and rows, float32[2, positions, width]."""
    (of_columns, of_rows), patches = tables, np.arange(columns * rows)

    def added(some: slice) -> NDArray[np.float32]:
        row, column = np.divmod(patches[some], columns)
        found: NDArray[np.float32] = of_columns[column] + of_rows[row]
        return found

    return added


def averaged(x: NDArray[np.float32], groups: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the means of groups of features float32[rows, width], as float32[groups, width]."""
    total = x[groups[:, 0]]
    for row in groups.T[1:]:
        total += x[row]
    return total / np.float32(groups.shape[1])
