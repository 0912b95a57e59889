"""Models that Ollama keeps on this machine, read where they are. Nothing of Ollama's is ever written or removed.

    models/manifests/registry.ollama.ai/library/qwen3/4b    JSON: the layers of qwen3:4b, each by its digest
    models/blobs/sha256-0123...                             a layer; the one of the type `model` is a GGUF file

A manifest is a file that anybody may have put there: it is read within limits, and what it names is a blob or nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmrun.hub.local.scandir import entries, expanded, read_small

HOLDER = "ollama"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:(?P<digits>[0-9a-f]{64})")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"  # of a name that says neither
_LEVELS = 4  # registry, owner, model, tag
_MOST_MANIFESTS = 10_000


def models() -> dict[str, Path]:
    """The model file of every name, such as "qwen3:4b", that is there. A name counts where it is found first."""
    found: dict[str, Path] = {}
    for folder in _folders():
        for count, (name, manifest) in enumerate(_manifests(folder / "manifests")):
            if count == _MOST_MANIFESTS:
                break
            blob = _model_blob(folder, manifest)
            if blob is not None:
                found.setdefault(name, blob)
    return found


def find(name: str) -> Path | None:
    """The file of a model as Ollama would name it; without a tag it is `latest`."""
    wanted = (name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest").lower()
    return next((path for known, path in models().items() if known.lower() == wanted), None)


def _folders() -> list[Path]:
    """OLLAMA_MODELS moves the folder; without it there is the user's own, and the one of the service on Linux."""
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
    """The one GGUF file of a model; None for a model of several, and for a manifest that is not one."""
    try:
        layers: Any = json.loads(read_small(manifest))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    match = _DIGEST.fullmatch(digests[0]) if len(digests) == 1 and isinstance(digests[0], str) else None
    if match is None:
        return None
    blob = folder / "blobs" / f"sha256-{match['digits']}"
    return blob if blob.is_file() else None
