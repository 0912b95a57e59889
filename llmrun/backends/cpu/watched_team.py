"""A team that runs a plan op by op and digests each output, to find the first op that differs between two runs."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.ops.registry import CPU_OPS
from llmrun.backends.cpu.pausing_team import PausingTeam
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import floats_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.plan import Plan

_DIGITS = 16  # of a digest


class WatchedTeam(PausingTeam):
    """A team whose steps take a few times as long, because all threads stop after each op.

    digests  the digests of the outputs of each op of the last step, and that of its logits
    """

    digests: list[str]

    def _run_step(self) -> None:
        self.digests = []
        firsts = self._first_records()
        for number, written in enumerate(self._lowered.written):
            self._run_records(firsts[number], firsts[number + 1])
            self.digests.append(_digest([self._rows_of(value, buffer) for value, buffer in written]))
        self.digests.append(_digest([self._logits()]))

    def _logits(self) -> NDArray[np.float32]:
        address, rows = self._word(records.STEP_LOGITS), self._word(records.STEP_SCORED)
        return floats_at(address, rows, self._lowered.logits_width)


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


def _digest(outputs: list[NDArray[np.float32]]) -> str:
    hashed = hashlib.sha256()
    for rows in outputs:
        hashed.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return hashed.hexdigest()[:_DIGITS]
