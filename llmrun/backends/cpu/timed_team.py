"""A team that takes the time of every op, for profiles. Its threads live in a kernel of their own (team.py): the
normal one knows nothing of it."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.team import Team, function_address
from llmrun.compiled.store import KernelName
from llmrun.layouts import records
from llmrun.layouts.arena import address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.lowering.base import Lowered

WORK_TIMED = KernelName.of("team", "work_timed")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step: seconds, float64[threads, ops], in the order of Lowered.records.

    A thread's time of an op begins when it is done with the op before; `working` and `waiting` of all ops together are
    its time from the first op's beginning to the last one's end.
    """

    working: NDArray[np.float64]
    waiting: NDArray[np.float64]  # at the barrier that follows, for the other threads; 0 where there is none


@dataclass(frozen=True, slots=True)
class _Clock:
    """What the kernel calls for a stamp (records.STAMP_BYTES): two words, first * major + second are ticks."""

    address: int
    identity: int  # the call's first argument; negative: it takes none
    major: int
    ticks_per_second: float

    @classmethod
    def here(cls) -> _Clock:
        """About 25 ns a call, through the vDSO."""
        if os.name == "nt":
            kernel32 = ctypes.CDLL("kernel32")
            frequency = ctypes.c_int64()
            kernel32.QueryPerformanceFrequency(ctypes.byref(frequency))
            return cls(function_address(kernel32.QueryPerformanceCounter), -1, 1, float(frequency.value))
        identity = time.CLOCK_MONOTONIC
        if sys.platform == "darwin":
            identity = time.CLOCK_UPTIME_RAW  # the other one counts in microseconds there
        return cls(function_address(ctypes.CDLL(None).clock_gettime), identity, 10**9, 1e9)


class TimedTeam(Team):
    """A team whose steps can be asked for afterwards."""

    def __init__(self, lowered: Lowered, n_threads: int) -> None:
        super().__init__(lowered, n_threads, work=WORK_TIMED)
        self._stamps = np.zeros((n_threads, 1 + 2 * len(lowered.records), 2), np.int64)
        self._taken: list[NDArray[np.int64]] = []  # of each step; made into times later, as that takes 0.1 ms
        self._clock = _Clock.here()
        self._set(records.STEP_STAMPS, address_of(self._stamps))
        self._set_sync(records.SYNC_CLOCK, self._clock.address)
        self._set_sync(records.SYNC_CLOCK_ID, self._clock.identity)

    def _run_step(self) -> None:
        self._stamps[:] = 0
        super()._run_step()
        if not self._sync[records.SYNC_STOP // records.WORD]:
            self._taken.append(self._stamps.copy())

    def taken_times(self) -> list[StepTimes]:
        """Of every step since this was last asked that came to its end."""
        times = [self._times(stamps) for stamps in self._taken]
        self._taken.clear()
        return times

    def _times(self, stamps: NDArray[np.int64]) -> StepTimes:
        ticks = stamps[:, :, 0] * self._clock.major + stamps[:, :, 1]
        ticks = np.maximum.accumulate(ticks, axis=1)  # no stamp where there was no barrier
        spans = np.diff(ticks, axis=1) / self._clock.ticks_per_second
        return StepTimes(spans[:, 0::2], spans[:, 1::2])
