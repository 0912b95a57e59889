"""A plan run with the kernels' NumPy twins: slow, short, and the definition of what the kernels compute.

`exact` leaves activations and the KV cache in float32 and multiplies by dequantized weights: what the model means.
`quantizing` rounds where the kernels round: activations to int8 for integer weights, keys and values as the KV cache's
type says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from llmrun.kernels.attention.attention import attention_reference
from llmrun.kernels.attention.kv_store import entered_reference
from llmrun.kernels.attention.rope import rope_reference
from llmrun.kernels.code import curves
from llmrun.kernels.linear.floats import linear_reference as linear_float
from llmrun.kernels.linear.int8 import linear_reference as linear_int8
from llmrun.kernels.linear.quantize import quantize_reference
from llmrun.kernels.rows import norms, rowwise
from llmrun.kernels.rows.convolution import convolution_reference
from llmrun.layouts.packed_types import BLOCK_COLUMNS, PACKED_TYPES
from llmrun.plan import ops
from llmrun.plan.experts import combined_reference, expert_linear_reference, routed_reference
from llmrun.plan.kv_shapes import AttentionShape, Place
from llmrun.plan.matrix import Matrix
from llmrun.quants.registry import BY_NAME

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.plan.plan import Plan

_LinearLayer = Callable[[Matrix, "NDArray[np.float32]"], "NDArray[np.float32]"]


def exact(plan: Plan, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits float32[n, vocabulary] of every position of one sequence, without any rounding of activations."""
    return _run(plan, tokens, lambda matrix, x: x @ dequantized(matrix).T, None)


def quantizing(plan: Plan, tokens: NDArray[np.int32], kv_type: str) -> NDArray[np.float32]:
    """The same with every rounding of the kernels."""
    return _run(plan, tokens, _linear_quantizing, kv_type)


def dequantized(matrix: Matrix) -> NDArray[np.float32]:
    """float32[rows, columns]."""
    dequantize = BY_NAME[matrix.kind.upper()].dequantize
    assert dequantize is not None
    return dequantize(matrix.read())


def integers_of(matrix: Matrix) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]:
    """(integers int8[rows, blocks, 32], scales and mins float32[rows, blocks, sub-blocks]; mins None for a type without
    them)."""
    unpack = BY_NAME[matrix.kind.upper()].unpack
    assert unpack is not None
    weights = unpack(matrix.read())
    packed = PACKED_TYPES[matrix.packed]

    def of_sub_blocks(factors: NDArray[np.float32], numbers: NDArray[np.int16] | None) -> NDArray[np.float32]:
        per_factor = factors if numbers is None else _repeated(factors, numbers.shape[1]) * numbers
        n_sub_blocks = matrix.columns // packed.sub_columns
        return _repeated(per_factor.astype(np.float32), n_sub_blocks).reshape(matrix.rows, -1, packed.sub_blocks)

    mins = weights.super_minimums
    return (
        weights.values.reshape(matrix.rows, -1, BLOCK_COLUMNS),
        of_sub_blocks(weights.super_scales, weights.sub_scales),
        None if mins is None else -of_sub_blocks(mins, weights.sub_minimums),
    )


