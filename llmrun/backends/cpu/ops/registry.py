"""Finds what the CPU engine needs for an op. Only the modules of the ops that a plan contains are imported."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Needs, StepShape
    from llmrun.backends.cpu.ops.base import CpuOp
    from llmrun.model.plan.ops.base import Op


@functools.cache
def cpu_op(kind: type[Op]) -> CpuOp:
    """Return the functions for a kind of op. `OPS` in NAME.py here has those for the ops of model/plan/ops/NAME.py."""
    name = kind.__module__.rpartition(".")[2]
    found: CpuOp = import_module(f"llmrun.backends.cpu.ops.{name}").OPS[kind]
    return found


def needs_of(op: Op, kv_type: str, step: StepShape) -> Needs:
    """Return the cost of one op in one step, excluding the quantization of its input (`quantizing_needs`)."""
    return cpu_op(type(op)).needs(op, kv_type, step)
