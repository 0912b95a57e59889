"""The team of threads that run a plan. Each worker makes a single kernel call, which lasts as long as the team."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.prefetching import Prefetching
from llmrun.backends.cpu.steps import NO_RUNS, StepRuns
from llmrun.base.compiled.store import Kernel, KernelName, load_kernels
from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of, allocate
from llmrun.model.plan.reach import seen_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering.base import Lowered

# How long a waiting thread spins before it sleeps on the futex. A thread that spins for longer may occupy a core that
# another thread needs. The first two rows show the decode speed of SmolLM2 on a Xeon whose pause takes 45 ns, and the
# third shows the time of a step on one where it takes 11 ns (2 threads on 2 cores):
#
#   microseconds                    0.4   1     2     4     5     8    13    45   180
#   idle, tok/s                         225               289               281   284
#   two busy programs, tok/s            156               163               118    72
#   idle, 1 row, ms                 6.8   6.4   4.4   4.2   4.1   4.3   4.3   4.2
_SPIN_SECONDS = 5e-6
_MEASURED_PAUSES = 1000
_WAIT_SECONDS = 0.1  # the longest that the main thread sleeps before it checks for signals

_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}

WORK = KernelName.of("team", "work")
START = KernelName.of("team", "start")
WAIT = KernelName.of("team", "wait")
SPIN = KernelName.of("team", "spin")
TEAM_KERNELS = (WORK, START, WAIT, SPIN)


class Team:
    """A team of `n_threads` workers for one lowered plan.

    The calling thread runs no ops. It sleeps until the step is done and wakes up for signals. `work` is the kernel that
    every worker runs.
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
        # This also runs at interpreter exit, before the arrays that the workers use are freed.
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
        # Without a futex, threads wait by sleeping for 50 us, or for 1 ms on Windows (its minimum). Yielding instead
        # would keep all cores busy while a chat is idle.
        doze, doze_for = (libc.usleep, 50) if sys.platform != "win32" else (libc.Sleep, 1)
        futex = _FUTEX_CALLS.get(platform.machine(), 0) if sys.platform == "linux" else 0
        self._set_sync(records.SYNC_DOZE, function_address(doze))
        self._set_sync(records.SYNC_DOZE_FOR, doze_for)
        self._set_sync(records.SYNC_FUTEX, futex)
        self._set_sync(records.SYNC_SYSCALL, function_address(libc.syscall) if futex else 0)

    def _pause_seconds(self, spin: Kernel) -> float:
        """Measure one iteration of a spin loop, which takes 10 to 50 ns on x86-64.

        The minimum of four measurements is returned, because other programs can only prolong them. Together, they take
        at most 0.2 ms.
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
    ) -> None:
        """Run one step. All arrays must be contiguous. Raises Cancelled after `cancel`.

        tokens     int32[rows]
        positions  int32[rows]
        tables     int64[windows, rows], addresses of block tables, which differ for rows of different sequences
        wanted     int32[], indices of the rows whose logits are wanted, then of those with hidden states only
        rotations  float32[rows, pairs of all ropes, 2]
        logits     float32[rows whose logits are wanted, padded width], the output
        runs       the runs of the step (layouts/states.py); needed only if the model has recurrent states
        scales     float32[rows, adapters], the scale of each LoRA adapter for each row, or None if no row uses any
        """
        if os.getpid() != self._process:
            raise LlmrunError(
                "a forked process cannot use its parent's engine", hint="Open the model in the child process."
            )
        if not self._finalizer.alive:
            raise LlmrunError("the engine is closed", hint="Open the model again.")
        seen = seen_ranges(self._lowered.reaches, positions, tables.reshape(-1)[: len(positions)])
        plan = self._records_of_step(scales)
        self._set(records.STEP_PLAN, address_of(plan))
        self._set(records.STEP_N_OPS, len(plan))
        self._set(records.STEP_SCALES, 0 if scales is None else address_of(scales))
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

    def _records_of_step(self, scales: NDArray[np.float32] | None) -> NDArray[np.int64]:
        """Return the records to run."""
        return self._lowered.plain if scales is None else self._lowered.records

    def _run_step(self) -> None:
        """Start the workers and sleep until they are done.

        A signal handler may raise an exception at any point. The workers are then stopped before it propagates, because
        they must not use arrays that are about to be freed.
        """
        number = int(self._sync[records.SYNC_STEP // records.WORD]) + 1
        try:
            self._start.run(number, address_of(self._step), 0, 0)
            self._sleep_until_done(number)
        except BaseException:
            self.cancel()
            while self._sync[records.SYNC_STEP // records.WORD] >= number and not self._is_done(number):
                # Ignore a second Ctrl-C here because the first one is about to be raised.
                with contextlib.suppress(BaseException):
                    self._sleep_until_done(number)
            raise

    def _is_done(self, number: int) -> bool:
        return bool(self._sync[records.SYNC_DONE // records.WORD] >= number)

    def _sleep_until_done(self, number: int) -> None:
        while not self._is_done(number):
            self._wait.run(number - 1, address_of(self._step), address_of(self._timeout), 0)

    def cancel(self) -> None:
        """Stop the running step at its next barrier. Can be called from any thread or signal handler."""
        self._set(records.STEP_ABORT, 1)

    def clear_cancel(self) -> None:
        self._set(records.STEP_ABORT, 0)

    def close(self) -> None:
        """Stop the workers. This is idempotent."""
        self._finalizer()


def function_address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _run_worker(work: Kernel, step: NDArray[np.int64], thread: int, n_threads: int) -> None:
    if sys.platform != "win32":
        # Signals must go to the main thread to interrupt its sleep.
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
