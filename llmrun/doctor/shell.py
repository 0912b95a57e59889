"""Commands as the user's shell takes them: PowerShell on Windows, else any that is POSIX's."""

from __future__ import annotations

import shlex
import sys
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
    """Moves what a variable names to a new folder for this session, which nobody else can write to: machine code will
    lie there."""
    if sys.platform != "win32":
        return f'export {variable}="$(mktemp -d)"'
    return f'$env:{variable}="$env:TEMP\\llmrun"'  # the user's own


def unset(variable: str) -> str:
    return f"unset {variable}" if sys.platform != "win32" else f"Remove-Item Env:{variable}"


def remove(folder: Path) -> str:
    if sys.platform != "win32":
        return f"rm -r {shlex.quote(str(folder))}"
    return f'Remove-Item -Recurse "{folder}"'
