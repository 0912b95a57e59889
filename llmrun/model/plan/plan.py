"""The plan of a model: the list of ops that turn tokens into logits.

An architecture calls the methods of Plan in the order of the model's computation. Each method appends an op and returns
the value that the op produces. Every family of ops (plan/ops) adds its own methods and defines the results of its ops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.model.plan.ops.activations import ActivationOps
from llmrun.model.plan.ops.attention import AttentionOps
from llmrun.model.plan.ops.convolution import ConvolutionOps
from llmrun.model.plan.ops.embedding import EmbeddingOps, ImageOp
from llmrun.model.plan.ops.experts import ExpertOps
from llmrun.model.plan.ops.linear import LinearOps
from llmrun.model.plan.ops.norms import NormOps
from llmrun.model.plan.ops.recurrences import RecurrenceOps
from llmrun.model.plan.ops.rows import LogitsOps, RowOps
from llmrun.model.plan.shapes import ALL, AttentionShape
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from llmrun.model.plan.matrix import Matrix
    from llmrun.model.plan.shapes import Reach


class Plan(
    EmbeddingOps,
    NormOps,
    LinearOps,
    RowOps,
    AttentionOps,
    ActivationOps,
    ConvolutionOps,
    RecurrenceOps,
    ExpertOps,
    LogitsOps,
):
    """The ops of one model, in order."""

    __slots__ = ()

    def take_hidden(self, width: int) -> Value:
        """Return the hidden states that the caller supplies, which no op computes."""
        self.given = Value(width)
        return self.given

    @property
    def supplied(self) -> list[Value]:
        """The values that the caller writes to memory."""
        given = [] if self.given is None else [self.given]
        return list(dict.fromkeys([*given, *(stage.takes for stage in self.stages)]))

    @property
    def returned(self) -> list[Value]:
        """The values that the caller reads from memory, apart from the logits."""
        hidden = [] if self.hidden is None else [self.hidden]
        return list(dict.fromkeys([*hidden, *(stage.gives for stage in self.stages if stage.gives)]))

    @property
    def matrices(self) -> list[Matrix]:
        """Every matrix that the ops use, without duplicates, in order of first use."""
        return list({matrix.name: matrix for op in self.ops for matrix in op.matrices}.values())

    def matrices_with(self, other: Plan) -> list[Matrix]:
        """Return the matrices of this plan, and then those that only another plan of the same file uses."""
        return list({matrix.name: matrix for matrix in [*self.matrices, *other.matrices]}.values())

    @property
    def windows(self) -> list[int]:
        """The distinct window sizes of the cache groups. Each has its own block table, and 0 means no window."""
        return list(dict.fromkeys(group.shape.window for group in self.groups))

    @property
    def reaches(self) -> list[Reach]:
        """The distinct ranges of positions that the rows of attention layers see."""
        shapes = [group.shape for group in self.groups]
        return list(dict.fromkeys(shape.reach for shape in shapes if isinstance(shape, AttentionShape)))

    def looks_ahead(self, reach: Reach) -> bool:
        """Return whether rows of images may look ahead in layers with this reach."""
        return not self.ahead_in_windows_only or reach.back < ALL

    def without_images(self) -> Plan:
        """Return the plan for a model that is opened without a projector."""
        return replace(self, ops=[op for op in self.ops if not isinstance(op, ImageOp)])

    @property
    def is_causal(self) -> bool:
        """Whether no row depends on later positions. If not, all rows of a sequence must be in one step."""
        return not any(reach.ahead for reach in self.reaches)

    @property
    def experts_used(self) -> int:
        """The number of rows in a CHOSEN value for each row of the step; 1 if the model has no router."""
        return next((routing.used for op in self.ops if (routing := op.routed_by)), 1)
