"""The op that looks up the embeddings of tokens or positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from llmrun.model.plan.twin import Run


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """An op that looks up the embedding of each token in the step: out = scale * table[token].

    If `by_position`, it looks up the embedding of each row's position instead.
    """

    table: Matrix
    scale: float
    by_position: bool
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return ()

    @property
    def matrix(self) -> Matrix:
        return self.table

    def twin(self, run: Run) -> None:
        positions = np.arange(len(run.tokens)) if self.by_position else None
        run.values[self.out] = run.rows_of(self.table, positions) * np.float32(self.scale)


class EmbedWords(NamedTuple):
    """The op record of `embed`. `scale` is a float32.

    `indices` is the offset in the step record of the list of indices, STEP_TOKENS or STEP_POSITIONS.
    """

    table: int
    group_bytes: int
    width: int
    out: int
    out_stride: int
    scale: int
    indices: int


class EmbeddingOps(PlanBuilder):
    __slots__ = ()

    def embed(self, table: Matrix, scale: float = 1.0) -> Value:
        out = Value(table.columns)
        self.ops.append(Embed(table, scale, by_position=False, out=out))
        return out

    def embed_positions(self, table: Matrix) -> Value:
        """Append the op that looks up each row's position, which must be less than the number of rows of the table."""
        out = Value(table.columns)
        self.ops.append(Embed(table, 1.0, by_position=True, out=out))
        return out
