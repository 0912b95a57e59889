"""Standard input as the input of a batch, and standard output as its output.

A batch reads its input several times, and keeps answers until all earlier lines are answered. Both need files, so
this module creates temporary files.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.prompts import STDIN
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.jobs.batching.journal import resolved, writing


@contextmanager
def opened_input(source: Path) -> Iterator[Path]:
    """Yield the input, or a temporary file with all of standard input for `-`. Error messages name standard input."""
    if str(source) != STDIN:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="llmrun-") as folder:
        path = Path(folder) / "standard input"
        if is_terminal(sys.stdin):
            out.note("reading the lines from the keyboard; press Ctrl-D to finish")
        with writing(path), path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield path
        except UsageError as error:
            raise UsageError(str(error).replace(str(path), path.name), hint=error.hint) from None


@contextmanager
def output_file(output: Path) -> Iterator[tuple[Path, Callable[[bytes], None] | None]]:
    """Yield the output file, and the function that writes answers to standard output for `-`, otherwise None."""
    if str(output) != STDIN:
        yield resolved(output), None
        return
    with tempfile.TemporaryDirectory(prefix="llmrun-") as folder:
        yield Path(folder) / "answers.jsonl", out.json_lines
