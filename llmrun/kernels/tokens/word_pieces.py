"""WordPiece: each word is divided into tokens from left to right, and always into the longest that fits.

A word with a rest that begins with no token becomes the unknown token as a whole. Words are separated by spaces.
"""

from __future__ import annotations

from llmrun.formats.layouts.tokens import NOT_FOUND
from llmrun.kernels.code.load_store import load_i32, load_i64, load_u8, store_i32, store_i64
from llmrun.kernels.compiler import inline_function, kernel
from llmrun.kernels.tokens.token_table import FNV_BASIS, SPACE, emit_inserted, find_token, hash_bytes

# Byte offsets of the words in the op record.
TEXT, ENDS, N_FRAGMENTS, INSERT_AT, INSERT_IDS, N_INSERTS = range(0, 48, 8)
TABLE, MASK, STARTS, LENGTHS, LONGEST, EMITTED, UNKNOWN = range(48, 104, 8)
STATES, IDS, COUNT = range(104, 128, 8)


@inline_function
def longest_token(op: int, address: int, n_bytes: int) -> tuple[int, int]:
    """Return the longest token that the `n_bytes` at an address begin with, and its length, or (NOT_FOUND, 0)."""
    table, mask = load_i64(op + TABLE), load_i64(op + MASK)
    starts, lengths = load_i64(op + STARTS), load_i64(op + LENGTHS)
    states = load_i64(op + STATES)
    n = min(n_bytes, load_i64(op + LONGEST))
    state = FNV_BASIS
    for i in range(n):
        state = hash_bytes(state, address + i, 1)
        store_i64(states + 8 * i, state)
    while n > 0:
        found, _ = find_token(table, mask, starts, lengths, load_i64(states + 8 * (n - 1)), address, n, address, 0)
        if found != NOT_FOUND:
            token = load_i32(load_i64(op + EMITTED) + 4 * found)
            if token != NOT_FOUND:
                return token, n
        n -= 1
    return NOT_FOUND, 0


@inline_function
def encode_word(op: int, address: int, n_bytes: int, n_out: int) -> int:
    """Write the ids of a word and return the total number of ids."""
    out = load_i64(op + IDS)
    first = n_out
    at = 0
    while at < n_bytes:
        token, length = longest_token(op, address + at, n_bytes - at)
        if token == NOT_FOUND:
            store_i32(out + 4 * first, load_i64(op + UNKNOWN))
            return first + 1
        store_i32(out + 4 * n_out, token)
        n_out += 1
        at += length
    return n_out


@kernel
def encode(op: int, step: int, thread: int, n_threads: int) -> None:
    """Write the ids of all fragments of a text, with special tokens inserted between them.

    The op record has these words, where arrays are addresses:

    TEXT, ENDS, N_FRAGMENTS    u8[], the end of each fragment int64[p], p
    INSERT_AT, INSERT_IDS      positions int64[k] and ids int32[k] of the special tokens to insert
    N_INSERTS                  k
    TABLE, MASK                the token table and its mask
    STARTS, LENGTHS            the address and length of each token's text, int64[n]
    LONGEST                    the length in bytes of the longest token
    EMITTED                    int32[n]: the id of each token, or NOT_FOUND for those that plain text cannot become
    UNKNOWN                    the id of the unknown token
    STATES                     scratch memory, int64[LONGEST]
    IDS, COUNT                 output: int32[text bytes + k], and the number of ids, int64[1]
    """
    text, ends, out = load_i64(op + TEXT), load_i64(op + ENDS), load_i64(op + IDS)
    insert_at, insert_ids = load_i64(op + INSERT_AT), load_i64(op + INSERT_IDS)
    n_inserts = load_i64(op + N_INSERTS)
    n_out = 0
    next_insert = 0
    start = 0
    for fragment in range(load_i64(op + N_FRAGMENTS)):
        next_insert, n_out = emit_inserted(start, next_insert, insert_at, insert_ids, n_inserts, out, n_out)
        end = load_i64(ends + fragment * 8)
        while start < end:
            after = start
            while after < end and load_u8(text + after) != SPACE:
                after += 1
            if after > start:
                n_out = encode_word(op, text + start, after - start, n_out)
            start = min(after + 1, end)
    next_insert, n_out = emit_inserted(start, next_insert, insert_at, insert_ids, n_inserts, out, n_out)
    store_i64(load_i64(op + COUNT), n_out)
