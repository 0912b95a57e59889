"""Reads RamaLama's short names, a `[shortnames]` table that maps each short name to a model.

A `[shortnames]` table in the user's own models.toml takes precedence over the catalogue. RamaLama's own files are read
only for names that are not in the catalogue, so installing RamaLama never changes the meaning of our names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path


def ramalama_folders() -> Iterator[Path]:
    """Yield the folders that RamaLama reads, in the same order as its `shortnames.py`. Later folders take precedence.

    The folders need not exist.
    """
    yield Path(sys.prefix, "share")
    if sys.platform == "win32":
        for variable, usual in (("LOCALAPPDATA", "~/AppData/Local"), ("APPDATA", "~/AppData/Roaming")):
            yield _folder(variable, usual)
        return
    for variable, usual in (("XDG_CONFIG_HOME", "~/.config"), ("XDG_DATA_HOME", "~/.local/share")):
        yield _folder(variable, usual)
    yield Path(os.path.expanduser("~/.local/pipx/venvs/ramalama/share"))  # noqa: PTH111 (never raises)
    yield from map(Path, ("/etc", "/usr/share", "/usr/local/share"))


def ramalama_target(name: str) -> str | None:
    """Return the model that a short name refers to in RamaLama's files, or None. Unreadable files are ignored."""
    found = None
    for folder in ramalama_folders():
        found = _read(folder / "ramalama" / "shortnames.conf").get(name.lower(), found)
    return found


def _read(path: Path) -> dict[str, str]:
    """Read a file as INI and strip quotes, as RamaLama does. Returned names are in lower case."""
    import configparser

    parser = configparser.ConfigParser(delimiters="=", interpolation=None, strict=False)
    try:
        parser.read_string(path.read_text("utf-8"), str(path))
    except (OSError, ValueError, configparser.Error):
        return {}
    if "shortnames" not in parser:
        return {}
    return {name.strip("'\""): target.strip("'\"") for name, target in parser["shortnames"].items()}


def _folder(variable: str, usual: str) -> Path:
    return Path(os.path.expanduser(os.environ.get(variable) or usual))  # noqa: PTH111 (never raises)
