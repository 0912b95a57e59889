"""Unigram: text is divided into the tokens whose scores have the largest sum.

The scores are log probabilities. The best division of each prefix of the text follows from those of shorter prefixes
(the Viterbi algorithm). `normalize` prepares the text: it replaces characters by a table and marks spaces.
"""

from __future__ import annotations

from llmrun.formats.layouts.tokens import IMPOSSIBLE, NOT_FOUND, PREFIX_BYTES, PREFIX_SLOTS
from llmrun.kernels.code.load_store import (
    load_f64,
    load_i32,
    load_i64,
    load_u8,
    load_u32,
    store_f64,
    store_i32,
    store_i64,
    store_u8,
)
from llmrun.kernels.compiler import inline_function, kernel
from llmrun.kernels.tokens.token_table import FNV_BASIS, SPACE, emit_inserted, find_token, finished_hash, hash_bytes

# Byte offsets of the words in the op record of `normalize`.
SOURCE, N_SOURCE, NODES, N_NODES, REPLACEMENTS, N_REPLACEMENTS = range(0, 48, 8)
ADDS_PREFIX, MERGES_SPACES, NORMALIZED, N_NORMALIZED = range(48, 80, 8)

# Byte offsets of the words in the op record of `encode`.
TEXT, ENDS, N_FRAGMENTS, INSERT_AT, INSERT_IDS, N_INSERTS = range(0, 48, 8)
TABLE, MASK, STARTS, LENGTHS, LONGEST, SCORES, UNKNOWN, UNKNOWN_SCORE = range(
    48, 112, 8
)  # LONGEST is that of `measure`
SUMS, ORIGINS, CHOSEN, IDS, COUNT = range(112, 152, 8)

_END_OF_KEY, _IS_REPLACEMENT, _WIDE = 1 << 8, 1 << 31, 1 << 9  # bits of a node
_MARK = (0xE2, 0x96, 0x81)  # U+2581, which stands for a space


@inline_function
def character_bytes(first: int) -> int:
    """Return the length of the UTF-8 character with this first byte, or 1 for other bytes."""
    if first < 0xC0:
        return 1
    if first < 0xE0:
        return 2
    return 3 if first < 0xF0 else 4


@inline_function
def children(node: int) -> int:
    """Return the number that gives the index of a node's child, combined with the child's byte by XOR."""
    return (node >> 10) << ((node & _WIDE) >> 6)


@inline_function
def longest_key(op: int, address: int, end: int) -> tuple[int, int]:
    """Return the length of the longest key that the text begins with, and the offset of its replacement, or (0, 0)."""
    nodes, n_nodes = load_i64(op + NODES), load_i64(op + N_NODES)
    length, offset = 0, 0
    index = children(load_u32(nodes)) if n_nodes > 0 else 0
    at = address
    while at < end:
        byte = load_u8(at)
        index ^= byte
        if byte == 0 or index >= n_nodes:
            break
        node = load_u32(nodes + 4 * index)
        if node & (_IS_REPLACEMENT | 0xFF) != byte:
            break
        at += 1
        index ^= children(node)
        if node & _END_OF_KEY != 0 and index < n_nodes:
            length, offset = at - address, load_u32(nodes + 4 * index) & ~_IS_REPLACEMENT
    return length, offset


@inline_function
def put(op: int, byte: int, n_out: int) -> int:
    """Append a byte to the normalized text, which is only measured if it has no memory yet."""
    out = load_i64(op + NORMALIZED)
    if out != 0:
        store_u8(out + n_out, byte)
    return n_out + 1


@inline_function
def put_mark(op: int, n_out: int) -> int:
    for i in range(3):
        n_out = put(op, _MARK[i], n_out)
    return n_out


@kernel
def normalize(op: int, step: int, thread: int, n_threads: int) -> None:
    """Write the normalized form of a text.

    The op record has these words, where arrays are addresses:

    SOURCE, N_SOURCE           u8[], and its length
    NODES, N_NODES             u32[]: a trie of the texts to replace (XOR-compressed compact double array), its length
    REPLACEMENTS               u8[]: the texts that replace them, each with a NUL at its end
    N_REPLACEMENTS             its length, which includes at least one NUL
    ADDS_PREFIX                1 to begin with a mark for a space
    MERGES_SPACES              1 to begin each word with one mark, instead of writing a mark for each space
    NORMALIZED, N_NORMALIZED   output: u8[], or 0 to find out its length, and the length, int64[1]
    """
    address = load_i64(op + SOURCE)
    end = address + load_i64(op + N_SOURCE)
    replacements, n_replacements = load_i64(op + REPLACEMENTS), load_i64(op + N_REPLACEMENTS)
    merges = load_i64(op + MERGES_SPACES) != 0
    needs_mark = merges or load_i64(op + ADDS_PREFIX) != 0  # whether the next word begins with a mark
    in_word = False
    n_out = 0
    while address < end:
        length, offset = longest_key(op, address, end)
        source = address
        if length > 0 and offset < n_replacements:
            source = replacements + offset
            n_bytes = 0
            while load_u8(source + n_bytes) != 0:
                n_bytes += 1
        else:
            length = n_bytes = min(character_bytes(load_u8(address)), end - address)
        for i in range(n_bytes):
            byte = load_u8(source + i)
            if byte == SPACE:
                in_word = False
                if not merges:
                    n_out = put_mark(op, n_out)
                continue
            if not in_word:
                in_word = True
                if needs_mark:
                    n_out = put_mark(op, n_out)
                    needs_mark = merges
            n_out = put(op, byte, n_out)
        address += length
    store_i64(load_i64(op + N_NORMALIZED), n_out)


