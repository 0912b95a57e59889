"""What the engine asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Tokenizer(Protocol):
    """Text to token ids and back. Ids equal llama.cpp's for the same vocabulary."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def end_of_generation(self) -> frozenset[int]:
        """Ids that end an answer; equal to llama.cpp's `llama_vocab_is_eog`."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        """Ids of text. `add_special` adds BOS/EOS as the vocabulary says (never a second BOS, whoever wrote the
        first one); `parse_special` lets control strings in the text become control tokens."""

    def protect(self, text: str) -> str:
        """Mark the control strings in text that a user, a tool or a file wrote, so that `encode_rendered` keeps
        them text. Marks already in the text are escaped."""

    def unprotect(self, text: str) -> str:
        """The inverse of `protect`."""

    def encode_rendered(self, text: str) -> NDArray[np.int32]:
        """Ids of a rendered chat template: control strings the template wrote become control tokens, protected
        ones stay text, the marks vanish; one BOS if the vocabulary asks for one."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in text; empty for control tokens."""

    def token_text(self, token_id: int) -> str:
        """How to show a token to a person: control tokens as spelled in the vocabulary (`<|im_end|>`)."""

    def decode(self, ids: Sequence[int]) -> bytes:
        """Concatenated `token_bytes`, with the leading space some vocabularies add removed."""
