"""Where things lie in the records that Python and the kernels share. Words are int64.

An op record describes one kernel call of the plan; the step record what changes from step to step. Kernels read both by
address; only this file knows the positions.

In a step of a single row ("replicated"), cheap row-wise ops are run by every thread for itself, each writing its own
copy, so that no barrier is needed before the next op: 5 barriers a layer instead of 10. Thread t's copy is row t of
the buffer, which has at least as many rows as there are threads.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final, NamedTuple, TypeVar, cast

WORD: Final = 8  # bytes
CACHE_LINE: Final = 64  # bytes

# --- op record -------------------------------------------------------------------------------------------------------
OP_WORDS: Final = 32
OP_BYTES: Final = OP_WORDS * WORD
OP_KERNEL: Final = 0 * WORD  # address of the machine code
OP_FLAGS: Final = 1 * WORD
OP_ROWS: Final = 2 * WORD  # offset in the step record of the number of rows: STEP_ROWS or STEP_WANTED
OP_CLAIM: Final = 3 * WORD  # address of the claim counter, alone on its cache line
OP_ARGS: Final = 4 * WORD  # the kernel's own words from here on: a NamedTuple of plan/ops

FLAG_BARRIER: Final = 1  # wait for all threads after this op
FLAG_REPLICATED: Final = 2  # in a step of one row: every thread runs it whole, and no barrier follows
FLAG_PRIVATE_INPUT: Final = 4  # the input, or the first of several, was written by a replicated op
FLAG_PRIVATE_OUTPUT: Final = 8  # the output is written by this replicated op
FLAG_PRIVATE_SECOND: Final = 16  # as FLAG_PRIVATE_INPUT, of an op's second input
FLAG_PRIVATE_THIRD: Final = 32

Words = TypeVar("Words", bound=NamedTuple)


def offsets(words: type[Words]) -> Words:
    """The same fields, with the byte offset of each word in the op record instead of the word itself.

    They are attributes of a module made for it, which Numba takes for constants one by one: the fields of a NamedTuple
    of 27 words made int8.py's experts a fifth slower to compile.
    """
    module = ModuleType(f"{words.__module__}.{words.__qualname__}")
    vars(module).update({name: OP_ARGS + WORD * index for index, name in enumerate(words._fields)})
    return cast("Words", module)


# --- step record -----------------------------------------------------------------------------------------------------
STEP_ROWS: Final = 0 * WORD
STEP_WANTED: Final = 1 * WORD  # rows whose logits are asked for
STEP_REPLICATED: Final = 2 * WORD  # 1 when the step has one row
STEP_TOKENS: Final = 3 * WORD  # int32[rows]
STEP_POSITIONS: Final = 4 * WORD  # int32[rows]
STEP_TABLES: Final = 5 * WORD  # int64[windows, rows]: address of the row's block table, int32[blocks], for each window
STEP_WANTED_ROWS: Final = 6 * WORD  # int32[wanted]: row of each wanted one
STEP_ROTATIONS: Final = 7 * WORD  # float32[rows, rotated pairs of all ropes, 2]: cosine and sine
STEP_LOGITS: Final = 8 * WORD  # float32[wanted, padded vocabulary]
STEP_ABORT: Final = 9 * WORD  # 1: stop at the next barrier
STEP_PLAN: Final = 10 * WORD  # address of the first op record
STEP_N_OPS: Final = 11 * WORD
STEP_SYNC: Final = 12 * WORD  # address of the words the team meets at
STEP_STAMPS: Final = 13 * WORD  # of a timed team: a clock's stamps for each thread, one and then two for each op
STEP_CHOSEN: Final = 14 * WORD  # rows, once for each expert that one is sent to
STEP_WORDS: Final = 16

STAMP_BYTES: Final = 2 * WORD  # what a clock writes: a struct timespec, or a count of ticks and nothing

# --- synchronization words, each on its own cache line ------------------------------------------------------------
SYNC_ARRIVED: Final = 0 * CACHE_LINE
SYNC_GENERATION: Final = 1 * CACHE_LINE
SYNC_SLEEPERS: Final = 2 * CACHE_LINE
SYNC_STOP: Final = 3 * CACHE_LINE  # generation from which a cancelled step is over; 0: not cancelled
SYNC_STEP: Final = 4 * CACHE_LINE  # number of the step to run; the workers wait for it to change
SYNC_PARKED: Final = 5 * CACHE_LINE  # workers asleep between steps
SYNC_FINISHED: Final = 6 * CACHE_LINE  # workers that finished the current step
SYNC_DONE: Final = 7 * CACHE_LINE  # number of the last finished step; the main thread waits for it
SYNC_EXIT: Final = 8 * CACHE_LINE  # 1: workers leave
SYNC_SYSCALL: Final = 9 * CACHE_LINE  # constants: addresses and numbers of the operating system's calls
SYNC_FUTEX: Final = SYNC_SYSCALL + WORD  # number of the futex call, 0 where there is none
SYNC_DOZE: Final = SYNC_SYSCALL + 2 * WORD  # where there is no futex: address of a call that sleeps a moment
SYNC_DOZE_FOR: Final = SYNC_SYSCALL + 5 * WORD  # and its argument
SYNC_SPIN: Final = SYNC_SYSCALL + 3 * WORD  # pauses before a barrier sleeps
SYNC_IDLE_SPIN: Final = SYNC_SYSCALL + 4 * WORD  # pauses before a worker parks between steps
SYNC_CLOCK: Final = SYNC_SYSCALL + 6 * WORD  # of a timed team: address of the call that writes a stamp
SYNC_CLOCK_ID: Final = SYNC_SYSCALL + 7 * WORD  # and its first argument; negative: it takes none
SYNC_BYTES: Final = 10 * CACHE_LINE
