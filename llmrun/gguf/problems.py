"""How a fault in a file is said: which file, which key, what was seen."""

from __future__ import annotations

from pathlib import Path

from llmrun.amounts import format_bytes
from llmrun.errors import BadGGUF

_HINT = "Download the file again; if the same line comes back, the file was made wrong and another copy is needed."


class HeaderTooLong(BadGGUF):
    """The header goes on behind the last byte that is read of it, and the file is long enough for that."""


def bad_gguf(path: Path, where: str, seen: str, kind: type[BadGGUF] = BadGGUF) -> BadGGUF:
    """The error for a broken rule: `where` is a key, a tensor or a part of the header, `seen` the value and limit."""
    return kind(f"not a valid GGUF file: {shown(str(path), 300)}: {where}: {seen}", hint=_HINT)


def incomplete(path: Path, seen: int, needed: int) -> BadGGUF:
    """Return the error for a file of `seen` bytes whose tensors end at byte `needed`."""
    sizes = f"{format_bytes(seen)} of {format_bytes(needed)}"
    if format_bytes(seen) == format_bytes(needed):
        sizes = f"{seen:,} of {needed:,} bytes"
    return BadGGUF(
        f"incomplete GGUF file: {shown(str(path), 300)}: {sizes}; the download or copy may have stopped early",
        hint="Download or copy the file again; `llmrun pull` also checks it.",
    )


def shown(text: str | bytes, limit: int = 80) -> str:
    r"""Text from a file, fit for a terminal line: what does not print (control characters, marks that turn the
    writing direction, lone surrogates) as \x1b or \u202e, bytes that are not UTF-8 as \xff, and the middle of a long
    text left out."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode(errors="backslashreplace") + ("…" if len(text) > 4 * limit else "")
    if len(text) > limit:
        text = text[: limit * 2 // 3] + "…" + text[-(limit // 3) :]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
