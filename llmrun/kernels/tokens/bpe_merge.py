"""Byte-level BPE, which converts the pieces of a text to token ids by merging adjacent symbols, lowest rank first.

Symbols are token ids from the start. The initial symbols are the ids of bytes, or of characters in vocabularies that
spell tokens in characters. A merge is therefore a single lookup of a pair of ids. For short pieces, all ranks are
scanned after every merge. For long pieces, the ranks are kept in a heap, because some pieces are very long, such as
1 MiB of the same letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmrun.formats.layouts.tokens import NOT_FOUND
from llmrun.kernels.code.load_store import load_i32, load_i64, load_u8, store_i32, store_i64, store_u8
from llmrun.kernels.compiler import inline_function, kernel
from llmrun.kernels.tokens.token_table import LOW_HALF, emit_inserted, find_text, heap_pop, heap_push, pair_slot

# Up to this many symbols, scanning all ranks is faster than a heap. Prose rarely has longer pieces.
SHORT_PIECE = 24
NO_RANK = 0x7FFFFFFF


def merge_by_priority(symbols: Sequence[str], priority: Callable[[str, str], float | None]) -> list[str]:
    """Merge adjacent pairs, lowest priority first, until no pair has a priority. The leftmost pair wins a tie.

    This is the readable twin of both merge kernels.
    """
    merged = list(symbols)
    while True:
        found = [
            (value, i) for i in range(len(merged) - 1) if (value := priority(merged[i], merged[i + 1])) is not None
        ]
        if not found:
            return merged
        _, i = min(found)
        merged[i : i + 2] = [merged[i] + merged[i + 1]]


# Byte offsets of the words in the op record.
TEXT, ENDS, N_PIECES, INSERT_AT, INSERT_IDS, N_INSERTS = range(0, 48, 8)
BYTE_SYMBOLS, PAIRS, PAIR_MASK, EMITTED, RAW_BYTE_IDS = range(48, 88, 8)
STARTS, LENGTHS, TABLE, MASK, LONGEST_WHOLE, SPELLING = range(88, 136, 8)
WHOLE_BEGINS, BY_CHARACTER = range(136, 152, 8)
SCRATCH, IDS, COUNT = range(152, 176, 8)

# If a character has no symbol, each of its bytes b becomes the symbol UNKNOWN_BYTES - b, which never merges.
UNKNOWN_BYTES = -2


@inline_function
def look_up_pair(op: int, left: int, right: int, ranks: int, products: int, at: int) -> int:
    """Store a pair's rank and merged symbol at index `at`. Return the rank, or NO_RANK if the pair does not merge."""
    slot = pair_slot(load_i64(op + PAIRS), load_i64(op + PAIR_MASK), left << 32 | right)
    if load_i64(slot) == 0:
        store_i32(ranks + at * 4, NO_RANK)
        return NO_RANK
    value: int = load_i64(slot + 8)
    store_i32(ranks + at * 4, value >> 32)
    store_i32(products + at * 4, value & LOW_HALF)
    return value >> 32


@inline_function
def merge_short(op: int, n: int, symbols: int, ranks: int, products: int) -> int:
    """Merge `n` symbols in place and return the number of symbols that remain."""
    for i in range(n - 1):
        left, right = load_i32(symbols + i * 4), load_i32(symbols + i * 4 + 4)
        look_up_pair(op, left, right, ranks, products, i)
    while n > 1:
        best = NO_RANK
        at = 0
        for i in range(n - 1):
            rank = load_i32(ranks + i * 4)
            if rank < best:
                best = rank
                at = i
        if best == NO_RANK:
            break
        symbol = load_i32(products + at * 4)
        store_i32(symbols + at * 4, symbol)
        n -= 1
        for i in range(at + 1, n):
            store_i32(symbols + i * 4, load_i32(symbols + i * 4 + 4))
            store_i32(ranks + i * 4, load_i32(ranks + i * 4 + 4))
            store_i32(products + i * 4, load_i32(products + i * 4 + 4))
        if at > 0:
            look_up_pair(op, load_i32(symbols + at * 4 - 4), symbol, ranks, products, at - 1)
        if at + 1 < n:
            look_up_pair(op, symbol, load_i32(symbols + at * 4 + 4), ranks, products, at)
    return n


