r"""The kinds of tokenizers in GGUF files, BPE, SentencePiece, WordPiece and Unigram, and the choice between them.

`gpt2` is byte-level BPE. The vocabulary spells every byte as one printable character, so any text can be encoded.
`gemma4` is character-level BPE. A character outside the vocabulary is encoded as one token per byte.

For BPE, a pre-tokenizer first splits the text into pieces. The names and rules of pre-tokenizers come from llama.cpp. A
pre-tokenizer is a list of patterns, most of which are identical to llama.cpp's. Each pattern is one stage. A stage
splits every piece of the previous stage and cannot look beyond the ends of a piece. Text between two matches also
becomes a piece. Code points that no pattern can distinguish share a symbol, and patterns.py compiles every pattern to a
table over symbols. A single kernel runs all tables. The sets of code points, also in patterns.py, come from a fixed
Unicode version.

llama.cpp distinguishes case only in ASCII. In llama.cpp, `\p{Lu}` matches any letter, and capitals are written as
`[\p{L}&&[^a-z]]`. In llama.cpp's patterns with non-ASCII characters, ranges of such characters never match whitespace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from unicodedata import normalize

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.compiled.host import load_kernel, load_kernels
from llmrun.base.compiled.kernel import KernelName
from llmrun.base.errors import UnsupportedModel, shown
from llmrun.formats.layouts.tokens import (
    GROUPS_OF_THREE,
    IMPOSSIBLE,
    KNOWN_WORD_BYTES,
    KNOWN_WORDS,
    MATCHES,
    NEVER,
    NOT_FOUND,
    PREFIX_SLOTS,
    SCRATCH_BYTES_PER_BYTE,
    TRAILING_RUN,
    WHOLE_GROUPS_OF_THREE,
)
from llmrun.model.tokenizers.patterns import contains, named, parse, sets_of, symbols_of, transitions, union
from llmrun.model.tokenizers.text_tokenizer import SPACE, Parts, TextTokenizer, longest_piece
from llmrun.model.tokenizers.vocabulary import NORMAL, UNUSED, USER_DEFINED, Defaults, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.tokenizers.patterns import CodePoints
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer


class Stage(Struct, frozen=True):
    """One pass over the pieces. For every kind except MATCHES, the pattern consists of a single set."""

    pattern: str
    kind: int = MATCHES


class PreTokenizer(Struct, frozen=True):
    """The rules for one value of `tokenizer.ggml.pre`."""

    stages: tuple[Stage, ...]
    ignore_merges: bool = False  # a piece that is itself a token is not split, even if no merges produce this token
    add_bos: bool = False  # the default if the file does not contain `tokenizer.ggml.add_bos_token`
    has_default_bos: bool = True  # BOS defaults to llama.cpp's id 11 if the file does not specify a BOS
    by_character: bool = False  # tokens consist of characters instead of bytes; `<0x41>` represents a byte
    escapes_spaces: bool = False  # a space is written as U+2581
    whole_newlines: bool = False  # a piece of newlines that is itself a token is not split
    always_adds_bos: bool = False  # adds a BOS even if the file specifies otherwise
    strips_before: str = ""  # the special token that strips preceding whitespace


class Splitter:
    """A pre-tokenizer's stages, compiled into tables."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self._kernel = load_kernel("tokens.split", "split")
        nodes = [parse(stage.pattern) for stage in stages]
        sets = [sets_of(node) for node in nodes]
        self._code_points, membership = symbols_of([members for several in sets for members in several])
        self._n_symbols = membership.shape[1]
        firsts = np.cumsum([0, *map(len, sets)])
        self._tables: list[NDArray[np.int32] | NDArray[np.uint8]] = []
        for stage, node, first, after in zip(stages, nodes, firsts, firsts[1:], strict=False):
            members = membership[first:after]
            is_pattern = stage.kind == MATCHES
            table = transitions(node, members, self._n_symbols) if is_pattern else members[0].astype(np.uint8)
            self._tables.append(table)
        words = [(stage.kind, table.ctypes.data) for stage, table in zip(stages, self._tables, strict=True)]
        self._stages = np.array(words, np.int64)

    def split(self, text: bytes, part_ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Split UTF-8 text into pieces and return int64[pieces], the byte offsets of the ends of the pieces.

        No piece crosses an offset in `part_ends`, whose last offset is the end of the text.
        """
        buffer = np.frombuffer(text + b"\0", np.uint8)
        symbols = np.empty(len(text) + 1, np.uint8)
        ends = np.empty(max(len(text), 1), np.int64)
        count = np.zeros(1, np.int64)
        self._kernel(
            buffer.ctypes.data,
            len(text),
            part_ends.ctypes.data,
            len(part_ends),
            self._code_points.ctypes.data,
            self._n_symbols,
            self._stages.ctypes.data,
            len(self._stages),
            symbols.ctypes.data,
            ends.ctypes.data,
            count.ctypes.data,
        )
        return ends[: count[0]].copy()


@functools.cache
def splitter(stages: tuple[Stage, ...]) -> Splitter:
    """Return a cached splitter for the given stages."""
    return Splitter(stages)


def _stages(*patterns: str | Stage) -> tuple[Stage, ...]:
    return tuple([Stage(pattern) if isinstance(pattern, str) else pattern for pattern in patterns])


# --- the patterns of pre-tokenizers ----------------------------------------------------------------------------------

_CONTRACTIONS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_OTHERS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_WORDS_AND_SPACES = rf"{_WORD}|\p{{N}}|{_OTHERS}|{_SPACES}"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_JAIS2 = (
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_OTHERS}|\s*[\r\n]+"
    + "".join([rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)])
    + r"|\s{1,2}(?!\S)|\s"
)


def _cased(capital: str, small: str, contraction: str, digits: str) -> str:
    """Build a pattern that starts a new word at capital letters. `capital` and `small` are sets in pattern notation."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{capital}*{small}+{contraction}|{before}{capital}+{small}*{contraction}"
    return rf"{words}|{digits}|{_OTHERS_AND_SLASHES}|{_SPACES}"


_WITH_CONTRACTION = rf"(?:{_CONTRACTIONS})?"
_TEKKEN = _cased(r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]", "", r"\p{N}")
_GPT4O = _cased(r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]", _WITH_CONTRACTION, r"\p{N}{1,3}")
_GRANITE_EMBEDDING = _cased(r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]", _WITH_CONTRACTION, r"\p{N}{1,3}")
_UNCASED = _cased(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]", _WITH_CONTRACTION, r"\p{N}{1,3}")
_UNCASED_DIGITS_APART = _cased(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]", _WITH_CONTRACTION, r"\p{N}")
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^\p{{Han}}]]+{_WITH_CONTRACTION}"
    rf"|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_OTHERS}|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"

