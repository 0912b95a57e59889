"""The interface of tokenizers, and the base class that implements special tokens, protected text and decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmrun.model.tokenizers.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, unmark

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.base.compiled.kernel import Kernel
    from llmrun.model.tokenizers.vocabulary import FillTokens, SpecialTokens, Vocabulary


class Tokenizer(Protocol):
    """A tokenizer, which converts text to token ids and back. The ids are the same as llama.cpp's ids."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def end_of_generation(self) -> frozenset[int]:
        """The ids of the tokens that end an answer, as in llama.cpp's `llama_vocab_is_eog`."""

    @property
    def fill_tokens(self) -> FillTokens | None:
        """The tokens of fill-in-the-middle prompts, or None if the vocabulary contains no such tokens."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        """Encode text as token ids, int32[tokens].

        add_special    adds BOS and EOS if the vocabulary requires them, but never a second BOS
        parse_special  turns control strings in the text into control tokens
        """

    def encode_continuation(self, text: str) -> NDArray[np.int32]:
        """Encode plain text that continues other text, and return token ids, int32[tokens].

        The result contains no BOS and no control tokens, and omits the leading space that some tokenizers add.
        """

    def protect(self, text: str) -> str:
        """Mark the control strings in untrusted text, so that `encode_rendered` keeps them as text.

        Marks that the text already contains are escaped.
        """

    def unprotect(self, text: str) -> str:
        """Undo the effect of `protect` on a text."""

    def encode_rendered(self, text: str | Sequence[str | int]) -> NDArray[np.int32]:
        """Encode a rendered chat template as token ids, int32[tokens].

        Control strings that the template wrote become control tokens. Protected strings stay text, without their marks.
        A BOS is added if the vocabulary requires one and the template has not written one. The text may consist of
        several texts with other numbers between them, which are copied to the result.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the decoded text. Control tokens add no bytes."""

    def all_token_bytes(self) -> list[bytes]:
        """Return the result of `token_bytes` for every token, in order of id."""

    def token_text(self, token_id: int) -> str:
        """Return a token's text for display. Control tokens appear as in the vocabulary, for example `<|im_end|>`."""

    def decode(self, ids: Sequence[int]) -> bytes:
        """Concatenate the bytes of the tokens, without the leading space that some tokenizers add."""


