"""A model's draft head on the CPU: a second plan with its own cache and team, over the packed matrices of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.base import check_batch
from llmrun.backends.cpu.cache_size import MAX_ROWS
from llmrun.backends.cpu.lower import kv_shapes, lower
from llmrun.backends.cpu.paged_kv import PagedKV
from llmrun.backends.cpu.steps import Rotations, WantedRows
from llmrun.backends.cpu.team import Team
from llmrun.base.types import Batch, Outputs
from llmrun.formats.layouts.arena import allocate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.weights import PackedMatrix
    from llmrun.base.types import ModelInfo
    from llmrun.model.plan.plan import Plan


class CpuDraftHead:
    """The DraftHead of CpuBackend. Load the kernels of `lowered` before calling `start`."""

    def __init__(
        self, plan: Plan, packed: Mapping[str, PackedMatrix], n_blocks: int, *, kv_type: str, n_threads: int
    ) -> None:
        """Lower the plan. `n_blocks` is the number of blocks in the cache."""
        assert plan.windows == [0]
        assert not plan.states
        self.plan = plan
        self._memory = [
            allocate(prod(shape), "KV cache").reshape(shape) for shape in kv_shapes(plan, [n_blocks], kv_type)
        ]
        self.lowered = lower(plan, packed, self._memory, kv_type=kv_type, max_rows=MAX_ROWS, n_threads=n_threads)

    def start(self, info: ModelInfo) -> None:
        """Start the threads. `info` describes the model."""
        self.info = info
        self.kv = PagedKV({0: self._memory}, info.max_sequences, info.context_size)
        self._rotations = Rotations([rope.in_context(info.context_size) for rope in self.plan.ropes])
        self._team = Team(self.lowered, info.threads)

    @property
    def kv_bytes(self) -> int:
        return sum(group.nbytes for group in self._memory)

    @property
    def drafted_tokens(self) -> int:
        assert self.plan.logits is not None
        return self.plan.logits.width

    def forward(self, batch: Batch, hidden: NDArray[np.float32]) -> Outputs:
        check_batch(batch, self.info, self.kv.lengths)
        before = {seq: self.kv.lengths[seq] for seq in batch.seq.tolist()}
        wanted = WantedRows.of(batch.want, self.plan.hidden)
        logits = np.empty((wanted.scored, self.lowered.logits_width), np.float32)
        positions = np.ascontiguousarray(batch.pos, np.int32)
        given, states = self.lowered.given, self.lowered.hidden
        assert given is not None
        assert states is not None
        self.kv.extend(Counter(batch.seq.tolist()))
        try:
            given[: len(hidden)] = hidden
            self._team.run(
                np.ascontiguousarray(batch.tokens, np.int32),
                positions,
                self.kv.table_addresses(batch.seq),
                wanted.rows,
                self._rotations.of(positions),
                logits,
            )
        except BaseException:
            for seq, length in before.items():
                self.kv.truncate(seq, length)
            raise
        finally:
            self._team.clear_cancel()
        return Outputs(logits[:, : self.drafted_tokens], states[wanted.hidden])

    def cancel(self) -> None:
        self._team.cancel()

    def close(self) -> None:
        self._team.close()
