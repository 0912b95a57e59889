"""The interface of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.model.tokenizers.fill_in_middle import FillTokens


class Tokenizer(Protocol):
    """A tokenizer, which turns text into token ids and back. The ids are the same as llama.cpp's."""

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
        """The tokens of prompts for filling in the middle, or None if the vocabulary has none."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        """Encode text as token ids, int32[tokens].

        add_special    adds BOS and EOS if the vocabulary requires them, but never a second BOS
        parse_special  turns control strings in the text into control tokens
        """

    def encode_continuation(self, text: str) -> NDArray[np.int32]:
        """Encode plain text that continues other text as token ids, int32[tokens].

        The result has no BOS and no control tokens, and it omits the leading space that some tokenizers add.
        """

    def protect(self, text: str) -> str:
        """Mark the control strings in untrusted text, so that `encode_rendered` keeps them as text.

        Marks that are already in the text are escaped.
        """

    def unprotect(self, text: str) -> str:
        """Undo the effect of `protect` on a text."""

    def encode_rendered(self, text: str) -> NDArray[np.int32]:
        """Encode a rendered chat template as token ids, int32[tokens].

        Control strings that the template wrote become control tokens. Protected ones stay text, and their marks are
        removed. A BOS is added if the vocabulary requires one and the template has not written it.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the decoded text. Control tokens add none."""

    def all_token_bytes(self) -> list[bytes]:
        """Return the result of `token_bytes` for every token, in order of id."""

    def token_text(self, token_id: int) -> str:
        """Return a token's text for display. Control tokens appear as in the vocabulary, for example `<|im_end|>`."""

    def decode(self, ids: Sequence[int]) -> bytes:
        """Concatenate the bytes of the tokens, without the leading space that some tokenizers add."""