def spelled(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token. Control tokens appear as in the vocabulary, for example `<|im_end|>`."""
    return tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id).encode()


def decode_spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Decode tokens like `Tokenizer.decode`, except that control tokens appear as in the vocabulary."""
    pieces = [spelled(tokenizer, token) for token in ids]
    first = next((index for index, token in enumerate(ids) if tokenizer.token_bytes(token)), None)
    if first is not None:
        pieces[first] = tokenizer.decode([ids[first]])  # `decode` removes the leading space that some tokenizers add
    return b"".join(pieces)


# Text that contains special tokens: the UTF-8 bytes in the vocabulary's spelling, the byte offsets where the parts of
# the text end, and the byte offsets and ids of the special tokens between the parts.
Parts = tuple[bytes, "NDArray[np.int64]", "NDArray[np.int64]", "NDArray[np.int32]"]

SPACE = "▁".encode()  # a space as written by SentencePiece


class TextTokenizer(ABC):
    """A `Tokenizer` whose subclasses implement the encoding of plain text."""

    def __init__(self, vocabulary: Vocabulary, *, space_prefix: bool = False) -> None:
        """Create a tokenizer. If `space_prefix`, every text begins with an added space, which `decode` removes."""
        self._vocabulary = vocabulary
        self._space_prefix = space_prefix
        self._bytes: dict[int, bytes] = {}

    @abstractmethod
    def _encode_plain(self, parts: Parts) -> NDArray[np.int32]:
        """Encode the text and insert the special tokens."""

    @abstractmethod
    def _written(self, text: bytes, *, after_special: bool) -> bytes:
        """Convert plain UTF-8 text to the vocabulary's spelling."""

    def _normal_bytes(self, text: bytes) -> bytes:
        """Convert the text of a normal token from the vocabulary's spelling to plain bytes."""
        return text.replace(SPACE, b" ")

    def _run(self, kernel: Kernel, parts: Parts, *words: int, most_per_byte: int = 1) -> NDArray[np.int32]:
        """Encode the text with a kernel that inserts the special tokens, and return the ids.

        words          the kernel's arguments between the parts and the outputs
        most_per_byte  the maximum number of tokens for each byte of the text
        """
        text, ends, insert_at, insert_ids = parts
        buffer = np.frombuffer(text + b"\0", np.uint8)
        ids = np.empty(most_per_byte * len(text) + len(insert_ids), np.int32)
        count = np.zeros(1, np.int64)
        kernel(
            buffer.ctypes.data,
            ends.ctypes.data,
            len(ends),
            insert_at.ctypes.data,
            insert_ids.ctypes.data,
            len(insert_ids),
            *words,
            ids.ctypes.data,
            count.ctypes.data,
        )
        return ids[: count[0]].copy()

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary.tables.vocabulary_size

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def end_of_generation(self) -> frozenset[int]:
        return self._vocabulary.end_of_generation

    @property
    def fill_tokens(self) -> FillTokens | None:
        return self._vocabulary.fill_tokens

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        parts = self._vocabulary.special.partition(without_surrogates(text), parse_control=parse_special)
        if add_special:
            parts = self._with_bos(parts)
            if self._vocabulary.add_eos and self._vocabulary.eos_id is not None:
                parts = [*parts, self._vocabulary.eos_id]
        return self._encode_parts(parts)

    def encode_continuation(self, text: str) -> NDArray[np.int32]:
        written = self._written(without_surrogates(text).encode(), after_special=False)
        ends = np.array([len(written)] if written else [], np.int64)
        return self._encode_plain((written, ends, np.empty(0, np.int64), np.empty(0, np.int32)))

    def protect(self, text: str) -> str:
        return self._vocabulary.special.protect(without_surrogates(text))

    def unprotect(self, text: str) -> str:
        return unmark(text)[0]

    def encode_rendered(self, text: str | Sequence[str | int]) -> NDArray[np.int32]:
        return self._encode_parts(self._with_bos(rendered_parts(text, self._vocabulary.special)))

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            kind = int(self._vocabulary.kinds[self._checked(token_id)])
            known = self._bytes[token_id] = self._bytes_of(kind, self._vocabulary.tables.text(token_id))
        return known

    def all_token_bytes(self) -> list[bytes]:
        texts = self._vocabulary.tables.texts(self.vocabulary_size)
        return list(map(self._bytes_of, self._vocabulary.kinds.tolist(), texts))

    def token_text(self, token_id: int) -> str:
        if self._vocabulary.kinds[self._checked(token_id)] in (CONTROL, UNKNOWN):
            return self._vocabulary.tables.text(token_id).decode(errors="replace")
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def decode(self, ids: Sequence[int]) -> bytes:
        decoded = b"".join([self.token_bytes(int(token)) for token in ids])
        return decoded.removeprefix(b" ") if self._space_prefix else decoded

    def begins_like(self, other: object, n: int) -> bool:
        """Return True if another tokenizer is of the same type and contains the same first n tokens.

        Comparing vocabularies of 128,000 tokens takes 0.1 s. Comparing token by token would take 1 s.
        """
        if type(other) is not type(self):
            return False
        ours, theirs = self._vocabulary, other._vocabulary
        return bool(np.array_equal(ours.kinds[:n], theirs.kinds[:n])) and ours.tables.texts(n) == theirs.tables.texts(n)

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocabulary_size:
            raise ValueError(
                f"token id out of range: {token_id} is not in the vocabulary of {self.vocabulary_size} tokens"
            )
        return token_id

    def _bytes_of(self, kind: int, text: bytes) -> bytes:
        """Return the bytes of a token of the given kind. `text` is the token as spelled in the vocabulary."""
        if kind == NORMAL:
            return self._normal_bytes(text)
        if kind == USER_DEFINED:
            return text
        if kind == BYTE:
            return _byte_of(text)
        return b""

    def _with_bos(self, parts: list[bytes | int]) -> list[bytes | int]:
        """Add a BOS at the beginning if the vocabulary requires one and the text does not begin with one."""
        bos_id = self._vocabulary.bos_id
        if not self._vocabulary.add_bos or bos_id is None or parts[:1] == [bos_id]:
            return parts
        if parts[1:2] == [bos_id] and isinstance(parts[0], bytes) and not self._written(parts[0], after_special=True):
            return parts  # the text before the BOS, such as a space, produces no tokens
        return [bos_id, *parts]

    def _encode_parts(self, parts: Sequence[bytes | int]) -> NDArray[np.int32]:
        texts: list[bytes] = []
        ends: list[int] = []
        positions: list[int] = []
        ids: list[int] = []
        length = 0
        after_special = True
        for part in parts:
            if isinstance(part, int):
                positions.append(length)
                ids.append(part)
            else:
                texts.append(self._written(part, after_special=after_special))
                length += len(texts[-1])
                ends.append(length)
            after_special = isinstance(part, int)
        inserts = np.array(positions, np.int64), np.array(ids, np.int32)
        return self._encode_plain((b"".join(texts), np.array(ends, np.int64), *inserts))


def rendered_parts(text: str | Sequence[str | int], special: SpecialTokens) -> list[bytes | int]:
    """Split the argument of `encode_rendered` into UTF-8 text and the ids between them, in order."""
    parts: list[bytes | int] = []
    for piece in [text] if isinstance(text, str) else text:
        if isinstance(piece, int):
            parts.append(piece)
        else:
            plain, marks = unmark(without_surrogates(piece))
            parts += special.partition(plain, parse_control=True, marks=marks)
    return parts


def without_surrogates(text: str) -> str:
    """Join surrogate pairs and replace unpaired surrogates with U+FFFD, so that the text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def longest_piece(ends: NDArray[np.int64]) -> int:
    """Return the length of the longest piece, in bytes."""
    return int(np.diff(ends, prepend=0).max(initial=0))


def _byte_of(text: bytes) -> bytes:
    """Return the byte of a token such as `<0x41>`, or b"" if the text is malformed."""
    try:
        return bytes([int(text[3:5], 16)])
    except ValueError:
        return b""
