"""Teams of threads that run a plan. Each worker makes a single kernel call, which lasts as long as the team.

Some teams can stop between the ops of a step, when no kernel is running and the values of the step are in memory.
WatchedTeam digests the output of each op, to find the first op that differs between two runs. SummingTeam sums the
squares of the inputs of matrix products for importance matrices. Each sum is computed row by row in float64, so the sum
does not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from msgspec import Struct

from llmrun.backends.cpu.lowering import FLOAT, STEP_COUNTS, Needed
from llmrun.backends.cpu.ops.registry import cpu_op
from llmrun.backends.cpu.prefetching import Prefetching
from llmrun.backends.cpu.steps import NO_RUNS, StepImages, StepRuns
from llmrun.base.compiled.host import load_kernels
from llmrun.base.compiled.kernel import Kernel, KernelName
from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate, floats_at
from llmrun.formats.layouts.experts import HEAD_ACTIVE, HEAD_EXPERTS
from llmrun.model.plan.ops.linear import FloatWords, IntegerWords, Product
from llmrun.model.plan.shapes import seen_ranges
from llmrun.model.plan.twin import Routing, Rows, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering import Buffer, Lowered, LoweredStage
    from llmrun.model.plan.plan import Plan

# How long a waiting thread spins before it sleeps on the futex. A thread that spins longer may occupy a core that
# another thread needs. The first two rows show the decode speed of SmolLM2 on a Xeon whose pause takes 45 ns, and the
# third row shows the time of a step on a Xeon whose pause takes 11 ns (2 threads on 2 cores):
#
#   microseconds                    0.4   1     2     4     5     8    13    45   180
#   idle, tok/s                         225               289               281   284
#   two busy programs, tok/s            156               163               118    72
#   idle, 1 row, ms                 6.8   6.4   4.4   4.2   4.1   4.3   4.3   4.2
_SPIN_SECONDS = 5e-6
_MEASURED_PAUSES = 1000
_WAIT_SECONDS = 0.1  # the longest sleep of the main thread between checks for signals

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}

WORK = KernelName.of("team", "work")
START = KernelName.of("team", "start")
WAIT = KernelName.of("team", "wait")
SPIN = KernelName.of("team", "spin")
TEAM_KERNELS = (WORK, START, WAIT, SPIN)


class Team:
    """A team of `n_threads` workers for one lowered plan.

    The calling thread runs no ops, sleeps until the step is done, and wakes up for signals. `work` is
    the kernel that every worker runs.
    """

    def __init__(
        self, lowered: Lowered, n_threads: int, work: KernelName = WORK, prefetching: Prefetching | None = None
    ) -> None:
        kernels = load_kernels([work, START, WAIT, SPIN])
        self._start, self._wait = kernels[START], kernels[WAIT]
        self._lowered = lowered
        self._prefetching = prefetching or Prefetching(n_threads)
        self._process = os.getpid()
        self._step = np.zeros(records.STEP_WORDS, np.int64)
        self._sync = allocate(records.SYNC_BYTES, "synchronization words").view(np.int64)
        self._timeout = np.array([0, int(_WAIT_SECONDS * 1e9)], np.int64)  # struct timespec
        self._describe_system()
        self._set(records.STEP_SYNC, address_of(self._sync))
        self._set_sync(records.SYNC_SPIN, round(_SPIN_SECONDS / self._pause_seconds(kernels[SPIN])))
        threads: list[threading.Thread] = []
        # The finalizer also runs at interpreter exit, before the arrays that the workers use are freed.
        self._finalizer = weakref.finalize(
            self, _stop_workers, self._process, self._sync, self._step, self._start, threads
        )
        try:
            for thread in range(n_threads):
                arguments = (kernels[work], self._step, thread, n_threads)
                worker = threading.Thread(target=_run_worker, args=arguments, name=f"llmrun-{thread}", daemon=True)
                worker.start()
                threads.append(worker)
        except BaseException:
            self.close()
            raise

    def _describe_system(self) -> None:
        libc = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.CDLL("kernel32")
        # Without a futex, threads wait by sleeping for 50 us, or for 1 ms on Windows, which is its minimum. If threads
        # yielded instead of sleeping, all cores would be busy while a chat is idle.
        doze, doze_for = (libc.usleep, 50) if sys.platform != "win32" else (libc.Sleep, 1)
        futex = _FUTEX_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
        self._set_sync(records.SYNC_DOZE, function_address(doze))
        self._set_sync(records.SYNC_DOZE_FOR, doze_for)
        self._set_sync(records.SYNC_FUTEX, futex)
        self._set_sync(records.SYNC_SYSCALL, function_address(libc.syscall) if futex else 0)

    def _pause_seconds(self, spin: Kernel) -> float:
        """Measure one iteration of a spin loop, which takes 10 to 50 ns on x86-64.

        Returns the minimum of four measurements, because other programs can only prolong a measurement. All four
        measurements take at most 0.2 ms.
        """
        measured = []
        for _ in range(4):
            started = time.perf_counter()
            spin.run(_MEASURED_PAUSES, address_of(self._step), 0, 0)
            measured.append(time.perf_counter() - started)
        return min(measured) / _MEASURED_PAUSES

    def _set(self, offset: int, value: int) -> None:
        self._step[offset // records.WORD] = value

    def _set_sync(self, offset: int, value: int) -> None:
        self._sync[offset // records.WORD] = value

    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        tables: NDArray[np.int64],
        wanted: NDArray[np.int32],
        rotations: NDArray[np.float32],
        logits: NDArray[np.float32],
        runs: StepRuns = NO_RUNS,
        scales: NDArray[np.float32] | None = None,
        images: StepImages | None = None,
    ) -> None:
        """Run one step. All arrays must be contiguous. Raises Cancelled after `cancel`.

        tokens     int32[rows]
        positions  int32[rows]
        tables     int64[windows, rows], addresses of block tables, which differ for rows of different sequences
        wanted     int32[], indices of the rows whose logits are wanted, then of the rows with hidden states only
        rotations  float32[rows, pairs of all ropes, 2]
        logits     float32[rows whose logits are wanted, padded width], the output
        runs       the runs of the step (layouts/kv.py); needed only if the model has recurrent states
        scales     float32[rows, adapters], the scale of each LoRA adapter for each row, or None if no row uses any
        images     the rows of images, or None if there are none
        """
        if os.getpid() != self._process:
            raise LlmrunError(
                "a forked process cannot use its parent's engine", hint="Open the model in the child process."
            )
        if not self._finalizer.alive:
            raise LlmrunError("the engine is closed", hint="Open the model again.")
        seen = self._seen_ranges(positions, tables, images)
        adapters = () if scales is None else (Needed.ADAPTERS,)
        plan = self._records_of_step(adapters if images is None else (*adapters, Needed.IMAGES))
        self._set(records.STEP_PLAN, address_of(plan))
        self._set(records.STEP_N_OPS, len(plan))
        self._set(records.STEP_SCALES, 0 if scales is None else address_of(scales))
        self._set(records.STEP_IMAGES, 0 if images is None else address_of(images.addresses))
        self._lowered.counters[:] = 0
        for offset in (records.SYNC_ARRIVED, records.SYNC_STOP, records.SYNC_FINISHED):
            self._set_sync(offset, 0)
        self._set(records.STEP_ROWS, len(tokens))
        self._set(records.STEP_WANTED, len(wanted))
        self._set(records.STEP_SCORED, len(logits))
        self._set(records.STEP_CHOSEN, len(tokens) * self._lowered.experts_used)
        self._set(records.STEP_REPLICATED, int(len(tokens) == 1))
        self._set(records.STEP_TOKENS, address_of(tokens))
        self._set(records.STEP_POSITIONS, address_of(positions))
        self._set(records.STEP_TABLES, address_of(tables))
        self._set(records.STEP_WANTED_ROWS, address_of(wanted))
        self._set(records.STEP_ROTATIONS, address_of(rotations))
        self._set(records.STEP_LOGITS, address_of(logits))
        self._set(records.STEP_SEEN, address_of(seen))
        self._set(records.STEP_RUNS, len(runs.words))
        self._set(records.STEP_RUN_LIST, address_of(runs.words))
        self._set(records.STEP_RUN_ROWS, address_of(runs.rows))
        self._set(records.STEP_PREFETCH, self._prefetching.way(len(tokens)))
        started = time.perf_counter()
        self._run_step()
        if self._sync[records.SYNC_STOP // records.WORD]:
            raise Cancelled("generation stopped")
        self._prefetching.took(len(tokens), time.perf_counter() - started)

    def _records_of_step(self, optional: tuple[Needed, ...]) -> NDArray[np.int64]:
        """Return the records to run, including these kinds of optional records."""
        return self._lowered.records_for(*optional)

    def _seen_ranges(
        self, positions: NDArray[np.int32], tables: NDArray[np.int64], images: StepImages | None
    ) -> NDArray[np.int32]:
        """Return the ranges of positions that the rows see, in the form of `seen_ranges`."""
        ahead = None if images is None or images.ahead is None else self._lowered.looks_ahead * images.ahead
        return seen_ranges(self._lowered.reaches, positions, tables.reshape(-1)[: len(positions)], ahead)

    def _run_step(self) -> None:
        """Start the workers and sleep until they are done.

        A signal handler may raise an exception at any point. The workers are then stopped before the exception
        propagates, because they must not use arrays that are about to be freed.
        """
        number = int(self._sync[records.SYNC_STEP // records.WORD]) + 1
        try:
            self._start.run(number, address_of(self._step), 0, 0)
            self._sleep_until_done(number)
        except BaseException:
            self.cancel()
            while self._sync[records.SYNC_STEP // records.WORD] >= number and not self._is_done(number):
                # Ignore a second Ctrl-C, because the first KeyboardInterrupt is about to be raised.
                with contextlib.suppress(BaseException):
                    self._sleep_until_done(number)
            raise

    def _is_done(self, number: int) -> bool:
        return bool(self._sync[records.SYNC_DONE // records.WORD] >= number)

    def _sleep_until_done(self, number: int) -> None:
        while not self._is_done(number):
            self._wait.run(number - 1, address_of(self._step), address_of(self._timeout), 0)

    def cancel(self) -> None:
        """Stop the running step at its next barrier. Any thread or signal handler can call `cancel`."""
        self._set(records.STEP_ABORT, 1)

    def clear_cancel(self) -> None:
        self._set(records.STEP_ABORT, 0)

    def close(self) -> None:
        """Stop the workers. Calls after the first have no effect."""
        self._finalizer()


def function_address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _run_worker(work: Kernel, step: NDArray[np.int64], thread: int, n_threads: int) -> None:
    if sys.platform != "win32":
        # Signals must be delivered to the main thread to interrupt its sleep.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    work.run(0, address_of(step), thread, n_threads)


def _stop_workers(
    process: int, sync: NDArray[np.int64], step: NDArray[np.int64], start: Kernel, threads: list[threading.Thread]
) -> None:
    if os.getpid() != process:
        return
    sync[records.SYNC_EXIT // records.WORD] = 1
    start.run(int(sync[records.SYNC_STEP // records.WORD]) + 1, address_of(step), 0, 0)
    for thread in threads:
        thread.join()


class StagedTeam(Team):
    """A team that runs the stages of a plan (plan/builder.py), each of them for one tile of rows at a time."""

    def run_stage(
        self,
        stage: LoweredStage,
        rows: NDArray[np.float32],
        positions: NDArray[np.int32],
        rotations: NDArray[np.float32],
        table: NDArray[np.int32],
        seen: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Run a stage for a tile of rows, and return its output, which the next tile overwrites. Raises Cancelled.

        Returns float32[rows, width of the output], or the input if the stage only stores keys and values.

        rows       float32[rows, width of the input]
        positions  int32[rows], the positions of the rows' keys and values
        rotations  float32[rows, pairs of all ropes, 2]
        table      the block table of the keys and values
        seen       int32[reaches, rows, 2], the ranges of positions that the rows see
        """
        count = len(rows)
        stage.takes[:count] = rows
        self._stage, self._seen = stage, np.ascontiguousarray(seen)
        tables = np.full((1, count), address_of(table), np.int64)
        nothing = np.zeros(count, np.int32)
        self.run(nothing, positions, tables, nothing[:0], rotations, np.zeros((0, 1), np.float32))
        return (stage.takes if stage.gives is None else stage.gives)[:count]

    def _records_of_step(self, optional: tuple[Needed, ...]) -> NDArray[np.int64]:
        return self._lowered.records[self._stage.first : self._stage.end]

    def _seen_ranges(
        self, positions: NDArray[np.int32], tables: NDArray[np.int64], images: StepImages | None
    ) -> NDArray[np.int32]:
        return self._seen


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