_CJK = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_DEEPSEEK3_WORDS = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_SPACES}"
_DEEPSEEK_CJK = "[\u0800-\u9fa5\uac00-\ud7ff" + r"&&[^\s]]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?\p{Cased}+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
    Stage(r"\s", TRAILING_RUN),
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u30ff]+"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_NOT_PUNCTUATION = r" ?[^(\s|.,!?)" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c]+"
_LINES = r"[^\n]+|\n+"

_THOUSANDS = Stage(r"\p{N}", GROUPS_OF_THREE)
_DIGITS_APART = _stages(r"\p{N}", _GPT2)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_DEFAULT = _stages(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# --- the names of pre-tokenizers -------------------------------------------------------------------------------------

_BY_LINE = PreTokenizer(_stages(_LINES), by_character=True, escapes_spaces=True)
_GEMMA4 = PreTokenizer(
    _stages(_LINES),
    by_character=True,
    escapes_spaces=True,
    whole_newlines=True,
    always_adds_bos=True,
)


def _named(names: str, rule: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), rule)


# Some pre-tokenizers use the same patterns but differ in other rules.
PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),
    **_named(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer(_stages(_LLAMA3), ignore_merges=True, add_bos=True),
    ),
    **_named("smaug-bpe dbrx", PreTokenizer(_stages(_LLAMA3))),
    **_named("chatglm-bpe", PreTokenizer(_stages(_LLAMA3), has_default_bos=False)),
    **_named("glm4 glm5", PreTokenizer(_stages(_LLAMA3), ignore_merges=True, has_default_bos=False)),
    **_named(
        "qwen2 deepseek-r1-qwen megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2",
        PreTokenizer(_stages(_QWEN2)),
    ),
    **_named("qwen35", PreTokenizer(_stages(_QWEN35))),
    **_named(
        "gpt-2 phi-2 mpt olmo jais gigachat mellum a.x-4.0 exaone4 trillion granite-docling modern-bert jina-es jina-de"
        " jina-v1-en roberta-bpe",
        PreTokenizer(_stages(_GPT2)),
    ),
    **_named("jina-v2-es jina-v2-de jina-v2-code", PreTokenizer(_stages(_GPT2), strips_before="<mask>")),
    **_named(
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer(_DIGITS_APART),
    ),
    **_named("tekken", PreTokenizer(_stages(_TEKKEN), ignore_merges=True, add_bos=True)),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(_stages(_GPT4O))),
    **_named("granite-embed-multi-97m", PreTokenizer(_stages(_GRANITE_EMBEDDING), ignore_merges=True)),
    **_named("tiny_aya cohere2moe", PreTokenizer(_stages(_THOUSANDS, _UNCASED))),
    **_named("falcon", PreTokenizer(_stages(r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    **_named("deepseek-llm", PreTokenizer(_stages(*_DEEPSEEK_LLM))),
    **_named("deepseek-coder", PreTokenizer(_stages(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_stages(r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    **_named(
        "spark2_5",
        PreTokenizer(
            _stages(r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
        ),
    ),
    **_named("youtu", PreTokenizer(_stages(_YOUTU_SCRIPTS, _UNCASED_DIGITS_APART), ignore_merges=True)),
    **_named("afmoe", PreTokenizer(_stages(_THOUSANDS, _AFMOE_SCRIPTS, _DEEPSEEK3))),
    **_named("kimi-k2", PreTokenizer(_stages(_KIMI))),
    **_named("jais-2", PreTokenizer(_stages(_JAIS2))),
    **_named("poro-chat bloom gpt3-finnish", PreTokenizer(_stages(_NOT_PUNCTUATION))),
    **_named("viking", PreTokenizer(_stages(_NOT_PUNCTUATION, r"\p{N}"))),
    **_named("chameleon", PreTokenizer(_stages(*_CHAMELEON), add_bos=True)),
    **_named("superbpe", PreTokenizer(_stages(r"\p{N}+", Stage("[0-9]", WHOLE_GROUPS_OF_THREE)))),
    **_named("bailingmoe bailingmoe2 llada-moe", PreTokenizer(_stages(_BAILING))),
    **_named("seed-coder", PreTokenizer(_stages(_SEED_CODER))),
    **_named("ufakzeka", PreTokenizer(_stages(_WORDS_AND_SPACES))),
    **_named("laguna", PreTokenizer(_stages(_LINES, _QWEN2))),
    **_named("exaone-moe", PreTokenizer(_stages(_EXAONE_MOE))),
    **_named(
        "minicpm5",
        PreTokenizer(_stages(r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    ),
    **_named("gemma4 granite-embed-multi-311m", _GEMMA4),
    **_named("sarvam-moe", _BY_LINE),
}


# --- BPE -------------------------------------------------------------------------------------------------------------

_DEFAULT_ID = 11  # llama.cpp's default for BOS and EOS if the file does not specify them
_NEWLINE = 0x0A
_ANY_BYTE = -1


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return the 256 printable characters that represent the bytes 0 to 255 in GPT-2's byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}
    return tuple(chr(spelled[byte]) for byte in range(256))


def _spellings() -> list[bytes]:
    return [character.encode() for character in byte_characters()]


def load_bpe(file: GGUFFile) -> BPETokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `gpt2`.

    Raises UnsupportedModel if the pre-tokenizer is not supported.
    """
    rule = pre_tokenizer_of(file)
    bos_id = _DEFAULT_ID if rule.has_default_bos else None
    return _load_bpe(file, rule, Defaults(bos_id=bos_id, eos_id=_DEFAULT_ID, add_bos=rule.add_bos))


def load_gemma4(file: GGUFFile) -> BPETokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `gemma4`."""
    return _load_bpe(file, PRE_TOKENIZERS["gemma4"], Defaults(bos_id=None, eos_id=None, add_bos=True))


def _load_bpe(file: GGUFFile, rule: PreTokenizer, defaults: Defaults) -> BPETokenizer:
    required = () if rule.by_character else _spellings()
    vocabulary = read_vocabulary(file, defaults, merged=True, required=required, strips_before=rule.strips_before)
    if rule.always_adds_bos:
        vocabulary = replace(vocabulary, add_bos=vocabulary.bos_id is not None)
    return BPETokenizer(vocabulary, rule)


def pre_tokenizer_of(file: GGUFFile) -> PreTokenizer:
    """Return the file's pre-tokenizer. Raises UnsupportedModel if PRE_TOKENIZERS does not contain the pre-tokenizer."""
    name = file.string("tokenizer.ggml.pre", "") or "default"
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"pre-tokenizer not supported: {shown(str(file.path), 300)}: tokenizer.ggml.pre: '{shown(name)}' "
            f"is not among the {len(PRE_TOKENIZERS)} that llmrun supports",
            hint="try --backend llama, or another model",
        )
    return rule


class BPETokenizer(TextTokenizer):
    """A BPE tokenizer that splits text with a pre-tokenizer and merges pairs in a kernel."""

    def __init__(self, vocabulary: Vocabulary, rule: PreTokenizer) -> None:
        super().__init__(vocabulary)
        self._rule = rule
        self._splitter = splitter(rule.stages)
        self._merge = load_kernel("tokens.bpe_merge", "merge")
        # Other characters below 256 are not byte characters, so a character outside Latin-1 replaces them.
        others = dict.fromkeys(range(256), "\uffff")
        self._latin_1 = others | {ord(character): chr(byte) for byte, character in enumerate(byte_characters())}
        tables = vocabulary.tables
        bytes_ = [bytes([byte]) for byte in range(256)]
        spellings = bytes_ if rule.by_character else _spellings()
        self._byte_symbols = tables.find(spellings)
        self._spelling = np.array([[len(text), *text.ljust(2, b"\0"), 0] for text in spellings], np.uint8)
        symbols = np.arange(len(tables.starts), dtype=np.int32)
        symbols[tables.vocabulary_size :] = NOT_FOUND
        symbols[: tables.vocabulary_size][vocabulary.control_mask()] = NOT_FOUND
        self._emitted = symbols
        raw = tables.find([b"<0x%02X>" % byte for byte in range(256)] if rule.by_character else bytes_)
        self._raw_byte_ids = np.where(raw == NOT_FOUND, NOT_FOUND, symbols[raw]).astype(np.int32)
        whole = rule.ignore_merges or rule.whole_newlines
        self._longest_whole = int(tables.lengths.max()) if whole else 0
        self._whole_begins = _NEWLINE if rule.whole_newlines else _ANY_BYTE

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        return text.replace(b" ", SPACE) if self._rule.escapes_spaces else text

    def _normal_bytes(self, text: bytes) -> bytes:
        if self._rule.escapes_spaces:
            return super()._normal_bytes(text)
        try:
            return text.decode().translate(self._latin_1).encode("latin-1")
        except UnicodeError:
            return text  # the token's text does not consist of byte characters

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        text, part_ends, insert_at, insert_ids = parts
        ends = self._splitter.split(text, part_ends)
        scratch = np.empty(SCRATCH_BYTES_PER_BYTE * longest_piece(ends), np.uint8)
        tables = self._vocabulary.tables
        return self._run(
            self._merge,
            (text, ends, insert_at, insert_ids),
            self._byte_symbols.ctypes.data,
            tables.pairs.ctypes.data,
            tables.pair_mask,
            self._emitted.ctypes.data,
            self._raw_byte_ids.ctypes.data,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            tables.table.ctypes.data,
            tables.mask,
            self._longest_whole,
            self._spelling.ctypes.data,
            self._whole_begins,
            int(self._rule.by_character),
            scratch.ctypes.data,
            most_per_byte=2,
        )


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def load_spm(file: GGUFFile) -> SPMTokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `llama`."""
    vocabulary = read_vocabulary(file, Defaults(bos_id=1, eos_id=2, add_bos=True), merged=False)
    scores = np.zeros(vocabulary.tables.vocabulary_size, np.float32)
    if file.has("tokenizer.ggml.scores"):
        scores[:] = file.numbers("tokenizer.ggml.scores")
    return SPMTokenizer(vocabulary, scores, space_prefix=file.boolean("tokenizer.ggml.add_space_prefix", True))


class SPMTokenizer(TextTokenizer):
    """A SentencePiece tokenizer that merges pairs by score in a kernel.

    Spaces are written as U+2581, and a character outside the vocabulary is encoded as one token per byte.
    """

    def __init__(self, vocabulary: Vocabulary, scores: NDArray[np.float32], *, space_prefix: bool) -> None:
        super().__init__(vocabulary, space_prefix=space_prefix)
        self._merge = load_kernel("tokens.spm_merge", "merge")
        self._priorities = _priorities(scores)
        self._priorities[vocabulary.control_mask()] = NEVER
        self._byte_ids = _byte_ids(vocabulary)
        tables = vocabulary.tables
        self._longest = int(tables.lengths.max())
        self._joined = np.zeros(256, np.uint8)
        load_kernel("tokens.spm_merge", "find_joined")(
            tables.starts.ctypes.data, tables.lengths.ctypes.data, len(tables.starts), self._joined.ctypes.data
        )

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        spaced = b" " + text if self._space_prefix and after_special else text
        return spaced.replace(b" ", SPACE)

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        scratch = np.empty(SCRATCH_BYTES_PER_BYTE * longest_piece(parts[1]), np.uint8)
        known = np.zeros((KNOWN_WORDS, KNOWN_WORD_BYTES // 8), np.int64)
        tables = self._vocabulary.tables
        return self._run(
            self._merge,
            parts,
            tables.table.ctypes.data,
            tables.mask,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            self._longest,
            self._priorities.ctypes.data,
            self._byte_ids.ctypes.data,
            self._joined.ctypes.data,
            known.ctypes.data,
            scratch.ctypes.data,
        )


def _priorities(scores: NDArray[np.float32]) -> NDArray[np.int32]:
    """Convert scores to int32 values that sort in descending order of the scores.

    The bits of a float, read as an integer, sort like the float itself once the lower 31 bits of negative floats are
    flipped.
    """
    bits = (0.0 - scores).astype(np.float32).view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int32)


def _byte_ids(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """Return int32[256]: the token of each byte, or NOT_FOUND if the token is a control token.

    A byte's token has a text such as `<0x41>`. If no such token exists, use the token whose text is the byte itself.
    """
    named = vocabulary.tables.find([b"<0x%02X>" % byte for byte in range(256)])
    plain = vocabulary.tables.find([bytes([byte]) for byte in range(256)])
    ids = np.where(named == NOT_FOUND, plain, named)
    return np.where(vocabulary.control_mask()[ids], NOT_FOUND, ids).astype(np.int32)


# --- WordPiece -------------------------------------------------------------------------------------------------------

# llama.cpp's defaults if the file does not specify these tokens: [UNK], [CLS] and [SEP] of bert-base-uncased.
_UNK_ID, _CLS_ID, _SEP_ID = 100, 101, 102

_REPLACEMENT = "\ufffd"  # replaces invalid UTF-8


def load_wordpiece(file: GGUFFile) -> WordPieceTokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `bert`."""
    vocabulary = read_vocabulary(file, Defaults(bos_id=_CLS_ID, eos_id=None, add_bos=True), merged=False)
    lowercase = file.boolean("tokenizer.ggml.normalizer.lowercase", True)
    return WordPieceTokenizer(
        # llama.cpp always adds [CLS] and [SEP], even if the file specifies otherwise.
        replace(vocabulary, add_bos=True),
        unknown_id=file.integer("tokenizer.ggml.unknown_token_id", _UNK_ID),
        sep_id=file.integer("tokenizer.ggml.seperator_token_id", _SEP_ID),
        words=Words(
            lowercase=lowercase, strip_accents=file.boolean("tokenizer.ggml.normalizer.strip_accents", lowercase)
        ),
    )


class Words(dict[int, str]):
    """A table for `str.translate` that normalizes the characters of a text and inserts spaces between words.

    Characters are looked up on demand, because a table of all of Unicode would take too long to build. Characters that
    Unicode 15.1 does not assign are never changed, so that ids do not depend on the interpreter's Unicode version.
    """

    def __init__(self, *, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self._lowercase, self._strip_accents = lowercase, strip_accents
        self._changing = union(*map(named, "LNPMS"))
        self._dropped = union(named("C"), *([named("M")] if strip_accents else []))
        self._alone = union(named("P"), named("ASCII symbols"), named("Ideographs of BERT"))

    def __missing__(self, code_point: int) -> str:
        self[code_point] = text = self._normalized(chr(code_point))
        return text

    def _normalized(self, character: str) -> str:
        """Return the replacement of a character: a space, nothing, or the character (with spaces if it is a word)."""
        if self._strip_accents and _contains(self._changing, character):
            character = normalize("NFD", character)[0]
        if _contains(named("s"), character):
            return " "
        if character == _REPLACEMENT or _contains(self._dropped, character):
            return ""
        alone = _contains(self._alone, character)
        if self._lowercase and _contains(self._changing, character):
            character = character.lower()[0]
        return f" {character} " if alone else character


def _contains(code_points: CodePoints, character: str) -> bool:
    return bool(contains(code_points, np.array([ord(character)]))[0])


class WordPieceTokenizer(TextTokenizer):
    """The WordPiece tokenizer of BERT models, which divides words into tokens in a kernel.

    Text is cleaned, divided into words and punctuation, and usually converted to lower case without accents, so
    decoding cannot restore the original text. In a GGUF vocabulary, tokens that begin a word begin with U+2581.
    """

    def __init__(self, vocabulary: Vocabulary, *, unknown_id: int, sep_id: int, words: Words) -> None:
        super().__init__(vocabulary, space_prefix=True)
        self._encode_words = load_kernel("tokens.word_pieces", "encode")
        self._unknown_id, self._sep_id, self._words = unknown_id, sep_id, words
        tables = vocabulary.tables
        self._emitted = np.arange(tables.vocabulary_size, dtype=np.int32)
        self._emitted[vocabulary.control_mask()] = NOT_FOUND
        self._longest = int(tables.lengths.max())

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        ids = super().encode(text, add_special=add_special, parse_special=parse_special)
        return np.append(ids, np.int32(self._sep_id)) if add_special else ids

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        words = text.decode().translate(self._words).split()
        return b" ".join([SPACE + word.encode() for word in words])

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        states = np.empty(self._longest, np.int64)
        tables = self._vocabulary.tables
        return self._run(
            self._encode_words,
            parts,
            tables.table.ctypes.data,
            tables.mask,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            self._longest,
            self._emitted.ctypes.data,
            self._unknown_id,
            states.ctypes.data,
        )


# --- Unigram ---------------------------------------------------------------------------------------------------------

_UNIGRAM_UNKNOWN_ID, _UNIGRAM_EOS_ID = 2, 1  # llama.cpp's defaults if the file does not specify these tokens
_UNKNOWN_PENALTY = np.float32(10)  # the difference between the lowest score and the score of an unknown character
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


def load_unigram(file: GGUFFile) -> UnigramTokenizer:
    """Load the tokenizer of a file whose `tokenizer.ggml.model` is `t5`. Raises BadGGUF for an invalid table."""
    vocabulary = read_vocabulary(file, Defaults(bos_id=None, eos_id=_UNIGRAM_EOS_ID, add_bos=False), merged=False)
    adds_eos = file.boolean("tokenizer.ggml.add_eos_token", True) and vocabulary.eos_id is not None
    scores = np.zeros(vocabulary.tables.vocabulary_size, np.float32)
    if file.has("tokenizer.ggml.scores"):
        scores[:] = file.numbers("tokenizer.ggml.scores")
    return UnigramTokenizer(
        replace(vocabulary, add_eos=adds_eos),
        scores,
        unknown_id=file.integer("tokenizer.ggml.unknown_token_id", _UNIGRAM_UNKNOWN_ID),
        replacing=_read_replacing(file),
        space_prefix=file.boolean("tokenizer.ggml.add_space_prefix", False),
        merges_spaces=file.boolean("tokenizer.ggml.remove_extra_whitespaces", False),
    )


def _read_replacing(file: GGUFFile) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the nodes of the trie of texts to replace, and the replacement texts, each terminated by a NUL.

    The file contains the size of the trie in bytes, the trie and the texts, in one array.
    """
    if not file.has(_CHARSMAP):
        return np.empty(0, np.uint32), np.zeros(1, np.uint8)
    data = file.integers(_CHARSMAP).astype(np.uint8)
    size = int(data[:4].view("<u4")[0]) if len(data) >= 4 else 0
    if len(data) < 4 or size % 4 or size + 4 >= len(data) or data[-1]:
        raise file.bad(_CHARSMAP, "must be a size, as many bytes of a trie, and texts with a NUL at the end")
    return data[4 : 4 + size].copy().view("<u4").astype(np.uint32), data[4 + size :].copy()


class UnigramTokenizer(TextTokenizer):
    """The Unigram tokenizer of SentencePiece, which normalizes and divides text in kernels.

    XLM-RoBERTa and its descendants use this tokenizer. A table in the file (usually NFKC) normalizes the text, which is
    divided into the tokens with the largest sum of scores.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        scores: NDArray[np.float32],
        *,
        unknown_id: int,
        replacing: tuple[NDArray[np.uint32], NDArray[np.uint8]],
        space_prefix: bool,
        merges_spaces: bool,
    ) -> None:
        super().__init__(vocabulary, space_prefix=space_prefix)
        self._normalize = load_kernel("tokens.unigram", "normalize")
        self._divide = load_kernel("tokens.unigram", "encode")
        self._unknown_id, self._replacing = unknown_id, replacing
        self._merges_spaces = merges_spaces
        self._scores, self._unknown_score = _usable(scores, vocabulary.kinds)
        tables = vocabulary.tables
        self._longest = np.zeros(PREFIX_SLOTS, np.int32)
        load_kernel("tokens.unigram", "measure")(
            tables.starts.ctypes.data, tables.lengths.ctypes.data, len(tables.starts), self._longest.ctypes.data
        )

    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        nodes, texts = self._replacing
        source = np.frombuffer(text + b"\0", np.uint8)
        count = np.zeros(1, np.int64)
        words = (
            *(source.ctypes.data, len(text), nodes.ctypes.data, len(nodes), texts.ctypes.data, len(texts)),
            *(int(self._space_prefix), int(self._merges_spaces)),
        )
        self._normalize(*words, 0, count.ctypes.data)
        normalized = np.empty(int(count[0]), np.uint8)
        self._normalize(*words, normalized.ctypes.data, count.ctypes.data)
        written = normalized.tobytes()
        return written if after_special or text.startswith(b" ") else written.removeprefix(SPACE)

    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        most = longest_piece(parts[1]) + 1
        sums, origins, chosen = np.empty(most), np.empty(most, np.int64), np.empty(most, np.int32)
        tables = self._vocabulary.tables
        return self._run(
            self._divide,
            parts,
            tables.table.ctypes.data,
            tables.mask,
            tables.starts.ctypes.data,
            tables.lengths.ctypes.data,
            self._longest.ctypes.data,
            self._scores.ctypes.data,
            self._unknown_id,
            self._unknown_score.ctypes.data,
            sums.ctypes.data,
            origins.ctypes.data,
            chosen.ctypes.data,
        )


def _usable(scores: NDArray[np.float32], kinds: NDArray[np.int32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores for the kernel, and the score of an unknown character, float64[1].

    User-defined tokens have the score 0, which makes them likely. Control tokens, the unknown token and tokens with
    the score -inf are excluded. Unknown characters are always allowed, so every text can be divided.
    """
    normal = scores[(kinds == NORMAL) & np.isfinite(scores)]
    lowest = normal.min() if len(normal) else np.float32(np.finfo(np.float32).max)
    found = np.where(np.isin(kinds, (NORMAL, UNUSED)), scores.astype(np.float64), IMPOSSIBLE)
    found[kinds == USER_DEFINED] = 0.0
    return found, np.array([lowest - _UNKNOWN_PENALTY], np.float64)


# --- the choice ------------------------------------------------------------------------------------------------------


class _Kind(Struct, frozen=True):
    """A kind of tokenizer: its loader, its kernels and an optional check of the metadata."""

    load: Callable[[GGUFFile], Tokenizer]
    kernels: tuple[KernelName, ...]
    check: Callable[[GGUFFile], object] | None = None  # raises UnsupportedModel without reading the vocabulary


_ALWAYS = (
    KernelName.of("tokens.token_table", "build"),
    *(KernelName.of("tokens.special_tokens", name) for name in ("build", "find")),
)
_BPE = (KernelName.of("tokens.split", "split"), KernelName.of("tokens.bpe_merge", "merge"))
_KINDS = {
    "gpt2": _Kind(load_bpe, _BPE, pre_tokenizer_of),
    "gemma4": _Kind(load_gemma4, _BPE),
    "llama": _Kind(
        load_spm, (KernelName.of("tokens.spm_merge", "find_joined"), KernelName.of("tokens.spm_merge", "merge"))
    ),
    "bert": _Kind(load_wordpiece, (KernelName.of("tokens.word_pieces", "encode"),)),
    "t5": _Kind(
        load_unigram, tuple(KernelName.of("tokens.unigram", name) for name in ("measure", "normalize", "encode"))
    ),
}
# Maps the kinds of tokenizer that llama.cpp supports but llmrun does not to the explanations in error messages.
_UNSUPPORTED = {
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
    "hybriddna": "k-mers of DNA",
    "whitespace": "words without whitespace",
}


def tokenizer_kernels(file: GGUFFile) -> Sequence[KernelName]:
    """Return the kernels that `load_tokenizer` uses, so that all of a model's kernels can be compiled together.

    Raises UnsupportedModel in the same cases as `load_tokenizer`, but does not read the vocabulary.
    """
    kind = _kind_of(file)
    if kind.check is not None:
        kind.check(file)
    return *_ALWAYS, *kind.kernels


def load_tokenizer(file: GGUFFile) -> Tokenizer:
    """Load the tokenizer of an open GGUF file. The tokenizer keeps the file's header in memory.

    Raises UnsupportedModel if the kind of tokenizer or the pre-tokenizer is not supported, and BadGGUF if there is
    no vocabulary.
    """
    kind = _kind_of(file)
    load_kernels(tokenizer_kernels(file))  # a single call, so that a first run compiles all kernels in parallel
    return kind.load(file)


def _kind_of(file: GGUFFile) -> _Kind:
    model = file.string("tokenizer.ggml.model")
    kind = _KINDS.get(model)
    if kind is None:
        known = f", which is {_UNSUPPORTED[model]}" if model in _UNSUPPORTED else ""
        raise UnsupportedModel(
            f"tokenizer not supported: {shown(str(file.path), 300)}: tokenizer.ggml.model: '{shown(model)}'{known}; "
            "llmrun supports BPE (gpt2, gemma4), SentencePiece (llama), WordPiece (bert) and Unigram (t5)",
            hint="try --backend llama, or another model",
        )
    return kind
