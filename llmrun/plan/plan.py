"""A plan: the ops that turn tokens into logits, as an architecture writes them down.

An architecture calls the methods of Plan in the order of the model. Each appends an op and returns the value it makes;
each family of ops (plan/ops) brings its own methods and says what its ops compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.plan.ops.activations import ActivationOps
from llmrun.plan.ops.attention import AttentionOps
from llmrun.plan.ops.convolution import ConvolutionOps
from llmrun.plan.ops.embedding import EmbeddingOps
from llmrun.plan.ops.experts import ExpertOps
from llmrun.plan.ops.linear import LinearOps
from llmrun.plan.ops.logits import LogitsOps
from llmrun.plan.ops.norms import NormOps
from llmrun.plan.ops.rows import RowOps

if TYPE_CHECKING:
    from llmrun.plan.matrix import Matrix


class Plan(EmbeddingOps, NormOps, LinearOps, RowOps, AttentionOps, ActivationOps, ConvolutionOps, ExpertOps, LogitsOps):
    """The ops of one model."""

    __slots__ = ()

    @property
    def matrices(self) -> list[Matrix]:
        """Every matrix that is looked up or multiplied by, once, in order of use."""
        return list({matrix.name: matrix for op in self.ops if (matrix := op.matrix)}.values())

    @property
    def windows(self) -> list[int]:
        """The distinct windows of the groups: each has its own block table. 0: everything is kept."""
        return list(dict.fromkeys(group.shape.window for group in self.groups))

    @property
    def experts_used(self) -> int:
        """Rows of a CHOSEN value for each row of the step; 1 where no op chooses."""
        return next((routing.used for op in self.ops if (routing := op.routed_by)), 1)
