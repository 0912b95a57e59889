"""Reads the vocabulary of a GGUF file: token texts and types, control tokens, special tokens, and the rules for BOS.

GGUF files specify only some control tokens, such as one or two tokens that end an answer. The other control tokens are
found by their text. The rules and the texts are llama.cpp's (`llama_vocab_is_eog`, `llama_vocab_fim_pre` and others),
so answers end at the same token as in llama.cpp.

The first step of tokenization is to find the special tokens in a text. Special tokens are either control tokens such as
`<|im_end|>`, which users must not be able to insert, or user-defined tokens: words that the model's authors added, and
that may appear in any text.

Untrusted text from users, tools and files is *protected* before a chat template renders it. `protect` inserts a mark
after the first character of every control string, so that the string no longer matches, even if the template changes
the surrounding text. The mark is U+FDD0, a code point that Unicode excludes from text interchange. Marks that the text
already contains are doubled. `unmark` removes the marks and returns their positions.

`TokenTables` builds the hash tables of tokens and merges that the kernels use.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct

from llmrun.formats.layouts.tokens import CONTROL as CONTROL_FLAG
from llmrun.formats.layouts.tokens import NOT_FOUND, ONE_CHARACTER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.metadata import StringArray
    from llmrun.formats.gguf.reader import GGUFFile


class FillTokens(Struct, frozen=True):
    """The ids of the control tokens in fill-in-the-middle prompts.

    bos         the token before the prefix, or None
    prefix, suffix, middle  begin the text before the gap, the text after the gap, and the answer
    repository  begins the name of the repository, or None
    file        begins the name of each file, or None
    """

    bos: int | None
    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


class Role(NamedTuple):
    """The role of a token in prompts, and how to find the token.

    keys   the keys that may specify the token, without the prefix `tokenizer.ggml.`; the last key in the file counts
    texts  the texts to look for if the file contains none of these keys
    ends   True if the token also ends an answer
    """

    keys: tuple[str, ...]
    texts: tuple[str, ...]
    ends: bool = False


_PREFIX = Role(
    ("fim_pre_token_id", "prefix_token_id"),
    (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
)
_SUFFIX = Role(
    ("fim_suf_token_id", "suffix_token_id"),
    (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
)
_MIDDLE = Role(
    ("fim_mid_token_id", "middle_token_id"),
    (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
)
_PADDING = Role(("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True)
_REPOSITORY = Role(
    ("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), ends=True
)
_FILE = Role(("fim_sep_token_id",), ("<|file_sep|>",), ends=True)

ROLES = (_PREFIX, _SUFFIX, _MIDDLE, _PADDING, _REPOSITORY, _FILE)


class RoleToken(NamedTuple):
    """The token of a role, and whether the token was found by its text. Tokens found by text become control tokens."""

    token: int
    by_text: bool


def find_roles(known: Mapping[str, int], named: Mapping[str, int]) -> dict[Role, RoleToken]:
    """Return the tokens of the vocabulary for the given roles.

    known  maps the texts that are in the vocabulary to their ids
    named  the ids in the file's keys `tokenizer.ggml.*_token_id`, indexed by the part of the key after the last dot
    """
    found = {}
    for role in ROLES:
        if by_key := [named[key] for key in role.keys if key in named]:
            found[role] = RoleToken(by_key[-1], by_text=False)
        elif by_text := [known[text] for text in role.texts if text in known]:
            found[role] = RoleToken(by_text[0], by_text=True)
    return found


def fill_tokens(found: Mapping[Role, RoleToken], bos: int | None) -> FillTokens | None:
    """Return the tokens for prompts, or None if one of the three required tokens is missing."""
    tokens = [found[role].token if role in found else None for role in (_PREFIX, _SUFFIX, _MIDDLE, _REPOSITORY, _FILE)]
    return checked_fill_tokens(bos, *tokens)


def fill_tokens_of(file: GGUFFile) -> FillTokens | None:
    """Return a file's fill-in-the-middle tokens, except BOS, without loading the vocabulary."""
    texts = {text for role in ROLES for text in role.texts}
    tokens = file.strings("tokenizer.ggml.tokens")
    # Comparing only the tokens that begin like one of the texts is a hundred times as fast.
    beginnings = tokens.data[np.minimum(tokens.starts, len(tokens.data) - 1)]
    likely = np.flatnonzero(np.isin(beginnings, [text.encode()[0] for text in texts])).tolist()
    known = {tokens[number]: number for number in likely if tokens[number] in texts}
    keys = [key for role in ROLES for key in role.keys if file.has(f"tokenizer.ggml.{key}")]
    return fill_tokens(find_roles(known, {key: file.integer(f"tokenizer.ggml.{key}") for key in keys}), bos=None)


