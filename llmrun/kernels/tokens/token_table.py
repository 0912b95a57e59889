"""The lookup tables of a vocabulary, which map text to tokens and pairs of adjacent symbols to merged tokens.

Both are hash tables with open addressing, which `build` fills once per model. They contain only numbers, and the texts
of the tokens stay in the file's header. Building both tables takes 30 ms for Llama 3 (128k tokens and 280k merges).
Building Python dictionaries would take 450 ms.

    token table   int64[slots], where 0 is a free slot: high half of the text's hash | id + 1
    pair table    (int64 key + 1, int64 value)[slots], where 0 is a free slot:
                  key = left << 32 | right, value = rank << 32 | merged

The number of slots is a power of two, and `mask` is that number minus one.

The binary min-heap of the merge kernels is also here. Its int64 keys are in memory that the caller provides, and the
caller keeps track of the size.
"""

from __future__ import annotations

from llmrun.formats.layouts.tokens import NOT_FOUND
from llmrun.kernels.code.load_store import load_i32, load_i64, load_u8, store_i32, store_i64
from llmrun.kernels.compiler import inline_function, kernel


@inline_function
def heap_push(heap: int, size: int, key: int) -> None:
    """Add a key to a heap of `size` keys."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        above = load_i64(heap + parent * 8)
        if above <= key:
            break
        store_i64(heap + child * 8, above)
        child = parent
    store_i64(heap + child * 8, key)


@inline_function
def heap_pop(heap: int, size: int) -> int:
    """Remove and return the smallest key of a heap of `size` > 0 keys."""
    least: int = load_i64(heap)
    last = size - 1
    key = load_i64(heap + last * 8)
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= last:
            break
        below = load_i64(heap + child * 8)
        if child + 1 < last:
            right = load_i64(heap + (child + 1) * 8)
            if right < below:
                child += 1
                below = right
        if below >= key:
            break
        store_i64(heap + parent * 8, below)
        parent = child
    store_i64(heap + parent * 8, key)
    return least


LOW_HALF = 0xFFFFFFFF
SPACE = 0x20

FNV_BASIS = 0xCBF29CE484222325 - (1 << 64)
FNV_PRIME = 0x100000001B3
GOLDEN_RATIO = 0x9E3779B97F4A7C15 - (1 << 64)


@inline_function
def hash_bytes(state: int, address: int, length: int) -> int:
    """Compute the FNV-1a hash of `length` bytes, starting from `state`.

    The `state` argument makes it possible to hash the concatenation of two texts without writing it to memory.
    """
    for i in range(length):
        state = (state ^ load_u8(address + i)) * FNV_PRIME
    return state


@inline_function
def finished_hash(state: int) -> int:
    mixed = (state ^ ((state >> 32) & LOW_HALF)) * GOLDEN_RATIO
    return mixed ^ ((mixed >> 32) & LOW_HALF)


@inline_function
def equal_bytes(a: int, b: int, length: int) -> bool:
    i = 0
    while i < length and load_u8(a + i) == load_u8(b + i):
        i += 1
    return i == length


@inline_function
def find_token(
    table: int,
    mask: int,
    starts: int,
    lengths: int,
    state: int,
    first: int,
    first_length: int,
    second: int,
    second_length: int,
) -> tuple[int, int]:
    """Find the token whose text is `first` followed by `second`. `state` is the FNV state after hashing that text.

    Returns (id or NOT_FOUND, index of the token's slot or of the free slot for it).
    """
    hashed = finished_hash(state)
    slot = hashed & mask
    while True:
        word = load_i64(table + slot * 8)
        if word == 0:
            return NOT_FOUND, slot
        if (word ^ hashed) >> 32 == 0:
            token = (word & LOW_HALF) - 1
            start = load_i64(starts + token * 8)
            if (
                load_i64(lengths + token * 8) == first_length + second_length
                and equal_bytes(start, first, first_length)
                and equal_bytes(start + first_length, second, second_length)
            ):
                return token, slot
        slot = (slot + 1) & mask


@inline_function
def find_text(table: int, mask: int, starts: int, lengths: int, address: int, length: int) -> int:
    """Return the id of the token with this text, or NOT_FOUND."""
    state = hash_bytes(FNV_BASIS, address, length)
    token: int
    token, _ = find_token(table, mask, starts, lengths, state, address, length, address, 0)
    return token


@inline_function
def pair_slot(pairs: int, pair_mask: int, key: int) -> int:
    """Return the address of the slot that contains `key`, or of the free slot for it."""
    hashed = key * GOLDEN_RATIO
    slot = (hashed ^ ((hashed >> 32) & LOW_HALF)) & pair_mask
    while True:
        address = pairs + slot * 16
        found = load_i64(address)
        if found == 0 or found == key + 1:
            return address
        slot = (slot + 1) & pair_mask


@inline_function
def add_tokens(starts: int, lengths: int, n_tokens: int, table: int, mask: int) -> None:
    """Insert all tokens. If several have the same text, the first one wins."""
    for token in range(n_tokens):
        address = load_i64(starts + token * 8)
        length = load_i64(lengths + token * 8)
        state = hash_bytes(FNV_BASIS, address, length)
        known, slot = find_token(table, mask, starts, lengths, state, address, length, address, 0)
        if known == NOT_FOUND:
            store_i64(table + slot * 8, (finished_hash(state) & ~LOW_HALF) | (token + 1))


@inline_function
def add_merge(
    rank: int, address: int, length: int, table: int, mask: int, starts: int, lengths: int, pairs: int, pair_mask: int
) -> bool:
    """Insert the merge "left right" as token ids. Return False if left, right or the merged text is not a token."""
    middle = 1  # the left symbol is never empty, and it may begin with a space
    while middle < length and load_u8(address + middle) != SPACE:
        middle += 1
    right_length = length - middle - 1
    if right_length < 1:
        return True  # a merge without a right symbol never applies
    right_address = address + middle + 1
    state = hash_bytes(FNV_BASIS, address, middle)
    left, _ = find_token(table, mask, starts, lengths, state, address, middle, address, 0)
    right = find_text(table, mask, starts, lengths, right_address, right_length)
    state = hash_bytes(state, right_address, right_length)
    merged, _ = find_token(table, mask, starts, lengths, state, address, middle, right_address, right_length)
    if left == NOT_FOUND or right == NOT_FOUND or merged == NOT_FOUND:
        return False
    key = left << 32 | right
    slot = pair_slot(pairs, pair_mask, key)
    if load_i64(slot) == 0:  # if a merge is listed twice, the first one wins
        store_i64(slot, key + 1)
        store_i64(slot + 8, rank << 32 | merged)
    return True


@kernel
def build(op: int, step: int, thread: int, n_threads: int) -> None:
    """Fill both tables and look up a list of texts.

    The op record has these words in this order, where arrays are addresses:

    starts, lengths, n_tokens        the address and length of each token's text, int64[n], n
    table, mask                      the token table and its mask
    query_starts, query_lengths      the address and length of each text to look up, int64[q]
    n_queries                        q
    query_ids                        output: int32[q], the id of each text, or NOT_FOUND
    merge_starts, merge_lengths      the address and length of each merge, int64[m]
    n_merges                         m
    pairs, pair_mask                 the pair table and its mask
    unresolved, n_unresolved         output: indices of merges with a text that is not a token, int32[m], and their
                                     number, int64[1]
    """
    starts = load_i64(op)
    lengths = load_i64(op + 8)
    table = load_i64(op + 24)
    mask = load_i64(op + 32)
    add_tokens(starts, lengths, load_i64(op + 16), table, mask)

    query_starts = load_i64(op + 40)
    query_lengths = load_i64(op + 48)
    query_ids = load_i64(op + 64)
    for query in range(load_i64(op + 56)):
        address = load_i64(query_starts + query * 8)
        length = load_i64(query_lengths + query * 8)
        store_i32(query_ids + query * 4, find_text(table, mask, starts, lengths, address, length))

    merge_starts = load_i64(op + 72)
    merge_lengths = load_i64(op + 80)
    pairs = load_i64(op + 96)
    pair_mask = load_i64(op + 104)
    unresolved = load_i64(op + 112)
    n_unresolved = 0
    for rank in range(load_i64(op + 88)):
        address = load_i64(merge_starts + rank * 8)
        length = load_i64(merge_lengths + rank * 8)
        if not add_merge(rank, address, length, table, mask, starts, lengths, pairs, pair_mask):
            store_i32(unresolved + n_unresolved * 4, rank)
            n_unresolved += 1

    store_i64(load_i64(op + 120), n_unresolved)


@inline_function
def emit_inserted(
    position: int, next_insert: int, insert_at: int, insert_ids: int, n_inserts: int, out: int, n_out: int
) -> tuple[int, int]:
    """Write the control tokens inserted at or before `position` in the text. Return (next insert, number of ids)."""
    while next_insert < n_inserts and load_i64(insert_at + next_insert * 8) <= position:
        store_i32(out + n_out * 4, load_i32(insert_ids + next_insert * 4))
        next_insert += 1
        n_out += 1
    return next_insert, n_out
