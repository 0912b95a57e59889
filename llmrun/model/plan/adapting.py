"""Adds the ops of LoRA adapters to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.formats.gguf.adapter import EMBEDDING
from llmrun.model.plan.ops.adapters import AdapterOp, AddLowRank, AddLowRankEmbedding, LowRank
from llmrun.model.plan.ops.embedding import Embed
from llmrun.model.plan.ops.linear import Linear, Product

if TYPE_CHECKING:
    from llmrun.model.plan.matrix import Matrix
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.plan import Plan

# The low-rank matrices of an adapter, by the name of the tensor that they change.
Pairs = Mapping[str, LowRank]


def with_adapters(plan: Plan, adapters: Sequence[Pairs]) -> Plan:
    """Return a plan that also computes the products of the adapters' matrices.

    The new ops follow the last of the neighboring matrix products that have the same input, because these run without a
    barrier between them. A step in which no row uses an adapter skips the new ops, and then has the same barriers as
    without adapters.
    """
    ops: list[Op] = []
    pending: list[Op] = []
    for op, following in zip(plan.ops, [*plan.ops[1:], None], strict=True):
        ops.append(op)
        pending += [added] if (added := _added(op, adapters)) else []
        if not (isinstance(op, Product) and isinstance(following, Product) and op.x is following.x):
            ops += pending
            pending.clear()
    return replace(plan, ops=ops)


def changeable(plan: Plan) -> set[str]:
    """Return the names of the tensors that adapters can change."""
    return {matrix.tensor for op in plan.ops if (matrix := _changed(op))}


def _added(op: Op, adapters: Sequence[Pairs]) -> AdapterOp | None:
    """Return the op that adds the adapters' products to the output of an op, or None if no adapter changes it."""
    matrix = _changed(op)
    found = [adapter.get(matrix.tensor) if matrix else None for adapter in adapters]
    if matrix is None or not any(found):
        return None
    if isinstance(op, Embed):
        scaled = [pair and replace(pair, factor=pair.factor * op.scale) for pair in found]
        return AddLowRankEmbedding(op.out, tuple(scaled))
    assert isinstance(op, Linear)
    return AddLowRank(op.x, op.out, tuple(pair and pair.same_part(matrix) for pair in found))


def _changed(op: Op) -> Matrix | None:
    """Return the matrix of an op if adapters can change it. Experts and products by head are not supported."""
    if isinstance(op, Embed):
        return op.table if op.table.name == EMBEDDING else None
    return op.weight if isinstance(op, Linear) else None
