"""The base class of ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from llmrun.model.plan.twin import Routing, Run


class Op(ABC):
    """One op of a plan. A plan runs its ops in order."""

    __slots__ = ()

    @property
    @abstractmethod
    def inputs(self) -> tuple[Value, ...]:
        """The values that the op reads, including any value that it accumulates into."""

    @property
    def changes(self) -> Value | None:
        """The value that the op changes in place, or None if it only produces a new value."""
        return None

    @property
    def matrix(self) -> Matrix | None:
        """The matrix that the op multiplies by or from which it looks up rows, or None if it uses no matrix."""
        return None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All matrices that the op uses."""
        return () if self.matrix is None else (self.matrix,)

    @property
    def routed_by(self) -> Routing | None:
        """The routing that the op produces or reads, or None if it has nothing to do with experts."""
        return None

    @abstractmethod
    def twin(self, run: Run) -> None:
        """Compute the op in NumPy for all rows of one sequence. This defines the correct result of the op's kernels."""
