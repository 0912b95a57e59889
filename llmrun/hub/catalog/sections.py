"""Parses our own models.toml lazily, one section at a time.

A run usually looks up one name among more than a hundred models. Parsing the whole file takes 23 ms, but splitting it
at its headings takes only 5 ms. Splitting works only if every heading is on a line of its own. This is true of our
file, and a test checks that both methods give the same result. The user's file may be any valid TOML, so it is parsed
as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.hub.catalog.file import CatalogFile

_HEADING = re.compile(r'^\[(models|families)\.(?:"([^"\n]+)"|([A-Za-z0-9_-]+))\]$', re.MULTILINE)
_ALIASES = re.compile(r"^aliases = (\[[^\n]*\])$", re.MULTILINE)
_NAME = re.compile(r'"([^"]*)"')
_REPOSITORY = re.compile(r'\brepository = "([^"]+)"')


class Sections(Mapping[str, Any]):
    """A mapping from table names to tables. Each table is parsed on access."""

    def __init__(self, kind: str, texts: Mapping[str, str]) -> None:
        self._kind, self._texts = kind, texts

    def __getitem__(self, name: str) -> Any:
        import tomllib

        return tomllib.loads(self._texts[name])[self._kind][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def aliases(self) -> dict[str, str]:
        """Return the aliases in all tables: alias -> table name."""
        found: dict[str, str] = {}
        for name, text in self._texts.items():
            for line in _ALIASES.findall(text):
                found |= dict.fromkeys(_NAME.findall(line), name)
        return found

    def repositories(self) -> dict[str, list[str]]:
        """Return the repositories in all tables: repository -> table names."""
        found: dict[str, list[str]] = {}
        for name, text in self._texts.items():
            for repository in dict.fromkeys(_REPOSITORY.findall(text)):
                found.setdefault(repository, []).append(name)
        return found


def read_sections(path: Path) -> CatalogFile:
    text = _read_text(path)
    texts: dict[str, dict[str, str]] = {"models": {}, "families": {}}
    headings = list(_HEADING.finditer(text))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        kind, quoted, bare = heading.groups()
        texts[kind][quoted or bare] = text[heading.start() : following.start() if following else len(text)]
    models = Sections("models", texts["models"])
    return CatalogFile(
        path, models, Sections("families", texts["families"]), {}, models.aliases(), models.repositories()
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"catalogue: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"catalogue: {path}: not UTF-8: {error}") from error
