'''Turns of several lines: `"""`, the text, `"""`. As Ollama's users type them.'''

from __future__ import annotations

import re

QUOTES = '"""'

_OPENING = re.compile(rf"\s*(?:/\w+\s+)?{QUOTES}")  # a command's argument may be a block, too


def is_unfinished(typed: str) -> bool:
    """Whether a block has begun in what was typed and has not ended yet."""
    opening = _OPENING.match(typed)
    return opening is not None and not _closes(typed[opening.end() - len(QUOTES) :].rstrip())


def without_quotes(typed: str) -> str | None:
    """The text of a block, less the newlines next to its quotes; None when what was typed is no whole block."""
    block = typed.strip()
    if not block.startswith(QUOTES) or not _closes(block):
        return None
    return block[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


def _closes(block: str) -> bool:
    return len(block) >= 2 * len(QUOTES) and block.endswith(QUOTES)
