"""Knows where users install the completion scripts, and removes them.

For bash and zsh, the script is loaded by a line in a file that also contains other settings of the shell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmrun.base.errors import LlmrunError
from llmrun.base.folders import Place, write_whole


class Installation(NamedTuple):
    """How users install completion for a shell.

    file  the file that loads or contains the script, below the home directory
    line  the line that loads the script, or "" if the file is the script
    """

    file: str
    line: str

    @property
    def path(self) -> Path:
        return Path(os.path.expanduser("~"), self.file)  # noqa: PTH111  (Path.home raises if there is no home folder)

    @property
    def command(self) -> str:
        """The shell command that makes new shells load the script."""
        if self.line:
            return f"echo '{self.line}' >> ~/{self.file}"
        folder, _, _ = self.file.rpartition("/")
        return f"mkdir -p ~/{folder} && llmrun completion fish > ~/{self.file}"


SHELLS = {
    "bash": Installation(".bashrc", 'eval "$(llmrun completion bash)"'),
    "zsh": Installation(".zshrc", 'eval "$(llmrun completion zsh)"'),
    "fish": Installation(".config/fish/completions/llmrun.fish", ""),
}


def installed() -> Iterator[Place]:
    """Yield the files with completion that `remove` would change or remove."""
    for shell, each in SHELLS.items():
        if each.line and each.line in _lines(each.path):
            yield Place(each.path, f"a line that loads completion for {shell}", is_shared=True)
        elif not each.line and each.path.is_file():
            yield Place(each.path, f"completion for {shell}")


def remove() -> list[Path]:
    """Remove completion from all shells, and return the changed files. Raises LlmrunError.

    Files of settings keep their other lines and their permissions. Links are followed.
    """
    changed = []
    for place in installed():
        path = Path(os.path.realpath(place.path))
        try:
            if place.is_shared:
                lines = {each.line for each in SHELLS.values()}
                kept = [line for line in _text(path).splitlines(keepends=True) if line.strip() not in lines]
                write_whole(path, "".join(kept).encode("utf-8", "surrogateescape"))
            else:
                place.path.unlink()
        except OSError as error:
            raise LlmrunError(f"{place.path}: cannot be changed: {error.strerror or error}") from error
        changed.append(place.path)
    return changed


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in _text(path).splitlines()]


def _text(path: Path) -> str:
    """Return the text of a file, or "" if the file does not exist or cannot be read."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return ""