def checked_fill_tokens(
    bos: int | None,
    prefix: int | None,
    suffix: int | None,
    middle: int | None,
    repository: int | None,
    file: int | None,
) -> FillTokens | None:
    """Return FillTokens with the given ids, or None if one of the three required ids is missing."""
    if prefix is None or suffix is None or middle is None:
        return None
    return FillTokens(bos, prefix, suffix, middle, repository, file)


# Tokens with these texts end an answer, and are control tokens even if the file specifies otherwise.
ENDING_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# The token ids under these keys of the file end an answer.
ENDING_KEYS = ("eot_token_id", "eom_token_id")

KNOWN_TEXTS = (*ENDING_TEXTS, "<|plamo:eos|>", *(text for role in ROLES for text in role.texts))


def find_ending_tokens(
    known: Mapping[str, int], named: Mapping[str, int], eos_id: int | None, roles: Mapping[Role, RoleToken]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that end an answer and the ids that are control tokens because of their text.

    known  maps those KNOWN_TEXTS that are in the vocabulary to their ids
    named  the ids in the file's keys `tokenizer.ggml.*_token_id`, indexed by the part of the key after the last dot
    roles  the result of `find_roles`
    """
    ending = {named[key] for key in ENDING_KEYS if key in named}
    ending |= {found.token for role, found in roles.items() if role.ends}
    control = {found.token for found in roles.values() if found.by_text}
    spelled = {known[text] for text in ENDING_TEXTS if text in known}
    ending |= spelled
    control |= spelled
    if eos_id is not None:
        ending.add(eos_id)

    def ends(text: str) -> bool:
        return known.get(text) in ending

    # In vocabularies with the tokens below, <|end|> ends one message of an answer, not the whole answer.
    if (ends("<|call|>") or ends("<|calls|>")) and (ends("<|return|>") or ends("<|flush|>")):
        ending.discard(known.get("<|end|>", -1))
    # In vocabularies with one of the two tokens below, </s> is an ordinary word.
    if "</s>" in known and (ends("<|tool_response>") or ends("<|plamo:eos|>")):
        ending.discard(known["</s>"])
        control.discard(known["</s>"])
    return frozenset(ending), frozenset(control)


MARK = "\ufdd0"

# The kernel tries to match tokens at every possible position, which takes time in proportion to the longest token. The
# limit prevents a malicious file from slowing down the kernel. Longer tokens are searched for one after another.
_LONGEST_IN_TREE = 512  # maximum length in bytes

_ASCII_SPACE = " \t\n\v\f\r"


class SpecialToken(Struct, frozen=True):
    """A control token or user-defined token."""

    token_id: int
    text: str
    is_control: bool
    strips_right: bool = False  # also matches the whitespace after the token
    strips_left: bool = False  # also matches the whitespace before the token


class SpecialTokens:
    """The special tokens of a vocabulary. As in llama.cpp, longer tokens match first."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        from llmrun.base.compiled.host import load_kernel  # servers do not load kernels

        ordered = sorted(tokens, key=lambda token: -len(token.text.encode()))
        self._long = [token for token in ordered if len(token.text.encode()) > _LONGEST_IN_TREE]
        self._tokens = ordered[len(self._long) :]
        self._find_kernel = load_kernel("tokens.special_tokens", "find")
        texts = [token.text.encode() for token in self._tokens]
        self._lengths = [len(text) for text in texts]
        self._ids = np.array([token.token_id for token in self._tokens], np.int32)
        flags = [CONTROL_FLAG * token.is_control | ONE_CHARACTER * (len(token.text) == 1) for token in self._tokens]
        self._flags = np.array(flags, np.uint8)
        joined = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        ends = np.cumsum(self._lengths, dtype=np.int64)
        self._edges = np.zeros((1 << (2 * len(joined)).bit_length(), 2), np.int64)
        self._beginnings = np.zeros(256, np.uint8)
        self._nodes = np.full(len(joined), NOT_FOUND, np.int32)
        load_kernel("tokens.special_tokens", "build")(
            joined.ctypes.data,
            ends.ctypes.data,
            len(texts),
            self._edges.ctypes.data,
            len(self._edges) - 1,
            self._beginnings.ctypes.data,
            self._nodes.ctypes.data,
        )

    def partition(self, text: str, *, parse_control: bool, marks: Sequence[int] = ()) -> list[bytes | int]:
        """Split text into UTF-8 text and the ids of special tokens, in order.

        Control strings stay text unless `parse_control` is True. Control strings that contain a mark always stay text.
        `marks` are the positions that `unmark` returns.
        """
        encoded = text.encode()
        found = self._find(encoded, parse_control=parse_control, marks=_byte_offsets(text, marks))
        long = self._long_in(text)
        wanted = (token for token in found.present if parse_control or not token.is_control)
        if long or found.overlap or any(token.strips_left or token.strips_right for token in wanted):
            return self._partition_by_length(text, [*long, *found.present], parse_control=parse_control, marks=marks)
        parts: list[bytes | int] = []
        done = 0
        for at, number in zip(found.places.tolist(), found.numbers.tolist(), strict=True):
            if at > done:
                parts.append(encoded[done:at])
            parts.append(int(self._ids[number]))
            done = at + self._lengths[number]
        if done < len(encoded):
            parts.append(encoded[done:])
        return parts

    def protect(self, text: str) -> str:
        """Insert a mark into every control string, and double the marks that the text already contains."""
        places: set[int] = set()
        found = self._find(text.encode(), parse_control=True, marks=())
        for token in [*self._long_in(text), *found.present]:
            if token.is_control:
                inside = _mark_offset(token)
                at = text.find(token.text)
                while at >= 0:
                    places.add(at + inside)
                    at = text.find(token.text, at + 1)
        cuts = [0, *sorted(places), len(text)]
        return MARK.join(text[start:end].replace(MARK, MARK * 2) for start, end in pairwise(cuts))

    def _partition_by_length(
        self, text: str, present: Sequence[SpecialToken], *, parse_control: bool, marks: Sequence[int]
    ) -> list[bytes | int]:
        """Split text with one pass per token, from the longest to the shortest, which is llama.cpp's algorithm.

        Only this algorithm is correct if tokens overlap or strip whitespace.
        """
        spans = [(0, len(text), -1)] if text else []
        for token in present:
            if parse_control or not token.is_control:
                spans = _cut_at(token, text, spans, marks if token.is_control else ())
        return [text[start:end].encode() if token_id < 0 else token_id for start, end, token_id in spans]

    def _long_in(self, text: str) -> list[SpecialToken]:
        return [token for token in self._long if token.text in text]

    def _find(self, encoded: bytes, *, parse_control: bool, marks: Sequence[int]) -> _Matches:
        buffer = np.frombuffer(encoded + b"\0", np.uint8)
        at_marks = np.array(marks, np.int64)
        present = np.zeros(len(self._tokens), np.uint8)
        places = np.empty(len(encoded), np.int64)
        numbers = np.empty(len(encoded), np.int32)
        result = np.zeros(2, np.int64)
        self._find_kernel(
            buffer.ctypes.data,
            len(encoded),
            at_marks.ctypes.data,
            len(marks),
            int(parse_control),
            self._beginnings.ctypes.data,
            self._edges.ctypes.data,
            len(self._edges) - 1,
            self._nodes.ctypes.data,
            self._flags.ctypes.data,
            present.ctypes.data,
            places.ctypes.data,
            numbers.ctypes.data,
            result.ctypes.data,
        )
        count, overlap = result.tolist()
        occurring = [self._tokens[number] for number in np.flatnonzero(present).tolist()]
        return _Matches(occurring, places[:count], numbers[:count], bool(overlap))


class _Matches(Struct, frozen=True):
    """The kernel's result for a text.

    present  the tokens that occur, longest first
    places   the byte offset of each match
    numbers  the index of each match's token in the list of tokens, which is sorted by length
    overlap  True if any matches overlap
    """

    present: list[SpecialToken]
    places: NDArray[np.int64]
    numbers: NDArray[np.int32]
    overlap: bool


def _byte_offsets(text: str, positions: Sequence[int]) -> list[int]:
    """Convert ascending positions in a text into byte offsets in the UTF-8 encoding of the text."""
    offsets = []
    done = length = 0
    for position in positions:
        length += len(text[done:position].encode())
        done = position
        offsets.append(length)
    return offsets


def unmark(text: str) -> tuple[str, list[int]]:
    """Return the text without marks, and the positions of the marks in this text. A doubled mark becomes one mark."""
    kept: list[str] = []
    marks: list[int] = []
    length = start = 0
    while (at := text.find(MARK, start)) >= 0:
        doubled = text.startswith(MARK, at + 1)
        kept.append(text[start : at + doubled])
        length += len(kept[-1])
        if not doubled:
            marks.append(length)
        start = at + 1 + doubled
    kept.append(text[start:])
    return "".join(kept), marks


def _mark_offset(token: SpecialToken) -> int:
    """Return the offset of the mark within a control string: 1, or 0 if the string has only one character."""
    return min(len(token.text) - 1, 1)


def _cut_at(
    token: SpecialToken, text: str, spans: list[tuple[int, int, int]], marks: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Split the plain-text spans (spans with id -1) at every unmarked occurrence of the token."""
    result = []
    length = len(token.text)
    for start, end, token_id in spans:
        if token_id >= 0:
            result.append((start, end, token_id))
            continue
        search = start
        while (at := text.find(token.text, search, end)) >= 0:
            if _is_marked(marks, at + _mark_offset(token), at + length):
                search = at + 1
                continue
            before = at
            while token.strips_left and before > start and text[before - 1] in _ASCII_SPACE:
                before -= 1
            if before > start:
                result.append((start, before, -1))
            start = at + length
            result.append((at, start, token.token_id))
            while token.strips_right and start < end and text[start] in _ASCII_SPACE:
                start += 1
            search = start
        if start < end:
            result.append((start, end, -1))
    return result


def _is_marked(marks: Sequence[int], first: int, after: int) -> bool:
    """Return True if a mark is at a position p with `first` <= p < `after`."""
    return bool(marks) and bisect_left(marks, first) < bisect_left(marks, after)


class _Texts(Struct, frozen=True):
    """The addresses and byte lengths of a list of texts, int64[n] each, and the array that owns the memory."""

    owner: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def in_file(cls, texts: StringArray) -> _Texts:
        return cls(texts.data, texts.starts + texts.data.ctypes.data, texts.lengths.astype(np.int64))

    @classmethod
    def copied(cls, texts: Sequence[bytes]) -> _Texts:
        owner = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        lengths = np.array([len(text) for text in texts], np.int64)
        return cls(owner, owner.ctypes.data + np.cumsum(lengths) - lengths, lengths)


class TokenTables:
    """Hash tables that map texts to token ids, and pairs of ids to the ids that they merge into.

    Merges may contain texts that are not tokens, and a byte may have no token. The ids of such texts start at
    `vocabulary_size`, so that merging can work with ids alone. The added ids never appear in the encoded text.

    `starts`, int64[symbols], holds the addresses of the texts, in the file's header or in memory owned by this object.
    `lengths`, int64[symbols], holds the lengths of the texts in bytes. kernels/tokens/token_table.py describes `table`,
    `pairs` and the masks.
    """

    def __init__(self, tokens: StringArray, merges: StringArray | None = None, required: Sequence[bytes] = ()) -> None:
        """Build the tables. Each text in `required` receives an id even if the text is not a token."""
        from llmrun.base.compiled.host import load_kernel

        self._build_kernel = load_kernel("tokens.token_table", "build")
        self.vocabulary_size = len(tokens)
        texts = _Texts.in_file(tokens)
        self.starts, self.lengths = texts.starts, texts.lengths
        self._owners = [texts.owner]
        self._name_empty_tokens()
        unresolved = self._build(merges)
        missing = self._missing([*required, *_sides_and_products(merges, unresolved)])
        if missing:
            more = self._own(missing)
            self.starts = np.concatenate([self.starts, more.starts])
            self.lengths = np.concatenate([self.lengths, more.lengths])
            self._build(merges)

    def find(self, texts: Sequence[bytes]) -> NDArray[np.int32]:
        """Return int32[texts]: the id of each text, or NOT_FOUND."""
        wanted = _Texts.copied(texts)
        ids = np.empty(len(texts), np.int32)
        self._run(n_tokens=0, wanted=wanted, ids=ids, merges=_Texts.copied(()))
        return ids

    def text(self, token: int) -> bytes:
        """Return a token's text as spelled in the vocabulary."""
        return ctypes.string_at(int(self.starts[token]), int(self.lengths[token]))

    def texts(self, n: int) -> list[bytes]:
        """Return the texts of the first n tokens."""
        return list(map(ctypes.string_at, self.starts[:n].tolist(), self.lengths[:n].tolist()))

    def _build(self, merges: StringArray | None) -> NDArray[np.int32]:
        """Fill the tables. Returns the indices of merges that contain a text without an id."""
        merge_texts = _Texts.copied(()) if merges is None else _Texts.in_file(merges)
        n_merges = len(merge_texts.starts)
        self.table = np.zeros(_slots(2 * len(self.starts)), np.int64)
        self.mask = len(self.table) - 1
        self.pairs = np.zeros((_slots(n_merges + n_merges // 2), 2), np.int64)
        self.pair_mask = len(self.pairs) - 1
        nothing = _Texts.copied(())
        return self._run(n_tokens=len(self.starts), wanted=nothing, ids=np.empty(0, np.int32), merges=merge_texts)

    def _run(self, *, n_tokens: int, wanted: _Texts, ids: NDArray[np.int32], merges: _Texts) -> NDArray[np.int32]:
        """Insert the first `n_tokens` texts, look up the wanted texts and insert the merges.

        Writes the ids of the wanted texts to `ids`. Returns the indices of merges that contain a text without an id.
        """
        unresolved = np.empty(len(merges.starts), np.int32)
        n_unresolved = np.empty(1, np.int64)
        self._build_kernel(
            self.starts.ctypes.data,
            self.lengths.ctypes.data,
            n_tokens,
            self.table.ctypes.data,
            self.mask,
            wanted.starts.ctypes.data,
            wanted.lengths.ctypes.data,
            len(ids),
            ids.ctypes.data,
            merges.starts.ctypes.data,
            merges.lengths.ctypes.data,
            len(merges.starts),
            self.pairs.ctypes.data,
            self.pair_mask,
            unresolved.ctypes.data,
            n_unresolved.ctypes.data,
        )
        return unresolved[: n_unresolved[0]]

    def _missing(self, texts: Sequence[bytes]) -> list[bytes]:
        unique = list(dict.fromkeys(texts))
        return [text for text, id_ in zip(unique, self.find(unique).tolist(), strict=True) if id_ == NOT_FOUND]

    def _name_empty_tokens(self) -> None:
        """Name tokens without text as llama.cpp does, for example `[EMPTY_5]`."""
        empty = np.flatnonzero(self.lengths == 0)
        if len(empty):
            names = self._own([b"[EMPTY_%d]" % token for token in empty.tolist()])
            self.starts[empty], self.lengths[empty] = names.starts, names.lengths

    def _own(self, texts: Sequence[bytes]) -> _Texts:
        copied = _Texts.copied(texts)
        self._owners.append(copied.owner)
        return copied


def _sides_and_products(merges: StringArray | None, ranks: NDArray[np.int32]) -> list[bytes]:
    """Return the left side, the right side and the result of each of the given merges."""
    texts: list[bytes] = []
    for text in [merges.raw(rank) for rank in ranks.tolist()] if merges is not None else []:
        middle = text.index(b" ", 1)
        left, right = text[:middle], text[middle + 1 :]
        texts += [left, right, left + right]
    return texts


def _slots(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 2."""
    return 1 << max(n - 1, 1).bit_length()


# Values of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_NAMED_TOKENS = ("bos", "eos", "eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
_FORMER_NAMES = ("prefix", "suffix", "middle")


class Defaults(Struct, frozen=True):
    """The defaults of one kind of tokenizer, for keys that the file does not contain."""

    bos_id: int | None
    eos_id: int | None
    add_bos: bool


class Vocabulary(Struct, frozen=True):
    """The vocabulary of a model, with its special tokens."""

    tables: TokenTables
    kinds: NDArray[np.int32]  # the file's token types, with CONTROL for tokens whose text marks them as control tokens
    special: SpecialTokens
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    end_of_generation: frozenset[int]
    fill_tokens: FillTokens | None

    def control_mask(self) -> NDArray[np.bool_]:
        """Return bool[tokens]: True for control and unknown tokens, which never represent plain text."""
        return np.isin(self.kinds, (CONTROL, UNKNOWN))


def read_vocabulary(
    file: GGUFFile, defaults: Defaults, *, merged: bool, required: Sequence[bytes] = (), strips_before: str = ""
) -> Vocabulary:
    """Read the keys `tokenizer.ggml.*`.

    merged         True if this kind of tokenizer reads merges from the file
    required       texts that must have an id even if they are not tokens
    strips_before  the special token that strips preceding whitespace

    The kernels require that tokens are unique, that arrays are as long as the vocabulary, and that ids are in range.
    The GGUF reader checked these requirements when the file was opened.
    """
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = file.strings("tokenizer.ggml.merges") if merged else None
    tables = TokenTables(tokens, merges, required)
    size = len(tokens)
    named = _named_tokens(file)
    known_ids = tables.find([text.encode() for text in KNOWN_TEXTS]).tolist()
    known = {text: id_ for text, id_ in zip(KNOWN_TEXTS, known_ids, strict=True) if 0 <= id_ < size}
    bos_id = named.get("bos_token_id", _inside(defaults.bos_id, size))
    eos_id = named.get("eos_token_id", _inside(defaults.eos_id, size))
    roles = find_roles(known, named)
    ending, control = find_ending_tokens(known, named, eos_id, roles)
    add_bos = file.boolean("tokenizer.ggml.add_bos_token", default=defaults.add_bos) and bos_id is not None
    kinds = _kinds(file, size)
    kinds[list(control)] = CONTROL
    return Vocabulary(
        tables=tables,
        kinds=kinds,
        special=_special_tokens(tables, kinds, file, strips_before),
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=add_bos,
        add_eos=file.boolean("tokenizer.ggml.add_eos_token", default=False) and eos_id is not None,
        end_of_generation=ending,
        fill_tokens=fill_tokens(roles, bos_id if add_bos else None),
    )


def _kinds(file: GGUFFile, size: int) -> NDArray[np.int32]:
    if not file.has("tokenizer.ggml.token_type"):
        return np.full(size, NORMAL, np.int32)
    return np.array(file.integers("tokenizer.ggml.token_type"), np.int32)


def _named_tokens(file: GGUFFile) -> dict[str, int]:
    """Return the token ids in the file's keys, indexed by the last part of the key."""
    keys = [f"{name}_token_id" for name in (*_NAMED_TOKENS, *_FORMER_NAMES)]
    return {key: file.integer(f"tokenizer.ggml.{key}") for key in keys if file.has(f"tokenizer.ggml.{key}")}


def _inside(token: int | None, size: int) -> int | None:
    return token if token is not None and token < size else None


def _special_tokens(tables: TokenTables, kinds: NDArray[np.int32], file: GGUFFile, strips_before: str) -> SpecialTokens:
    name = file.string("general.name", default="").lower()
    # GGUF has no key for whitespace stripping, so llama.cpp decides by the model's name.
    strips_right = "phi-3" in name or "phi3" in name
    if "modern-bert" in name and not strips_before:
        strips_before = "[MASK]"
    found = []
    for token in np.flatnonzero((kinds == CONTROL) | (kinds == UNKNOWN) | (kinds == USER_DEFINED)).tolist():
        try:
            text = tables.text(token).decode()
        except UnicodeDecodeError:
            continue  # this token never matches, because text never contains invalid UTF-8
        if MARK in text:
            continue  # only `protect` may insert marks into a rendered text
        right = strips_right and not strips_before and text not in ("<unk>", "<s>", "<|endoftext|>")
        left = text == strips_before
        found.append(SpecialToken(token, text, kinds[token] != USER_DEFINED, strips_left=left, strips_right=right))
    return SpecialTokens(found)
