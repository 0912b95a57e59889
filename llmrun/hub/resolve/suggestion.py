"""Which model of the catalogue to suggest to somebody who has named none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from llmrun.errors import UsageError
from llmrun.hub.catalog.lookup import load_catalog
from llmrun.hub.resolve.memory_check import surely_fits

if TYPE_CHECKING:
    from llmrun.hub.catalog.entry import CatalogEntry

# From the smallest to the best. One family under the Apache license that our own engine runs, so that each step is
# known to be better than the one before. `fit` calls 10 tokens a second fast enough. Most CPUs read memory at 30 to
# 60 GB/s, which is too slow for the 5 GB that a dense 8B model reads per token, while the 30B reads only 3B weights.
_LADDER: Final = ("qwen3:0.6b", "qwen3:1.7b", "qwen3:4b-instruct", "qwen3:30b-instruct")


class Suggestion(NamedTuple):
    """A model that suits a machine, and the size of its download in bytes."""

    name: str
    size: int


def suggested_model(memory: int) -> Suggestion | None:
    """Return the best model that surely fits into this much memory; None if none does.

    By the sizes that the catalogue quotes: nothing is requested and nothing is measured.
    """
    catalog, known = load_catalog(), None
    for name in _LADDER:
        try:
            size = quoted_size(catalog.entry(name))
        except (KeyError, UsageError):  # the user's own catalogue may have replaced it
            continue
        if size is not None and surely_fits(size, memory):
            known = Suggestion(name, size)
    return known


def quoted_size(entry: CatalogEntry) -> int | None:
    """Return the bytes of a model's default quantization, as the catalogue quotes them."""
    return entry.quants[entry.default].estimated_size
