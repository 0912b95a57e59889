"""Checks the tables of a tools file. Every error names the file, the key, the value and what is valid."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.formats.gguf.problems import shown

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PASSED_ON = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_LONGEST_S = 3600.0


class Table:
    """A table of the user's file. `where` is its dotted name, or "" for the whole file."""

    def __init__(self, path: Path, where: str, values: Mapping[str, Any]) -> None:
        self.values = values
        self.path = path
        self._where = where

    def error(self, key: str, words: str, hint: str = "") -> UsageError:
        """Return the error for a key. If `key` is empty, the error is about the whole table."""
        names = shown(".".join(name for name in (self._where, key) if name), 200)
        return UsageError(": ".join(part for part in (f"tools: {self.path}", names, words) if part), hint=hint)

    def check_keys(self, known: Iterable[str]) -> None:
        for key in self.values:
            if key not in known:
                raise self.error(key, "no such key", nearest(key, known))

    def table(self, key: str) -> Table:
        """Return the table with this key, or an empty table if there is none."""
        where = f"{self._where}.{key}" if self._where else key
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "a table")
        return Table(self.path, where, value)

    def text(self, key: str) -> str:
        value = self._needed(key, "text")
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(key, "text")
        return value

    def texts(self, key: str, example: str) -> list[str]:
        value = self._needed(key, f"a list of texts such as {example}")
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(key, f"a list of texts such as {example}")
        if any("\0" in one for one in value):
            raise self.error(key, "contains a NUL character")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        number = float(value) if type(value) in (int, float) else math.nan
        if not 0 < number <= _LONGEST_S:
            raise self._wrong(key, f"a number of seconds up to {_LONGEST_S:g}")
        return number

    def folder(self, key: str) -> Path | None:
        """Return a folder. A relative path starts at the folder of the file."""
        if key not in self.values:
            return None
        folder = self.path.absolute().parent / os.path.expanduser(self.text(key))  # noqa: PTH111
        if not folder.is_dir():
            raise self.error(key, f"{str(folder)!r} is not a folder")
        return folder

    def environment(self, key: str) -> dict[str, str]:
        """Return a table of variables. A value such as "$NAME" stands for the variable NAME in our own environment."""
        table = self.table(key)
        for name, value in table.values.items():
            if not _VARIABLE.fullmatch(name):
                raise table.error(name, "not a valid variable name", "names are made of letters, digits and _")
            if not isinstance(value, str) or "\0" in value:
                # The value itself is not shown, because it may be a key.
                raise table.error(name, "must be text without NUL characters", 'as in env = { TZ = "UTC" }')
        return {name: _passed_on(table, name, value) for name, value in table.values.items()}

    def _needed(self, key: str, valid: str) -> Any:
        if key not in self.values:
            raise self.error(key, f"missing; it must be {valid}")
        return self.values[key]

    def _wrong(self, key: str, valid: str) -> UsageError:
        return self.error(key, f"{self.values[key]!r:.60} is not {valid}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar name, or with all names."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}"


def _passed_on(table: Table, name: str, value: str) -> str:
    match = _PASSED_ON.fullmatch(value)
    if match is None:
        return value
    variable = match[1] or match[2]
    if variable not in os.environ:
        raise table.error(name, f"the environment variable {variable} is not set", f"export {variable}=... first")
    return os.environ[variable]
