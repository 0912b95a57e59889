"""Builds the errors for invalid files. Their messages name the file, the key and the value found."""

from __future__ import annotations

from pathlib import Path

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import BadGGUF

_HINT = (
    "Download the file again. If this error comes back, the file itself is faulty: use another copy or quantization."
)


class HeaderTooLong(BadGGUF):
    """The header is longer than the limit for reading it. The file itself may be complete."""


def bad_gguf(path: Path, where: str, seen: str, kind: type[BadGGUF] = BadGGUF) -> BadGGUF:
    """Return the error for a file that breaks a rule of the format.

    where  the key, tensor or part of the header
    seen   the value found, and the limit
    """
    return kind(f"not a valid GGUF file: {shown(str(path), 300)}: {where}: {seen}", hint=_HINT)


def incomplete(path: Path, seen: int, needed: int) -> BadGGUF:
    """Return the error for a file that has only `seen` bytes although its tensors end at byte `needed`."""
    sizes = f"{format_bytes(seen)} of {format_bytes(needed)}"
    if format_bytes(seen) == format_bytes(needed):
        sizes = f"{seen:,} of {needed:,} bytes"
    return BadGGUF(
        f"incomplete GGUF file: {shown(str(path), 300)}: {sizes}; the download or copy may have stopped early",
        hint="Download or copy the file again; `llmrun pull` also checks it.",
    )


def shown(text: str | bytes, limit: int = 80) -> str:
    r"""Escape text from a file so that it is safe to print on one terminal line.

    Non-printable characters (control characters, bidirectional marks, lone surrogates) become escapes such as \x1b or
    \u202e, and bytes that are not UTF-8 become escapes such as \xff. The middle of long text is replaced with "…".
    """
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode(errors="backslashreplace") + ("…" if len(text) > 4 * limit else "")
    if len(text) > limit:
        text = text[: limit * 2 // 3] + "…" + text[-(limit // 3) :]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
