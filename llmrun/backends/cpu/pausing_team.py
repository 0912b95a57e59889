"""A team that can stop between the ops of a step, when nothing is running and the values of the step are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.base import STEP_COUNTS
from llmrun.backends.cpu.lowering.needs import FLOAT
from llmrun.backends.cpu.team import Team
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, floats_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering.base import Buffer
    from llmrun.model.plan.values import Value


class PausingTeam(Team):
    """A team whose subclasses run a step in parts."""

    def _first_records(self) -> list[int]:
        """Return the index of the first record of each op, and the number of records."""
        lowered = self._lowered
        firsts: list[int] = np.searchsorted(lowered.origins, np.arange(len(lowered.written) + 1)).tolist()
        return firsts

    def _run_records(self, first: int, end: int) -> None:
        """Run some of the records, and wait until all threads are done."""
        if first == end:
            return
        self._set(records.STEP_PLAN, address_of(self._lowered.records[first:end]))
        self._set(records.STEP_N_OPS, end - first)
        for offset in (records.SYNC_ARRIVED, records.SYNC_STOP, records.SYNC_FINISHED):
            self._set_sync(offset, 0)
        super()._run_step()

    def _rows_of(self, value: Value, buffer: Buffer) -> NDArray[np.float32]:
        """Return a view of the rows of a value, float32[rows, width]."""
        rows = self._word(STEP_COUNTS[value.rows])
        return floats_at(buffer.address, rows, buffer.stride // FLOAT)[:, : value.width]

    def _word(self, offset: int) -> int:
        return int(self._step[offset // records.WORD])
