"""Finds the models in llmrun's own folder by name: files that the user imported, and files that were put there.

The name of `models/mine.gguf` is "mine", and the name of `models/team/big-00001-of-00002.gguf` is "team/big". Case does
not matter. A file may be a link; a link to a missing file is still found, so that it can be reported and removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from llmrun.hub.local import paths
from llmrun.hub.names import models_among, without_shard

ENDING = ".gguf"
_DEEPEST = 4  # the maximum depth of subfolders
_OTHERS = ("web", "received")  # the subfolders whose models have other names; see paths.py


class OwnModel(Struct, frozen=True):
    """A model in llmrun's own folder. `missing` is the first of its files that is a link to a missing file, or None."""

    name: str
    files: tuple[Path, ...]
    missing: Path | None

    @property
    def key(self) -> str:
        """The normalized name, for comparisons."""
        return key_of(self.name)

    @property
    def target(self) -> str:
        """The missing file to which the link `missing` leads."""
        return os.path.realpath(self.missing or self.files[0])


def own_models() -> list[OwnModel]:
    """Return the models in our own folder and its subfolders. If names are equal, only the first has the name."""
    return sorted(_below(paths.models_folder(), "", 0), key=lambda own: own.missing is not None)


def find_own(name: str) -> OwnModel | None:
    """Return the model with this name, with or without ".gguf", or None."""
    wanted = key_of(stem_of(name))
    return next((own for own in own_models() if own.key == wanted), None)


def key_of(name: str) -> str:
    """Return the normalized name, for comparisons. macOS may write "é" as two characters."""
    if name.isascii():
        return name.lower()
    import unicodedata

    return unicodedata.normalize("NFC", name).lower()


def _below(folder: Path, above: str, depth: int) -> Iterator[OwnModel]:
    broken: dict[str, bool] = {}  # whether each file is a link to a missing file, by name
    for entry in paths.entries(folder):
        if entry.name.startswith("."):
            continue
        if paths.is_file(entry):
            broken[entry.name] = False
        elif entry.is_symlink():
            if not os.path.exists(entry.path):  # noqa: PTH110
                broken[entry.name] = True
        elif depth < _DEEPEST and entry.is_dir(follow_symlinks=False) and (above or entry.name not in _OTHERS):
            yield from _below(Path(entry.path), f"{above}{entry.name}/", depth + 1)
    for first, names in models_among(broken).items():
        missing = next((folder / name for name in names if broken[name]), None)
        yield OwnModel(above + stem_of(first), tuple(folder / each for each in names), missing)


def stem_of(file: str) -> str:
    """Return a file name without its ending and its shard numbers."""
    whole = without_shard(file)
    return whole[: -len(ENDING)] if whole.lower().endswith(ENDING) else whole
