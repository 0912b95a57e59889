"""Searches the model catalogue offline."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmrun.base.errors import ModelNotFound
from llmrun.hub.catalog import CatalogEntry, load_catalog
from llmrun.hub.estimates import copies, estimated
from llmrun.hub.names import size_in

YES, TIGHT, NO = "yes", "tight", "no"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model in the catalogue, with details that help the user choose. Sizes refer to the default quantization.

    size      the download size in bytes; None if the number of weights is unknown
    is_exact  whether `size` is the exact file size; if not, it is rounded or computed from the number of weights
    needed    a generous estimate of the memory in bytes needed for 4,096 tokens of context; None if `size` is None
    here      the quantizations that are on this machine, including those of Ollama and LM Studio
    """

    entry: CatalogEntry
    size: int | None
    is_exact: bool
    needed: int | None
    here: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.entry.name

    def fits(self, memory: int | None) -> str:
        """Return YES, NO, TIGHT (the weights fit, but the KV cache may not), or "" if unknown.

        memory  free memory in bytes; None if the system does not report it
        """
        if self.size is None or self.needed is None or memory is None:
            return ""
        if self.needed <= memory:
            return YES
        return TIGHT if self.size <= memory else NO


def find_models(words: Sequence[str]) -> list[FoundModel]:
    """Return the catalogue models that match all words, sorted by family and size. Without words, returns all models.

    The search covers names, aliases, descriptions and licences, and ignores case. In names, punctuation is ignored as
    well, so "qwen3-4b" matches "qwen3:4b". A number must match from its first digit, so "4b" does not match "14b".
    Raises ModelNotFound with a suggestion if nothing matches.
    """
    catalog = load_catalog()
    wanted = [word.lower() for word in words if word]
    pages = [_Page(entry, _text(entry)) for entry in catalog.entries()]
    found = [page.entry for page in pages if all(page.has(word) for word in wanted)]
    if not found:
        raise _nothing_found(wanted, pages)
    here = copies(catalog)
    return [_described(entry, here) for entry in sorted(found, key=_place)]


def _described(entry: CatalogEntry, here: Collection[str]) -> FoundModel:
    found = estimated(entry, entry.default)
    return FoundModel(
        entry,
        found.size if found else None,
        found.is_exact if found else False,
        found.needed if found else None,
        tuple(quant for quant in entry.quants if entry.name_with(quant).lower() in here),
    )


def _place(entry: CatalogEntry) -> tuple[str, float, str]:
    named = size_in(entry.name)
    return entry.family, named if named < math.inf else entry.parameters or math.inf, entry.name


class _Page(NamedTuple):
    """A model with its searchable text."""

    entry: CatalogEntry
    text: str

    def has(self, word: str) -> bool:
        """Return whether a word, given in lower case, matches this model."""
        if word[:1].isdigit():  # "4b" must not match "14b"
            return re.search(rf"(?<![0-9.]){re.escape(word)}", self.text) is not None
        letters = _letters(word)
        return word in self.text or (bool(letters) and letters in _letters(self.entry.name))


def _text(entry: CatalogEntry) -> str:
    return "\n".join((entry.name, *entry.aliases, entry.description, entry.license)).lower()


def _letters(text: str) -> str:
    return "".join(letter for letter in text if letter.isalnum())


def _nothing_found(wanted: Sequence[str], pages: Sequence[_Page]) -> ModelNotFound:
    typed = " ".join(wanted)[:200]
    unknown = [word for word in wanted if not any(page.has(word) for page in pages)]
    meant = [_nearest(word, pages) if word in unknown else word for word in wanted]
    if unknown and None not in meant:
        hint = f"did you mean `llmrun search {' '.join(filter(None, meant))}`?"
    elif unknown:
        hint = f"to search the Hugging Face Hub: llmrun search --hub {typed}"
    else:
        hint = "each word matches some models, but none matches all; use fewer words"
    return ModelNotFound(f"search: {typed!r}: no model in the catalogue matches", hint=hint)


def _nearest(word: str, pages: Sequence[_Page]) -> str | None:
    """Return the family or catalogue word closest to a misspelled word, or None if none is close."""
    import difflib

    families = list(dict.fromkeys(page.entry.family for page in pages))
    for known in (families, _words(pages)):
        if near := difflib.get_close_matches(word, known, n=1, cutoff=0.7):
            return near[0]
    return None


def _words(pages: Sequence[_Page]) -> list[str]:
    """Return the distinct words of all names, descriptions and licences."""
    seen = (word.strip(",;:.()") for page in pages for word in page.text.split())
    return list(dict.fromkeys(word for word in seen if len(word) > 2))
