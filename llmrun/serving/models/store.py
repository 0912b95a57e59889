"""Finds the files of models for `KnownModels`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmrun.base.errors import LlmrunError
from llmrun.hub.catalog.lookup import load_catalog
from llmrun.hub.upkeep import inventory
from llmrun.options.presets import Preset
from llmrun.serving.models.known import KnownModel, public_name


def models_in_store() -> Iterator[KnownModel]:
    """Yield the models that llmrun or another program has downloaded. Projectors and other parts are left out."""
    for model in inventory.models():
        if model.current:
            name = public_name(model.name, model.path)
            yield KnownModel(name, model.path, model.name, model.size, model.modified)


def given_model(name: str, path: Path, preset: Preset | None) -> KnownModel:
    """Return a model that was given at start. The file of a stand-in may be missing."""
    known = KnownModel(name, path)
    if path.is_file():
        model = inventory.of_path(path)
        known = KnownModel(name, path, "", model.size, model.modified)
    return known if preset is None else known.under(preset)


def catalogue_name(name: str) -> str | None:
    """Return the full name of the catalogue's model that a name refers to, or None."""
    try:
        return load_catalog().find(name).name
    except LlmrunError:
        return None
