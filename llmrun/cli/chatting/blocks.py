'''Parses turns of several lines in `"""` quotes, as in Ollama.'''

from __future__ import annotations

import re

QUOTES = '"""'

_OPENING = re.compile(rf"\s*(?:/\w+\s+)?{QUOTES}")  # a command's argument may also be a block


def is_unfinished(typed: str) -> bool:
    """Return whether the input opens a block and does not close it."""
    opening = _OPENING.match(typed)
    return opening is not None and not _closes(typed[opening.end() - len(QUOTES) :].rstrip())


def without_quotes(typed: str) -> str | None:
    """Return a block's text without the newlines next to the quotes, or None if the input is not a complete block."""
    block = typed.strip()
    if not block.startswith(QUOTES) or not _closes(block):
        return None
    return block[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


def _closes(block: str) -> bool:
    return len(block) >= 2 * len(QUOTES) and block.endswith(QUOTES)
