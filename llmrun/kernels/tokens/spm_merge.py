"""SentencePiece-style merging: adjacent symbols are merged if their combined text is a token, best score first.

A symbol is a range of the text, and two adjacent symbols merge if a lookup of their bytes finds a token. SentencePiece
does not split text into pieces, so everything between two control tokens is one fragment. However, symbols never merge
across a pair of bytes that does not occur in any token, and most spaces form such a pair with the byte before them. The
text between two such pairs, a "word", is merged separately, and a repeated word reuses its earlier ids. This is 4 times
as fast as one heap for the whole text. The readable twin is `bpe_merge.merge_by_priority`.
"""

from __future__ import annotations

from llmrun.formats.layouts.tokens import KNOWN_WORD_BYTES, KNOWN_WORDS, NEVER, NOT_FOUND
from llmrun.kernels.code.load_store import copy_bytes, load_i32, load_i64, load_u8, store_i32, store_i64, store_u8
from llmrun.kernels.compiler import inline_function, kernel
from llmrun.kernels.tokens.token_table import (
    FNV_BASIS,
    LOW_HALF,
    emit_inserted,
    equal_bytes,
    find_text,
    finished_hash,
    hash_bytes,
    heap_pop,
    heap_push,
)

NO_PAIR = 0x7FFFFFFFFFFFFFFF


# Byte offsets of the words in the op record.
TEXT, ENDS, N_FRAGMENTS, INSERT_AT, INSERT_IDS, N_INSERTS = range(0, 48, 8)
TABLE, MASK, STARTS, LENGTHS, LONGEST, PRIORITIES, BYTE_IDS = range(48, 104, 8)
JOINED, KNOWN = range(104, 120, 8)
SCRATCH, IDS, COUNT = range(120, 144, 8)

# The UTF-8 bytes of U+2581, which represents a space.
SPACE_BYTES = 3
SPACE_0, SPACE_1, SPACE_2 = 0xE2, 0x96, 0x81


@inline_function
def is_space(address: int, n_bytes: int) -> bool:
    """Return whether the `n_bytes` at an address begin with a space."""
    return (
        n_bytes >= SPACE_BYTES
        and load_u8(address) == SPACE_0
        and load_u8(address + 1) == SPACE_1
        and load_u8(address + 2) == SPACE_2
    )


@kernel
def find_joined(op: int, step: int, thread: int, n_threads: int) -> None:
    """Find the bytes that precede a space inside any token.

    The op record has these words in this order, where arrays are addresses:

    starts, lengths    the address and length of each token's text, int64[n]
    n_tokens           n
    joined             output: u8[256], 1 for these bytes
    """
    starts, lengths, joined = load_i64(op), load_i64(op + 8), load_i64(op + 24)
    for token in range(load_i64(op + 16)):
        address, length = load_i64(starts + token * 8), load_i64(lengths + token * 8)
        for at in range(1, length):
            if is_space(address + at, length - at):
                store_u8(joined + load_u8(address + at - 1), 1)


@inline_function
def word_end(op: int, text: int, start: int, end: int) -> int:
    """Return the first position after `start` across which no symbols merge, or `end` if there is none."""
    at = start + 1
    while at < end and not (
        load_u8(text + at) == SPACE_0
        and is_space(text + at, end - at)
        and load_u8(load_i64(op + JOINED) + load_u8(text + at - 1)) == 0
    ):
        at += 1
    return at


@inline_function
def usable_token(op: int, address: int, n_bytes: int) -> int:
    """Return the id of the token with this text, or NOT_FOUND if there is none that plain text can become."""
    starts, lengths = load_i64(op + STARTS), load_i64(op + LENGTHS)
    token: int = find_text(load_i64(op + TABLE), load_i64(op + MASK), starts, lengths, address, n_bytes)
    if token != NOT_FOUND and load_i32(load_i64(op + PRIORITIES) + token * 4) == NEVER:
        return NOT_FOUND
    return token


@inline_function
def split_characters(text: int, n_bytes: int, begins: int, widths: int, previous: int, following: int) -> int:
    """Write one symbol per UTF-8 character, linked in order, and return their number."""
    count = 0
    offset = 0
    while offset < n_bytes:
        lead = load_u8(text + offset)
        width = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        width = min(width, n_bytes - offset)
        store_i32(begins + count * 4, offset)
        store_i32(widths + count * 4, width)
        store_i32(previous + count * 4, count - 1)
        offset += width
        count += 1
        store_i32(following + count * 4 - 4, count if offset < n_bytes else -1)
    return count


@inline_function
def consider_pair(
    op: int, text: int, left: int, begins: int, widths: int, following: int, keys: int, heap: int, size: int
) -> int:
    """Push the pair that starts with symbol `left` onto the heap if it can merge, and return the size of the heap."""
    store_i64(keys + left * 8, NO_PAIR)
    right = load_i32(following + left * 4)
    if right < 0:
        return size
    width = load_i32(widths + left * 4) + load_i32(widths + right * 4)
    if width > load_i64(op + LONGEST):
        return size
    token = usable_token(op, text + load_i32(begins + left * 4), width)
    if token == NOT_FOUND:
        return size
    key = load_i32(load_i64(op + PRIORITIES) + token * 4) << 32 | left
    store_i64(keys + left * 8, key)
    heap_push(heap, size, key)
    return size + 1


