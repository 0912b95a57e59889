"""A team that times every op, for profiles. The workers run a separate kernel, so untimed teams have no overhead."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from llmrun.backends.cpu.team import Team, function_address
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.layouts.arena import address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering import Lowered, Needed

WORK_TIMED = KernelName.of("team", "work_timed")


class StepTimes(Struct, frozen=True):
    """The times of one step in seconds, float64[threads, ops], in the order of Lowered.records.

    For each thread, the time of an op starts when the previous op is done. The sum of `working` and `waiting` over all
    ops is therefore the time from the start of the first op to the end of the last op.
    """

    working: NDArray[np.float64]
    waiting: NDArray[np.float64]  # seconds spent waiting at the barrier after the op, or 0 without a barrier


class _Clock(Struct, frozen=True):
    """The clock function that the kernel calls to write a timestamp (records.STAMP_BYTES).

    A timestamp consists of two words. The time in ticks is `first * major + second`.
    """

    address: int
    identity: int  # the first argument of the clock function, or negative if the function has no such argument
    major: int
    ticks_per_second: float

    @classmethod
    def here(cls) -> _Clock:
        """Return the clock function of this system. On Linux, a call takes about 25 ns through the vDSO."""
        if sys.platform == "win32":
            kernel32 = ctypes.CDLL("kernel32")
            frequency = ctypes.c_int64()
            kernel32.QueryPerformanceFrequency(ctypes.byref(frequency))
            return cls(function_address(kernel32.QueryPerformanceCounter), -1, 1, float(frequency.value))
        if sys.platform == "darwin":  # on macOS, CLOCK_MONOTONIC only has microsecond resolution
            identity = time.CLOCK_UPTIME_RAW
        else:
            identity = time.CLOCK_MONOTONIC
        return cls(function_address(ctypes.CDLL(None).clock_gettime), identity, 10**9, 1e9)


class TimedTeam(Team):
    """A team that records the times of its steps."""

    def __init__(self, lowered: Lowered, n_threads: int) -> None:
        super().__init__(lowered, n_threads, work=WORK_TIMED)
        self._stamps = np.zeros((n_threads, 1 + 2 * len(lowered.records), 2), np.int64)
        self._taken: list[NDArray[np.int64]] = []  # the timestamps of each step; converting them takes 0.1 ms
        self._clock = _Clock.here()
        self._set(records.STEP_STAMPS, address_of(self._stamps))
        self._set_sync(records.SYNC_CLOCK, self._clock.address)
        self._set_sync(records.SYNC_CLOCK_ID, self._clock.identity)

    def _records_of_step(self, optional: tuple[Needed, ...]) -> NDArray[np.int64]:
        """Return all records, because the times are in the order of all records."""
        return self._lowered.records

    def _run_step(self) -> None:
        self._stamps[:] = 0
        super()._run_step()
        if not self._sync[records.SYNC_STOP // records.WORD]:
            self._taken.append(self._stamps.copy())

    def taken_times(self) -> list[StepTimes]:
        """Return the times of all steps completed since the last call."""
        times = [self._times(stamps) for stamps in self._taken]
        self._taken.clear()
        return times

    def _times(self, stamps: NDArray[np.int64]) -> StepTimes:
        ticks = stamps[:, :, 0] * self._clock.major + stamps[:, :, 1]
        ticks = np.maximum.accumulate(ticks, axis=1)  # ops without a barrier lack one timestamp
        spans = np.diff(ticks, axis=1) / self._clock.ticks_per_second
        return StepTimes(spans[:, 0::2], spans[:, 1::2])
