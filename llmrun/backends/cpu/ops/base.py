"""The functions that the CPU engine needs for each kind of op."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from llmrun.backends.cpu.lowering import Needs, StepShape
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import SpeedTable

Lower = Callable[["Lowering", Any], None]
NeedsOf = Callable[[Any, str, StepShape], Needs]
SecondsOf = Callable[[Any, "SpeedTable", str, StepShape], float]


class CpuOp(Struct, frozen=True):
    """A kind of op. `needs` and `seconds` are called with the op, the KV cache type and the step.

    name     the name in profiles; ops that do the same work share a name
    lower    appends the records that compute the op
    needs    returns the op's cost in a step, excluding the quantization of its input
    seconds  returns the op's expected time in a step
    """

    name: str
    lower: Lower
    needs: NeedsOf
    seconds: SecondsOf


def reads_and_writes(values: Callable[[Any], tuple[Value, ...]]) -> NeedsOf:
    """Return a function that computes the cost of ops without weights.

    `values` returns one value for each read or write by the op. Only the sizes of these values matter.
    """

    def needs(op: Any, kv_type: str, step: StepShape) -> Needs:
        return Needs(activation_bytes=step.float_bytes(*values(op)))

    return needs


def takes_as_long_as(name: str, value: str = "out") -> SecondsOf:
    """Return a function that estimates an op's time from the time of a measured op, "rmsnorm" or "swiglu".

    `value` names the attribute that holds the operand whose size determines the time.
    """
    value_of = attrgetter(value)

    def seconds(op: Any, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
        return row_seconds(name, value_of(op), speeds, step)

    return seconds


def row_seconds(name: str, value: Value, speeds: SpeedTable, step: StepShape) -> float:
    """Return the time in seconds that a measured row-wise op takes for all rows of a value."""
    rows = step.of(value)
    return speeds.rows(name).seconds(rows, value.width) if rows else 0.0
