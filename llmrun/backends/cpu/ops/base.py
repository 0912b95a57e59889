"""What the CPU engine knows about one kind of op."""

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
    """One kind of op. `needs` and `seconds` are given the op, the KV cache's type and the step.

    name     what a profile calls it; ops that do the same share a name
    lower    append the records that compute it
    needs    what it reads and multiplies in a step, without the quantizing of its input
    seconds  how long a step of it is expected to take
    """

    name: str
    lower: Lower
    needs: NeedsOf
    seconds: SecondsOf


def reads_and_writes(values: Callable[[Any], tuple[Value, ...]]) -> NeedsOf:
    """The needs of an op without weights: an op's `values`, each as often as it is read or written."""

    def needs(op: Any, kv_type: str, step: StepShape) -> Needs:
        return Needs(activation_bytes=step.float_bytes(*values(op)))

    return needs


def takes_as_long_as(name: str, value: str = "out") -> SecondsOf:
    """The time of a measured row op ("rmsnorm" or "swiglu") on the op's value of that name."""
    value_of = attrgetter(value)

    def seconds(op: Any, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
        return row_seconds(name, value_of(op), speeds, step)

    return seconds


def row_seconds(name: str, value: Value, speeds: SpeedTable, step: StepShape) -> float:
    """The time of a measured row op on all rows of a value."""
    rows = step.of(value)
    return speeds.rows(name).seconds(rows, value.width) if rows else 0.0
