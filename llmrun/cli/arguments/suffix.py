"""The flags of `generate` for filling in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.prompt import checked_text, read_text

Suffix = Annotated[
    str | None, typer.Option("--suffix", metavar="TEXT", help="Fill the gap between the prompt and this text.")
]
SuffixFile = Annotated[
    Path | None,
    typer.Option("--suffix-file", metavar="FILE", help="Fill the gap between the prompt and this file."),
]


def read_suffix(text: str | None, file: Path | None) -> str | None:
    """Return the text after the gap, or None if nothing is to be filled in. Raises UsageError."""
    if text is not None and file is not None:
        raise UsageError("--suffix: cannot be combined with --suffix-file")
    if file is not None:
        return read_text(file, "--suffix-file", exact=True)
    return None if text is None else checked_text(text, "--suffix")