def _repeated(factors: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """[rows, n] -> [rows, count]: each as often as it takes."""
    return np.repeat(factors, count // factors.shape[1], axis=1)


def _linear_quantizing(matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    if not matrix.is_integer:
        return linear_float(dequantized(matrix), x)
    integers, scales = quantize_reference(x)
    assert x.shape[1] % BLOCK_COLUMNS == 0
    return linear_int8(*integers_of(matrix), integers, scales)


class _Run:
    """The values of one sequence, all positions at once."""

    def __init__(self, plan: Plan, tokens: NDArray[np.int32], linear: _LinearLayer, kv_type: str | None) -> None:
        self._tokens, self._linear, self._kv_type = tokens, linear, kv_type
        positions = np.arange(len(tokens), dtype=np.int32)
        self._rotations = [rope.in_context(len(tokens)).rotations(positions) for rope in plan.ropes]
        self._pairings = [rope.pairing for rope in plan.ropes]
        self.values: dict[ops.Value, NDArray[np.float32]] = {}
        self._keys_values: dict[Place, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        self._routed: dict[ops.Routing, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def do(self, op: ops.Op) -> None:
        values = self.values
        match op:
            case ops.Embed():
                values[op.out] = dequantized(op.table)[self._tokens] * np.float32(op.scale)
            case ops.RmsNorm():
                values[op.out] = norms.rmsnorm_reference(values[op.x], op.weight, op.epsilon)
            case ops.LayerNorm():
                values[op.out] = norms.layernorm_reference(values[op.x], op.weight, op.bias, op.epsilon)
            case ops.HeadNorm():
                heads = self._heads(op.x, len(op.weight))
                values[op.out] = self._joined(norms.rmsnorm_reference(heads, op.weight, op.epsilon))
            case ops.Linear():
                product = self._linear(op.weight, values[op.x])
                values[op.out] = values[op.out] + product if op.adds else product
            case ops.Bias():
                values[op.out] = values[op.x] + op.bias
            case ops.Add():
                values[op.out] = values[op.out] + np.float32(op.scale) * values[op.y]
            case ops.AddGated():
                values[op.out] = values[op.out] + curves.sigmoid_reference(values[op.gate]) * values[op.y]
            case ops.Gated():
                values[op.out] = rowwise.gated_reference(values[op.gate], values[op.up], op.activation)
            case ops.Activate():
                values[op.out] = rowwise.activation_reference(values[op.x], op.activation)
            case ops.SoftCap():
                values[op.x] = curves.soft_cap_reference(values[op.x], op.cap)
            case ops.Scale():
                values[op.x] = values[op.x] * np.float32(op.factor)
            case ops.Columns():
                parts = self._parts(op.x, op.groups)
                values[op.out] = self._joined(parts[:, :, op.first : op.first + op.out.width // op.groups])
            case ops.Join():
                b = self._parts(op.b, op.groups)
                width = op.out.width // op.groups - b.shape[2]
                a = self._parts(op.a, op.a.width // width)
                both = [np.broadcast_to(a, (*b.shape[:2], width)), b]
                values[op.out] = self._joined(np.concatenate(both, axis=2))
            case ops.HeadLinear():
                parts, rows = self._parts(op.x, op.heads), op.weight.rows // op.heads
                products = [self._linear(op.weight.part(h * rows, rows), parts[:, h]) for h in range(op.heads)]
                values[op.out] = np.concatenate(products, axis=1)
            case ops.RopeStore():
                self._store(op)
            case ops.Rotate():
                self._rotate(op)
            case ops.Attention():
                self._attend(op)
            case ops.Convolve():
                values[op.out] = convolution_reference(values[op.x], op.weight)
            case ops.Route():
                self._routed[op.routing] = routed_reference(values[op.logits], op)
            case ops.ExpertLinear():
                values[op.out] = self._expert_linear(op)
            case ops.ExpertBias():
                chosen, _ = self._routed[op.routing]
                values[op.out] = values[op.x] + op.bias[chosen.reshape(-1)]
            case ops.Combine():
                _, weights = self._routed[op.routing]
                combined = combined_reference(values[op.y], weights)
                values[op.out] = values[op.out] + combined if op.adds else combined

    def _heads(self, value: ops.Value, head_size: int) -> NDArray[np.float32]:
        """float32[rows, heads, head size]."""
        return self._parts(value, value.width // head_size)

    def _parts(self, value: ops.Value, groups: int) -> NDArray[np.float32]:
        """float32[rows, groups, width of each]."""
        x = self.values[value]
        return x.reshape(len(x), groups, -1)

    def _joined(self, parts: NDArray[np.float32]) -> NDArray[np.float32]:
        return parts.reshape(len(parts), -1)

    def _store(self, op: ops.RopeStore) -> None:
        shape = op.place.shape
        assert isinstance(shape, AttentionShape)
        queries = self._rotated(self._heads(op.q, shape.head_size), op.query_rope)
        keys = self._rotated(self._heads(op.k, shape.head_size), op.key_rope)
        stored = self._heads(op.v, shape.value_size)
        if self._kv_type is not None:
            queries, keys, stored = entered_reference(queries, keys, stored, self._kv_type)
        self.values[op.out] = self._joined(queries)
        self._keys_values[op.place] = keys, stored

    def _rotate(self, op: ops.Rotate) -> None:
        shape = op.place.shape
        assert isinstance(shape, AttentionShape)
        queries = self._rotated(self._heads(op.q, shape.head_size), op.rope)
        if self._kv_type is not None:
            queries, _, _ = entered_reference(queries, queries, queries, self._kv_type)
        self.values[op.out] = self._joined(queries)

    def _rotated(self, heads: NDArray[np.float32], rope: int | None) -> NDArray[np.float32]:
        return heads if rope is None else rope_reference(heads, self._rotations[rope], self._pairings[rope])

    def _attend(self, op: ops.Attention) -> None:
        shape = op.place.shape
        assert isinstance(shape, AttentionShape)
        keys, stored = self._keys_values[op.place]
        rows = []
        for position, query in enumerate(self._heads(op.q, shape.head_size)):
            seen = slice(max(0, position + 1 - shape.window) if shape.window else 0, position + 1)
            rows.append(attention_reference(query, keys[seen], stored[seen], op.scale, op.soft_cap, op.sinks))
        self.values[op.out] = self._joined(np.stack(rows))

    def _expert_linear(self, op: ops.ExpertLinear) -> NDArray[np.float32]:
        x = self.values[op.x]
        if op.x.rows is not ops.Rows.CHOSEN:
            x = np.repeat(x, op.routing.used, axis=0)
        chosen, _ = self._routed[op.routing]
        return expert_linear_reference(x, op.weight, op.routing.experts, chosen.reshape(-1), self._linear)


def _run(plan: Plan, tokens: NDArray[np.int32], linear: _LinearLayer, kv_type: str | None) -> NDArray[np.float32]:
    run = _Run(plan, tokens, linear, kv_type)
    for op in plan.ops:
        run.do(op)
    assert plan.logits is not None
    return run.values[plan.logits]
