"""Estimates from the catalogue alone, without a model's header, and the copies of catalogue models on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.base.errors import LlmrunError
from llmrun.hub.catalog import Catalog, CatalogEntry
from llmrun.hub.local.other_programs import LM_STUDIO, OLLAMA
from llmrun.hub.names import shards_of
from llmrun.hub.resolve.memory_check import estimated_need
from llmrun.hub.upkeep import inventory


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated sizes of one quantization, in bytes.

    size      the download size
    is_exact  whether `size` is the exact file size; if not, it is rounded or computed from the number of weights
    needed    a generous estimate of the memory needed for 4,096 tokens of context
    read      the weights that each token reads: all, or those of the active experts
    """

    name: str
    size: int
    is_exact: bool
    needed: int
    read: int


def estimated(entry: CatalogEntry, quantization: str) -> Estimate | None:
    """Return the estimate for one quantization of a model, or None if the number of weights is unknown."""
    size = entry.size_of(quantization)
    if size is None:
        return None
    return Estimate(
        entry.name_with(quantization),
        size,
        entry.quants[quantization].size is not None,
        estimated_need(size, entry.weights),
        round(size * active_share(entry)),
    )


def active_share(entry: CatalogEntry) -> float:
    """Return the share of a model's weights that each token uses, which is less than 1 in mixtures of experts."""
    return min(1.0, entry.active / entry.weights) if entry.active and entry.weights else 1.0


def copies(catalog: Catalog) -> dict[str, inventory.Model]:
    """Return the models on this machine that the catalogue lists, by their names in the catalogue in lower case.

    Copies of Ollama and LM Studio count if their name or file name is the catalogue's; our own copies come first.
    """
    found: dict[str, inventory.Model] = {}
    files: dict[str, str] = {}
    for model in inventory.models():
        name = model.name.lower()
        if model.holder == OLLAMA:
            name = _named_by_ollama(name.removeprefix(f"{OLLAMA}:"), catalog)
        elif model.holder == LM_STUDIO:
            files = files or _files(catalog)
            name = files.get(model.path.name.lower(), "")
        found.setdefault(name, model)
    return found


def _named_by_ollama(name: str, catalog: Catalog) -> str:
    try:
        return catalog.find(name).name.lower()
    except LlmrunError:  # the catalogue does not list this model
        return ""


def _files(catalog: Catalog) -> dict[str, str]:
    """Return the catalogue's name for each file name in lower case."""
    return {
        shards_of(quant.files[0].file)[0].lower(): entry.name_with(quant.name).lower()
        for entry in catalog.entries()
        for quant in entry.quants.values()
    }
