"""The base class of ops: what each op declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from llmrun.plan.matrix import Matrix
from llmrun.plan.values import Value

if TYPE_CHECKING:
    from llmrun.plan.twin import Run
    from llmrun.plan.values import Routing


class Op(ABC):
    """One op of a plan. A plan runs its ops in order."""

    __slots__ = ()

    @property
    @abstractmethod
    def inputs(self) -> tuple[Value, ...]:
        """The values it reads, including one that it adds onto."""

    @property
    def changes(self) -> Value | None:
        """The value that it changes in place, or None if it only makes a new one."""
        return None

    @property
    def matrix(self) -> Matrix | None:
        """The matrix that it multiplies by or looks rows up in."""
        return None

    @property
    def routed_by(self) -> Routing | None:
        """The routing that it makes or reads, or None outside mixtures of experts."""
        return None

    @abstractmethod
    def twin(self, run: Run) -> None:
        """Compute it in NumPy, on all rows of one sequence: the definition of what its kernels compute."""
