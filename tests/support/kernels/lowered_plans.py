"""Plans lowered with placeholder weights and caches, which tests examine but never run."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from llmrun.backends.cpu.lower import kv_shapes, lower, state_shapes
from llmrun.backends.cpu.lowering import Lowered, Needed
from llmrun.backends.cpu.weights import reserve
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import allocate
from llmrun.model.plan.plan import Plan


def lowered_plan(plan: Plan, max_rows: int = 16, threads: int = 3) -> Lowered:
    shapes = kv_shapes(plan, [4] * len(plan.windows), "f16")
    kv = [allocate(prod(shape), "a test's cache").reshape(shape) for shape in shapes]
    states = [allocate(prod(shape), "states").reshape(shape) for shape in state_shapes(plan, 2)]
    return lower(plan, reserve(plan.matrices), kv, states, kv_type="f16", max_rows=max_rows, n_threads=threads)


def without_optional(lowered: Lowered) -> Lowered:
    """Return the records that run in steps without adapters and images."""
    kept = np.flatnonzero(lowered.needed == Needed.ALWAYS)
    kernels = [lowered.kernels[index] for index in kept]
    origins = [lowered.origins[index] for index in kept]
    return replace(lowered, records=lowered.records[kept], kernels=kernels, origins=origins)


def count_barriers(lowered: Lowered, *, one_row: bool) -> int:
    flags = lowered.records[:, records.OP_FLAGS // records.WORD]
    waits = (flags & records.FLAG_BARRIER) != 0
    if one_row:
        waits &= (flags & records.FLAG_REPLICATED) == 0
    return int(waits.sum())
