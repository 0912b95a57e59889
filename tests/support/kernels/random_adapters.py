"""Random LoRA adapters for plans that no file belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmrun.formats.gguf.adapter import EMBEDDING
from llmrun.model.plan.adapting import changeable, with_adapters
from llmrun.model.plan.ops.adapters import LowRank
from llmrun.model.plan.plan import Plan
from tests.support.kernels.runs import matrix_of


def with_random_adapters(plan: Plan, ranks: Sequence[int], seed: int = 0) -> Plan:
    """Return the plan with one adapter of each rank, each of which leaves out every fourth matrix."""
    random = np.random.default_rng(seed)
    sizes = {matrix.tensor: (matrix.rows, matrix.columns) for matrix in plan.matrices}
    adapters = []
    for number, rank in enumerate(ranks):
        pairs = {}
        for place, name in enumerate(sorted(changeable(plan))):
            rows, columns = sizes[name]
            if (place + number) % 4 == 3:
                continue
            shapes = ((rows, rank), (columns, rank)) if name == EMBEDDING else ((rank, columns), (rows, rank))
            a, b = (
                matrix_of("f32", random.normal(0, 0.3, shape).astype(np.float32), f"{number} {name} {part}")
                for shape, part in zip(shapes, "ab", strict=True)
            )
            pairs[name] = LowRank(a, b, 0.7 + number)
        adapters.append(pairs)
    return with_adapters(plan, adapters)


def some_scales(rows: int, adapters: int, seed: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return float32[rows, adapters], of which half are 0."""
    random = np.random.default_rng(seed)
    return (random.normal(0, 1, (rows, adapters)) * random.integers(0, 2, (rows, adapters))).astype(np.float32)
