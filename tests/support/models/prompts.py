"""Text for measuring a model: prose, code, chats and ten languages, written for this purpose."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Protocol

PASSAGES = Path(__file__).resolve().parents[2] / "data" / "passages.txt"


class _Encoder(Protocol):
    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> Iterable[int]: ...


@cache
def passages() -> tuple[str, ...]:
    """Return 55 passages of at least 116 SmolLM2 tokens each. Chats contain ChatML's control strings."""
    return tuple(PASSAGES.read_text(encoding="utf-8").rstrip("\n").split("\n====\n"))


def prompts(tokenizer: _Encoder, most_tokens: int) -> list[list[int]]:
    """Return the token ids of every passage, truncated to `most_tokens`."""
    return [_ids(tokenizer, text)[:most_tokens] for text in passages()]


def long_text(tokenizer: _Encoder) -> list[int]:
    """Return the token ids of all passages joined into one text."""
    return _ids(tokenizer, "\n\n".join(passages()))


def _ids(tokenizer: _Encoder, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special=False, parse_special=True)]