@inline_function
def merge_fragment(
    op: int, text: int, n: int, begins: int, widths: int, previous: int, following: int, keys: int, heap: int
) -> None:
    """Merge `n` linked symbols.

    A heap entry is priority << 32 | index of the left symbol. It is stale if that symbol's key has changed.
    """
    size = 0
    for left in range(n):
        size = consider_pair(op, text, left, begins, widths, following, keys, heap, size)
    while size > 0:
        entry = heap_pop(heap, size)
        size -= 1
        at = entry & LOW_HALF
        if load_i64(keys + at * 8) != entry:
            continue
        absorbed = load_i32(following + at * 4)
        right = load_i32(following + absorbed * 4)
        store_i32(widths + at * 4, load_i32(widths + at * 4) + load_i32(widths + absorbed * 4))
        store_i32(following + at * 4, right)
        store_i64(keys + absorbed * 8, NO_PAIR)
        if right >= 0:
            store_i32(previous + right * 4, at)
        left = load_i32(previous + at * 4)
        if left >= 0:
            size = consider_pair(op, text, left, begins, widths, following, keys, heap, size)
        size = consider_pair(op, text, at, begins, widths, following, keys, heap, size)


@inline_function
def emit_fragment(op: int, text: int, begins: int, widths: int, following: int, n_out: int) -> int:
    """Write the ids of the linked symbols, and return the total number of ids.

    A symbol that is not a token is written as the ids of its bytes.
    """
    out = load_i64(op + IDS)
    at = 0
    while at >= 0:
        address = text + load_i32(begins + at * 4)
        width = load_i32(widths + at * 4)
        token = usable_token(op, address, width)
        if token != NOT_FOUND:
            store_i32(out + n_out * 4, token)
            n_out += 1
        else:
            for i in range(width):
                token = load_i32(load_i64(op + BYTE_IDS) + load_u8(address + i) * 4)
                if token != NOT_FOUND:
                    store_i32(out + n_out * 4, token)
                    n_out += 1
        at = load_i32(following + at * 4)
    return n_out


@inline_function
def encode_word(op: int, text: int, n_bytes: int, n_out: int) -> int:
    """Write the ids of a word and return the total number of ids. Words never merge with their neighbors."""
    scratch = load_i64(op + SCRATCH)
    begins, widths = scratch, scratch + 4 * n_bytes
    previous, following = scratch + 8 * n_bytes, scratch + 12 * n_bytes
    keys, heap = scratch + 16 * n_bytes, scratch + 24 * n_bytes
    n = split_characters(text, n_bytes, begins, widths, previous, following)
    merge_fragment(op, text, n, begins, widths, previous, following, keys, heap)
    count: int = emit_fragment(op, text, begins, widths, following, n_out)
    return count


@inline_function
def encode_known_word(op: int, start: int, n_bytes: int, n_out: int) -> int:
    """Write the ids of a word like `encode_word`, but copy them if the word is in the table of known words.

    An entry of the table has four int64: the word's position, its length in bytes, the position of its ids in the
    output, and their number. A length of 0 marks an empty entry.
    """
    text, ids = load_i64(op + TEXT), load_i64(op + IDS)
    slot = finished_hash(hash_bytes(FNV_BASIS, text + start, n_bytes)) & (KNOWN_WORDS - 1)
    word = load_i64(op + KNOWN) + slot * KNOWN_WORD_BYTES
    if load_i64(word + 8) == n_bytes and equal_bytes(text + load_i64(word), text + start, n_bytes):
        count: int = load_i64(word + 24)
        copy_bytes(ids + n_out * 4, ids + load_i64(word + 16) * 4, count * 4)
        return n_out + count
    after: int = encode_word(op, text + start, n_bytes, n_out)
    store_i64(word, start)
    store_i64(word + 8, n_bytes)
    store_i64(word + 16, n_out)
    store_i64(word + 24, after - n_out)
    return after


@kernel
def merge(op: int, step: int, thread: int, n_threads: int) -> None:
    """Write the ids of all fragments of a text, with control tokens inserted between them.

    The op record has these words, where arrays are addresses:

    TEXT, ENDS, N_FRAGMENTS    u8[], the end of each fragment int64[p], p
    INSERT_AT, INSERT_IDS      positions int64[k] and ids int32[k] of the control tokens to insert
    N_INSERTS                  k
    TABLE, MASK                the token table and its mask
    STARTS, LENGTHS            the address and length of each token's text, int64[n]
    LONGEST                    the length in bytes of the longest token
    PRIORITIES                 int32[n], lowest first; NEVER for tokens that plain text cannot become
    BYTE_IDS                   int32[256]: the id of each byte, or NOT_FOUND
    JOINED                     u8[256] from `find_joined`
    KNOWN                      int64[KNOWN_WORDS][4] of zeros, the table of known words
    SCRATCH                    u8[SCRATCH_BYTES_PER_BYTE * bytes of the longest fragment]
    IDS, COUNT                 output: int32[text bytes + k], and the number of ids, int64[1]
    """
    ends, out = load_i64(op + ENDS), load_i64(op + IDS)
    insert_at, insert_ids = load_i64(op + INSERT_AT), load_i64(op + INSERT_IDS)
    n_inserts = load_i64(op + N_INSERTS)
    n_out = 0
    next_insert = 0
    start = 0
    for fragment in range(load_i64(op + N_FRAGMENTS)):
        next_insert, n_out = emit_inserted(start, next_insert, insert_at, insert_ids, n_inserts, out, n_out)
        end = load_i64(ends + fragment * 8)
        while start < end:
            after = word_end(op, load_i64(op + TEXT), start, end)
            n_out = encode_known_word(op, start, after - start, n_out)
            start = after
    next_insert, n_out = emit_inserted(start, next_insert, insert_at, insert_ids, n_inserts, out, n_out)
    store_i64(load_i64(op + COUNT), n_out)
