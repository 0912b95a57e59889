"""Ops that transform the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.curves import soft_cap_reference
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.values import Value

if TYPE_CHECKING:
    from llmrun.model.plan.twin import Run


@dataclass(frozen=True, slots=True)
class SoftCap(Op):
    """An op that computes x = cap * tanh(x / cap) in place on the logits x."""

    x: Value
    cap: float

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    @property
    def changes(self) -> Value:
        return self.x

    def twin(self, run: Run) -> None:
        run.values[self.x] = soft_cap_reference(run.values[self.x], self.cap)


class SoftCapWords(NamedTuple):
    """The op record of `soft_cap`. Each step provides the address of the logits. `cap` is a float32."""

    stride: int
    width: int
    cap: int


class LogitsOps(PlanBuilder):
    __slots__ = ()

    def soft_cap_logits(self, cap: float) -> None:
        assert self.logits is not None
        self.ops.append(SoftCap(self.logits, cap))
