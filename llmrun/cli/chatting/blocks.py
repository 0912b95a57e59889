'''Turns of several lines: `"""`, the text, `"""`. As Ollama's users type them.'''

from __future__ import annotations

QUOTES = '"""'


def is_unfinished(typed: str) -> bool:
    """Whether a block has begun in what was typed and has not ended yet."""
    return typed.lstrip().startswith(QUOTES) and not _closes(typed.strip())


def without_quotes(typed: str) -> str | None:
    """The text of a block, less the newlines next to its quotes; None when what was typed is no whole block."""
    block = typed.strip()
    if not block.startswith(QUOTES) or not _closes(block):
        return None
    return block[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


def _closes(block: str) -> bool:
    return len(block) >= 2 * len(QUOTES) and block.endswith(QUOTES)
