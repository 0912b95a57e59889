"""The main loop of the worker threads, which run the plan, wait at barriers, and sleep between steps.

A barrier consists of an arrival counter and a generation number, which each thread reads before it arrives. Waiting
threads first spin, because the other threads usually arrive within microseconds. Then they sleep on a futex, because
another program may be using the cores that the remaining threads need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmrun.formats.layouts import records
from llmrun.kernels.code import simd
from llmrun.kernels.code.load_store import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_c1,
    call_c2,
    call_c6,
    call_kernel,
    load_i64,
)
from llmrun.kernels.compiler import inline_function, kernel, kernel_family

_FUTEX_WAIT_PRIVATE = 128
_FUTEX_WAKE_PRIVATE = 129
_EVERYONE = 1 << 30

SYNC_ARRIVED = records.SYNC_ARRIVED
SYNC_GENERATION = records.SYNC_GENERATION
SYNC_SLEEPERS = records.SYNC_SLEEPERS
SYNC_STOP = records.SYNC_STOP
SYNC_STEP = records.SYNC_STEP
SYNC_PARKED = records.SYNC_PARKED
SYNC_FINISHED = records.SYNC_FINISHED
SYNC_DONE = records.SYNC_DONE
SYNC_EXIT = records.SYNC_EXIT


@inline_function
def _sleep_while(sync: Any, word: Any, value: Any, timeout: Any) -> Any:
    """Sleep while the low half of a word equals `value`, until the thread is woken or the timeout expires.

    `timeout` is the address of a timespec, or 0 to wait forever. On systems without futexes, sleep once for a short
    time.
    """
    futex = load_i64(sync + records.SYNC_FUTEX)
    if futex != 0:
        call_c6(load_i64(sync + records.SYNC_SYSCALL), futex, word, _FUTEX_WAIT_PRIVATE, value, timeout, 0)
    else:
        call_c1(load_i64(sync + records.SYNC_DOZE), load_i64(sync + records.SYNC_DOZE_FOR))


@inline_function
def _wake_all(sync: Any, word: Any) -> Any:
    futex = load_i64(sync + records.SYNC_FUTEX)
    if futex != 0:
        call_c6(load_i64(sync + records.SYNC_SYSCALL), futex, word, _FUTEX_WAKE_PRIVATE, _EVERYONE, 0, 0)


@inline_function
def _no_stamp(sync: Any, step: Any, thread: Any, number: Any) -> Any:
    """Do nothing. Teams that are not timed use this function instead of `_stamp`."""


@inline_function
def _stamp(sync: Any, step: Any, thread: Any, number: Any) -> Any:
    """Write the current time to a thread's timestamp with index `number`."""
    n_stamps = 1 + 2 * load_i64(step + records.STEP_N_OPS)
    at = load_i64(step + records.STEP_STAMPS) + (thread * n_stamps + number) * records.STAMP_BYTES
    clock, identity = load_i64(sync + records.SYNC_CLOCK), load_i64(sync + records.SYNC_CLOCK_ID)
    if identity >= 0:
        call_c2(clock, identity, at)
    else:
        call_c1(clock, at)


@kernel_family
def work(level: str) -> Callable[..., None]:
    """Build a worker's main loop, which runs the plan once per step until SYNC_EXIT is set. The loop ignores `op`."""
    return _worker(level, _no_stamp)


@kernel_family
def work_timed(level: str) -> Callable[..., None]:
    """Build the main loop of a timed team.

    The loop writes timestamps before the first op, after the work of each op, and after each barrier.
    """
    return _worker(level, _stamp)


@kernel_family
def spin(level: str) -> Callable[..., None]:
    """Build a kernel that spins `op` times like a waiting thread, so that the main thread can time it."""
    spin_while = _spinning(level)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        spin_while(load_i64(step + records.STEP_SYNC) + SYNC_EXIT, 0, op)

    return run


