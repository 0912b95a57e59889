"""A mixture of experts in NumPy: which rows go to which of them, and what becomes of what they make. The kernels are in
routing.py, int8.py, floats.py and rows.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llmrun.kernels.code.curves import sigmoid_reference
from llmrun.layouts.expert_tables import LEAST_SUM
from llmrun.plan.ops import Gating

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.plan.matrix import Matrix
    from llmrun.plan.ops import Route


def routed_reference(logits: NDArray[np.float32], op: Route) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(experts int64[rows, used], weights float32[rows, used]) of logits float32[rows, experts]."""
    import numpy as np

    match op.gating:
        case Gating.SOFTMAX:
            probabilities = _softmax(logits)
        case Gating.SIGMOID:
            probabilities = sigmoid_reference(logits)
        case Gating.SOFTMAX_OF_CHOSEN:
            probabilities = logits
    ranked = probabilities if op.selection_bias is None else probabilities + op.selection_bias
    chosen = np.argsort(-ranked, axis=1, kind="stable")[:, : op.routing.used]
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    if op.gating is Gating.SOFTMAX_OF_CHOSEN:
        weights = _softmax(weights)
    if op.normalized:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), np.float32(LEAST_SUM))
    weights = weights * np.float32(op.scale)
    if op.expert_scales is not None:
        weights = weights * op.expert_scales[chosen]
    return chosen, weights.astype(np.float32)


def expert_linear_reference(
    x: NDArray[np.float32],
    weight: Matrix,
    n_experts: int,
    experts: NDArray[np.int64],
    linear: Callable[[Matrix, NDArray[np.float32]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """x float32[rows, columns], `experts` int64[rows] the one each is sent to; returns float32[rows, outputs]."""
    import numpy as np

    outputs = weight.rows // n_experts
    y = np.empty((len(x), outputs), np.float32)
    for expert in np.unique(experts).tolist():
        mine = experts == expert
        y[mine] = linear(weight.part(expert * outputs, outputs), x[mine])
    return y


def combined_reference(y: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """y float32[rows * used, width], weights float32[rows, used]; returns float32[rows, width]: added in order."""
    import numpy as np

    of_rows = y.reshape(*weights.shape, -1)
    total = np.zeros((len(weights), y.shape[1]), np.float32)
    for rank in range(weights.shape[1]):
        total += of_rows[:, rank] * weights[:, rank, None]
    return total


def _softmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy as np

    e = np.exp(x - x.max(1, keepdims=True))
    result: NDArray[np.float32] = e / e.sum(1, keepdims=True)
    return result
