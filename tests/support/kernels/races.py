"""Which threads meet in memory while a lowered plan runs: by what its records read and write, and its barriers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmrun.backends.cpu.lowering.base import Lowered
from llmrun.layouts import records
from llmrun.layouts.arena import address_of
from llmrun.layouts.packed_types import GROUP_ROWS

# Words of an op record, counted from its arguments: what a kernel reads and what it writes.
READS = {
    "embed": [0],
    "rmsnorm": [0],
    "quantize": [0],
    "linear.int8": [9, 11, 12, 13, 14],
    "linear.floats": [4],
    "rope_store": [0, 10, 12],
    "rotate": [0],
    "attention": [0, 4],
    "capped_attention": [0, 4],
    "merge": [0],
    "gated": [0, 2],
    "layernorm": [0],
    "add": [2, 4, 8],
    "join": [0, 4],
    "keep": [0],
    "convolve": [0, 2],
    "soft_cap": [],
    "route": [0],
    "group": [3],
    "experts.int8": [9, 11, 12, 13, 14, 23, 25],
    "experts.floats": [4, 11, 13],
    "bias": [0, 6],
    "combine": [0, 2, 3, 6],
}
WRITES = {
    "embed": [8],
    "rmsnorm": [2],
    "quantize": [2, 4, 5, 6, 7],
    "linear.int8": [16],
    "linear.floats": [6],
    "rope_store": [2, 16],
    "rotate": [2],
    "attention": [2, 10],
    "capped_attention": [2, 10],
    "merge": [2],
    "gated": [4],
    "layernorm": [2],
    "add": [0],
    "join": [8],
    "keep": [2],
    "convolve": [6],
    "soft_cap": [],  # the logits
    "route": [10, 11],
    "group": [0, 4, 5, 6],
    "experts.int8": [16],
    "experts.floats": [6],
    "bias": [2],
    "combine": [6],
}
CACHE_WORDS = {("rope_store", 16), ("attention", 4), ("capped_attention", 4), ("keep", 2), ("convolve", 2)}
# Tables of a routing, of which each thread has its own in a step of one row.
TABLE_WORDS = {("group", 3), ("experts.int8", 23), ("experts.int8", 25), ("experts.floats", 11), ("experts.floats", 13)}
TABLE_WORDS |= {("bias", 6), ("combine", 2), ("combine", 3)}
# Inputs that are not an op's first have flags of their own.
SECOND_INPUTS = {("gated", 2), ("add", 4), ("join", 4), ("rope_store", 10)}
THIRD_INPUTS = {("add", 8), ("rope_store", 12)}
N_GROUPS = 1  # word of a product: groups of its outputs
GROUP_BYTES = 4 * GROUP_ROWS


@dataclass(frozen=True)
class Access:
    """One record's use of one buffer, `offset` bytes behind its beginning at `address`."""

    record: int
    address: int
    offset: int
    writes: bool
    private: bool  # each thread has a copy in a step of one row
    replicated: bool  # every thread writes the same bytes


def accesses(lowered: Lowered) -> Iterator[list[Access]]:
    """What each record touches, in order."""
    first = records.OP_ARGS // records.WORD
    for index, (name, words) in enumerate(zip(lowered.kernels, lowered.records.tolist(), strict=True)):
        kernel = name.module if name.function in ("linear", "experts") else name.function
        flags = words[records.OP_FLAGS // records.WORD]
        uses = [(word, False, input_flag(kernel, word)) for word in READS[kernel]]
        uses += [(word, True, records.FLAG_PRIVATE_OUTPUT) for word in WRITES[kernel]]
        offsets = {word: offset_of_head(lowered, index, words[first + word]) for word, *_ in uses}
        yield [
            Access(
                index,
                words[first + word] - offsets[word],
                offsets[word],
                writes,
                (bool(flags & private) and (kernel, word) not in CACHE_WORDS) or (kernel, word) in TABLE_WORDS,
                bool(flags & records.FLAG_REPLICATED),
            )
            for word, writes, private in uses
            if words[first + word]  # the logits' address comes with each step
        ]


def offset_of_head(lowered: Lowered, record: int, address: int) -> int:
    """How far into a buffer a product of one head among many reads or writes."""
    of_the_same = [number for number, origin in enumerate(lowered.origins) if origin == lowered.origins[record]]
    products = [number for number in of_the_same if lowered.kernels[number].function == "linear"]
    if len(products) == 1 or record not in products:
        return 0
    starts = [address_of(part) for part in lowered.keep if isinstance(part, np.ndarray)]
    return min(address - start for start in starts if start <= address)


def input_flag(kernel: str, word: int) -> int:
    if (kernel, word) in SECOND_INPUTS:
        return records.FLAG_PRIVATE_SECOND
    return records.FLAG_PRIVATE_THIRD if (kernel, word) in THIRD_INPUTS else records.FLAG_PRIVATE_INPUT


def races(lowered: Lowered, *, one_row: bool) -> list[tuple[Access, Access]]:
    """Pairs of uses of one buffer, one of them writing, that no barrier keeps apart and no thread has for itself."""
    found = []
    since_barrier: list[Access] = []
    flags = lowered.records[:, records.OP_FLAGS // records.WORD].tolist()
    for uses, flag in zip(accesses(lowered), flags, strict=True):
        for use in uses:
            for other in since_barrier:
                if use.address != other.address or not (use.writes or other.writes):
                    continue
                if lie_beside(lowered, use, other):
                    continue
                own_copies = one_row and use.private and other.private
                if not own_copies:
                    found.append((other, use))
        since_barrier += uses
        alone = one_row and flag & records.FLAG_REPLICATED
        if flag & records.FLAG_BARRIER and not alone:
            since_barrier = []
    return [(a, b) for a, b in found if not (one_row and a.replicated and shared_cache(lowered, a))]


def needless_barriers(lowered: Lowered, *, one_row: bool) -> list[str]:
    """Kernels whose barrier could be left out without a race, but for those that one row does without."""
    found = []
    column = lowered.records[:, records.OP_FLAGS // records.WORD]
    for index in np.flatnonzero(column & records.FLAG_BARRIER)[:-1].tolist():
        if one_row and column[index] & records.FLAG_REPLICATED:
            continue
        column[index] &= ~records.FLAG_BARRIER
        if not races(lowered, one_row=one_row):
            found.append(str(lowered.kernels[index]))
        column[index] |= records.FLAG_BARRIER
    return found


def lie_beside(lowered: Lowered, a: Access, b: Access) -> bool:
    """Outputs of two heads' products of one op, of which neither reaches into the other."""
    same_op = lowered.origins[a.record] == lowered.origins[b.record] and a.record != b.record
    if not same_op or any(lowered.kernels[use.record].function != "linear" for use in (a, b)):
        return False
    n_groups = lowered.records[a.record, records.OP_ARGS // records.WORD + N_GROUPS]
    return a.writes and b.writes and abs(a.offset - b.offset) >= GROUP_BYTES * int(n_groups)


def shared_cache(lowered: Lowered, use: Access) -> bool:
    """In a step of one row every thread stores the same keys and values, and reads back what it wrote itself."""
    first = records.OP_ARGS // records.WORD
    return any(
        name.function == kernel and words[first + word] == use.address
        for name, words in zip(lowered.kernels, lowered.records.tolist(), strict=True)
        for kernel, word in CACHE_WORDS
    )
