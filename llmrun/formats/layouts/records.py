"""The layout of the records that Python and the kernels share, and the version of the CPU engine's numerics.

An op record describes one kernel call in the plan. The step record holds everything that changes from step to step.
Kernels read both by address, and only this file knows the offsets. Words are int64. Other records describe the units of
LoRA adapters and the benchmarks of this machine's limits. A unit is a part of an op's work for one adapter. Units are
ordered by adapter.

In a step of one row, cheap row-wise ops are "replicated", which means that every thread computes the whole op and
writes its own copy of the result. The next op then needs no barrier before it, so each layer has 5 barriers instead of
10. The copy of thread t is row t of the buffer, which has at least one row per thread.

Two engines with equal NUMERICS compute equal bits from equal inputs. NUMERICS is here so that kernels, plans, saved
states and recordings can all import it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final, NamedTuple, TypeVar, cast

NUMERICS: Final = 2  # raise it on purpose, in the commit that changes a bit of any result


WORD: Final = 8  # bytes
CACHE_LINE: Final = 64  # bytes

# --- op record -------------------------------------------------------------------------------------------------------
OP_WORDS: Final = 32
OP_BYTES: Final = OP_WORDS * WORD
OP_KERNEL: Final = 0 * WORD  # address of the machine code
OP_FLAGS: Final = 1 * WORD
OP_ROWS: Final = 2 * WORD  # offset of the row count in the step record, such as STEP_ROWS or STEP_WANTED
OP_CLAIM: Final = 3 * WORD  # address of the claim counter, which has its own cache line
OP_ARGS: Final = 4 * WORD  # the kernel's own arguments start here (a NamedTuple from plan/ops)

FLAG_BARRIER: Final = 1  # wait for all threads after this op
FLAG_REPLICATED: Final = 2  # in a step of one row, every thread runs the whole op and no barrier follows
FLAG_PRIVATE_INPUT: Final = 4  # a replicated op wrote the input (or the first input, if there are several)
FLAG_PRIVATE_OUTPUT: Final = 8  # this op is replicated, and each thread writes its own output
FLAG_PRIVATE_SECOND: Final = 16  # like FLAG_PRIVATE_INPUT, for the second input
FLAG_PRIVATE_THIRD: Final = 32  # like FLAG_PRIVATE_INPUT, for the third input
FLAG_PRIVATE_FOURTH: Final = 64  # like FLAG_PRIVATE_INPUT, for the fourth input
FLAG_PRIVATE_FIFTH: Final = 128  # like FLAG_PRIVATE_INPUT, for the fifth input

Words = TypeVar("Words", bound=NamedTuple)


def offsets(words: type[Words]) -> Words:
    """Return an object with the fields of `words`, each of which holds the byte offset of its word in the op record.

    The object is actually a module, because Numba treats each attribute of a module as a constant. With a NamedTuple of
    27 words instead, the expert kernels in int8.py took a fifth longer to compile.
    """
    module = ModuleType(f"{words.__module__}.{words.__qualname__}")
    vars(module).update({name: OP_ARGS + WORD * index for index, name in enumerate(words._fields)})
    return cast("Words", module)


# --- step record -----------------------------------------------------------------------------------------------------
STEP_ROWS: Final = 0 * WORD
STEP_WANTED: Final = 1 * WORD  # number of rows whose logits or hidden states are requested
STEP_REPLICATED: Final = 2 * WORD  # 1 when the step has one row
STEP_TOKENS: Final = 3 * WORD  # int32[rows]
STEP_POSITIONS: Final = 4 * WORD  # int32[rows]
STEP_TABLES: Final = 5 * WORD  # int64[windows, rows]: addresses of the rows' block tables, which are int32[blocks]
STEP_WANTED_ROWS: Final = (
    6 * WORD
)  # int32[wanted]: the rows whose logits are requested, then those with hidden states only
STEP_ROTATIONS: Final = 7 * WORD  # float32[rows, rotated pairs of all ropes, 2]: cosine and sine
STEP_LOGITS: Final = 8 * WORD  # float32[scored, padded vocabulary]
STEP_ABORT: Final = 9 * WORD  # 1 requests a stop at the next barrier
STEP_PLAN: Final = 10 * WORD  # address of the first op record
STEP_N_OPS: Final = 11 * WORD
STEP_SYNC: Final = 12 * WORD  # address of the synchronization words
STEP_STAMPS: Final = 13 * WORD  # timed teams only: each thread's timestamps, one at the start and two per op
STEP_CHOSEN: Final = 14 * WORD  # number of slots, which is the number of rows times the experts per row
STEP_RUNS: Final = 15 * WORD  # number of sequences that have rows; 0 if the model has no recurrent state
STEP_RUN_LIST: Final = 16 * WORD  # int64[runs, RUN_WORDS] (kv.py)
STEP_RUN_ROWS: Final = 17 * WORD  # int32[rows]: the rows of the first run in order, then those of the second one, ...
STEP_SCORED: Final = 18 * WORD  # number of rows whose logits are requested
STEP_SCALES: Final = 19 * WORD  # float32[rows, adapters]: scales of LoRA adapters; 0 if no row of the step uses any
STEP_SEEN: Final = 20 * WORD  # int32[reaches, rows, 2]: the first position that a row sees, and the one after the last
STEP_PREFETCH: Final = 21 * WORD  # how integer weights are prefetched (PREFETCH_...)
STEP_IMAGES: Final = (
    22 * WORD
)  # int64[rows]: addresses of the rows of images, 0 for other rows; 0 if the step has no images
STEP_WORDS: Final = 23

PREFETCH_NONE: Final = 0
PREFETCH_LINEAR: Final = 1  # 4 KB ahead
PREFETCH_STREAMS: Final = 2  # four streams, each a quarter of the thread's next chunk

STAMP_BYTES: Final = 2 * WORD  # a clock writes a struct timespec, or a tick count in the first word

# --- synchronization words, each on its own cache line ------------------------------------------------------------
SYNC_ARRIVED: Final = 0 * CACHE_LINE
SYNC_GENERATION: Final = 1 * CACHE_LINE
SYNC_SLEEPERS: Final = 2 * CACHE_LINE
SYNC_STOP: Final = 3 * CACHE_LINE  # generation at which a cancelled step ends, or 0 if the step is not cancelled
SYNC_STEP: Final = 4 * CACHE_LINE  # ID of the step to run; workers wait for this to change
SYNC_PARKED: Final = 5 * CACHE_LINE  # number of workers that are asleep between steps
SYNC_FINISHED: Final = 6 * CACHE_LINE  # number of workers that have finished the current step
SYNC_DONE: Final = 7 * CACHE_LINE  # ID of the last finished step; the main thread waits for this to change
SYNC_EXIT: Final = 8 * CACHE_LINE  # 1 tells the workers to exit
SYNC_SYSCALL: Final = 9 * CACHE_LINE  # constants start here, such as addresses and system call numbers
SYNC_FUTEX: Final = SYNC_SYSCALL + WORD  # the futex system call number, or 0 if the system has no futex
SYNC_DOZE: Final = SYNC_SYSCALL + 2 * WORD  # address of a function that sleeps briefly, for systems without futexes
SYNC_DOZE_FOR: Final = SYNC_SYSCALL + 3 * WORD  # the argument for the function at SYNC_DOZE
SYNC_SPIN: Final = SYNC_SYSCALL + 4 * WORD  # spin iterations before a thread sleeps
SYNC_CLOCK: Final = SYNC_SYSCALL + 5 * WORD  # timed teams only: address of the function that writes a timestamp
SYNC_CLOCK_ID: Final = SYNC_SYSCALL + 6 * WORD  # first argument for the function at SYNC_CLOCK; negative if it has none
SYNC_BYTES: Final = 10 * CACHE_LINE


BLOCK_ROWS: Final = 4  # rows of a work item
EXPAND_GROUPS: Final = 16  # groups of 16 outputs of a work item of `expand`


class Unit(NamedTuple):
    """A unit. `factor` is a float32; the product with the scale of a row multiplies the low-rank product.

    weights      address of the packed matrix, or of one of its groups
    group_bytes  bytes from one group to the next
    columns      columns of the packed matrix, padded to a multiple of 4
    adapter      index of the adapter
    offset       bytes from the start of a row of low-rank products to those of the unit
    """

    weights: int
    group_bytes: int
    columns: int
    adapter: int
    offset: int
    factor: int


UNIT_BYTES: Final = WORD * len(Unit._fields)
UNIT_WEIGHTS, UNIT_GROUP_BYTES, UNIT_COLUMNS, UNIT_ADAPTER, UNIT_OFFSET, UNIT_FACTOR = range(0, UNIT_BYTES, WORD)


MOST_SUMS = 12


READ_BYTES = 512  # the number of consecutive bytes that `read` reads from one stream at a time


class ReadWords(NamedTuple):
    """The arguments of `read` in its op record.

    streams  number of equal parts of a chunk that are read side by side; each is a multiple of READ_BYTES
    ahead    prefetch distance in bytes, or 0 to prefetch nothing
    """

    address: int
    chunks: int
    chunk_bytes: int
    results: int
    streams: int
    ahead: int


class MultiplyWords(NamedTuple):
    """The arguments of `multiply` in its op record."""

    rounds: int
    vectors: int
    results: int


def independent_sums(level: str) -> int:
    """Return how many independent sums `multiply` computes to hide the latency of the multiply instruction.

    Their number is limited by the number of registers.
    """
    return MOST_SUMS if level == "avx512vnni" else 4


def products_a_round(level: str) -> int:
    """Return how many int8 multiply-adds `multiply` performs per round."""
    return (128 if level == "neoni8mm" else 64) * independent_sums(level)