@inline_function
def challenge(op: int, at: int, end: int, token: int, total: int) -> None:
    """Let a token from `at` to `end` replace the best division up to `end`, if the sum of the scores is larger."""
    sums = load_i64(op + SUMS)
    if total > load_f64(sums + 8 * end):
        store_f64(sums + 8 * end, total)
        store_i64(load_i64(op + ORIGINS) + 8 * end, at)
        store_i32(load_i64(op + CHOSEN) + 4 * end, token)


@inline_function
def longest_slot(longest: int, state: int) -> int:
    """Return the address of the length of the longest token with a prefix, from the FNV state after hashing that."""
    slot: int = finished_hash(state) & (PREFIX_SLOTS - 1)
    return longest + 4 * slot


@kernel
def measure(op: int, step: int, thread: int, n_threads: int) -> None:
    """Write how long tokens are at most that begin with the same PREFIX_BYTES bytes.

    Without this, dividing a text would look up as many bytes as the longest token has at every character.

    STARTS, LENGTHS, N    the address and length of each token's text, int64[n] each, and n
    LONGEST               output: int32[PREFIX_SLOTS], initially 0, by the hash of the prefix
    """
    starts, lengths, longest = load_i64(op), load_i64(op + 8), load_i64(op + 24)
    for token in range(load_i64(op + 16)):
        length = load_i64(lengths + 8 * token)
        if length >= PREFIX_BYTES:
            slot = longest_slot(longest, hash_bytes(FNV_BASIS, load_i64(starts + 8 * token), PREFIX_BYTES))
            store_i32(slot, max(length, load_i32(slot)))


@inline_function
def divide(op: int, address: int, n_bytes: int) -> None:
    """Find the best division of each prefix of a text: the sum of its scores, its last token and where that begins.

    Characters that are not tokens become the unknown token, whose score is lower than those of all others.
    """
    table, mask = load_i64(op + TABLE), load_i64(op + MASK)
    starts, lengths, scores = load_i64(op + STARTS), load_i64(op + LENGTHS), load_i64(op + SCORES)
    unknown, unknown_score = load_i64(op + UNKNOWN), load_f64(load_i64(op + UNKNOWN_SCORE))
    sums = load_i64(op + SUMS)
    for end in range(n_bytes + 1):
        store_f64(sums + 8 * end, 2 * IMPOSSIBLE)
    store_f64(sums, 0.0)
    at = 0
    while at < n_bytes:
        width = min(character_bytes(load_u8(address + at)), n_bytes - at)
        total = load_f64(sums + 8 * at)
        is_token = False
        state = FNV_BASIS
        most, length = n_bytes - at, 0
        while length < most:
            state = hash_bytes(state, address + at + length, 1)
            length += 1
            if length == PREFIX_BYTES:
                most = min(most, load_i32(longest_slot(load_i64(op + LONGEST), state)))
            token, _ = find_token(table, mask, starts, lengths, state, address + at, length, address, 0)
            score = load_f64(scores + 8 * token) if token != NOT_FOUND else IMPOSSIBLE
            if score > IMPOSSIBLE:
                is_token = is_token or length == width
                challenge(op, at, at + length, token, total + score)
        if not is_token:
            challenge(op, at, at + width, unknown, total + unknown_score)
        at += width


@inline_function
def write_division(op: int, n_bytes: int, n_out: int) -> int:
    """Write the ids of the best division and return the total number of ids. Unknown tokens in a row become one."""
    origins, chosen, out = load_i64(op + ORIGINS), load_i64(op + CHOSEN), load_i64(op + IDS)
    unknown = load_i64(op + UNKNOWN)
    first = n_out
    end = n_bytes
    previous = NOT_FOUND
    while end > 0:
        token = load_i32(chosen + 4 * end)
        if token != unknown or previous != unknown:
            store_i32(out + 4 * n_out, token)
            n_out += 1
        previous = token
        end = load_i64(origins + 8 * end)
    last = n_out - 1
    while first < last:
        token = load_i32(out + 4 * first)
        store_i32(out + 4 * first, load_i32(out + 4 * last))
        store_i32(out + 4 * last, token)
        first += 1
        last -= 1
    return n_out


@kernel
def encode(op: int, step: int, thread: int, n_threads: int) -> None:
    """Write the ids of all fragments of a normalized text, with special tokens inserted between them.

    The op record has these words, where arrays are addresses:

    TEXT, ENDS, N_FRAGMENTS    u8[], the end of each fragment int64[p], p
    INSERT_AT, INSERT_IDS      positions int64[k] and ids int32[k] of the special tokens to insert
    N_INSERTS                  k
    TABLE, MASK                the token table and its mask
    STARTS, LENGTHS            the address and length of each token's text, int64[n]
    LONGEST                    the output of `measure`
    SCORES                     f64[n]: the score of each token, or IMPOSSIBLE for those that plain text cannot become
    UNKNOWN, UNKNOWN_SCORE     the id of the unknown token, and the score of unknown characters, f64[1]
    SUMS, ORIGINS, CHOSEN      scratch memory, f64[m + 1], int64[m + 1] and int32[m + 1], for m bytes in a fragment
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
        divide(op, text + start, end - start)
        n_out = write_division(op, end - start, n_out)
        start = end
    next_insert, n_out = emit_inserted(start, next_insert, insert_at, insert_ids, n_inserts, out, n_out)
    store_i64(load_i64(op + COUNT), n_out)
