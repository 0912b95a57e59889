"""Finds the models that LM Studio stores on this machine, and never modifies or removes them.

The models are stored as `models/OWNER/MODEL/FILE.gguf`. If the user moved the `models` folder, its new path is in LM
Studio's settings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmrun.hub.local.scandir import entries, expanded, is_file, read_small
from llmrun.hub.names.file_names import models_among

HOLDER = "lmstudio"


def models() -> dict[str, Path]:
    """Return the first file of every complete model, keyed by "OWNER/MODEL/FILE.gguf"."""
    found: dict[str, Path] = {}
    for folder in dict.fromkeys(_folders()):
        for owner in entries(folder):
            for model in entries(Path(owner.path)):
                for name, path in _files(Path(model.path)).items():
                    found.setdefault(f"{owner.name}/{model.name}/{name}", path)
    return found


def find(name: str) -> Path | None:
    """Return the first file of the model "OWNER/MODEL/FILE.gguf" (ignoring case), or None."""
    return next((path for known, path in models().items() if known.lower() == name.lower()), None)


def _files(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in models_among([entry.name for entry in entries(folder) if is_file(entry)])}


def _folders() -> list[Path]:
    """Return the folder in LM Studio's settings, then the default folders of its newer and older versions."""
    homes = [home for home in (_pointed_home(), expanded("~/.lmstudio"), expanded("~/.cache/lm-studio")) if home]
    moved = [folder for folder in map(_moved_models, homes) if folder]
    return [*moved, *(home / "models" for home in homes)]


def _pointed_home() -> Path | None:
    """Return LM Studio's home folder as recorded in `~/.lmstudio-home-pointer`, or None."""
    try:
        text = read_small(expanded("~/.lmstudio-home-pointer")).decode("utf-8").strip()
    except (OSError, ValueError):
        return None
    return _absolute(text)


def _moved_models(home: Path) -> Path | None:
    try:
        settings: Any = json.loads(read_small(home / "settings.json"))
        return _absolute(settings["downloadsFolder"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _absolute(text: object) -> Path | None:
    """Return a value from LM Studio's files as a path, or None if it is not an absolute path."""
    if not isinstance(text, str) or not text.isprintable() or not Path(text).is_absolute():
        return None
    return Path(text)
