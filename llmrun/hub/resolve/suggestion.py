"""Suggests a model from the catalogue to users who have not named one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from llmrun.base.errors import UsageError
from llmrun.hub.catalog.lookup import load_catalog
from llmrun.hub.resolve.memory_check import surely_fits

if TYPE_CHECKING:
    from llmrun.hub.catalog.entry import CatalogEntry

# Models from the smallest to the best. They belong to one family, so each is known to be better than the one before it.
# The family is Apache-licensed, and our own engine supports it. A dense 8B model is left out because it reads 5 GB per
# token. To generate the 10 tokens per second that `fit` considers fast enough, it needs 50 GB/s of memory bandwidth.
# Our test machines read 29 to 36 GB/s. The 30B model reads only 3B weights per token.
_LADDER: Final = ("qwen3:0.6b", "qwen3:1.7b", "qwen3:4b-instruct", "qwen3:30b-instruct")


class Suggestion(NamedTuple):
    """A model that suits this machine, with its download size in bytes."""

    name: str
    size: int


def suggested_model(memory: int) -> Suggestion | None:
    """Return the best model that certainly fits into `memory` bytes, or None.

    The decision is based on the sizes in the catalogue. This function uses no network.
    """
    catalog, known = load_catalog(), None
    for name in _LADDER:
        try:
            size = quoted_size(catalog.entry(name))
        except (KeyError, UsageError):  # the user's own catalogue may have replaced this model
            continue
        if size is not None and surely_fits(size, memory):
            known = Suggestion(name, size)
    return known


def quoted_size(entry: CatalogEntry) -> int | None:
    """Return the size in bytes of a model's default quantization, according to the catalogue."""
    return entry.quants[entry.default].estimated_size
