"""Run the kernels of tokenizers on buffers next to a guard page (guard_pages.py)."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from llmrun.base.compiled import host
from llmrun.base.compiled.host import load_kernels
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.tokens import (
    KNOWN_WORD_BYTES,
    KNOWN_WORDS,
    PREFIX_SLOTS,
    SCRATCH_BYTES_PER_BYTE,
    STAGE_WORDS,
)
from llmrun.model.tokenizers import kinds
from llmrun.model.tokenizers.kinds import load_tokenizer
from llmrun.model.tokenizers.patterns import N_CODE_POINTS
from llmrun.model.tokenizers.text_tokenizer import longest_piece
from tests.support.gguf.gguf_files import CONTROL, NORMAL, Vocabulary, tiny_spm_vocabulary, tiny_vocabulary, write_gguf

if TYPE_CHECKING:
    from tests.support.kernels.guard_pages import GuardedMemory

_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
_PIECES = ("▁hello", "▁He", "ll", "▁the", "▁", "x", "o", "日本")
_TYPES = (CONTROL,) * len(_SPECIAL) + (NORMAL,) * len(_PIECES)
_WORD_PIECE = Vocabulary(_SPECIAL + _PIECES, _TYPES, model="bert", bos=2, unknown=1)
_UNIGRAM = replace(_WORD_PIECE, model="t5", eos=3, scores=tuple(-float(rank) for rank in range(len(_TYPES))))
# The characters map has a trie of one node, which has no children.
_KEYS: dict[str, dict[str, object]] = {
    "bert": {"tokenizer.ggml.seperator_token_id": 3},
    "t5": {"tokenizer.ggml.precompiled_charsmap": np.array([4, 0, 0, 0, 0, 0, 0, 0, 0], np.uint8)},
}


class _GuardedKernels:
    """A stand-in for load_kernel whose kernels run on guarded copies of their arrays. Results are copied back."""

    def __init__(self, memory: GuardedMemory, say: Callable[[str], None]) -> None:
        self._memory, self._say = memory, say
        self._n_symbols = 0  # for the last token table; lookups do not receive it
        self._n_special = self._tree_nodes = 0  # for the last special-token tree

    def load(self, module: str, function: str) -> Callable[..., None]:
        name = KernelName.of(module, function)
        kernel = load_kernels([name])[name]
        sizes = {
            "build": self._table_sizes if module == "tokens.token_table" else self._tree_sizes,
            "find": self._find_sizes,
            "find_joined": self._joined_sizes,
            "split": self._split_sizes,
            "merge": self._bpe_sizes if module == "tokens.bpe_merge" else self._spm_sizes,
            "encode": self._unigram_sizes if module == "tokens.unigram" else self._word_piece_sizes,
            "normalize": self._normalize_sizes,
            "measure": self._measure_sizes,
        }[function]

        def run(*words: int) -> None:
            guarded = list(words)
            copies = {}
            for index, n_bytes in sizes(words).items():
                copies[words[index]] = copy = self._memory.take(n_bytes)
                guarded[index] = copy.ctypes.data
                ctypes.memmove(guarded[index], words[index], n_bytes)
            self._say(f"{module}.{function}")
            kernel(*guarded)
            for original, copy in copies.items():
                ctypes.memmove(original, copy.ctypes.data, copy.nbytes)

        return run

    # The size in bytes behind each word that is an address, as given in the kernels' docstrings.

    def _table_sizes(self, words: Sequence[int]) -> dict[int, int]:
        n_tokens, mask, queries, merges, pair_mask = (words[index] for index in (2, 4, 7, 11, 13))
        self._n_symbols = n_tokens or self._n_symbols
        texts = {0: 8 * self._n_symbols, 1: 8 * self._n_symbols, 3: 8 * (mask + 1)}
        asked = {5: 8 * queries, 6: 8 * queries, 8: 4 * queries}
        return texts | asked | {9: 8 * merges, 10: 8 * merges, 12: 16 * (pair_mask + 1), 14: 4 * merges, 15: 8}

    def _bpe_sizes(self, words: Sequence[int]) -> dict[int, int]:
        sizes, text_bytes, longest = _text_sizes(words)
        vocabulary = {6: 1024, 7: 16 * (words[8] + 1), 9: 4 * self._n_symbols, 10: 1024, 11: 8 * self._n_symbols}
        vocabulary |= {12: 8 * self._n_symbols, 13: 8 * (words[14] + 1), 16: 1024}
        outputs = {19: SCRATCH_BYTES_PER_BYTE * longest, 20: 4 * (2 * text_bytes + words[5]), 21: 8}
        return sizes | vocabulary | outputs

    def _spm_sizes(self, words: Sequence[int]) -> dict[int, int]:
        sizes, text_bytes, longest = _text_sizes(words)
        vocabulary = {6: 8 * (words[7] + 1), 8: 8 * self._n_symbols, 9: 8 * self._n_symbols}
        vocabulary |= {11: 4 * self._n_symbols, 12: 1024, 13: 256, 14: KNOWN_WORDS * KNOWN_WORD_BYTES}
        outputs = {15: SCRATCH_BYTES_PER_BYTE * longest, 16: 4 * (text_bytes + words[5]), 17: 8}
        return sizes | vocabulary | outputs

    def _word_piece_sizes(self, words: Sequence[int]) -> dict[int, int]:
        sizes, text_bytes, _ = _text_sizes(words)
        vocabulary = {6: 8 * (words[7] + 1), 8: 8 * self._n_symbols, 9: 8 * self._n_symbols, 11: 4 * self._n_symbols}
        return sizes | vocabulary | {13: 8 * words[10], 14: 4 * (text_bytes + words[5]), 15: 8}

    def _unigram_sizes(self, words: Sequence[int]) -> dict[int, int]:
        sizes, text_bytes, longest = _text_sizes(words)
        vocabulary = {6: 8 * (words[7] + 1), 8: 8 * self._n_symbols, 9: 8 * self._n_symbols}
        vocabulary |= {10: 4 * PREFIX_SLOTS, 11: 8 * self._n_symbols, 13: 8}
        scratch = {14: 8 * (longest + 1), 15: 8 * (longest + 1), 16: 4 * (longest + 1)}
        return sizes | vocabulary | scratch | {17: 4 * (text_bytes + words[5]), 18: 8}

    def _measure_sizes(self, words: Sequence[int]) -> dict[int, int]:
        return {0: 8 * words[2], 1: 8 * words[2], 3: 4 * PREFIX_SLOTS}

    def _normalize_sizes(self, words: Sequence[int]) -> dict[int, int]:
        n_out = ctypes.c_int64.from_address(words[9]).value
        return {0: words[1], 2: 4 * words[3], 4: words[5], 9: 8} | ({8: n_out} if words[8] else {})

    def _joined_sizes(self, words: Sequence[int]) -> dict[int, int]:
        return {0: 8 * words[2], 1: 8 * words[2], 3: 256}

    def _tree_sizes(self, words: Sequence[int]) -> dict[int, int]:
        ends = (ctypes.c_int64 * words[2]).from_address(words[1])
        self._n_special = words[2]
        self._tree_nodes = 1 + (ends[-1] if words[2] else 0)
        return {0: self._tree_nodes - 1, 1: 8 * words[2], 3: 16 * (words[4] + 1), 5: 256, 6: 4 * self._tree_nodes}

    def _find_sizes(self, words: Sequence[int]) -> dict[int, int]:
        n_bytes, n_marks = words[1], words[3]
        tree = {5: 256, 6: 16 * (words[7] + 1), 8: 4 * self._tree_nodes, 9: self._n_special}
        return {0: n_bytes, 2: 8 * n_marks} | tree | {10: self._n_special, 11: 8 * n_bytes, 12: 4 * n_bytes, 13: 16}

    def _split_sizes(self, words: Sequence[int]) -> dict[int, int]:
        """Return sizes without the stages' own tables, whose addresses are inside the stage records."""
        n_bytes, n_parts, n_stages = words[1], words[3], words[7]
        stages = {4: N_CODE_POINTS, 6: 8 * STAGE_WORDS * n_stages}
        return {0: n_bytes, 2: 8 * n_parts} | stages | {8: n_bytes + 1, 9: 8 * n_bytes, 10: 8}