_DIGITS = 16  # hexadecimal digits of a digest


class WatchedTeam(PausingTeam):
    """A team whose steps take several times as long, because all threads stop after each op.

    digests  the digests of the outputs of each op of the last step, and the digest of the logits
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
        kind, matrix = cpu_op(type(op)).name, op.matrix
        if matrix is not None:
            last = matrix.name.removesuffix(".weight")
        names.append(f"{kind} {last}" if matrix is not None else f"{kind} after {last}" if last else kind)
    return list(zip([*names, "logits"], digests, strict=True))


def _digest(outputs: list[NDArray[np.float32]]) -> str:
    hashed = hashlib.sha256()
    for rows in outputs:
        hashed.update(np.ascontiguousarray(rows, "<f4").tobytes())
    return hashed.hexdigest()[:_DIGITS]


_LAYERS, _OUTPUT = "blk.", "output."  # prefixes of the names of matrices
_ROWS = 64  # rows that are squared at a time, so that the squares stay in the CPU's cache


class InputSums(Struct):
    """The sums of an input.

    names   the names of the tensors that are multiplied by the input
    sums    float64[experts or 1, width]
    counts  int64[experts or 1], the number of rows that were added
    """

    names: list[str]
    sums: NDArray[np.float64]
    counts: NDArray[np.int64]


class _Tables(NamedTuple):
    """The addresses of a routing's tables (layouts/experts.py) as stored in the record of a product."""

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


class _Reading(Struct, frozen=True):
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
           `with_output` is set and the output matrix is not the token embedding
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
    """Yield one reading for each input, before the first product that reads the input."""
    buffers: dict[Value, Buffer] = {}
    known: dict[tuple[Value, Routing | None], InputSums] = {}
    for number, op in enumerate(plan.ops):
        if isinstance(op, Product) and op.weight.name.startswith(prefixes):
            name = op.weight.name.partition("[")[0]  # the name without the row range of a part (Matrix.part)
            routing = op.routed_by
            found = known.get((op.x, routing))
            if found is None:
                experts = routing.experts if routing else 1
                found = InputSums([], np.zeros((experts, op.x.width)), np.zeros(experts, np.int64))
                known[op.x, routing] = found
                record = lowered.records[firsts[number + 1] - 1]  # the preceding records quantize the input
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
