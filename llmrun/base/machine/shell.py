"""Formats commands for the user's shell, which is PowerShell on Windows and POSIX sh elsewhere."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_ESCAPED = {ord(character): f"`{character}" for character in '"$`'}  # escapes within PowerShell's double quotes


def words(command: Sequence[str]) -> str:
    if sys.platform != "win32":
        return shlex.join(command)
    line = " ".join(map(quoted, command))
    return f"& {line}" if line.startswith('"') else line  # without &, PowerShell would print a quoted word


def quoted(word: str) -> str:
    """Quote a word if necessary."""
    if sys.platform != "win32":
        return shlex.quote(word)
    return word if word.replace("-", "").isalnum() else f'"{word.translate(_ESCAPED)}"'


def with_variable(name: str, value: str, command: Sequence[str]) -> str:
    """Return a command that runs with an environment variable set.

    The value must come from llmrun itself, because special characters in it are not escaped.
    """
    if sys.platform != "win32":
        return f'{name}="{value}" {words(command)}'
    return f'$env:{name}="{value}"; {words(command)}'


def setting(name: str, value: str) -> str:
    """Return a command that sets an environment variable for this shell session."""
    if sys.platform != "win32":
        return f"export {name}={shlex.quote(value)}"
    return f"$env:{name} = {_literal(value)}"


def writing(path: Path, text: str) -> list[str]:
    """Return commands that write a text file with a final newline, and create its folder."""
    if sys.platform != "win32":
        folder, file = (shlex.quote(str(each)) for each in (path.parent, path))
        return [f"mkdir -p {folder}", f"printf '%s\\n' {shlex.quote(text)} > {file}"]
    file = _literal(str(path))
    return [f"New-Item -Force {file} > $null", f"Set-Content -LiteralPath {file} -Value {_literal(text)}"]


def _literal(text: str) -> str:
    """Quote a text for PowerShell so that nothing in it is expanded."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"


def another_folder(variable: str) -> str:
    """Return a command that sets an environment variable to a private folder for this shell session.

    The folder must not be writable by other users, because llmrun may load machine code from it.
    """
    if sys.platform != "win32":
        return f'export {variable}="$(mktemp -d)"'
    return f'$env:{variable}="$env:TEMP\\llmrun"'  # on Windows, each user has a private TEMP


def unset(variable: str) -> str:
    return f"unset {variable}" if sys.platform != "win32" else f"Remove-Item Env:{variable}"


def remove(folder: Path) -> str:
    if sys.platform != "win32":
        return f"rm -r {shlex.quote(str(folder))}"
    return f'Remove-Item -Recurse "{folder}"'
