"""Commands as the user's shell takes them: PowerShell on Windows, else any that is POSIX's."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def words(command: Sequence[str]) -> str:
    if sys.platform != "win32":
        return shlex.join(command)
    return "& " + " ".join(f'"{word}"' if not word.replace("-", "").isalnum() else word for word in command)


def with_variable(name: str, value: str, command: Sequence[str]) -> str:
    """A command that is run with a variable set. The value is one of ours: nothing in it means anything in quotes."""
    if sys.platform != "win32":
        return f'{name}="{value}" {words(command)}'
    return f'$env:{name}="{value}"; {words(command)}'


def another_folder(variable: str) -> str:
    """Moves what a variable names to where temporary files go, which can be written."""
    folder = str(Path(tempfile.gettempdir()) / "llmrun")
    return f"export {variable}={shlex.quote(folder)}" if sys.platform != "win32" else f'$env:{variable}="{folder}"'


def unset(variable: str) -> str:
    return f"unset {variable}" if sys.platform != "win32" else f"Remove-Item Env:{variable}"


def remove(folder: Path) -> str:
    if sys.platform != "win32":
        return f"rm -r {shlex.quote(str(folder))}"
    return f'Remove-Item -Recurse "{folder}"'