@inline_function
def queue_pair(op: int, at: int, symbols: int, following: int, ranks: int, products: int, heap: int, size: int) -> int:
    """Push the pair that starts at index `at` onto the heap if it can merge, and return the size of the heap."""
    store_i32(ranks + at * 4, NO_RANK)
    right = load_i32(following + at * 4)
    if right < 0:
        return size
    rank = look_up_pair(op, load_i32(symbols + at * 4), load_i32(symbols + right * 4), ranks, products, at)
    if rank == NO_RANK:
        return size
    heap_push(heap, size, rank << 32 | at)
    return size + 1


@inline_function
def merge_long(
    op: int, n: int, symbols: int, previous: int, following: int, ranks: int, products: int, heap: int
) -> int:
    """Merge `n` symbols, move the remaining symbols to the front, and return their number.

    A heap entry is rank << 32 | index of the left symbol. It is stale if that symbol's rank has changed.
    """
    for i in range(n):
        store_i32(previous + i * 4, i - 1)
        store_i32(following + i * 4, i + 1 if i + 1 < n else -1)
    size = 0
    for i in range(n):
        size = queue_pair(op, i, symbols, following, ranks, products, heap, size)
    while size > 0:
        entry = heap_pop(heap, size)
        size -= 1
        at = entry & LOW_HALF
        if load_i32(ranks + at * 4) != entry >> 32:
            continue
        store_i32(symbols + at * 4, load_i32(products + at * 4))
        absorbed = load_i32(following + at * 4)
        right = load_i32(following + absorbed * 4)
        store_i32(following + at * 4, right)
        store_i32(ranks + absorbed * 4, NO_RANK)
        if right >= 0:
            store_i32(previous + right * 4, at)
        left = load_i32(previous + at * 4)
        if left >= 0:
            size = queue_pair(op, left, symbols, following, ranks, products, heap, size)
        size = queue_pair(op, at, symbols, following, ranks, products, heap, size)
    count = 0
    at = 0
    while at >= 0:
        store_i32(symbols + count * 4, load_i32(symbols + at * 4))
        count += 1
        at = load_i32(following + at * 4)
    return count


@inline_function
def emit_symbols(op: int, n: int, symbols: int, n_out: int) -> int:
    """Write the ids of `n` symbols and return the total number of ids.

    A symbol that is not a token is written byte by byte, and bytes without a token are skipped. llama.cpp does the
    same. With well-formed vocabularies, neither case occurs.
    """
    out = load_i64(op + IDS)
    for i in range(n):
        symbol = load_i32(symbols + i * 4)
        if symbol < 0:
            token = load_i32(load_i64(op + RAW_BYTE_IDS) + (UNKNOWN_BYTES - symbol) * 4)
            if token != NOT_FOUND:
                store_i32(out + n_out * 4, token)
                n_out += 1
            continue
        token = load_i32(load_i64(op + EMITTED) + symbol * 4)
        if token != NOT_FOUND:
            store_i32(out + n_out * 4, token)
            n_out += 1
            continue
        address = load_i64(load_i64(op + STARTS) + symbol * 8)
        for j in range(load_i64(load_i64(op + LENGTHS) + symbol * 8)):
            token = load_i32(load_i64(op + RAW_BYTE_IDS) + load_u8(address + j) * 4)
            if token != NOT_FOUND:
                store_i32(out + n_out * 4, token)
                n_out += 1
    return n_out


@inline_function
def whole_token(op: int, text: int, n: int, spelled: int) -> int:
    """Return the id of the token whose text is exactly these `n` bytes, or NOT_FOUND. Control tokens are ignored."""
    length = 0
    for i in range(n):
        entry = load_i64(op + SPELLING) + load_u8(text + i) * 4
        store_u8(spelled + length, load_u8(entry + 1))
        store_u8(spelled + length + 1, load_u8(entry + 2))
        length += load_u8(entry)
    starts, lengths = load_i64(op + STARTS), load_i64(op + LENGTHS)
    token: int = find_text(load_i64(op + TABLE), load_i64(op + MASK), starts, lengths, spelled, length)
    if token != NOT_FOUND:
        token = load_i32(load_i64(op + EMITTED) + token * 4)
    return token


@inline_function
def byte_symbols(op: int, text: int, n: int, symbols: int) -> int:
    """Write the symbols of `n` bytes and return their number."""
    for i in range(n):
        store_i32(symbols + i * 4, load_i32(load_i64(op + BYTE_SYMBOLS) + load_u8(text + i) * 4))
    return n


