"""Cutting text into the pieces within which BPE merges: llama.cpp's pre-tokenizers, by their names in GGUF files.

A pattern never asks more of a character than its class, so the text is first collapsed to one byte per character:
ASCII as it is, any other letter, number, punctuation mark or space as one of a few bytes from 0x80 on. Patterns then
are ordinary `re` patterns over bytes. That fixes the Unicode version (see unicode_ranges), needs no library, and runs
at 3 MB/s (default) to 18 MB/s (llama-bpe).

Several patterns in a row are stages: each cuts the pieces of the one before it, and sees nothing beyond their ends.
What a pattern does not match is a piece of its own.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.tokenizers import unicode_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OTHER, _LETTER, _NUMBER, _PUNCTUATION, _SPACE = 0x80, 0x81, 0x82, 0x83, 0x84

# How the classes are written in a pattern, always inside brackets; ASCII members are spelled out.
_CLASSES = {
    r"\p{L}": r"A-Za-z\x81",
    r"\p{N}": r"0-9\x82",
    r"\p{P}": r"!-#%-*,-/:;?@\[-\]_{}\x83",
    r"\s": r"\t-\r \x84",
}

_CONTRACTIONS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}]+|[\p{{N}}]{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_GPT2 = (
    r"'(?:[stmd]|re|ve|ll)| ?[\p{L}]+| ?[\p{N}]+"
    r"| ?[^\s\p{L}\p{N}]+|[\s]+(?![^\s])|[\s]+"
)
_DIGITS_APART = (r"[\p{N}]", _GPT2)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"[\p{N}]+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for."""

    stages: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # unless `tokenizer.ggml.add_bos_token` says otherwise
    has_default_bos: bool = True  # llama.cpp's id 11, when the file names none

    def split(self, text: str) -> tuple[bytes, NDArray[np.int64]]:
        """(UTF-8 of the text, byte offsets at which its pieces end). The text has no surrogates."""
        encoded = text.encode()
        if len(encoded) == len(text):
            return encoded, np.array(self._ends(encoded), np.int64)
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ends = np.array(self._ends(_class_bytes()[code_points].tobytes()), np.int64)
        widths = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
        return encoded, np.cumsum(widths, dtype=np.int64)[ends - 1]

    def _ends(self, collapsed: bytes) -> list[int]:
        ends = [len(collapsed)]
        for stage in self.stages:
            ends = _split_pieces(_compiled(stage), collapsed, ends)
        return ends


def _split_pieces(pattern: re.Pattern[bytes], collapsed: bytes, ends: list[int]) -> list[int]:
    """Where pieces end once every one of `ends` is cut at the matches of a pattern."""
    result: list[int] = []
    add = result.append
    start = 0
    for end in ends:
        done = start
        for match in pattern.finditer(collapsed, start, end):
            begin, after = match.span()
            if begin > done:
                add(begin)
            add(after)
            done = after
        if done < end:
            add(end)
        start = end
    return result


@functools.cache
def _compiled(stage: str) -> re.Pattern[bytes]:
    for name, members in _CLASSES.items():
        stage = stage.replace(name, members)
    return re.compile(stage.encode("ascii"))


@functools.cache
def _class_bytes() -> NDArray[np.uint8]:
    """uint8[0x110000]: the byte that stands for a code point."""
    table = np.full(0x110000, _OTHER, np.uint8)
    for ranges, byte in (
        (unicode_ranges.LETTERS, _LETTER),
        (unicode_ranges.NUMBERS, _NUMBER),
        (unicode_ranges.PUNCTUATION, _PUNCTUATION),
        (unicode_ranges.WHITE_SPACE, _SPACE),
    ):
        for code_points in ranges.split():
            first, _, last = code_points.partition("-")
            table[int(first, 16) : int(last or first, 16) + 1] = byte
    table[:0x80] = np.arange(0x80)
    return table


_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

# The names that stand for all the others in messages.
SUPPORTED_KINDS = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm")

# Names whose patterns are the same may differ in what llama.cpp does besides.
PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA_BPE
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    "chatglm-bpe": PreTokenizer((_LLAMA3,), has_default_bos=False),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True, has_default_bos=False)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        PreTokenizer((_QWEN2,)),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "a.x-4.0", "exaone4", "trillion"),
        PreTokenizer((_GPT2,)),
    ),
    "granite-docling": PreTokenizer((_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer(_DIGITS_APART),
    ),
}
