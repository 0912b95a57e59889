"""A plan run with the kernels' NumPy twins: slow, short, and the definition of what the kernels compute.

`exact` leaves activations and the KV cache in float32 and multiplies by dequantized weights: what the model means.
`quantizing` rounds where the kernels round: activations to int8 for integer weights, keys and values as the KV cache's
type says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from llmrun.kernels import plan as ops
from llmrun.kernels.attention import attention_reference
from llmrun.kernels.kv_store import entered_reference
from llmrun.kernels.linear_float import linear_reference as linear_float
from llmrun.kernels.linear_int8 import linear_reference as linear_int8
from llmrun.kernels.packed_types import BLOCK_COLUMNS, PACKED_TYPES
from llmrun.kernels.quantize import quantize_reference
from llmrun.kernels.rope import rope_reference
from llmrun.kernels.rowwise import rmsnorm_reference, swiglu_reference
from llmrun.kernels.weights import Matrix
from llmrun.quants.registry import BY_NAME

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LinearLayer = Callable[[Matrix, "NDArray[np.float32]"], "NDArray[np.float32]"]


def exact(plan: ops.Plan, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits float32[n, vocabulary] of every position of one sequence, without any rounding of activations."""
    return _run(plan, tokens, lambda matrix, x: x @ dequantized(matrix).T, None)


def quantizing(plan: ops.Plan, tokens: NDArray[np.int32], kv_type: str) -> NDArray[np.float32]:
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


def _run(plan: ops.Plan, tokens: NDArray[np.int32], linear: _LinearLayer, kv_type: str | None) -> NDArray[np.float32]:
    shape = plan.attention_shape
    rotations = plan.rope.rotations(np.arange(len(tokens), dtype=np.int32))
    values: dict[ops.Value, NDArray[np.float32]] = {}
    keys_values: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for op in plan.ops:
        match op:
            case ops.Embed():
                values[op.out] = dequantized(op.table)[tokens]
            case ops.RmsNorm():
                values[op.out] = rmsnorm_reference(values[op.x], op.weight, op.epsilon)
            case ops.Linear():
                product = linear(op.weight, values[op.x])
                values[op.out] = values[op.out] + product if op.adds else product
            case ops.RopeStore():
                q, k, v = (values[value].reshape(len(tokens), -1, shape.head_size) for value in (op.q, op.k, op.v))
                rotated, keys = rope_reference(q, rotations), rope_reference(k, rotations)
                if kv_type is not None:
                    rotated, keys, v = entered_reference(rotated, keys, v, kv_type)
                values[op.out] = rotated.reshape(len(tokens), -1)
                keys_values[op.layer] = keys, v
            case ops.Attention():
                keys, stored = keys_values[op.layer]
                queries = values[op.q].reshape(len(tokens), -1, shape.head_size)
                scale = shape.head_size**-0.5
                rows = [
                    attention_reference(query, keys[: i + 1], stored[: i + 1], scale) for i, query in enumerate(queries)
                ]
                values[op.out] = np.stack(rows).reshape(len(tokens), -1)
            case ops.SwiGLU():
                values[op.out] = swiglu_reference(values[op.gate], values[op.up])
    assert plan.logits is not None
    return values[plan.logits]
