"""The description of one kind of op for the CPU engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from llmrun.backends.cpu.lowering.needs import Needs, StepShape
from llmrun.plan.values import Value

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering.base import Lowering
    from llmrun.backends.cpu.speeds.figures import SpeedTable

Lower = Callable[["Lowering", Any], None]
NeedsOf = Callable[[Any, str, StepShape], Needs]
SecondsOf = Callable[[Any, "SpeedTable", str, StepShape], float]


@dataclass(frozen=True, slots=True)
class CpuOp:
    """One kind of op. `needs` and `seconds` take the op, the type of the KV cache and the step.

    name     the name in profiles; ops that do the same work share a name
    lower    appends the records that compute it
    needs    returns the bytes it reads and its products in a step, without quantizing its input
    seconds  returns how long it is expected to take in a step
    """

    name: str
    lower: Lower
    needs: NeedsOf
    seconds: SecondsOf


def reads_and_writes(values: Callable[[Any], tuple[Value, ...]]) -> NeedsOf:
    """Return a function for the needs of ops without weights.

    `values` lists the values of an op, each as many times as it is read or written.
    """

    def needs(op: Any, kv_type: str, step: StepShape) -> Needs:
        return Needs(activation_bytes=step.float_bytes(*values(op)))

    return needs


def takes_as_long_as(name: str, value: str = "out") -> SecondsOf:
    """Return a function that estimates an op's time by that of a measured one, "rmsnorm" or "swiglu".

    `value` is the attribute of the op with the value whose size counts.
    """
    value_of = attrgetter(value)

    def seconds(op: Any, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
        return row_seconds(name, value_of(op), speeds, step)

    return seconds


def row_seconds(name: str, value: Value, speeds: SpeedTable, step: StepShape) -> float:
    """Return the seconds that a measured row-wise op takes on all rows of a value."""
    rows = step.of(value)
    return speeds.rows(name).seconds(rows, value.width) if rows else 0.0
