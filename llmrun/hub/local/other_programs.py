"""Finds the models that Ollama and LM Studio store on this machine, and never modifies or removes them.

LM Studio stores models as `models/OWNER/MODEL/FILE.gguf`. If the user moved the `models` folder, its new path is in LM
Studio's settings. Ollama's folder contains:

    models/manifests/registry.ollama.ai/library/qwen3/4b    JSON that lists the layers of qwen3:4b with their digests
    models/blobs/sha256-0123...                             a layer; the layer of type `model` is a GGUF file

Manifests are untrusted input, so their size and number are limited, and they can refer only to files in `blobs`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmrun.hub.local.paths import entries, expanded, is_file, read_small
from llmrun.hub.names import models_among

LM_STUDIO = "lmstudio"


def lm_studio_models() -> dict[str, Path]:
    """Return the first file of every complete model, keyed by "OWNER/MODEL/FILE.gguf"."""
    found: dict[str, Path] = {}
    for folder in dict.fromkeys(_lm_studio_folders()):
        for owner in entries(folder):
            for model in entries(Path(owner.path)):
                for name, path in _files(Path(model.path)).items():
                    found.setdefault(f"{owner.name}/{model.name}/{name}", path)
    return found


def _files(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in models_among([entry.name for entry in entries(folder) if is_file(entry)])}


def _lm_studio_folders() -> list[Path]:
    """Return the folder in LM Studio's settings, then the default folders of its newer and older versions."""
    homes = [home for home in (_pointed_home(), expanded("~/.lmstudio"), expanded("~/.cache/lm-studio")) if home]
    moved = [folder for folder in map(_moved_models, homes) if folder]
    return [*moved, *(home / "models" for home in homes)]


def _pointed_home() -> Path | None:
    """Return LM Studio's home folder as recorded in `~/.lmstudio-home-pointer`, or None."""
    try:
        text = read_small(expanded("~/.lmstudio-home-pointer")).decode("utf-8-sig").strip()
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


OLLAMA = "ollama"
FOLDER_NAMES = {OLLAMA: "Ollama's folder", LM_STUDIO: "LM Studio's folder"}
_MODEL_LAYER = "application/vnd.ollama.image.model"
_PROJECTOR_LAYER = "application/vnd.ollama.image.projector"
_DIGEST = re.compile(r"sha256:(?P<digits>[0-9a-f]{64})")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"  # the default registry and owner, which names omit
_LEVELS = 4  # folder levels: registry, owner, model, tag
_MOST_MANIFESTS = 10_000


def ollama_models() -> dict[str, Path]:
    """Return the GGUF file of every model, keyed by names such as "qwen3:4b". Earlier folders take precedence."""
    found: dict[str, Path] = {}
    for folder in _ollama_folders():
        for count, (name, manifest) in enumerate(_manifests(folder / "manifests")):
            if count == _MOST_MANIFESTS:
                break
            blob = _model_blob(folder, manifest)
            if blob is not None:
                found.setdefault(name, blob)
    return found


def _ollama_folders() -> list[Path]:
    """Return the folder that OLLAMA_MODELS names, or else the default folders of the user and of the Linux service."""
    named = os.environ.get("OLLAMA_MODELS")
    return [expanded(named)] if named else [expanded("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]


def _manifests(folder: Path, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    for entry in entries(folder):
        parts = (*above, entry.name)
        if not _SEGMENT.fullmatch(entry.name):
            continue
        if len(parts) < _LEVELS and entry.is_dir(follow_symlinks=False):
            yield from _manifests(Path(entry.path), parts)
        elif len(parts) == _LEVELS and entry.is_file(follow_symlinks=False):
            yield _name(*parts), Path(entry.path)


def _name(registry: str, owner: str, model: str, tag: str) -> str:
    if registry != _REGISTRY:
        return f"{registry}/{owner}/{model}:{tag}"
    return f"{model}:{tag}" if owner == _LIBRARY else f"{owner}/{model}:{tag}"


def _model_blob(folder: Path, manifest: Path) -> Path | None:
    """Return the GGUF file of a model, or None if the model has several files or its manifest is invalid."""
    blobs = _blobs(folder, manifest, _MODEL_LAYER)
    return blobs[0] if len(blobs) == 1 else None


def _blobs(folder: Path, manifest: Path, kind: str) -> list[Path]:
    """Return the layers of this media type, or [] if one is missing or the manifest is invalid."""
    try:
        layers: Any = json.loads(read_small(manifest))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == kind]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    matches = [_DIGEST.fullmatch(digest) if isinstance(digest, str) else None for digest in digests]
    blobs = [folder / "blobs" / f"sha256-{match['digits']}" for match in matches if match is not None]
    return blobs if len(blobs) == len(digests) and all(blob.is_file() for blob in blobs) else []


def ollama_projectors(model: Path) -> list[Path]:
    """Return the vision projectors that Ollama's manifests combine with a model's GGUF file."""
    found: dict[Path, None] = {}
    for folder in _ollama_folders():
        if model.parent == folder / "blobs":
            for (_, manifest), _ in zip(_manifests(folder / "manifests"), range(_MOST_MANIFESTS), strict=False):
                if _model_blob(folder, manifest) == model:
                    found |= dict.fromkeys(_blobs(folder, manifest, _PROJECTOR_LAYER))
    return [*found]


def holder_of(path: Path) -> str:
    """Return the program in whose folder a file is, OLLAMA or LM_STUDIO, or ""."""
    for holder, folders in ((OLLAMA, _ollama_folders()), (LM_STUDIO, _lm_studio_folders())):
        if any(path.is_relative_to(folder) for folder in folders):
            return holder
    return ""


def find_held_model(holder: str, name: str) -> Path | None:
    """Return the first file of a model that OLLAMA or LM_STUDIO stores, or None. The case of the name does not matter.

    The default tag of Ollama's models is `latest`.
    """
    if holder == OLLAMA and ":" not in name.rsplit("/", 1)[-1]:
        name += ":latest"
    models = ollama_models() if holder == OLLAMA else lm_studio_models()
    return next((path for known, path in models.items() if known.lower() == name.lower()), None)
