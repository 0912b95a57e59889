"""RamaLama's short names: a table `[shortnames]`, each a name and what it stands for.

They are accepted in the user's own models.toml, where they win over the catalogue, and read from RamaLama's own files
for names that the catalogue does not know: what is installed beside llmrun changes no name of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_WINDOWS = os.name == "nt"


def ramalama_folders() -> Iterator[Path]:
    """Where RamaLama looks, the last one winning; none need exist. Its `shortnames.py` has the same list."""
    yield Path(sys.prefix, "share")
    if _WINDOWS:
        for variable, usual in (("LOCALAPPDATA", "~/AppData/Local"), ("APPDATA", "~/AppData/Roaming")):
            yield _folder(variable, usual)
        return
    for variable, usual in (("XDG_CONFIG_HOME", "~/.config"), ("XDG_DATA_HOME", "~/.local/share")):
        yield _folder(variable, usual)
    yield Path(os.path.expanduser("~/.local/pipx/venvs/ramalama/share"))  # noqa: PTH111 (never raises)
    yield from map(Path, ("/etc", "/usr/share", "/usr/local/share"))


def ramalama_target(name: str) -> str | None:
    """What a name stands for in RamaLama's files; None where it is in none of them. A file that RamaLama could not
    read either has no names."""
    found = None
    for folder in ramalama_folders():
        found = _read(folder / "ramalama" / "shortnames.conf").get(name.lower(), found)
    return found


def _read(path: Path) -> dict[str, str]:
    """As RamaLama reads it: an INI file, its quotes stripped. Names are lower case."""
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
