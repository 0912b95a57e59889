"""A team that runs a plan op by op and digests each output, to find the first op that differs between two runs."""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lowering.needs import FLOAT
from llmrun.backends.cpu.ops.registry import CPU_OPS
from llmrun.backends.cpu.team import Team
from llmrun.layouts import records
from llmrun.layouts.arena import address_of
from llmrun.plan.values import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering.base import Buffer
    from llmrun.plan.plan import Plan
    from llmrun.plan.values import Value

_DIGITS = 16  # of a digest
_COUNTS = {Rows.ALL: records.STEP_ROWS, Rows.WANTED: records.STEP_WANTED, Rows.CHOSEN: records.STEP_CHOSEN}


class WatchedTeam(Team):
    """A team whose steps take a few times as long, because all threads stop after each op.

    digests  the digests of the outputs of each op of the last step, and that of its logits
    """

    digests: list[str]

    def _run_step(self) -> None:
        lowered, self.digests = self._lowered, []
        firsts = np.searchsorted(lowered.origins, np.arange(len(lowered.written) + 1)).tolist()
        for number, written in enumerate(lowered.written):
            first, end = firsts[number], firsts[number + 1]
            if first < end:
                self._set(records.STEP_PLAN, address_of(lowered.records[first:end]))
                self._set(records.STEP_N_OPS, end - first)
                for offset in (records.SYNC_ARRIVED, records.SYNC_STOP, records.SYNC_FINISHED):
                    self._set_sync(offset, 0)
                super()._run_step()
            self.digests.append(_digest([self._rows_of(value, buffer) for value, buffer in written]))
        self.digests.append(_digest([self._logits()]))

    def _rows_of(self, value: Value, buffer: Buffer) -> NDArray[np.float32]:
        rows = self._word(_COUNTS[value.rows])
        return _floats(buffer.address, rows, buffer.stride // FLOAT)[:, : value.width]

    def _logits(self) -> NDArray[np.float32]:
        address, rows = self._word(records.STEP_LOGITS), self._word(records.STEP_WANTED)
        return _floats(address, rows, self._lowered.logits_width)

    def _word(self, offset: int) -> int:
        return int(self._step[offset // records.WORD])


def named_digests(plan: Plan, digests: list[str]) -> list[tuple[str, str]]:
    """Return the name of each op of a plan, followed by "logits", with its digest.

    An op is named after its matrix, or after the last matrix before it, as in "RMS norm after blk.0.attn_output".
    """
    names, last = [], ""
    for op in plan.ops:
        kind, matrix = CPU_OPS[type(op)].name, op.matrix
        if matrix is not None:
            last = matrix.name.removesuffix(".weight")
        names.append(f"{kind} {last}" if matrix is not None else f"{kind} after {last}" if last else kind)
    return list(zip([*names, "logits"], digests, strict=True))


def _floats(address: int, rows: int, width: int) -> NDArray[np.float32]:
    """Return the float32[rows, width] in memory at an address."""
    memory = (ctypes.c_float * (rows * width)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(rows, width)


def _digest(outputs: list[NDArray[np.float32]]) -> str:
    hashed = hashlib.sha256()
    for rows in outputs:
        hashed.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return hashed.hexdigest()[:_DIGITS]
