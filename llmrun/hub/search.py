"""Searching the models that llmrun knows by name, without asking any server."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmrun.errors import ModelNotFound
from llmrun.hub.catalog.entry import CatalogEntry, Quant
from llmrun.hub.catalog.lookup import load_catalog
from llmrun.hub.names.model_order import bits_in_file, size_in, weights_in
from llmrun.hub.resolve.memory_check import estimated_need
from llmrun.hub.upkeep import inventory

YES, TIGHT, NO = "yes", "tight", "no"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model of the catalogue, with the facts that help to choose it. All are of its usual quantization.

    size      bytes to download; None if nobody knows how many weights it has
    is_exact  whether that is the size of the file; else it is rounded, or computed from the number of weights
    needed    bytes of memory with 4,096 tokens of context, estimated on the high side; None as for size
    here      the quantizations that are on this machine
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
        """Return YES or NO, TIGHT if the weights fit and the rest may not, "" if unknown.

        memory  bytes that are free; None if the system does not say
        """
        if self.size is None or self.needed is None or memory is None:
            return ""
        if self.needed <= memory:
            return YES
        return TIGHT if self.size <= memory else NO


def find_models(words: Sequence[str]) -> list[FoundModel]:
    """Return the models of the catalogue that match all words, sorted by family and size; without words all.

    A word matches in a name, an alias, the description or the licence, in upper or lower case. In names, characters
    between letters and digits do not matter: "qwen3-4b" is found. Numbers match from their first digit on: "4b" is not
    found in "14b". Raises ModelNotFound with a suggestion if nothing matches.
    """
    catalog = load_catalog()
    wanted = [word.lower() for word in words if word]
    pages = [_Page(entry, _text(entry)) for entry in catalog.entries()]
    found = [page.entry for page in pages if all(page.has(word) for word in wanted)]
    if not found:
        raise _nothing_found(wanted, pages)
    here = {model.name.lower() for model in inventory.models()}
    return [_described(entry, here) for entry in sorted(found, key=_place)]


def _described(entry: CatalogEntry, here: Collection[str]) -> FoundModel:
    usual = entry.quants[entry.default]
    size = usual.estimated_size or _size_by_weights(entry, usual)
    weights = entry.parameters or weights_in(entry.name)
    return FoundModel(
        entry,
        size,
        usual.size is not None,
        estimated_need(size, weights) if size is not None else None,
        tuple(quant for quant in entry.quants if entry.name_with(quant).lower() in here),
    )


def _size_by_weights(entry: CatalogEntry, quant: Quant) -> int | None:
    weights = entry.parameters or weights_in(entry.name)
    return round(weights * bits_in_file(quant.name) / 8) if weights else None


def _place(entry: CatalogEntry) -> tuple[str, float, str]:
    named = size_in(entry.name)
    return entry.family, named if named < math.inf else entry.parameters or math.inf, entry.name


class _Page(NamedTuple):
    """A model and the text that words are looked for in."""

    entry: CatalogEntry
    text: str

    def has(self, word: str) -> bool:
        """Whether a word, in lower case, matches."""
        if word[:1].isdigit():  # "4b" is not meant by "14b"
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
        hint = f"`llmrun search --hub {typed}` asks the Hugging Face Hub"
    else:
        hint = "each word is in some model, but no model has all: search for fewer"
    return ModelNotFound(f"search: {typed!r}: no model of the catalogue matches", hint=hint)


def _nearest(word: str, pages: Sequence[_Page]) -> str | None:
    """Return the family, name or word of a description that a misspelt word was meant as, if one is near."""
    import difflib

    families = list(dict.fromkeys(page.entry.family for page in pages))
    for known in (families, _words(pages)):
        if near := difflib.get_close_matches(word, known, n=1, cutoff=0.7):
            return near[0]
    return None


def _words(pages: Sequence[_Page]) -> list[str]:
    """Return each word of names, descriptions and licences once."""
    seen = (word.strip(",;:.()") for page in pages for word in page.text.split())
    return list(dict.fromkeys(word for word in seen if len(word) > 2))
