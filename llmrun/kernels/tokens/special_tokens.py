"""Finds special tokens in a text with a trie of their bytes.

A vocabulary may have thousands of special tokens, including runs of 2 to 31 spaces. Searching for each of them in turn
took 56 to 304 ms for 0.4 MB of prose and code, longer than the rest of tokenization. The trie takes 0.7 to 5.3 ms.

edge table    (int64 key + 1, int64 node)[slots], where 0 is a free slot and key = node << 8 | byte
"""

from __future__ import annotations

from llmrun.formats.layouts.tokens import CONTROL, NOT_FOUND, ONE_CHARACTER
from llmrun.kernels.code.load_store import load_i32, load_i64, load_u8, store_i32, store_i64, store_u8
from llmrun.kernels.compiler import inline_function, kernel
from llmrun.kernels.tokens.token_table import pair_slot

# Byte offsets of the words in the op record of `find`.
TEXT, N_BYTES, MARKS, N_MARKS, PARSE_CONTROL = range(0, 40, 8)
BEGINNINGS, EDGES, EDGE_MASK, TOKENS, FLAGS = range(40, 80, 8)
PRESENT, FOUND_AT, FOUND, RESULT = range(80, 112, 8)


@kernel
def build(op: int, step: int, thread: int, n_threads: int) -> None:
    """Build the trie of a list of non-empty texts.

    The op record has these words in this order, where arrays are addresses:

    texts, ends, n_texts    u8[], the end of each text int64[n], n
    edges, mask             the edge table, which must have more slots than the texts have bytes, and its mask
    beginnings              output: u8[256], 1 for every first byte of a text
    tokens                  int32[bytes of the texts + 1] of NOT_FOUND; output: the index of the text that ends at each
                            node
    """
    texts, ends, n_texts = load_i64(op), load_i64(op + 8), load_i64(op + 16)
    edges, mask = load_i64(op + 24), load_i64(op + 32)
    beginnings, tokens = load_i64(op + 40), load_i64(op + 48)
    n_nodes = 1
    start = 0
    for text in range(n_texts):
        end = load_i64(ends + text * 8)
        store_u8(beginnings + load_u8(texts + start), 1)
        node = 0
        for at in range(start, end):
            key = node << 8 | load_u8(texts + at)
            slot = pair_slot(edges, mask, key)
            if load_i64(slot) == 0:
                store_i64(slot, key + 1)
                store_i64(slot + 8, n_nodes)
                n_nodes += 1
            node = load_i64(slot + 8)
        if load_i32(tokens + node * 4) == NOT_FOUND:  # if two texts are equal, the first one wins
            store_i32(tokens + node * 4, text)
        start = end


@inline_function
def is_marked(marks: int, n_marks: int, first: int, at: int, end: int, one_character: int) -> bool:
    """Return whether a mark was removed between `at` and `end`, or right before a text of one character.

    `first` is the index of the first mark at or after `at`.
    """
    while first < n_marks and load_i64(marks + first * 8) == at:
        if one_character:
            return True
        first += 1
    return first < n_marks and load_i64(marks + first * 8) < end


@kernel
def find(op: int, step: int, thread: int, n_threads: int) -> None:
    """Find special tokens from left to right, the longest at each position.

    The op record has these words, where arrays are addresses:

    TEXT, N_BYTES          u8[n], n
    MARKS, N_MARKS         positions of the marks that `unmark` removed, in ascending order, int64[m], m
    PARSE_CONTROL          whether to find control tokens
    BEGINNINGS to TOKENS   the results of `build`, with the edge table and its mask
    FLAGS                  u8[tokens]
    PRESENT                output: u8[tokens], 1 for each token that occurs, even if it is excluded or overlaps another
    FOUND_AT, FOUND        output: position int64[n] and token int32[n] of each token found
    RESULT                 output: int64[2], the number of tokens found, and 1 if another token overlaps a found token,
                           ends after it, and is at least as long, else 0
    """
    text, n_bytes = load_i64(op + TEXT), load_i64(op + N_BYTES)
    marks, n_marks = load_i64(op + MARKS), load_i64(op + N_MARKS)
    beginnings, edges, mask = load_i64(op + BEGINNINGS), load_i64(op + EDGES), load_i64(op + EDGE_MASK)
    tokens, all_flags = load_i64(op + TOKENS), load_i64(op + FLAGS)
    wants_control = load_i64(op + PARSE_CONTROL)
    count = 0
    overlaps = 0
    taken = NOT_FOUND
    taken_bytes = 0
    taken_end = 0
    next_mark = 0
    for start in range(n_bytes):
        if load_u8(beginnings + load_u8(text + start)) == 0:
            continue
        while next_mark < n_marks and load_i64(marks + next_mark * 8) < start:
            next_mark += 1
        node = 0
        at = start
        best = NOT_FOUND
        best_end = start
        while at < n_bytes:
            slot = pair_slot(edges, mask, node << 8 | load_u8(text + at))
            if load_i64(slot) == 0:
                break
            node = load_i64(slot + 8)
            at += 1
            token = load_i32(tokens + node * 4)
            if token == NOT_FOUND:
                continue
            store_u8(load_i64(op + PRESENT) + token, 1)
            flags = load_u8(all_flags + token)
            if flags & CONTROL and (
                wants_control == 0 or is_marked(marks, n_marks, next_mark, start, at, flags & ONE_CHARACTER)
            ):
                continue
            best = token
            best_end = at
        if best == NOT_FOUND:
            continue
        if start >= taken_end:
            store_i64(load_i64(op + FOUND_AT) + count * 8, start)
            store_i32(load_i64(op + FOUND) + count * 4, best)
            count += 1
            taken, taken_bytes, taken_end = best, best_end - start, best_end
        elif best_end > taken_end and best_end - start >= taken_bytes and best != taken:
            overlaps = 1
    store_i64(load_i64(op + RESULT), count)
    store_i64(load_i64(op + RESULT) + 8, overlaps)
