"""Ops that apply LoRA adapters: low-rank matrices that are added to a model's own.

Each row of a step has a scale for each adapter. Rows whose scales are all 0 are not touched, so their results are
bit-identical to those of a model without adapters.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run


@dataclass(frozen=True, slots=True)
class LowRank:
    """The pair of float32 matrices that an adapter adds to a matrix W [outputs, inputs]: W + scale * factor * B A.

    a       [rank, inputs]. For a table of embeddings, [tokens, rank]: each token's row is multiplied by B
    b       [outputs, rank]
    factor  alpha / rank
    """

    a: Matrix
    b: Matrix
    factor: float

    @property
    def rank(self) -> int:
        return self.b.columns

    def same_part(self, of: Matrix) -> LowRank:
        """Return the pair for a matrix that is a part of the adapter's tensor."""
        return LowRank(self.a, of.same_part_of(self.b), self.factor)


class AdapterOp(Op):
    """An op that adds the products of low-rank matrices to `out`, for each adapter in order.

    `pairs` has an entry for each adapter, which is None if the adapter does not change this matrix.
    """

    __slots__ = ()

    out: Value
    pairs: tuple[LowRank | None, ...]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.out,)

    @property
    def changes(self) -> Value:
        return self.out

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for pair in self.pairs if pair for matrix in (pair.a, pair.b))

    def twin(self, run: Run) -> None:
        if run.scales is None:
            return
        for pair, scales in zip(self.pairs, run.scales.T, strict=True):
            if pair is None:
                continue
            rows = np.flatnonzero(scales)
            low = self.low_rank(run, pair)[rows] * (scales[rows] * np.float32(pair.factor))[:, None]
            run.values[self.out][rows] += run.multiply(pair.b, low)

    @abstractmethod
    def low_rank(self, run: Run, pair: LowRank) -> NDArray[np.float32]:
        """Return the rows that are multiplied by B, float32[rows, rank]."""


@dataclass(frozen=True, slots=True)
class AddLowRank(AdapterOp):
    """An op that computes out += scale * factor * x A^T B^T, for each adapter in order."""

    x: Value
    out: Value
    pairs: tuple[LowRank | None, ...]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.out)

    def low_rank(self, run: Run, pair: LowRank) -> NDArray[np.float32]:
        return run.multiply(pair.a, run.values[self.x])


@dataclass(frozen=True, slots=True)
class AddLowRankEmbedding(AdapterOp):
    """An op that computes out += scale * factor * A[token] B^T, for each adapter in order."""

    out: Value
    pairs: tuple[LowRank | None, ...]

    def low_rank(self, run: Run, pair: LowRank) -> NDArray[np.float32]:
        return run.rows_of(pair.a)


class LowRankWords(NamedTuple):
    """The op record of `reduce` and `look_up`, which multiply rows by the matrices A, and of `expand`, for B.

    units        address of the units (layouts/records.py)
    n_units      `reduce`: groups of 16 features of all low-rank products. Otherwise, adapters that have a pair
    n_groups     `expand`: groups of 16 outputs
    columns      `reduce`: inputs, padded to a multiple of 4
    x, x_stride  the input rows; `look_up` has none
    out          the output rows: low-rank products, or the rows to which `expand` adds
    n_adapters   number of scales of each row of the step
    wanted       1 if the rows are those whose outputs are wanted
    logits       1 if the step provides the address of the output
    """

    units: int
    n_units: int
    n_groups: int
    columns: int
    x: int
    x_stride: int
    out: int
    out_stride: int
    n_adapters: int
    wanted: int
    logits: int
