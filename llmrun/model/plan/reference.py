"""Runs a plan with the NumPy twins of its ops. It is slow and simple, and defines the correct results of the kernels.

`exact` keeps activations and the KV cache in float32 and multiplies by dequantized weights, so nothing is quantized at
run time. `quantizing` rounds in the same places as the kernels: activations to int8 if the weights are integers, and
keys and values to the type of the KV cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.formats.layouts.linear import PACKED_TYPES
from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import BLOCK_COLUMNS
from llmrun.model.plan.ops.linear import float_linear_reference, integer_linear_reference, quantize_reference
from llmrun.model.plan.twin import Run, dequantized

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.matrix import Matrix
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import ImageInputs, Multiply, Value


def exact(
    plan: Plan,
    tokens: NDArray[np.int32],
    scales: NDArray[np.float32] | None = None,
    given: NDArray[np.float32] | None = None,
    images: ImageInputs | None = None,
) -> NDArray[np.float32]:
    """Compute logits float32[n, vocabulary] for every position of one sequence, without quantizing activations.

    scales  float32[n, adapters]: the scale of each LoRA adapter at each position, or None
    given   float32[n, hidden size], the hidden states that the plan of a draft head takes
    images  the images, whose rows are IMAGE_ROW in `tokens`
    """
    return _result(_run(plan, tokens, multiply_exact, None, scales, given, images), plan.logits)


def exact_hidden(
    plan: Plan, tokens: NDArray[np.int32], given: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Compute the hidden states float32[n, hidden size] in the same way as `exact`."""
    return _result(_run(plan, tokens, multiply_exact, None, given=given), plan.hidden) / np.float32(plan.hidden_scale)


def quantizing(
    plan: Plan,
    tokens: NDArray[np.int32],
    kv_type: str,
    scales: NDArray[np.float32] | None = None,
    images: ImageInputs | None = None,
) -> NDArray[np.float32]:
    """Compute the same logits as `exact`, but round in the same places as the kernels."""
    return _result(_run(plan, tokens, multiply_quantizing, kv_type, scales, images=images), plan.logits)


def integers_of(matrix: Matrix) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]:
    """Unpack a matrix into (integers, scales, mins).

    Integers are int8[rows, blocks, 32]. Scales and mins are float32[rows, blocks, sub-blocks]; `mins` is None for types
    without minimums.
    """
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
    """Repeat each factor along the second axis: [rows, n] -> [rows, count]."""
    return np.repeat(factors, count // factors.shape[1], axis=1)


def multiply_exact(matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x @ dequantized(matrix).T


def multiply_quantizing(matrix: Matrix, x: NDArray[np.float32]) -> NDArray[np.float32]:
    if not matrix.is_integer:
        return float_linear_reference(dequantized(matrix), x)
    integers, scales = quantize_reference(x)
    assert x.shape[1] % BLOCK_COLUMNS == 0
    return integer_linear_reference(*integers_of(matrix), integers, scales)


def _run(
    plan: Plan,
    tokens: NDArray[np.int32],
    multiply: Multiply,
    kv_type: str | None,
    scales: NDArray[np.float32] | None = None,
    given: NDArray[np.float32] | None = None,
    images: ImageInputs | None = None,
) -> Run:
    run = Run(plan.ropes, tokens, multiply, kv_type, scales, images, plan.looks_ahead)
    if plan.given is not None:
        assert given is not None
        run.values[plan.given] = given
    for op in plan.ops:
        op.twin(run)
    return run


def _result(run: Run, value: Value | None) -> NDArray[np.float32]:
    assert value is not None
    return run.values[value]