@inline_function
def character_symbols(op: int, text: int, n: int, symbols: int) -> int:
    """Write the symbols of `n` bytes for vocabularies that spell tokens in characters, and return their number."""
    starts, lengths = load_i64(op + STARTS), load_i64(op + LENGTHS)
    table, mask = load_i64(op + TABLE), load_i64(op + MASK)
    count = 0
    at = 0
    while at < n:
        lead = load_u8(text + at)
        width = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        if width == 1:
            symbol = load_i32(load_i64(op + BYTE_SYMBOLS) + lead * 4)
        else:
            symbol = find_text(table, mask, starts, lengths, text + at, width)
        if symbol != NOT_FOUND:
            store_i32(symbols + count * 4, symbol)
            count += 1
        else:
            for i in range(width):
                store_i32(symbols + count * 4, UNKNOWN_BYTES - load_u8(text + at + i))
                count += 1
        at += width
    return count


@inline_function
def encode_piece(op: int, text: int, n: int, n_out: int) -> int:
    """Write the ids of one piece of `n` bytes and return the total number of ids."""
    scratch = load_i64(op + SCRATCH)
    begins = load_i64(op + WHOLE_BEGINS)
    if n <= load_i64(op + LONGEST_WHOLE) and (begins < 0 or begins == load_u8(text)):
        whole = whole_token(op, text, n, scratch)
        if whole != NOT_FOUND:
            store_i32(load_i64(op + IDS) + n_out * 4, whole)
            return n_out + 1
    by_character = load_i64(op + BY_CHARACTER)
    n = character_symbols(op, text, n, scratch) if by_character else byte_symbols(op, text, n, scratch)
    if n <= SHORT_PIECE:
        n_left = merge_short(op, n, scratch, scratch + 4 * n, scratch + 8 * n)
    else:
        links, ranks, heap = scratch + 4 * n, scratch + 12 * n, scratch + 20 * n
        n_left = merge_long(op, n, scratch, links, links + 4 * n, ranks, ranks + 4 * n, heap)
    count: int = emit_symbols(op, n_left, scratch, n_out)
    return count


@kernel
def merge(op: int, step: int, thread: int, n_threads: int) -> None:
    """Write the ids of all pieces of a text, with control tokens inserted between them.

    The op record has these words, where arrays are addresses:

    TEXT, ENDS, N_PIECES       u8[], the end of each piece int64[p], p
    INSERT_AT, INSERT_IDS      positions int64[k] and ids int32[k] of the control tokens to insert
    N_INSERTS                  k
    BYTE_SYMBOLS               int32[256], with NOT_FOUND only if tokens are spelled in characters
    PAIRS, PAIR_MASK           the pair table and its mask
    EMITTED                    int32[symbols]: the id, or NOT_FOUND for symbols that plain text never produces
    RAW_BYTE_IDS               int32[256]: the ids of the tokens for single raw bytes, or NOT_FOUND
    STARTS, LENGTHS            the address and length of each symbol's text, int64[]
    TABLE, MASK                the token table and its mask
    LONGEST_WHOLE              the length in bytes of the longest token, or 0 if pieces that are tokens must be merged
                               too
    SPELLING                   u8[256][4]: the vocabulary's spelling of each byte, as (length, first byte, second byte)
    WHOLE_BEGINS               the first byte that a piece must have to stay whole, or -1 for any byte
    BY_CHARACTER               whether tokens are spelled in characters
    SCRATCH                    u8[SCRATCH_BYTES_PER_BYTE * bytes of the longest piece]
    IDS, COUNT                 output: int32[2 * text bytes + k], and the number of ids, int64[1]
    """
    text, ends, out = load_i64(op + TEXT), load_i64(op + ENDS), load_i64(op + IDS)
    insert_at, insert_ids = load_i64(op + INSERT_AT), load_i64(op + INSERT_IDS)
    n_inserts = load_i64(op + N_INSERTS)
    n_out = 0
    next_insert = 0
    start = 0
    for piece in range(load_i64(op + N_PIECES)):
        next_insert, n_out = emit_inserted(start, next_insert, insert_at, insert_ids, n_inserts, out, n_out)
        end = load_i64(ends + piece * 8)
        if end > start:
            n_out = encode_piece(op, text + start, end - start, n_out)
        start = end
    next_insert, n_out = emit_inserted(start, next_insert, insert_at, insert_ids, n_inserts, out, n_out)
    store_i64(load_i64(op + COUNT), n_out)