def _spinning(level: str) -> Any:
    """Return a function that waits until a word differs from `old`, for at most `most` pause instructions."""
    pause = simd.Operations(level).pause

    @inline_function
    def spin_while(word: Any, old: Any, most: Any) -> Any:
        for _ in range(most):
            if atomic_load(word) != old:
                return
            pause()

    return spin_while


def _worker(level: str, stamp: Any) -> Callable[..., None]:
    spin_while = _spinning(level)

    @inline_function
    def wait_for_change(sync: Any, word: Any, old: Any, sleepers: Any) -> Any:
        spin_while(word, old, load_i64(sync + records.SYNC_SPIN))
        if atomic_load(word) != old:
            return
        atomic_add(sleepers, 1)
        while atomic_load(word) == old:
            _sleep_while(sync, word, old, 0)
        atomic_add(sleepers, -1)

    @inline_function
    def barrier(sync: Any, step: Any, n_threads: Any) -> Any:
        """Wait for all threads and return whether the step was cancelled.

        The last thread to arrive decides whether to cancel, so that all threads agree.
        """
        generation = atomic_load(sync + SYNC_GENERATION)
        if atomic_add(sync + SYNC_ARRIVED, 1) == n_threads - 1:
            if load_i64(step + records.STEP_ABORT) != 0 and load_i64(sync + SYNC_STOP) == 0:
                atomic_store(sync + SYNC_STOP, generation + 1)
            atomic_store(sync + SYNC_ARRIVED, 0)
            atomic_store(sync + SYNC_GENERATION, generation + 1)
            if atomic_load(sync + SYNC_SLEEPERS) != 0:
                _wake_all(sync, sync + SYNC_GENERATION)
        else:
            wait_for_change(sync, sync + SYNC_GENERATION, generation, sync + SYNC_SLEEPERS)
        stop = atomic_load(sync + SYNC_STOP)
        return stop != 0 and stop <= generation + 1

    @inline_function
    def run_plan(sync: Any, step: Any, thread: Any, n_threads: Any) -> Any:
        plan = load_i64(step + records.STEP_PLAN)
        replicated = load_i64(step + records.STEP_REPLICATED)
        stamp(sync, step, thread, 0)
        for index in range(load_i64(step + records.STEP_N_OPS)):
            op = plan + index * records.OP_BYTES
            call_kernel(load_i64(op + records.OP_KERNEL), op, step, thread, n_threads)
            stamp(sync, step, thread, 2 * index + 1)
            flags = load_i64(op + records.OP_FLAGS)
            apart = replicated != 0 and flags & records.FLAG_REPLICATED != 0
            if flags & records.FLAG_BARRIER and not apart:
                if barrier(sync, step, n_threads):
                    return
                stamp(sync, step, thread, 2 * index + 2)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        sync = load_i64(step + records.STEP_SYNC)
        seen = 0
        while True:
            wait_for_change(sync, sync + SYNC_STEP, seen, sync + SYNC_PARKED)
            seen = atomic_load(sync + SYNC_STEP)
            if atomic_load(sync + SYNC_EXIT) != 0:
                return
            run_plan(sync, step, thread, n_threads)
            if atomic_add(sync + SYNC_FINISHED, 1) == n_threads - 1:
                atomic_store(sync + SYNC_DONE, seen)
                _wake_all(sync, sync + SYNC_DONE)

    return run


@kernel
def start(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Make the workers run step number `op`, or exit if SYNC_EXIT is set. The main thread calls this function."""
    sync = load_i64(step + records.STEP_SYNC)
    atomic_store(sync + SYNC_STEP, op)
    if atomic_load(sync + SYNC_PARKED) != 0:
        _wake_all(sync, sync + SYNC_STEP)


@kernel
def wait(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Sleep until the step is done, a signal arrives, or the time in the timespec at `thread` has passed.

    The main thread calls this function. `op` is the number of the previous step.
    """
    sync = load_i64(step + records.STEP_SYNC)
    if atomic_load(sync + SYNC_DONE) == op:
        _sleep_while(sync, sync + SYNC_DONE, op, thread)