def _text_sizes(words: Sequence[int]) -> tuple[dict[int, int], int, int]:
    """Return the sizes for the six words that both merges share, the text's bytes and its longest piece's bytes."""
    _, ends_address, n_pieces, _, _, n_inserts = words[:6]
    ends = np.array((ctypes.c_int64 * n_pieces).from_address(ends_address), np.int64)
    text_bytes = int(ends[-1]) if n_pieces else 0
    sizes = {0: text_bytes, 1: 8 * n_pieces, 3: 8 * n_inserts, 4: 4 * n_inserts}
    return sizes, text_bytes, longest_piece(ends)


def run_tokenizers(memory: GuardedMemory, say: Callable[[str], None]) -> bytes:
    """Run all kinds of vocabulary on texts of many lengths, short and long enough for either code path. Return a
    checksum of the ids."""
    checksum = hashlib.sha256()
    kernels = _GuardedKernels(memory, say)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for module in (host, kinds):  # vocabulary.py imports the function when it needs the function
            stack.enter_context(mock.patch.object(module, "load_kernel", kernels.load))
        by_line = replace(tiny_vocabulary(), pre="gemma4")
        afmoe = replace(tiny_vocabulary(), pre="afmoe")
        for vocabulary in (tiny_vocabulary(), tiny_spm_vocabulary(), by_line, afmoe, _WORD_PIECE, _UNIGRAM):
            metadata = {"general.architecture": "llama", **vocabulary.metadata()}
            metadata |= _KEYS.get(vocabulary.model, {})
            tokenizer = load_tokenizer(open_gguf(write_gguf(Path(folder) / "vocabulary.gguf", metadata, {})))
            for text in ("", "a", "Hello", "Hello world é", "the " * 40, "x" * 300, "日本" * 20, "<|im_end|>a</s>"):
                checksum.update(tokenizer.encode(text, add_special=True, parse_special=True).tobytes())
    return checksum.digest()
