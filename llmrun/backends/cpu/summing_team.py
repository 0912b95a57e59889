"""A team that sums the squares of the inputs of matrix products, from which importance matrices are made.

The team stops before the first product that reads an input. A sum is computed in float64, row by row, so it does not
depend on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from llmrun.backends.cpu.pausing_team import PausingTeam
from llmrun.formats.layouts import records
from llmrun.formats.layouts.expert_tables import HEAD_ACTIVE, HEAD_EXPERTS
from llmrun.model.plan.ops.linear import FloatWords, IntegerWords, Product
from llmrun.model.plan.values import Routing, Rows, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering.base import Buffer, Lowered
    from llmrun.model.plan.plan import Plan

_LAYERS, _OUTPUT = "blk.", "output."  # how the names of the matrices begin
_ROWS = 64  # rows that are squared at a time, so that the squares stay in the CPU's cache


@dataclass(slots=True)
class InputSums:
    """The sums of an input.

    names   the names of the tensors that are multiplied by it
    sums    float64[experts or 1, width]
    counts  int64[experts or 1], the rows that were added
    """

    names: list[str]
    sums: NDArray[np.float64]
    counts: NDArray[np.int64]


class _Tables(NamedTuple):
    """The addresses of a routing's tables (expert_tables.py) as the record of a product has them."""

    head: int
    row_numbers: int

    @classmethod
    def of(cls, record: NDArray[np.int64], op: Product) -> Self:
        words = records.offsets(IntegerWords) if op.weight.is_integer else records.offsets(FloatWords)
        return cls(*(int(record[offset // records.WORD]) for offset in (words.tables, words.row_numbers)))

    def rows_by_expert(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Yield each active expert, and the indices of its rows of the input."""
        active = ctypes.c_int64.from_address(self.head + HEAD_ACTIVE).value
        slots = _integers_at(self.head + HEAD_EXPERTS, 2 * (active + 1)).reshape(-1, 2)
        sources = _integers_at(self.row_numbers, int(slots[-1, 1]))
        firsts = slots[:, 1].tolist()
        for expert, begin, end in zip(slots[:-1, 0].tolist(), firsts, firsts[1:], strict=False):
            yield expert, sources[begin:end]


@dataclass(frozen=True, slots=True)
class _Reading:
    """The sums of the input `x`, which is in memory before the record `first`.

    tables  where the step finds the experts of the rows; None outside mixtures of experts
    """

    first: int
    x: Value
    buffer: Buffer
    tables: _Tables | None
    found: InputSums


class SummingTeam(PausingTeam):
    """A team that adds the squares of the inputs in each step to its sums.

    found  the sums since the last call of `clear`, for the matrices of all layers, and for the output matrix if
           `with_output` and if there is one besides the token embedding
    """

    def __init__(self, lowered: Lowered, n_threads: int, plan: Plan, *, with_output: bool = False) -> None:
        super().__init__(lowered, n_threads)
        outputs = (_OUTPUT,) if with_output else ()
        self._readings = list(_readings(plan, lowered, self._first_records(), (_LAYERS, *outputs)))
        self.found = [reading.found for reading in self._readings]
        self.needs_logits = any(reading.x.rows in (Rows.WANTED, Rows.SCORED) for reading in self._readings)

    def clear(self) -> None:
        for found in self.found:
            found.sums[:] = 0
            found.counts[:] = 0

    def _run_step(self) -> None:
        first = 0
        for reading in self._readings:
            self._run_records(first, reading.first)
            if self._sync[records.SYNC_STOP // records.WORD]:
                return
            first = reading.first
            self._add(reading)
        self._run_records(first, len(self._lowered.records))

    def _add(self, reading: _Reading) -> None:
        rows, found = self._rows_of(reading.x, reading.buffer), reading.found
        if reading.tables is None:
            _add_squares(rows, found.sums[0])
            found.counts += len(rows)
            return
        for expert, sources in reading.tables.rows_by_expert():
            _add_squares(rows[sources], found.sums[expert])
            found.counts[expert] += len(sources)


def _readings(plan: Plan, lowered: Lowered, firsts: list[int], prefixes: tuple[str, ...]) -> Iterator[_Reading]:
    """Yield one reading for each input, before the first product that reads it."""
    buffers: dict[Value, Buffer] = {}
    known: dict[tuple[Value, Routing | None], InputSums] = {}
    for number, op in enumerate(plan.ops):
        if isinstance(op, Product) and op.weight.name.startswith(prefixes):
            name = op.weight.name.partition("[")[0]  # without the rows of a part (Matrix.part)
            routing = op.routed_by
            found = known.get((op.x, routing))
            if found is None:
                experts = routing.experts if routing else 1
                found = InputSums([], np.zeros((experts, op.x.width)), np.zeros(experts, np.int64))
                known[op.x, routing] = found
                record = lowered.records[firsts[number + 1] - 1]  # the records before it quantize the input
                tables = _Tables.of(record, op) if routing else None
                yield _Reading(firsts[number], op.x, buffers[op.x], tables, found)
            if name not in found.names:
                found.names.append(name)
        buffers.update(lowered.written[number])
        if op.changes is not None:
            known = {key: found for key, found in known.items() if key[0] is not op.changes}


def _integers_at(address: int, count: int) -> NDArray[np.int32]:
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def _add_squares(rows: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
    for begin in range(0, len(rows), _ROWS):
        sums += np.square(rows[begin : begin + _ROWS], dtype=np.float64).sum(axis=0)
