"""Remembers which tools run without confirmation.

Only the user marks a tool as safe, in the tools file or in a chat. A mark is bound to the sha256 of the tool's
definition, so a tool loses its mark if the server changes what the tool says it does. A mark also holds for only one
program, which is a command with its working directory and its declared variables: `cwd` decides which files relative
arguments name, and variables such as PATH or NODE_OPTIONS decide which code runs.

The file is tools/safe-tools.json in the data folder. It stores only the sha256 of each program, because its arguments
and variables may contain keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmrun.base.errors import LlmrunError
from llmrun.base.folders import data_folder
from llmrun.engine.tools.declared import CommandDeclaration, ServerDeclaration
from llmrun.engine.tools.tool import Definition, digest_of

_VERSION = 1
_MOST_BYTES = 1 << 22
CHANGED = "its definition has changed since it was marked as safe"
REMOVED = "its mark was removed in a chat"

Program = ServerDeclaration | CommandDeclaration
_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark for a tool.

    server   the server's name in the user's file; "" for a command
    command  the sha256 of the program, which is the server or the command itself
    tool     the tool's own name
    digest   the sha256 of the definition that the mark is for; "" if the user has removed the mark
    in_chat  whether the mark was made in a chat, so it applies even if the user's file has none
    """

    server: str
    command: str
    tool: str
    digest: str
    in_chat: bool

    @property
    def key(self) -> _Key:
        return self.server, self.command, self.tool


class SafeMarks:
    """The marks of one file. Every change reads the file again and replaces it atomically."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_folder() / "tools" / "safe-tools.json"
        self._marks = {mark.key: mark for mark in self._read()}

    def why_unsafe(self, program: Program, tool: Definition, *, in_file: bool) -> str | None:
        """Return why a tool needs confirmation: "" if it has no mark, or a reason. Returns None if it is safe.

        in_file  whether the user's file marks the tool. This saves a mark for the first definition that is seen
        """
        mark = self._marks.get((tool.server, _digest_of_program(program), tool.name))
        if mark is None and in_file:
            try:
                self._add(program, tool, tool.digest, in_chat=False)
            except LlmrunError as error:
                return f"its definition cannot be saved: {error}"
            return None
        if mark is None or not (in_file or mark.in_chat):
            return ""
        if not mark.digest:
            return REMOVED
        return None if mark.digest == tool.digest else CHANGED

    def mark_safe(self, program: Program, tool: Definition) -> None:
        """Mark the current definition of a tool as safe. Raises LlmrunError if the mark cannot be saved."""
        self._add(program, tool, tool.digest, in_chat=True)

    def unmark(self, program: Program, tool: Definition) -> None:
        """Remove the mark of a tool, even if it is in the user's file. Raises LlmrunError if that cannot be saved."""
        self._add(program, tool, "", in_chat=False)

    def _add(self, program: Program, tool: Definition, digest: str, *, in_chat: bool) -> None:
        mark = _Mark(tool.server, _digest_of_program(program), tool.name, digest, in_chat)
        marks = {known.key: known for known in self._read()} | {mark.key: mark}  # another chat may have added marks
        self._write(marks)
        self._marks = marks

    def _read(self) -> list[_Mark]:
        """Return the saved marks. Raises LlmrunError if the file is damaged, so that no mark is trusted by mistake."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
            table = json.loads(data)
            if table["version"] != _VERSION:
                raise ValueError(f"version {table['version']!r:.20}")
            return [_mark(entry) for entry in table["marks"]]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LlmrunError(
                f"tools: {self._path}: damaged: {error!s:.80}",
                hint="delete it; this also deletes the marks that you made in chats",
            ) from error
        except OSError as error:
            raise LlmrunError(f"tools: {self._path}: {error.strerror or error}") from error

    def _write(self, marks: dict[_Key, _Mark]) -> None:
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}-{threading.get_ident()}")
        text = json.dumps({"version": _VERSION, "marks": [asdict(mark) for mark in marks.values()]}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(text, "utf-8")
                partial.replace(self._path)
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
        except OSError as error:
            raise LlmrunError(
                f"disk: {self._path}: cannot be written: {error.strerror or error}",
                hint="set LLMRUN_DATA_DIR to a folder that you can write to",
            ) from error


def _digest_of_program(program: Program) -> str:
    """Return the sha256 of what the user's file runs: the command, the working directory and the declared variables."""
    folder = None if program.folder is None else str(program.folder)
    return digest_of([program.command, folder, dict(program.environment)])


def _mark(entry: Any) -> _Mark:
    """Convert an entry of the file. Raises KeyError or TypeError."""
    mark = _Mark(entry["server"], entry["command"], entry["tool"], entry["digest"], entry["in_chat"])
    texts = (*mark.key, mark.digest)
    if not all(isinstance(text, str) for text in texts) or not isinstance(mark.in_chat, bool):
        raise TypeError("an entry has a wrong type")
    return mark
