"""Our own models.toml, a section at a time.

Every start looks up one name, and the file has a hundred and more models: parsed as a whole it takes 23 ms of every
start, cut at its headings 5 ms. That asks for headings on lines of their own, which ours has (a test compares both
readings); the user's own file may be any TOML, and is parsed as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmrun.hub.catalog.file import CatalogFile, read_text

_HEADING = re.compile(r'^\[(models|families)\.(?:"([^"\n]+)"|([A-Za-z0-9_-]+))\]$', re.MULTILINE)
_ALIASES = re.compile(r"^aliases = (\[[^\n]*\])$", re.MULTILINE)
_NAME = re.compile(r'"([^"]*)"')
_REPOSITORY = re.compile(r'\brepository = "([^"]+)"')


class Sections(Mapping[str, Any]):
    """Tables by name; each is parsed when it is asked for."""

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
        """Of all tables, with the name of each."""
        found: dict[str, str] = {}
        for name, text in self._texts.items():
            for line in _ALIASES.findall(text):
                found |= dict.fromkeys(_NAME.findall(line), name)
        return found

    def repositories(self) -> dict[str, list[str]]:
        """Those that tables mention, with the names of these."""
        found: dict[str, list[str]] = {}
        for name, text in self._texts.items():
            for repository in dict.fromkeys(_REPOSITORY.findall(text)):
                found.setdefault(repository, []).append(name)
        return found


def read_sections(path: Path) -> CatalogFile:
    text = read_text(path)
    texts: dict[str, dict[str, str]] = {"models": {}, "families": {}}
    headings = list(_HEADING.finditer(text))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        kind, quoted, bare = heading.groups()
        texts[kind][quoted or bare] = text[heading.start() : following.start() if following else len(text)]
    models = Sections("models", texts["models"])
    return CatalogFile(
        path, models, Sections("families", texts["families"]), {}, models.aliases(), models.repositories()
    )
